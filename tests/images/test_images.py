"""Files to pictures, pictures to tensors."""

import math
import pickle
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops, ImageCms, ImageStat
from PIL.PngImagePlugin import PngInfo
from timm.data import create_transform
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.images.preprocessing
from vitmha.images import ImageBytes, ImageReadError, Preprocessing, read_image

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

# What is right for the hard files, from their manifest: size, and mean of red, green and blue.
HOPPER = ((128, 128), (89.7, 80.1, 95.4))
HARD_PICTURES = {
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
# The picture that another shows too, and how far they may be apart on average.
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
    "pillow__broken.png": "not a picture",
    "pillow__broken_data_stream.png": "unrecognized data stream",
    "pillow__decompression_bomb.gif": "decompression bomb",
    "pillow__bmp_reallybig.bmp": "decompression bomb",
    "pillow__negative_size.ppm": "not a picture",
    "pillow__test-ole-file.doc": "not a picture",
    "tinyimagenet__.DS_Store.bin": "not a picture",
}


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
    for suffix in (".png", ".tif", ".webp"):
        upright = save_and_read(stored, tmp_path / f"a{suffix}", exif=exif, lossless=True)
        assert_same_pixels(upright, picture)
        assert_same_pixels(read_image(upright), picture)  # not turned again
        sizes: list[tuple[int, int]] = []
        read_image(tmp_path / f"a{suffix}", lambda *size, sizes=sizes: sizes.append(size) or size)
        assert sizes == [(43, 67)]
    smooth = picture.resize((8, 6)).resize((67, 43), Image.Resampling.BICUBIC)
    stored = smooth.transpose(STORED_AS[orientation]) if orientation > 1 else smooth
    seen = save_and_read(stored, tmp_path / "a.avif", exif=exif, quality=95)
    assert max(ImageStat.Stat(ImageChops.difference(seen, smooth)).mean) < 3  # turned otherwise, it would be far more


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


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("exif", [b"MM\x00*\x00\x00\x00\x08\x00\x09\x01", b"garbage!", b"MM\x00", b"II*\x00"])
def test_broken_exif_does_not_spoil_the_picture(picture: Image.Image, tmp_path: Path, suffix: str, exif: bytes) -> None:
    file = tmp_path / f"a{suffix}"
    assert save_and_read(picture, file, exif=b"Exif\x00\x00" + exif).size == (67, 43)
    assert read_image(file, lambda *size: size).size == (67, 43)


def test_broken_exif_in_the_text_of_a_png_does_not_spoil_it(picture: Image.Image, tmp_path: Path) -> None:
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n 3\nno hex")
    assert_same_pixels(save_and_read(picture, tmp_path / "a.png", pnginfo=text), picture)


def test_exif_that_cannot_be_written_again_still_turns_the_picture(
    picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.transpose(STORED_AS[6]).save(tmp_path / "a.png", exif=exif)
    monkeypatch.setattr(Image.Exif, "tobytes", lambda *_: b""[0])
    assert_same_pixels(read_image(tmp_path / "a.png"), picture)


def test_every_hard_file_gives_what_the_manifest_says() -> None:
    folder = Path(__file__).parents[3] / "shared" / "images"
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} of hard files, some of which may not be passed on")
    read: dict[str, Image.Image] = {}
    errors: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        began = time.monotonic()
        try:
            read[file.name] = read_image(file)
        except ImageReadError as error:
            errors[file.name] = str(error).removeprefix(f"{file}: ")
        assert time.monotonic() - began < 1, file
    del errors["MANIFEST.md"]
    assert len(read) + len(errors) == 55
    assert sorted(errors) == sorted(HARD_ERRORS)
    assert [name for name, reason in HARD_ERRORS.items() if reason not in errors[name]] == []
    assert [name for name, error in errors.items() if "\n" in error or str(folder) in error] == []
    for name, (size, mean) in HARD_PICTURES.items():
        picture = read[name]
        assert (name, picture.mode, picture.size) == (name, "RGB", size)
        assert ImageStat.Stat(picture).mean == pytest.approx(mean, abs=0.15), name
    gray = [name for name in read if "gray" in name or name.startswith(("pillow__hopper_16", "pillow__hopper_1bit"))]
    for name in (*gray, "pillow__hopper.pfm", "pillow__hopper_bad_exif.jpg"):
        assert len({read[name].getchannel(channel).tobytes() for channel in "RGB"}) == 1, name
    for name, (other, most) in HARD_TWINS.items():
        difference = ImageStat.Stat(ImageChops.difference(read[name], read[other])).mean
        assert sum(difference) / 3 < most, name
    assert sorted(read) == sorted(HARD_PICTURES.keys() | HARD_TWINS.keys())


def test_a_colour_profile_is_applied_where_it_changes_the_colours(tmp_path: Path) -> None:
    green = Image.new("RGB", (3, 2), (0, 200, 50))
    # The profile's green is sRGB's red, and so on: each channel moves on by one.
    turned = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    r, g, b = (turned.index(tag, 128) for tag in (b"rXYZ", b"gXYZ", b"bXYZ"))
    tags = bytearray(turned)
    tags[r : r + 4], tags[g : g + 4], tags[b : b + 4] = b"gXYZ", b"bXYZ", b"rXYZ"
    expected = Image.new("RGB", (3, 2), (200, 50, 0))
    for profile, result in ((bytes(tags), expected), (turned, green), (bytes(tags[:200]), green), (b"none", green)):
        assert_near(save_and_read(green, tmp_path / "a.png", icc_profile=profile), result)
    clear = Image.new("RGBA", (3, 2), (0, 200, 50, 51))  # a fifth of the colour, four fifths of white
    assert_near(
        save_and_read(clear, tmp_path / "b.png", icc_profile=bytes(tags)), Image.new("RGB", (3, 2), (244, 214, 204))
    )
    gray = Image.new("L", (3, 2), 99)  # a profile for another kind of picture
    assert_near(save_and_read(gray, tmp_path / "c.png", icc_profile=bytes(tags)), Image.new("RGB", (3, 2), (99,) * 3))
    palette = green.convert("P", palette=Image.Palette.ADAPTIVE)
    assert_near(save_and_read(palette, tmp_path / "d.png", icc_profile=bytes(tags)), expected)


def assert_near(picture: Image.Image, expected: Image.Image) -> None:
    assert_close(pil_to_tensor(picture).int(), pil_to_tensor(expected).int(), rtol=0, atol=2)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_jpegs_of_other_colours_keep_what_is_seen(picture: Image.Image, tmp_path: Path, mode: str) -> None:
    smooth = picture.resize((8, 6)).resize((64, 48), Image.Resampling.BICUBIC)
    result = save_and_read(smooth.convert(mode), tmp_path / "a.jpg", quality=95)
    assert max(ImageStat.Stat(ImageChops.difference(result, smooth)).mean) < 4  # inverted, it would be far more


def test_deep_gray_with_a_transparent_level_is_laid_on_white(tmp_path: Path) -> None:
    deep = Image.new("I;16", (3, 2), 40_000)
    deep.putpixel((0, 0), 65_535)
    result = save_and_read(deep, tmp_path / "a.png", transparency=40_000)
    assert result.getpixel((0, 0)) == (255, 255, 255)
    assert result.getpixel((1, 1)) == (255, 255, 255)
    other = Image.new("I;16", (3, 2), 64 * 257)  # 40,000 in eight bits
    assert save_and_read(other, tmp_path / "b.png", transparency=40_000).getpixel((0, 0)) == (64, 64, 64)


@pytest.mark.parametrize("place", [0, 1])
def test_levels_that_are_no_numbers_do_not_darken_the_others(tmp_path: Path, place: int) -> None:
    levels = [math.nan, math.inf, -math.inf, 1.0, 3.0]
    levels[0], levels[place] = levels[place], levels[0]
    deep = Image.new("F", (5, 1))
    deep.putdata([*levels])
    gray = save_and_read(deep, tmp_path / "a.tif").getchannel("R")
    found = dict(zip(map(str, levels), [gray.getpixel((i, 0)) for i in range(5)], strict=True))
    assert found == {"nan": 0, "inf": 3, "-inf": 1, "1.0": 1, "3.0": 3}
    deep.putdata([math.nan] * 5)
    deep.save(tmp_path / "b.tif")
    with pytest.raises(ImageReadError, match=r"b\.tif: .*none of its gray levels is a number"):
        read_image(tmp_path / "b.tif")


def test_pages_and_frames_give_the_first(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (3, 2), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    for suffix in (".tif", ".gif", ".png", ".webp"):
        extra = {"lossless": True} if suffix == ".webp" else {}
        assert_same_pixels(
            save_and_read(pages[0], tmp_path / f"a{suffix}", save_all=True, append_images=pages[1:], **extra), pages[0]
        )


def test_threads_read_without_a_warning_and_leave_the_filters_alone(picture: Image.Image, tmp_path: Path) -> None:
    broken = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09\x01"
    picture.save(tmp_path / "a.jpg", exif=broken)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda _: read_image(tmp_path / "a.jpg").size, range(400)))
    assert sizes == [(67, 43)] * 400
    assert list(warnings.filters) == before
    with pytest.raises(UserWarning, match=r"EXIF|Truncated|Expecting"), Image.open(tmp_path / "a.jpg") as opened:
        opened.getexif()


def damaged_files(picture: Image.Image, folder: Path) -> dict[str, str]:
    picture.save(folder / "whole.jpg")
    (folder / "cut off.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:900])
    picture.save(folder / "cut off.png")
    (folder / "cut off.png").write_bytes((folder / "cut off.png").read_bytes()[:900])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no picture")
    (folder / "folder.png").mkdir()
    return {
        "cut off.jpg": "truncated",
        "cut off.png": "truncated",
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
        with pytest.raises(ImageReadError, match=reason):
            read_image(tmp_path / name, lambda *size: size)


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
    assert_same_pixels(read_image(ImageBytes(content, "b")), picture)
    with pytest.raises(ImageReadError, match=r"^far away/b.png: .*truncated"):
        read_image(ImageBytes(content[:900], "far away/b.png"))


def test_a_picture_too_large_is_an_error(picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture.save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 67 * 43 - 1)  # of which Pillow would warn
    assert_same_pixels(read_image(tmp_path / "a.png"), picture)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 67 * 43 // 2 - 1)
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
    preprocessing = Preprocessing(image_size=(side, side), interpolation=interpolation, crop_pct=crop, **RGB)
    assert_close(preprocessing(picture), expected(picture).as_subclass(torch.Tensor), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(29, 29), (97, 97), (23, 53), (53, 23)])
def test_preprocessing_equals_timm(picture: Image.Image, size: tuple[int, int]) -> None:
    expected = create_transform(size, is_training=False, interpolation="bicubic", crop_pct=0.9, **RGB)
    preprocessing = Preprocessing(image_size=size, crop_pct=0.9, **RGB)
    assert_close(preprocessing(picture), expected(picture), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("size", "crop", "resized"), [((29, 23), 1.0, [29, 23]), ((31, 97), 0.875, [35, 110])])
def test_squashed_pictures_equal_torchvision_and_timm(
    picture: Image.Image, size: tuple[int, int], crop: float, resized: list[int]
) -> None:
    steps = [v2.Resize(resized, InterpolationMode.BICUBIC), v2.CenterCrop(size), v2.ToImage()]
    expected = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(**RGB)])
    preprocessing = Preprocessing(image_size=size, crop_pct=crop, crop_mode="squash", **RGB)
    assert_close(preprocessing(picture), expected(picture).as_subclass(torch.Tensor), rtol=0, atol=2e-6)
    timms = create_transform(size, False, interpolation="bicubic", crop_pct=crop, crop_mode="squash", **RGB)
    assert_close(preprocessing(picture), timms(picture), rtol=0, atol=2e-6)


def test_a_picture_of_the_right_size_only_changes_its_scale(picture: Image.Image) -> None:
    preprocessing = Preprocessing(image_size=(43, 67), **RGB)
    assert_close(preprocessing(picture), preprocessing.normalize(pil_to_tensor(picture)[None])[0], rtol=0, atol=0)


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_of_a_thin_picture_only_the_middle_is_made(
    crop_mode: Any, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Preprocessing(image_size=(29, 31), crop_pct=0.9, crop_mode=crop_mode, **RGB)
    expected = preprocessing.pixels(picture).int()
    monkeypatch.setattr(vitmha.images.preprocessing, "MOST_RESIZED", 0)
    assert (preprocessing.pixels(picture).int() - expected).abs().max() <= 1
    monkeypatch.undo()
    made, resize = [], Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, size, *more: made.append(size) or resize(self, size, *more))
    thin = Image.new("RGB", (1, 65_000), (10, 20, 30))  # would be 33 x 2,145,000 pixels
    pixels = Preprocessing(image_size=(29, 31), crop_pct=0.9, **RGB).pixels(thin)
    assert made == [(31, 29)]
    assert (pixels == torch.tensor([10, 20, 30])[:, None, None]).all()


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
        ({"crop_pct": 0.0}, "crop is a share, above 0 and up to 1: got 0.0"),
        ({"crop_pct": 1.1}, "got 1.1"),
        ({"image_size": (0, 3)}, r"got \(0, 3\)"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"image_size": (2, 3), **RGB, **wrong})
