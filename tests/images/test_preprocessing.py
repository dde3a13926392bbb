"""Preprocessing equals the transforms of torchvision and timm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.testing import assert_close
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.images.preprocessing
from vitmha.images import Preprocessing, read_image

RGB = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("side", "crop_pct"), [(29, 1.0), (29, 0.875), (97, 0.9)])
@pytest.mark.parametrize("is_portrait", [False, True])
def test_preprocessing_equals_torchvision(
    image: Image.Image, interpolation: str, side: int, crop_pct: float, is_portrait: bool
) -> None:
    if is_portrait:
        image = image.transpose(Image.Transpose.ROTATE_90)
    expected = v2.Compose(
        [
            v2.Resize(int(side / crop_pct), InterpolationMode(interpolation)),
            v2.CenterCrop(side),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**RGB),
        ]
    )
    preprocessing = Preprocessing(image_size=(side, side), interpolation=interpolation, crop_pct=crop_pct, **RGB)
    assert_close(preprocessing(image), expected(image).as_subclass(torch.Tensor), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(29, 29), (97, 97), (23, 53), (53, 23)])
def test_preprocessing_equals_timm(image: Image.Image, size: tuple[int, int]) -> None:
    # If height and width differ, timm 1.0.26 is bilinear whatever it is asked for.
    interpolation = "bicubic" if size[0] == size[1] else "bilinear"
    expected = create_transform(size, is_training=False, interpolation=interpolation, crop_pct=0.9, **RGB)
    preprocessing = Preprocessing(image_size=size, crop_pct=0.9, interpolation=interpolation, **RGB)
    assert_close(preprocessing(image), expected(image), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("size", "crop_pct", "resized"), [((29, 23), 1.0, [29, 23]), ((31, 97), 0.875, [35, 110])])
def test_squash_equals_torchvision_and_timm(
    image: Image.Image, size: tuple[int, int], crop_pct: float, resized: list[int]
) -> None:
    steps = [v2.Resize(resized, InterpolationMode.BICUBIC), v2.CenterCrop(size), v2.ToImage()]
    expected = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(**RGB)])
    preprocessing = Preprocessing(image_size=size, crop_pct=crop_pct, crop_mode="squash", **RGB)
    assert_close(preprocessing(image), expected(image).as_subclass(torch.Tensor), rtol=0, atol=2e-6)
    by_timm = create_transform(size, False, interpolation="bicubic", crop_pct=crop_pct, crop_mode="squash", **RGB)
    assert_close(preprocessing(image), by_timm(image), rtol=0, atol=2e-6)


def test_an_image_of_the_right_size_is_only_normalized(image: Image.Image) -> None:
    preprocessing = Preprocessing(image_size=(43, 67), **RGB)
    assert_close(preprocessing(image), preprocessing.normalize(pil_to_tensor(image)[None])[0], rtol=0, atol=0)


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_of_a_very_thin_image_only_the_crop_is_resized(
    crop_mode: Any, image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Preprocessing(image_size=(29, 31), crop_pct=0.9, crop_mode=crop_mode, **RGB)
    expected = preprocessing.pixels(image).int()
    monkeypatch.setattr(vitmha.images.preprocessing, "MAX_RESIZED_PIXELS", 0)
    assert (preprocessing.pixels(image).int() - expected).abs().max() <= 1
    monkeypatch.undo()
    sizes, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *args: sizes.append(size) or resize(self, size, *args)
    )
    thin = Image.new("RGB", (1, 65_000), (10, 20, 30))  # would be 33 x 2,145,000 pixels
    pixels = Preprocessing(image_size=(29, 31), crop_pct=0.9, **RGB).pixels(thin)
    assert sizes == [(31, 29)]
    assert (pixels == torch.tensor([10, 20, 30])[:, None, None]).all()


def test_a_single_mean_converts_to_grayscale(image: Image.Image) -> None:
    gray = Preprocessing(image_size=(43, 67), mean=(0.25,), std=(0.5,))(image)
    assert_close(gray, (pil_to_tensor(image.convert("L")) / 255 - 0.25) / 0.5)


def test_normalize_equals_values_computed_by_hand() -> None:
    preprocessing = Preprocessing(image_size=(1, 2), mean=(0.0, 0.2, 1.0), std=(1.0, 0.5, 0.25))
    pixels = torch.tensor([0, 51, 51, 255, 255, 0], dtype=torch.uint8).view(1, 3, 1, 2)
    normalized = preprocessing.normalize(pixels)
    assert_close(normalized, torch.tensor([0.0, 0.2, 0.0, 1.6, 0.0, -4.0]).view(1, 3, 1, 2))
    assert_close(preprocessing.denormalize(normalized), pixels / 255)
    assert_close(preprocessing.denormalize(normalized * 10).amax(), torch.tensor(1.0))
    assert preprocessing.normalize(pixels[:0]).shape == (0, 3, 1, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mean": (0.5, 0.5)}, r"mean and std .* 1 \(grayscale\) or 3 \(RGB\), got \(0.5, 0.5\) and "),
        ({"std": (0.5,)}, r"mean and std .*, got \(0.485, 0.456, 0.406\) and \(0.5,\)"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be above 0"),
        ({"std": (0.5, float("nan"), 0.5)}, "std must be above 0"),
        ({"mean": (0.5, float("inf"), 0.5)}, "mean must be finite"),
        ({"crop_pct": 0.0}, "crop_pct must be above 0 and up to 1, got 0.0"),
        ({"crop_pct": 1.1}, "crop_pct must be .*, got 1.1"),
        ({"image_size": (0, 3)}, r"image_size must be .*, got \(0, 3\)"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"image_size": (2, 3), **RGB, **wrong})


def test_renormalize_replaces_the_mean_and_std_of_another_model() -> None:
    new = Preprocessing(image_size=(2, 3), **RGB)
    old = Preprocessing(image_size=(2, 3), mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    pixels = torch.randint(256, (5, 3, 2, 3), dtype=torch.uint8)
    assert_close(new.renormalize(old.normalize(pixels), old), new.normalize(pixels))
    assert torch.equal(new.renormalize(new.normalize(pixels), None), new.normalize(pixels))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("side", [32, 64, 128, 224])
def test_decoding_at_a_fraction_hardly_changes_the_input(side: int, interpolation: str, tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=(side, side), interpolation=interpolation, crop_pct=0.875, **RGB)
    for width, height in ((500, 375), (333, 499), (1901, 1427)):
        noise = [
            to_pil_image(torch.rand(3, n, n)).resize((width, height), Image.Resampling.BICUBIC) for n in (5, 29, 97)
        ]
        file = tmp_path / "a.jpg"
        Image.blend(Image.blend(*noise[:2], 0.5), noise[2], 0.33).save(file, quality=92)
        full = preprocessing.pixels(read_image(file)).int()
        difference = (preprocessing.read_pixels(file).int() - full).abs().float()  # in levels of 255
        assert difference.mean() <= 0.5
        assert difference.max() <= 16
        # The last image is large enough for a fraction; single pixels, which "nearest" picks, would be others.
        assert width < 1900 or difference.any() == (interpolation != "nearest")
