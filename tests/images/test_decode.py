"""Image files of every kind are decoded to upright sRGB images, or raise an error of one line."""

import logging
import math
import multiprocessing
import pickle
import struct
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders import multichannel_tiff
from PIL import Image, ImageChops, ImageCms, ImageStat
from PIL.PngImagePlugin import PngInfo
from torch.testing import assert_close
from torchvision.transforms.v2.functional import pil_to_tensor

from vitmha.images import (
    MAX_PIXELS,
    ImageBytes,
    ImageReadError,
    Preprocessing,
    check_header,
    color,
    decode,
    read_image,
    read_reduced,
    reading,
)
from vitmha.images.pixel_budget import PixelBudget

# How a file of each orientation stores the upright image.
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

# Expected values for the hard files, from their manifest: size, and mean of red, green and blue.
HOPPER = ((128, 128), (89.7, 80.1, 95.4))
HARD_IMAGES = {
    "exifex__Landscape_1.jpg": ((1800, 1200), (98.3, 115.6, 134.0)),
    "hymenoptera__imageNotFound.gif": ((300, 300), (242.3,) * 3),
    "imagenet__n01728572_thunder_snake_exif0.JPEG": ((500, 333), (123.0, 108.8, 96.7)),
    "imagenet__n02676566_acoustic_guitar_gray_icc.JPEG": ((700, 467), (83.1,) * 3),
    "imagenet__n02951585_can_opener_exif6.JPEG": ((294, 392), (139.5, 128.8, 93.5)),
    "imagenet__n04238763_slide_rule_aspect3.4.JPEG": ((411, 120), (190.7, 190.6, 189.0)),  # its profile applied
    "pillow__1x1_l.png": ((1, 1), (128.0,) * 3),
    "pillow__apng_mode_palette_1bit_alpha.png": ((128, 64), (0.0,) * 3),
    "pillow__chi.gif": ((320, 240), (249.7, 250.9, 247.0)),
    "pillow__hopper.jpg": HOPPER,
    "pillow__hopper.png": HOPPER,
    "pillow__hopper.psd": HOPPER,
    "pillow__hopper_1bit.pbm": ((128, 128), (84.3,) * 3),
    "pillow__hopper_bad_exif.jpg": ((500, 500), (125.5,) * 3),
    "pillow__hopper_gray.jpg": ((128, 128), (84.7,) * 3),
    "pillow__iss634.webp": ((245, 245), (134.6, 136.6, 90.2)),
    "pillow__jpeg_ff00_header.jpg": ((300, 225), (116.4, 78.9, 77.2)),
    "pillow__lab.tif": ((10, 10), (254.0, 255.0, 254.0)),
    "pillow__orientation_rectangle.jpg": ((1, 2), (254.0, 0.0, 0.0)),
    "pillow__pil123rgba.png": ((162, 150), (190.4, 188.9, 172.0)),
    "pillow__pil_sample_rgb.jpg": ((100, 100), (28.0, 4.5, 3.5)),
    "pillow__sugarshack.mpo": ((640, 480), (120.5, 108.9, 99.1)),
    "pillow__transparent.png": ((200, 150), (211.0, 202.7, 204.1)),
    "pillow__uint16_1_4660.tif": ((10, 10), (18.0,) * 3),
    "pillow__exif_imagemagick_orientation.png": ((512, 512), (144.5, 142.6, 143.1)),
    "tinyimagenet__val_0.JPEG": ((64, 64), (121.5, 119.9, 120.7)),
    "tinyimagenet__val_10_gray.JPEG": ((64, 64), (169.2,) * 3),
    "vips__indexed.png": ((290, 442), (129.3, 118.2, 108.5)),
    "vips__looks-like-svg.webp": ((256, 256), (208.0, 210.5, 202.7)),
}
# The file that shows the same image, and the largest mean difference between the two.
HARD_TWINS = {
    **{f"pillow__hopper_orientation_{n}.jpg": ("pillow__hopper.jpg", 6) for n in range(2, 9)},
    "pillow__hopper_orientation_6.webp": ("pillow__hopper.jpg", 6),
    "exifex__Landscape_6.jpg": ("exifex__Landscape_1.jpg", 4),
    "pillow__hopper.avif": ("pillow__hopper.png", 4),
    "pillow__pil_sample_cmyk.jpg": ("pillow__pil_sample_rgb.jpg", 6),
    "pillow__hopper_16bit.pgm": ("pillow__hopper_gray.jpg", 1),
    "pillow__hopper.pfm": ("pillow__hopper_gray.jpg", 0.6),
    "pillow__pil123p.png": ("pillow__pil123rgba.png", 1.3),
}
HARD_ERRORS = {
    "pillow__hopper.heif": "it is HEIF",
    "pillow__truncated_jpeg.jpg": "truncated",
    "vips__truncated.jpg": "truncated",
    "pillow__truncated_image.png": "truncated",
    "pillow__truncated_end_chunk.png": "Truncated",
    "pillow__broken.png": "not an image",
    "pillow__broken_data_stream.png": "unrecognized data stream",
    "pillow__decompression_bomb.gif": "too large",
    "pillow__bmp_reallybig.bmp": "too large",
    "pillow__negative_size.ppm": "not an image",
    "pillow__test-ole-file.doc": "not an image",
    "tinyimagenet__.DS_Store.bin": "not an image",
}


def save_and_read(image: Image.Image, path: Path, **options: object) -> Image.Image:
    image.save(path, **options)
    return read_image(path)


def assert_same_pixels(image: Image.Image, expected: Image.Image) -> None:
    assert image.mode == expected.mode
    assert_close(pil_to_tensor(image), pil_to_tensor(expected), rtol=0, atol=0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(image: Image.Image, tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = image.transpose(STORED_AS[orientation]) if orientation > 1 else image
    for suffix in (".png", ".tif", ".webp"):
        upright = save_and_read(stored, tmp_path / f"a{suffix}", exif=exif, lossless=True)
        assert_same_pixels(upright, image)
        assert_same_pixels(read_image(upright), image)  # not rotated again
        sizes: list[tuple[int, int]] = []
        read_image(tmp_path / f"a{suffix}", lambda *size, sizes=sizes: sizes.append(size) or size)
        assert sizes == [(43, 67)]
    smooth = image.resize((8, 6)).resize((67, 43), Image.Resampling.BICUBIC)
    stored = smooth.transpose(STORED_AS[orientation]) if orientation > 1 else smooth
    decoded = save_and_read(stored, tmp_path / "a.avif", exif=exif, quality=95)
    assert max(ImageStat.Stat(ImageChops.difference(decoded, smooth)).mean) < 3  # far more in another orientation


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
def test_grayscale_of_more_than_8_bits_is_scaled(
    tmp_path: Path, mode: str, suffix: str, level: float, expected: int
) -> None:
    deep = Image.new(mode, (3, 2), level)
    assert_same_pixels(save_and_read(deep, tmp_path / f"a{suffix}"), Image.new("RGB", (3, 2), (expected,) * 3))


@pytest.mark.parametrize(("mode", "levels"), [("I", [-100_000, 0, 300_000]), ("F", [-1000.0, 0.0, 3000.0])])
def test_levels_outside_the_range_of_the_format_are_not_clipped(tmp_path: Path, mode: str, levels: list[float]) -> None:
    deep = Image.new(mode, (3, 1))
    deep.putdata(levels)
    gray = save_and_read(deep, tmp_path / "a.tif").getchannel("R")
    assert [gray.getpixel((i, 0)) for i in range(3)] == [0, 64, 255]


def test_transparent_images_are_composited_onto_white(tmp_path: Path) -> None:
    half = Image.new("RGBA", (2, 3), (200, 100, 0, 51))  # a fifth of the color, four fifths of white
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
    ("mode", "color", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 7, (7, 7, 7)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("LAB", (255, 128, 128), (254, 255, 254)),  # white, by way of XYZ
    ],
)
def test_other_modes_become_rgb(
    tmp_path: Path, mode: str, color: int | tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    result = save_and_read(Image.new(mode, (3, 2), color), tmp_path / "a.tif")
    assert_same_pixels(result, Image.new("RGB", (3, 2), expected))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("exif", [b"MM\x00*\x00\x00\x00\x08\x00\x09\x01", b"garbage!", b"MM\x00", b"II*\x00"])
def test_an_image_with_corrupt_exif_is_read(image: Image.Image, tmp_path: Path, suffix: str, exif: bytes) -> None:
    file = tmp_path / f"a{suffix}"
    assert save_and_read(image, file, exif=b"Exif\x00\x00" + exif).size == (67, 43)
    assert read_image(file, lambda *size: size).size == (67, 43)


def test_a_png_with_corrupt_exif_in_its_text_is_read(image: Image.Image, tmp_path: Path) -> None:
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n 3\nno hex")
    assert_same_pixels(save_and_read(image, tmp_path / "a.png", pnginfo=text), image)


def test_the_orientation_is_applied_even_if_the_exif_cannot_be_written_again(
    image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(STORED_AS[6]).save(tmp_path / "a.png", exif=exif)
    monkeypatch.setattr(Image.Exif, "tobytes", lambda *_: b""[0])
    assert_same_pixels(read_image(tmp_path / "a.png"), image)


def test_every_hard_file_is_read_as_its_manifest_says(hard_images: Path) -> None:
    read: dict[str, Image.Image] = {}
    errors: dict[str, str] = {}
    for file in sorted(hard_images.iterdir()):
        try:
            read[file.name] = read_image(file)
        except ImageReadError as error:
            errors[file.name] = str(error).removeprefix(f"{file}: ")
    del errors["MANIFEST.md"]
    assert len(read) + len(errors) == 55
    assert sorted(errors) == sorted(HARD_ERRORS)
    assert [name for name, reason in HARD_ERRORS.items() if reason not in errors[name]] == []
    assert [name for name, error in errors.items() if "\n" in error or str(hard_images) in error] == []
    for name, (size, mean) in HARD_IMAGES.items():
        image = read[name]
        assert (name, image.mode, image.size) == (name, "RGB", size)
        assert ImageStat.Stat(image).mean == pytest.approx(mean, abs=0.15), name
    gray = [name for name in read if "gray" in name or name.startswith(("pillow__hopper_16", "pillow__hopper_1bit"))]
    for name in (*gray, "pillow__hopper.pfm", "pillow__hopper_bad_exif.jpg"):
        assert len({read[name].getchannel(channel).tobytes() for channel in "RGB"}) == 1, name
    for name, (other, limit) in HARD_TWINS.items():
        difference = ImageStat.Stat(ImageChops.difference(read[name], read[other])).mean
        assert sum(difference) / 3 < limit, name
    assert sorted(read) == sorted(HARD_IMAGES.keys() | HARD_TWINS.keys())


def test_a_color_profile_is_applied_if_it_changes_the_colors(tmp_path: Path) -> None:
    green = Image.new("RGB", (3, 2), (0, 200, 50))
    # The profile's green is sRGB's red, and so on: the channels are rotated.
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    r, g, b = (srgb.index(tag, 128) for tag in (b"rXYZ", b"gXYZ", b"bXYZ"))
    tags = bytearray(srgb)
    tags[r : r + 4], tags[g : g + 4], tags[b : b + 4] = b"gXYZ", b"bXYZ", b"rXYZ"
    expected = Image.new("RGB", (3, 2), (200, 50, 0))
    for profile, result in ((bytes(tags), expected), (srgb, green), (bytes(tags[:200]), green), (b"none", green)):
        assert_near(save_and_read(green, tmp_path / "a.png", icc_profile=profile), result)
    clear = Image.new("RGBA", (3, 2), (0, 200, 50, 51))  # a fifth of the color, four fifths of white
    assert_near(
        save_and_read(clear, tmp_path / "b.png", icc_profile=bytes(tags)), Image.new("RGB", (3, 2), (244, 214, 204))
    )
    gray = Image.new("L", (3, 2), 99)  # a profile for another kind of image
    assert_near(save_and_read(gray, tmp_path / "c.png", icc_profile=bytes(tags)), Image.new("RGB", (3, 2), (99,) * 3))
    palette = green.convert("P", palette=Image.Palette.ADAPTIVE)
    assert_near(save_and_read(palette, tmp_path / "d.png", icc_profile=bytes(tags)), expected)


def assert_near(image: Image.Image, expected: Image.Image) -> None:
    assert_close(pil_to_tensor(image).int(), pil_to_tensor(expected).int(), rtol=0, atol=2)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_jpegs_in_other_color_spaces_look_the_same(image: Image.Image, tmp_path: Path, mode: str) -> None:
    smooth = image.resize((8, 6)).resize((64, 48), Image.Resampling.BICUBIC)
    result = save_and_read(smooth.convert(mode), tmp_path / "a.jpg", quality=95)
    assert max(ImageStat.Stat(ImageChops.difference(result, smooth)).mean) < 4  # far more if inverted


def test_16_bit_grayscale_with_a_transparent_level_is_composited_onto_white(tmp_path: Path) -> None:
    deep = Image.new("I;16", (3, 2), 40_000)
    deep.putpixel((0, 0), 65_535)
    result = save_and_read(deep, tmp_path / "a.png", transparency=40_000)
    assert result.getpixel((0, 0)) == (255, 255, 255)
    assert result.getpixel((1, 1)) == (255, 255, 255)
    other = Image.new("I;16", (3, 2), 64 * 257)  # 40,000 in eight bits
    assert save_and_read(other, tmp_path / "b.png", transparency=40_000).getpixel((0, 0)) == (64, 64, 64)


@pytest.mark.parametrize("position", [0, 1])
def test_nan_and_inf_do_not_change_the_other_levels(tmp_path: Path, position: int) -> None:
    levels = [math.nan, math.inf, -math.inf, 1.0, 3.0]
    levels[0], levels[position] = levels[position], levels[0]
    deep = Image.new("F", (5, 1))
    deep.putdata([*levels])
    gray = save_and_read(deep, tmp_path / "a.tif").getchannel("R")
    found = dict(zip(map(str, levels), [gray.getpixel((i, 0)) for i in range(5)], strict=True))
    assert found == {"nan": 0, "inf": 3, "-inf": 1, "1.0": 1, "3.0": 3}
    deep.putdata([math.nan] * 5)
    deep.save(tmp_path / "b.tif")
    with pytest.raises(ImageReadError, match=r"b\.tif: .*all gray levels are NaN or inf"):
        read_image(tmp_path / "b.tif")


def test_the_first_page_or_frame_is_read(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (3, 2), color) for color in ((255, 0, 0), (0, 0, 255))]
    for suffix in (".tif", ".gif", ".png", ".webp"):
        extra = {"lossless": True} if suffix == ".webp" else {}
        assert_same_pixels(
            save_and_read(pages[0], tmp_path / f"a{suffix}", save_all=True, append_images=pages[1:], **extra), pages[0]
        )


def test_reading_in_threads_emits_no_warning_and_restores_the_warning_filters(
    image: Image.Image, tmp_path: Path
) -> None:
    corrupt = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09\x01"
    image.save(tmp_path / "a.jpg", exif=corrupt)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda _: read_image(tmp_path / "a.jpg").size, range(400)))
    assert sizes == [(67, 43)] * 400
    assert list(warnings.filters) == before
    with pytest.raises(UserWarning, match=r"EXIF|Truncated|Expecting"), Image.open(tmp_path / "a.jpg") as opened:
        opened.getexif()


def write_corrupt_files(image: Image.Image, directory: Path) -> dict[str, str]:
    image.save(directory / "complete.jpg")
    (directory / "half a file.jpg").write_bytes((directory / "complete.jpg").read_bytes()[:900])
    image.save(directory / "half a file.png")
    (directory / "half a file.png").write_bytes((directory / "half a file.png").read_bytes()[:900])
    (directory / "empty.png").touch()
    (directory / "text.png").write_text("not an image")
    (directory / "directory.png").mkdir()
    return {
        "half a file.jpg": "truncated",
        "half a file.png": "truncated",
        "empty.png": "not an image",
        "text.png": "not an image",
        "missing.png": "No such file",
        "directory.png": "Is a directory",
    }


def test_every_error_is_one_line_with_the_path(image: Image.Image, tmp_path: Path) -> None:
    for name, reason in write_corrupt_files(image, tmp_path).items():
        with pytest.raises(ImageReadError, match=reason) as caught:
            read_image(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(caught.value)
        assert caught.value.path == tmp_path / name
        with pytest.raises(ImageReadError, match=reason):
            read_image(tmp_path / name, lambda *size: size)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("needed", "scale"), [((11, 17), 4), ((12, 17), 2), ((22, 34), 2), ((23, 34), 1), ((5, 8), 8), ((44, 68), 1)]
)
def test_a_jpeg_is_decoded_at_the_smallest_acceptable_size(
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
    assert max(ImageStat.Stat(difference).mean) < 12  # far more in another orientation


def test_other_formats_are_decoded_at_full_size(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.png")
    assert_same_pixels(read_image(tmp_path / "a.png", lambda *_: (1, 1)), image)


def test_bytes_in_memory_are_read_like_a_file(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert_same_pixels(read_image(ImageBytes(content, "b")), image)
    with pytest.raises(ImageReadError, match=r"^far away/b.png: .*truncated"):
        read_image(ImageBytes(content[:900], "far away/b.png"))
    for content in (b"text", b"", b"II*\0"):
        with pytest.raises(ImageReadError, match=r"^b: not an image in a format that Pillow reads$"):
            read_image(ImageBytes(content, "b"))


def test_an_image_with_too_many_pixels_is_an_error(
    image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 67 * 43 - 1)  # for which Pillow emits a warning
    assert_same_pixels(read_image(tmp_path / "a.png"), image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 67 * 43 // 2 - 1)
    with pytest.raises(ImageReadError, match=r"a\.png: too large: 2881 pixels, at most 2878 \(max_pixels\)$"):
        read_image(tmp_path / "a.png")


def test_files_with_more_than_max_pixels_are_errors(
    image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in (".png", ".jpg", ".tif", ".avif", ".gif"):
        image.save(tmp_path / f"a{suffix}")
        assert read_image(tmp_path / f"a{suffix}", max_pixels=67 * 43).size == (67, 43)
        for read in (read_image, Preprocessing(image_size=(5, 3), mean=(0.5,), std=(0.5,)).read_pixels):
            with pytest.raises(ImageReadError, match=r": too large: 67 x 43 pixels, at most 2880 \(max_pixels\)$"):
                read(tmp_path / f"a{suffix}", max_pixels=67 * 43 - 1)
    assert_same_pixels(read_image(image, max_pixels=1), image)  # it is in memory already
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageReadError, match="at most 2000 "):  # the default of a classifier raises no limit
        read_image(tmp_path / "a.png", max_pixels=MAX_PIXELS)
    assert read_image(tmp_path / "a.png", max_pixels=MAX_PIXELS + 1).size == (67, 43)


def test_an_avif_larger_than_libavif_reads_is_too_large(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.avif")
    head, size, rest = (tmp_path / "a.avif").read_bytes().partition(struct.pack(">II", *image.size))
    assert size
    (tmp_path / "a.avif").write_bytes(head + struct.pack(">II", 17_000, 17_000) + rest)
    with pytest.raises(ImageReadError, match=r"a\.avif: too large: 17000 x 17000 pixels, at most \d+ \(max_pixels\)$"):
        read_image(tmp_path / "a.avif")


def test_a_small_tiff_of_a_large_tile_is_too_large(tmp_path: Path) -> None:
    tags = {256: 10, 257: 10, 258: 8, 259: 8, 262: 1, 277: 1, 322: 32_768, 323: 32_768, 324: 200, 325: 9}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(100))
    with pytest.raises(ImageReadError, match=r"a\.tif: too large: 32768 x 32768 pixels, at most \d+ \(max_pixels\)$"):
        read_image(tmp_path / "a.tif")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_reading_holds_few_copies(tmp_path: Path) -> None:
    script = """
import sys
from vitmha.images import color, decode
color.STRIP_PIXELS = 2**18
for path in sys.argv[1:]:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    sizes = []
    for read in (lambda: None, lambda: decode.read_image(path)):
        read()
        with open("/proc/self/status") as file:
            sizes.append(int(file.read().split("VmHWM:")[1].split()[0]) * 1024)
    print((sizes[1] - sizes[0]) / 4000**2)
"""
    bounds = {"RGB": 4.5, "L": 5.5, "RGBA": 8.5, "I;16": 6.5}  # bytes per pixel: of the file's pixels, and 4 for RGB
    for mode in bounds:
        Image.new(mode, (4000, 4000)).save(tmp_path / f"{mode}.png", compress_level=1)
    files = [str(tmp_path / f"{mode}.png") for mode in bounds]
    done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True, check=True)
    for (mode, bound), found in zip(bounds.items(), done.stdout.split(), strict=True):
        assert float(found) < bound, mode


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "I;16", "F", "CMYK", "1"])
def test_an_image_converted_in_strips_has_the_same_pixels(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (43, 67, 4), dtype=np.uint8)
    if mode in ("I;16", "F"):
        image = Image.fromarray(levels[..., 0].astype(np.uint16 if mode == "I;16" else np.float32) * 90)
    else:
        image = Image.fromarray(levels, "RGBA" if mode == "RGBA" else "CMYK").convert(mode)
    image.info["transparency"] = 7 if mode == "P" else None
    image.save(tmp_path / "a.tif" if mode in ("F", "CMYK") else tmp_path / "a.png")
    file = next(tmp_path.iterdir())
    expected = read_image(file)
    monkeypatch.setattr(color, "STRIP_PIXELS", 67 * 5)
    assert_same_pixels(read_image(file), expected)


def test_threads_hold_at_most_the_pixels_of_the_budget() -> None:
    budget, lock, held, most = PixelBudget(100), threading.Lock(), 0, 0

    def hold(pixels: int) -> None:
        nonlocal held, most
        with budget.reserve(pixels):
            with lock:
                held += min(pixels, 100)
                most = max(most, held)
            time.sleep(0.002)
            with lock:
                held -= min(pixels, 100)
            if pixels == 40:
                raise ValueError

    with ThreadPoolExecutor(8) as threads:
        done = [threads.submit(hold, pixels) for pixels in (30, 40, 60, 500, 1) * 8]
    assert sum(each.exception() is not None for each in done) == 8
    assert (most <= 100, budget.free) == (True, 100)


def test_readers_hold_their_pixels_until_the_image_is_resized(
    image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix, options in ((".png", {}), (".jpg", {}), (".jpeg", {"progressive": True})):
        image.resize((800, 600)).save(tmp_path / f"a{suffix}", **options)
    budget = PixelBudget(1_000_000)
    monkeypatch.setattr(decode, "HELD_PIXELS", budget)
    for suffix, pixels in ((".png", 800 * 600), (".jpg", 200 * 150), (".jpeg", 800 * 600)):
        with reading(tmp_path / f"a{suffix}", lambda *_: (150, 200)):
            assert budget.free == 1_000_000 - pixels
        assert budget.free == 1_000_000
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:-500])
    with pytest.raises(ImageReadError, match="truncated"):
        read_image(tmp_path / "b.png")
    assert budget.free == 1_000_000


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.png")
    with decode.HELD_PIXELS.reserve(MAX_PIXELS):
        child = multiprocessing.get_context("fork").Process(target=read_image, args=(tmp_path / "a.png",))
        child.start()
        child.join(20)
        exit_code = child.exitcode
        child.kill()
    assert exit_code == 0


def test_postscript_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(ImageReadError, match=r"a\.png: EPS is not supported, since that needs Ghostscript: convert it"):
        read_image(tmp_path / "a.png")


def test_what_pillow_logs_about_corrupt_files_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tif").write_bytes(multichannel_tiff(channels=7, bits=8))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that does not log
    with pytest.raises(ImageReadError, match="a TIFF of 7 channels"):
        read_image(tmp_path / "a.tif")
    assert capsys.readouterr().err == ""


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ImageReadError("a: b.png", "corrupt: badly")))
    assert (type(error), error.path, str(error)) == (ImageReadError, "a: b.png", "a: b.png: corrupt: badly")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_jpeg_decoded_at_a_fraction_says_where_the_whole_image_lies(
    tmp_path: Path, orientation: int, scale: int
) -> None:
    ramp = Image.merge("RGB", [Image.linear_gradient("L").rotate(angle).resize((205, 131)) for angle in (0, 90, 0)])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = ramp.transpose(STORED_AS[orientation]) if orientation > 1 else ramp
    stored.save(tmp_path / "a.jpg", exif=exif, quality=98, subsampling=0)
    image, box = read_reduced(tmp_path / "a.jpg", lambda height, width: (height // scale, width // scale))
    assert image.size == (-(-205 // scale), -(-131 // scale))
    assert (box[2] - box[0], box[3] - box[1]) == (205 / scale, 131 / scale)
    difference = ImageChops.difference(image.resize((11, 7), box=box), ramp.resize((11, 7)))
    assert max(high for _, high in difference.getextrema()) <= 3


def test_an_image_that_is_decoded_in_full_fills_its_box(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.png")
    assert read_reduced(tmp_path / "a.png", lambda *_: (1, 1))[1] == (0.0, 0.0, 67.0, 43.0)


def test_a_tiff_that_pillow_does_not_read_is_described(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(multichannel_tiff(channels=4, bits=16))
    for read in (read_image, check_header):
        with pytest.raises(
            ImageReadError, match=r"a\.tif: a TIFF of 4 channels of 16 bits is not supported: convert it"
        ):
            read(tmp_path / "a.tif")


def test_content_that_is_no_image_is_refused_and_stays_open() -> None:
    content = ImageBytes(b"not an image, but longer than a header", "upload")
    for _ in range(2):
        with pytest.raises(ImageReadError, match="upload: not an image in a format that Pillow reads"):
            read_image(content)
