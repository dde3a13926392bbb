"""Augmentation of batches equals torchvision's, image by image, and follows the sampled parameters."""

import pytest
import torch
from builders import assert_equal
from torch import Tensor
from torch.testing import assert_close
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from vitmha.data.augmentation import Augmentation, BatchRandAugment, MixupCutmix, RandomCropFlip, RandomErasing
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.images import Preprocessing

SIZE = (13, 19)


def random_images(count: int, channels: int = 3) -> Tensor:
    return torch.randint(256, (count, channels, *SIZE), dtype=torch.uint8)


def augmented(images: Tensor, **strengths: float) -> Tensor:
    """All images with the same operations."""
    names = BatchRandAugment.OPERATIONS
    params = torch.zeros(len(images), len(names))
    for name, strength in strengths.items():
        params[:, names.index(name)] = strength
    return BatchRandAugment(magnitude=30.0).apply(images, params)


def by_torchvision(images: Tensor, name: str, strength: float) -> Tensor:
    factor = 1 + 0.9 * strength
    x = images.float() / 255
    if name == "posterize":
        return transforms.posterize(images, 8 - round(4 * abs(strength)))
    if name == "solarize":
        return transforms.solarize(images, 256 * (1 - abs(strength)))
    adjust = {
        "brightness": transforms.adjust_brightness,
        "color": transforms.adjust_saturation,
        "contrast": transforms.adjust_contrast,
    }[name]
    return (255 * adjust(x, factor)).round()


@pytest.mark.parametrize(("padding", "hflip"), [(3, 0.5), (0, 0.5), (4, 0.0)])
def test_crop_and_flip_equal_torchvision(padding: int, hflip: float) -> None:
    images = torch.randint(256, (211, 3, 7, 11), dtype=torch.uint8)
    augmentation = RandomCropFlip(padding=padding, hflip=hflip)
    params = augmentation.sample_params(211, torch.Generator().manual_seed(3))
    for image, result, (flipped, top, left) in zip(
        images, augmentation.apply(images, params), params.tolist(), strict=True
    ):
        expected = transforms.horizontal_flip(image) if flipped else image
        assert_equal(result, transforms.crop(transforms.pad(expected, [padding]), top, left, 7, 11))
    assert {*params[:, 0].tolist()} == ({0, 1} if hflip else {0})
    assert {*params[:, 1].tolist()} == {*params[:, 2].tolist()} == set(range(2 * padding + 1))


@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", ["brightness", "color", "contrast", "posterize", "solarize"])
def test_color_operations_equal_torchvision(name: str, strength: float) -> None:
    images = random_images(5)
    result = augmented(images, **{name: strength})
    assert_close(result.float(), by_torchvision(images, name, strength).float(), rtol=0, atol=1.01)
    assert not torch.equal(result, images)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"rotate": 0.7}, {"angle": -21.0}),
        ({"rotate": -1.0}, {"angle": 30.0}),
        ({"translate_x": 1 / 0.45 / 19}, {"translate": [-1, 0]}),
        ({"translate_y": -2 / 0.45 / 13}, {"translate": [0, 2]}),
    ],
)
def test_geometric_operations_equal_torchvision(operation: dict[str, float], expected: dict) -> None:
    images = random_images(3)
    arguments = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **expected}
    by_torchvision = transforms.affine(images.float(), interpolation=InterpolationMode.BILINEAR, **arguments)
    assert_close(augmented(images, **operation).float(), by_torchvision, rtol=0, atol=1.01)


def test_a_shear_moves_each_row_in_proportion_to_its_height() -> None:
    images = torch.zeros(1, 1, 21, 41, dtype=torch.uint8)
    images[..., 20] = 255
    sheared = augmented(images, shear_x=1.0)[0, 0].float()
    centers = (sheared * torch.arange(41)).sum(1) / sheared.sum(1)
    assert_close(centers, 20 - 0.3 * (torch.arange(21) - 10.0), rtol=0, atol=0.02)


def test_negative_sharpness_blurs_and_positive_sharpens() -> None:
    images = random_images(4)[..., 1:-1, 1:-1]
    spread = [augmented(images, sharpness=strength).float().std() for strength in (-1.0, 0.0, 1.0)]
    assert spread[0] < spread[1] < spread[2]


@pytest.mark.parametrize("channels", [1, 3])
def test_zero_strengths_leave_the_images_unchanged(channels: int) -> None:
    images = random_images(5, channels)
    assert_equal(augmented(images), images)


def test_at_most_two_operations_are_sampled_with_strengths_up_to_the_magnitude() -> None:
    params = BatchRandAugment(magnitude=9.0).sample_params(4000, torch.Generator().manual_seed(0))
    chosen = (params != 0).sum(1)
    assert chosen.max() == 2
    assert 0.85 < (chosen == 2).float().mean() < 0.95  # one pair of eleven is the same operation twice
    assert 0.29 < params[chosen == 2].abs().max() <= 0.3
    assert ((params != 0).float().mean(0) - 2 / 11).abs().max() < 0.03
    assert abs(params.mean()) < 0.005


def test_each_image_has_its_own_strength() -> None:
    images = random_images(1).expand(64, -1, -1, -1)
    augmentation = BatchRandAugment(magnitude=30.0)
    results = augmentation.apply(images, augmentation.sample_params(64, torch.Generator().manual_seed(0)))
    assert len({bytes(result.numpy()) for result in results}) > 60


def test_erasing_fills_a_rectangle_of_the_sampled_area() -> None:
    images = torch.full((2000, 3, 40, 60), 200, dtype=torch.uint8)
    augmentation = RandomErasing(p=0.25, color=(1.0, 2.0, 3.0))
    results = augmentation.apply(images, augmentation.sample_params(2000, torch.Generator().manual_seed(0)))
    erased = results[:, 0] == 1
    assert_equal(results[:, 1] == 2, erased)
    assert_equal(results[:, 2] == 3, erased)
    assert (results[:, 0][~erased] == 200).all()
    area = erased.float().mean((1, 2))
    assert 0.22 < (area > 0).float().mean() < 0.28
    assert area[area > 0].min() > 0.01
    assert area.max() < 0.35
    for mask in erased[area > 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert_equal(mask, rows[:, None] & columns)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_labels_are_the_fractions_of_the_mixed_images(count: int, mixup: float, cutmix: float) -> None:
    mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=9)
    images = torch.arange(1.0, count + 1)[:, None, None, None].expand(-1, 3, *SIZE)
    labels = torch.arange(count)
    mixed, fractions = mix.apply(images, labels, mix.sample_params(count, torch.Generator().manual_seed(1)))
    assert_close(fractions.sum(1), torch.ones(count))
    # The mean of an image shows how much of both neighbors is in it.
    assert_close(mixed.mean((1, 2, 3)), fractions @ torch.arange(1.0, 10))
    if count % 2:
        assert_equal(mixed[-1], images[-1])
    for i in range(count - count % 2):
        assert set(fractions[i].nonzero().flatten().tolist()) <= {i, i ^ 1}


def test_mixup_blends_and_cutmix_pastes() -> None:
    images = torch.stack([torch.zeros(1, *SIZE), torch.ones(1, *SIZE)]).repeat(100, 1, 1, 1)
    labels = torch.zeros(200, dtype=torch.int64)
    cutmix_fractions = {}
    for name, (mixup, cutmix) in {"mixup": (0.8, 0.0), "cutmix": (0.0, 1.0), "both": (0.8, 1.0)}.items():
        mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=2)
        mixed, _ = mix.apply(images, labels, mix.sample_params(200, torch.Generator().manual_seed(2)))
        is_pasted = ((mixed == 0) | (mixed == 1)).flatten(1).all(1)
        is_flat = (mixed == mixed[:, :, :1, :1]).flatten(1).all(1)
        assert (is_pasted | is_flat).all()
        cutmix_fractions[name] = is_pasted.float().mean().item()
    assert cutmix_fractions["mixup"] < 0.05
    assert cutmix_fractions["cutmix"] == 1
    assert 0.4 < cutmix_fractions["both"] < 0.6


def test_the_weight_of_mixup_follows_its_beta_distribution() -> None:
    mix = MixupCutmix(mixup=0.4, cutmix=0.0, num_classes=2)
    weights = mix.sample_params(20_000, torch.Generator().manual_seed(0))[:, 1]
    assert weights.mean() == pytest.approx(0.5, abs=0.01)
    assert weights.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.005)


def loaders(world_size: int) -> list[InMemoryLoader]:
    """The loaders of one or several processes, with all augmentations."""
    augmentations: list[Augmentation] = [
        RandomCropFlip(padding=2, hflip=0.5),
        BatchRandAugment(magnitude=15.0),
        RandomErasing(p=0.5, color=(9.0, 9.0, 9.0)),
    ]
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (53, 3, *SIZE), dtype=torch.uint8, generator=generator)
    return [
        InMemoryLoader(
            images,
            torch.arange(53) % 5,
            preprocessing=Preprocessing(image_size=SIZE, mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4)),
            batch_sampler=GlobalBatchSampler(53, 12 // world_size, training=True, rank=rank, world_size=world_size),
            augmentations=augmentations,
            mix=MixupCutmix(mixup=0.8, cutmix=1.0, num_classes=5),
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_read_the_mixed_images_of_one(world_size: int) -> None:
    [single], several = loaders(1), loaders(world_size)
    for (images, labels), *parts in zip(single, *several, strict=True):
        assert_equal(torch.cat([part for part, _ in parts]), images)
        assert_equal(torch.cat([part for _, part in parts]), labels)


def test_augmentation_does_not_draw_from_the_global_random_stream() -> None:
    [loader] = loaders(1)
    before = torch.get_rng_state()
    first = [images for images, _ in loader]
    assert_equal(torch.get_rng_state(), before)
    for images, (again, _) in zip(first, loader, strict=True):
        assert_equal(again, images)
