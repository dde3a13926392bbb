"""Transforms of single images in training, compared with torchvision's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.data.transforms
from vitmha.data.transforms import TrainTransform, three_augment
from vitmha.images import Preprocessing, read_image, read_reduced

MinSize = Callable[[int, int], tuple[int, int]]
Reduced = tuple[Image.Image, tuple[float, float, float, float]]
POLICIES: dict[str, Callable[[], list[v2.Transform]]] = {
    **{f"RandAugment {level}": lambda level=level: [v2.RandAugment(2, level)] for level in range(1, 31)},
    "AutoAugment": lambda: [v2.AutoAugment()],
    "3-Augment": three_augment,
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_on_every_image(name: str) -> None:
    policy = v2.Compose(POLICIES[name]())
    for image in (Image.new("RGB", (5, 7)), Image.new("RGB", (1, 1), "white"), Image.effect_noise((9, 8), 99)):
        for seed in range(25):
            torch.manual_seed(seed)
            result = policy(image.convert("RGB"))
            assert (result.mode, result.size) == ("RGB", image.size)


def test_three_augment_applies_one_of_three_operations() -> None:
    choice, _ = three_augment()
    image = to_pil_image(torch.randint(256, (3, 9, 9), dtype=torch.uint8))
    before, counts = pil_to_tensor(image).int(), {"grayscale": 0, "solarized": 0, "blurred": 0}
    for _ in range(300):
        after = pil_to_tensor(choice(image)).int()
        if (after == after[:1]).all():
            counts["grayscale"] += 1
        elif torch.equal(after, torch.where(before < 128, before, 255 - before)):
            counts["solarized"] += 1
        else:
            assert after.float().std() < before.float().std()
            counts["blurred"] += 1
    assert min(counts.values()) > 60


def train_transform(size: tuple[int, int], random_erasing: float = 0.0) -> TrainTransform:
    preprocessing = Preprocessing(image_size=size, mean=(0.5,) * 3, std=(0.5,) * 3)
    return TrainTransform(preprocessing, crop_scale=(0.08, 1.0), transforms=[], random_erasing=random_erasing)


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_image_decoded_at_a_smaller_size_looks_the_same(
    tmp_path: Path, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    blocks = to_pil_image(torch.randint(256, (3, 6, 9), dtype=torch.uint8))
    blocks.resize((900, 600)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    sizes, outputs, transform = [], [], train_transform((61, 47))
    crops: list[dict[str, int]] = []
    make_params = transform.random_crop.make_params
    monkeypatch.setattr(
        transform.random_crop, "make_params", lambda inputs: crops.append(make_params(inputs)) or crops[-1]
    )

    def read_and_check(source: Path, min_size: MinSize) -> Reduced:
        image, box = read_reduced(source, min_size)
        scale = max(image.size) / 900
        assert crops[-1]["height"] * scale >= 2.75 * 61 or scale == 1
        assert crops[-1]["width"] * scale >= 2.75 * 47 or scale == 1
        sizes.append(max(image.size))
        return image, box

    def read_at_full_size(source: Path, min_size: MinSize) -> Reduced:
        return read_reduced(source, lambda *size: min_size(*size) and size)

    for read in (read_and_check, read_at_full_size):
        monkeypatch.setattr(vitmha.data.transforms, "read_reduced", read)
        torch.manual_seed(0)
        outputs.append(torch.stack([transform(tmp_path / "a.jpg") for _ in range(30)]))
    assert {450, 900} <= set(sizes) <= {225, 450, 900}
    difference = (outputs[0] - outputs[1]).abs() * 127.5  # in levels of 255
    assert difference.mean() < 0.5
    assert difference.max() <= 16
    assert not torch.equal(*outputs)


def test_the_random_crop_equals_torchvision(tmp_path: Path) -> None:
    to_pil_image(torch.randint(256, (3, 6, 9), dtype=torch.uint8)).resize((90, 60)).save(tmp_path / "a.png")
    transform, reference = train_transform((17, 19)), v2.RandomResizedCrop((17, 19), interpolation=3)
    for seed in range(20):
        torch.manual_seed(seed)
        actual = transform(tmp_path / "a.png")
        torch.manual_seed(seed)
        expected = pil_to_tensor(reference(read_image(tmp_path / "a.png"))) / 127.5 - 1
        # At its edge, this one interpolates with pixels outside the crop, which torchvision does not.
        assert (actual - expected)[:, 2:-2, 2:-2].abs().max() < 0.03


def test_random_erasing_fills_with_noise(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    erased = [
        train_transform((20, 20), random_erasing=0.5)(tmp_path / "a.png").unique().numel() > 10 for _ in range(100)
    ]
    assert 30 < sum(erased) < 70
