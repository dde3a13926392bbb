"""Files to pictures, pictures to tensors."""

import pickle
import traceback
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops, ImageStat
from timm.data import create_transform
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from vitmha.images import ImageReadError, PictureBytes, Preprocessing, read_image

# How a file of each orientation holds the upright picture.
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
RGB = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture
def picture() -> Image.Image:
    """Noise with some structure, 67 wide and 43 high."""
    gradient = torch.linspace(0, 180, 67)[None, None] + 30 * torch.rand(3, 43, 1)
    return to_pil_image((gradient + 40 * torch.rand(3, 43, 67)).clamp(0, 255).to(torch.uint8))


def save_and_read(picture: Image.Image, path: Path, **options: object) -> Image.Image:
    picture.save(path, **options)
    return read_image(path)


def assert_same_pixels(picture: Image.Image, expected: Image.Image) -> None:
    assert picture.mode == expected.mode
    assert_close(pil_to_tensor(picture), pil_to_tensor(expected), rtol=0, atol=0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(picture: Image.Image, tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture.transpose(STORED_AS[orientation]) if orientation > 1 else picture
    assert_same_pixels(save_and_read(stored, tmp_path / "a.png", exif=exif), picture)


@pytest.mark.parametrize(
    ("mode", "suffix", "level", "expected"),
    [
        ("I;16", ".tif", 4660, 18),  # 4660 / 65535 of 255
        ("I;16", ".png", 65535, 255),
        ("I", ".pgm", 4660, 18),
        ("I", ".tif", 300, 1),
        ("F", ".tif", 0.5, 128),  # a scale of 0 to 1
        ("F", ".tif", 77.0, 77),  # a scale of 0 to 255
    ],
)
def test_deep_gray_is_scaled(tmp_path: Path, mode: str, suffix: str, level: float, expected: int) -> None:
    deep = Image.new(mode, (3, 2), level)
    assert_same_pixels(save_and_read(deep, tmp_path / f"a{suffix}"), Image.new("RGB", (3, 2), (expected,) * 3))


@pytest.mark.parametrize(("mode", "levels"), [("I", [-100_000, 0, 300_000]), ("F", [-1000.0, 0.0, 3000.0])])
def test_levels_outside_the_format_are_not_clipped(tmp_path: Path, mode: str, levels: list[float]) -> None:
    deep = Image.new(mode, (3, 1))
    deep.putdata(levels)
    gray = save_and_read(deep, tmp_path / "a.tif").getchannel("R")
    assert [gray.getpixel((i, 0)) for i in range(3)] == [0, 64, 255]


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    half = Image.new("RGBA", (2, 3), (200, 100, 0, 51))  # a fifth of the colour, four fifths of white
    expected = Image.new("RGB", (2, 3), (244, 224, 204))
    assert_same_pixels(save_and_read(half, tmp_path / "rgba.png"), expected)

    gray = Image.new("LA", (2, 3), (100, 51))
    assert_same_pixels(save_and_read(gray, tmp_path / "la.png"), Image.new("RGB", (2, 3), (224, 224, 224)))

    palette = Image.new("P", (2, 3), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert_same_pixels(
        save_and_read(palette, tmp_path / "p.png", transparency=1), Image.new("RGB", (2, 3), (255, 255, 255))
    )
    assert_same_pixels(save_and_read(palette, tmp_path / "opaque.png"), Image.new("RGB", (2, 3), (9, 9, 9)))


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 7, (7, 7, 7)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("LAB", (255, 128, 128), (254, 255, 254)),  # white, by way of XYZ
    ],
)
def test_other_modes_become_rgb(
    tmp_path: Path, mode: str, colour: int | tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    result = save_and_read(Image.new(mode, (3, 2), colour), tmp_path / "a.tif")
    assert_same_pixels(result, Image.new("RGB", (3, 2), expected))


def test_broken_exif_does_not_spoil_the_picture(picture: Image.Image, tmp_path: Path) -> None:
    exif = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09\x01"
    assert save_and_read(picture, tmp_path / "a.jpg", exif=exif).size == (67, 43)


def damaged_files(picture: Image.Image, folder: Path) -> dict[str, str]:
    picture.save(folder / "whole.jpg")
    (folder / "cut off.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:900])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no picture")
    (folder / "folder.png").mkdir()
    return {
        "cut off.jpg": "truncated",
        "empty.png": "not a picture",
        "text.png": "not a picture",
        "missing.png": "No such file",
        "folder.png": "Is a directory",
    }


def test_every_failure_is_one_line_with_the_path(picture: Image.Image, tmp_path: Path) -> None:
    for name, reason in damaged_files(picture, tmp_path).items():
        with pytest.raises(ImageReadError, match=reason) as caught:
            read_image(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(caught.value)
        assert caught.value.path == tmp_path / name


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("needed", "scale"), [((11, 17), 4), ((12, 17), 2), ((22, 34), 2), ((23, 34), 1), ((5, 8), 8), ((44, 68), 1)]
)
def test_a_jpeg_is_decoded_as_small_as_will_do(
    tmp_path: Path, orientation: int, needed: tuple[int, int], scale: int
) -> None:
    blocks = Image.new("RGB", (4, 2))
    blocks.putdata([(60 * x, 200 * y, 99) for y in range(2) for x in range(4)])
    upright = blocks.resize((68, 44), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright.transpose(STORED_AS[orientation]) if orientation in STORED_AS else upright
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    sizes: list[tuple[int, int]] = []
    result = read_image(tmp_path / "a.jpg", lambda *size: sizes.append(size) or needed)
    assert sizes == [(44, 68)]
    assert result.size == (-(-68 // scale), -(-44 // scale))
    difference = ImageChops.difference(result, upright.resize(result.size, Image.Resampling.BOX))
    assert max(ImageStat.Stat(difference).mean) < 12  # mirrored or turned, it would be far more


def test_other_formats_come_in_full(picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / "a.png")
    assert_same_pixels(read_image(tmp_path / "a.png", lambda *_: (1, 1)), picture)


def test_bytes_are_read_like_a_file(picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert_same_pixels(read_image(PictureBytes(content, "b")), picture)
    with pytest.raises(ImageReadError, match=r"^far away/b.png: .*truncated"):
        read_image(PictureBytes(content[:900], "far away/b.png"))


@pytest.mark.parametrize("limit", [67 * 43 - 1, 67 * 43 // 2 - 1])  # where Pillow warns, and where it stops
def test_a_picture_too_large_is_an_error(
    picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    picture.save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(ImageReadError, match="decompression bomb"):
        read_image(tmp_path / "a.png")


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ImageReadError("a: b.png", "broken: badly")))
    assert (type(error), error.path, str(error)) == (ImageReadError, "a: b.png", "a: b.png: broken: badly")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_survives_the_way_out_of_a_worker(picture: Image.Image, tmp_path: Path, workers: int) -> None:
    damaged_files(picture, tmp_path)
    paths = [str(tmp_path / name) for name in ("whole.jpg", "cut off.jpg")]
    with pytest.raises(ImageReadError, match="truncated") as caught:
        list(DataLoader(paths, num_workers=workers, collate_fn=lambda batch: read_image(batch[0]).size))
    traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector
    assert str(caught.value.path) == paths[1]
    assert str(caught.value).startswith(f"{paths[1]}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("side", "crop"), [(29, 1.0), (29, 0.875), (97, 0.9)])
@pytest.mark.parametrize("turned", [False, True])
def test_preprocessing_equals_torchvision(
    picture: Image.Image, interpolation: str, side: int, crop: float, turned: bool
) -> None:
    if turned:
        picture = picture.transpose(Image.Transpose.ROTATE_90)
    expected = v2.Compose(
        [
            v2.Resize(int(side / crop), InterpolationMode(interpolation)),
            v2.CenterCrop(side),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**RGB),
        ]
    )
    preprocessing = Preprocessing(image_size=(side, side), interpolation=interpolation, crop=crop, **RGB)
    assert_close(preprocessing(picture), expected(picture).as_subclass(torch.Tensor), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(29, 29), (97, 97), (23, 53), (53, 23)])
def test_preprocessing_equals_timm(picture: Image.Image, size: tuple[int, int]) -> None:
    expected = create_transform(size, is_training=False, interpolation="bicubic", crop_pct=0.9, **RGB)
    preprocessing = Preprocessing(image_size=size, crop=0.9, **RGB)
    assert_close(preprocessing(picture), expected(picture), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("size", "crop", "resized"), [((29, 23), 1.0, [29, 23]), ((31, 97), 0.875, [35, 110])])
def test_squashed_pictures_equal_torchvision_and_timm(
    picture: Image.Image, size: tuple[int, int], crop: float, resized: list[int]
) -> None:
    steps = [v2.Resize(resized, InterpolationMode.BICUBIC), v2.CenterCrop(size), v2.ToImage()]
    expected = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(**RGB)])
    preprocessing = Preprocessing(image_size=size, crop=crop, squash=True, **RGB)
    assert_close(preprocessing(picture), expected(picture).as_subclass(torch.Tensor), rtol=0, atol=2e-6)
    timms = create_transform(size, False, interpolation="bicubic", crop_pct=crop, crop_mode="squash", **RGB)
    assert_close(preprocessing(picture), timms(picture), rtol=0, atol=2e-6)


def test_a_picture_of_the_right_size_only_changes_its_scale(picture: Image.Image) -> None:
    preprocessing = Preprocessing(image_size=(43, 67), **RGB)
    assert_close(preprocessing(picture), preprocessing.normalize(pil_to_tensor(picture)[None])[0], rtol=0, atol=0)


def test_one_mean_makes_gray(picture: Image.Image) -> None:
    gray = Preprocessing(image_size=(43, 67), mean=(0.25,), std=(0.5,))(picture)
    assert_close(gray, (pil_to_tensor(picture.convert("L")) / 255 - 0.25) / 0.5)


def test_normalize_on_numbers_made_by_hand() -> None:
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
        ({"mean": (0.5, 0.5)}, r"1 \(gray\) or 3 \(RGB\): got \(0.5, 0.5\)"),
        ({"std": (0.5,)}, r"got \(0.485, 0.456, 0.406\) and \(0.5,\)"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be above 0"),
        ({"crop": 0.0}, "crop is a share, above 0 and up to 1: got 0.0"),
        ({"crop": 1.1}, "got 1.1"),
        ({"image_size": (0, 3)}, r"got \(0, 3\)"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"image_size": (2, 3), **RGB, **wrong})
