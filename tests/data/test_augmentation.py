"""Batched augmentation against torchvision's picture by picture, and against what is drawn."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from vitmha.data.augmentation import Augmentation, BatchRandAugment, MixupCutmix, RandomCropFlip, RandomErasing
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.images import Preprocessing

SIZE = (13, 19)


def equal(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


def pictures(count: int, channels: int = 3) -> Tensor:
    return torch.randint(256, (count, channels, *SIZE), dtype=torch.uint8)


def distorted(images: Tensor, **strengths: float) -> Tensor:
    """All pictures with the same changes."""
    names = BatchRandAugment.CHANGES
    draws = torch.zeros(len(images), len(names))
    for name, strength in strengths.items():
        draws[:, names.index(name)] = strength
    return BatchRandAugment(magnitude=30.0).apply(images, draws)


def by_torchvision(images: Tensor, name: str, strength: float) -> Tensor:
    factor = 1 + 0.9 * strength
    x = images.float() / 255
    if name == "posterise":
        return transforms.posterize(images, 8 - round(4 * abs(strength)))
    if name == "solarise":
        return transforms.solarize(images, 256 * (1 - abs(strength)))
    adjust = {
        "brightness": transforms.adjust_brightness,
        "colour": transforms.adjust_saturation,
        "contrast": transforms.adjust_contrast,
    }[name]
    return (255 * adjust(x, factor)).round()


@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", ["brightness", "colour", "contrast", "posterise", "solarise"])
def test_changes_of_colour_equal_torchvisions(name: str, strength: float) -> None:
    images = pictures(5)
    result = distorted(images, **{name: strength})
    assert_close(result.float(), by_torchvision(images, name, strength).float(), rtol=0, atol=1.01)
    assert not torch.equal(result, images)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rotation": 0.7}, {"angle": -21.0}),
        ({"rotation": -1.0}, {"angle": 30.0}),
        ({"shift_x": 1 / 0.45 / 19}, {"translate": [-1, 0]}),
        ({"shift_y": -2 / 0.45 / 13}, {"translate": [0, 2]}),
    ],
)
def test_changes_of_geometry_equal_torchvisions(change: dict[str, float], expected: dict) -> None:
    images = pictures(3)
    arguments = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **expected}
    wanted = transforms.affine(images.float(), interpolation=InterpolationMode.BILINEAR, **arguments)
    assert_close(distorted(images, **change).float(), wanted, rtol=0, atol=1.01)


def test_a_shear_moves_each_row_by_its_height() -> None:
    images = torch.zeros(1, 1, 21, 41, dtype=torch.uint8)
    images[..., 20] = 255
    sheared = distorted(images, shear_x=1.0)[0, 0].float()
    centres = (sheared * torch.arange(41)).sum(1) / sheared.sum(1)
    assert_close(centres, 20 - 0.3 * (torch.arange(21) - 10.0), rtol=0, atol=0.02)


def test_sharpness_blurs_and_sharpens_about_the_same_mean() -> None:
    images = pictures(4)[..., 1:-1, 1:-1]
    spread = [distorted(images, sharpness=strength).float().std() for strength in (-1.0, 0.0, 1.0)]
    assert spread[0] < spread[1] < spread[2]


@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_drawn_changes_nothing(channels: int) -> None:
    images = pictures(5, channels)
    equal(distorted(images), images)


def test_two_changes_at_most_are_drawn_up_to_the_magnitude() -> None:
    draws = BatchRandAugment(magnitude=9.0).draw(4000, torch.Generator().manual_seed(0))
    chosen = (draws != 0).sum(1)
    assert chosen.max() == 2
    assert 0.85 < (chosen == 2).float().mean() < 0.95  # the same twice in one of eleven
    assert 0.29 < draws[chosen == 2].abs().max() <= 0.3
    assert ((draws != 0).float().mean(0) - 2 / 11).abs().max() < 0.03
    assert abs(draws.mean()) < 0.005


def test_each_picture_has_its_own_strength() -> None:
    images = pictures(1).expand(64, -1, -1, -1)
    change = BatchRandAugment(magnitude=30.0)
    results = change.apply(images, change.draw(64, torch.Generator().manual_seed(0)))
    assert len({bytes(result.numpy()) for result in results}) > 60


def test_erasing_paints_a_rectangle_of_the_drawn_area() -> None:
    images = torch.full((2000, 3, 40, 60), 200, dtype=torch.uint8)
    change = RandomErasing(chance=0.25, colour=(1.0, 2.0, 3.0))
    results = change.apply(images, change.draw(2000, torch.Generator().manual_seed(0)))
    painted = results[:, 0] == 1
    equal(results[:, 1] == 2, painted)
    equal(results[:, 2] == 3, painted)
    assert (results[:, 0][~painted] == 200).all()
    share = painted.float().mean((1, 2))
    assert 0.22 < (share > 0).float().mean() < 0.28
    assert share[share > 0].min() > 0.01
    assert share.max() < 0.35
    for picture in painted[share > 0]:
        rows, columns = picture.any(1), picture.any(0)
        equal(picture, rows[:, None] & columns)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_labels_are_the_shares_of_the_pictures(count: int, mixup: float, cutmix: float) -> None:
    mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=9)
    images = torch.arange(1.0, count + 1)[:, None, None, None].expand(-1, 3, *SIZE)
    labels = torch.arange(count)
    mixed, shares = mix.apply(images, labels, mix.draw(count, torch.Generator().manual_seed(1)))
    assert_close(shares.sum(1), torch.ones(count))
    # The mean of a picture tells how much of either neighbour is in it.
    assert_close(mixed.mean((1, 2, 3)), shares @ torch.arange(1.0, 10))
    if count % 2:
        equal(mixed[-1], images[-1])
    for i in range(count - count % 2):
        assert set(shares[i].nonzero().flatten().tolist()) <= {i, i ^ 1}


def test_mixup_blends_and_cutmix_pastes() -> None:
    images = torch.stack([torch.zeros(1, *SIZE), torch.ones(1, *SIZE)]).repeat(100, 1, 1, 1)
    labels = torch.zeros(200, dtype=torch.int64)
    kinds = {}
    for name, (mixup, cutmix) in {"mixup": (0.8, 0.0), "cutmix": (0.0, 1.0), "both": (0.8, 1.0)}.items():
        mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=2)
        mixed, _ = mix.apply(images, labels, mix.draw(200, torch.Generator().manual_seed(2)))
        is_pasted = ((mixed == 0) | (mixed == 1)).flatten(1).all(1)
        is_flat = (mixed == mixed[:, :, :1, :1]).flatten(1).all(1)
        assert (is_pasted | is_flat).all()
        kinds[name] = is_pasted.float().mean().item()
    assert kinds["mixup"] < 0.05
    assert kinds["cutmix"] == 1
    assert 0.4 < kinds["both"] < 0.6


def test_the_share_of_mixup_follows_its_beta_distribution() -> None:
    stays = MixupCutmix(mixup=0.4, cutmix=0.0, num_classes=2).draw(20_000, torch.Generator().manual_seed(0))[:, 1]
    assert stays.mean() == pytest.approx(0.5, abs=0.01)
    assert stays.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.005)


@dataclass(frozen=True)
class Strong:
    """Everything at once, in one process or in several."""

    world_size: int

    def loaders(self) -> list[InMemoryLoader]:
        changes: list[Augmentation] = [
            RandomCropFlip(padding=2, hflip=0.5),
            BatchRandAugment(magnitude=15.0),
            RandomErasing(chance=0.5, colour=(9.0, 9.0, 9.0)),
        ]
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(256, (53, 3, *SIZE), dtype=torch.uint8, generator=generator)
        return [
            InMemoryLoader(
                images,
                torch.arange(53) % 5,
                preprocessing=Preprocessing(image_size=SIZE, mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4)),
                batch_sampler=GlobalBatchSampler(
                    53, 12 // self.world_size, training=True, rank=rank, world_size=self.world_size
                ),
                changes=changes,
                mix=MixupCutmix(mixup=0.8, cutmix=1.0, num_classes=5),
            )
            for rank in range(self.world_size)
        ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_see_the_mixed_pictures_of_one(world_size: int) -> None:
    [alone], several = Strong(1).loaders(), Strong(world_size).loaders()
    for (images, labels), *parts in zip(alone, *several, strict=True):
        equal(torch.cat([part for part, _ in parts]), images)
        equal(torch.cat([part for _, part in parts]), labels)


def test_no_draw_touches_the_global_random_stream() -> None:
    [loader] = Strong(1).loaders()
    before = torch.get_rng_state()
    first = [images for images, _ in loader]
    equal(torch.get_rng_state(), before)
    for images, (again, _) in zip(first, loader, strict=True):
        equal(again, images)
