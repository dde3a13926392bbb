"""Decodes one image file to an upright RGB image in sRGB."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from vitmha.errors import UserError

# EXIF's number of the orientation, what turns a picture of each upright, and those in which columns are held as rows.
ORIENTATION, LYING = 0x0112, (5, 6, 7, 8)
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# ICC's names of the colours that a picture of a mode can have.
COLOURS = {"L": "GRAY", "RGB": "RGB ", "RGBA": "RGB ", "CMYK": "CMYK"}
# Files that a search in a folder takes for pictures.
SUFFIXES = {
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm"),
    *(".pgm", ".png", ".pnm", ".ppm", ".psd", ".tga", ".tif", ".tiff", ".webp"),
}


class ImageReadError(UserError):
    """A file that cannot be read as a picture; its text is one line, the path and the reason."""

    def __init__(self, path: Path | str, reason: str | None = None) -> None:
        if reason is None:
            # A DataLoader rebuilds a worker's error from the text of its traceback, whose last line reads
            # "vitmha.images.ImageReadError: path: reason".
            _, path, reason = str(path).strip().splitlines()[-1].split(": ", 2)
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ImageBytes(BytesIO):
    """The content of a picture file that is no file of its own.

    Args:
        content: Its bytes.
        name: Stands in errors, for the path.
    """

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


Source = Path | str | ImageBytes | Image.Image | np.ndarray


def read_image(source: Source, min_size: Callable[[int, int], tuple[int, int]] | None = None) -> Image.Image:
    """One picture, upright as its EXIF orientation asks, in mode RGB and in the colours of sRGB.

    Transparency is laid on white. Gray of more than 8 bits is scaled and never clipped. Of an animation or a file of
    several pages, the first. A colour profile that fits and differs from sRGB is applied. Several threads may read at
    once.

    Args:
        source: A file in any format that Pillow reads, a picture of Pillow's, or an array of one: (height, width) or
            (height, width, channels) of uint8, or gray of another type.
        min_size: Gives, from the picture's upright height and width, those that will do: a JPEG is decoded, faster, at
            1/2, 1/4 or 1/8 of its size where that is no smaller. Other formats, and without it all, come in full size.

    Returns:
        The picture in mode RGB, its size as (width, height) after the rotation.

    Raises:
        ImageReadError: The file is missing, damaged, no picture, or of more pixels than twice Pillow's
            MAX_IMAGE_PIXELS, 179 millions unless it is changed.
    """
    with _opened(source) as picture:
        # JPEGs alone can be decoded smaller. TIFF's reader turns a picture by itself, and what turns a PNG may stand
        # behind its pixels.
        if picture.format not in ("JPEG", "MPO"):
            picture.load()
        orientation = _orientation(picture)
        if min_size is not None:
            width, height = picture.size
            if orientation in LYING:
                picture.draft(None, min_size(width, height))
            else:
                rows, columns = min_size(height, width)
                picture.draft(None, (columns, rows))
        turn = UPRIGHT.get(orientation)
        upright = _to_rgb(picture.copy() if turn is None else picture.transpose(turn))
        upright.info.clear()  # or who reads it again turns it again
        return upright


@contextmanager
def _opened(source: Source) -> Iterator[Image.Image]:
    """The file as Pillow opens it; whatever goes wrong inside becomes an `ImageReadError`."""
    path = name_of(source)
    try:
        with QUIET, _as_picture(source) as picture:
            yield picture
    except UnidentifiedImageError:
        raise ImageReadError(path, f"not a picture in a format that Pillow reads{_format_named(source)}") from None
    except Exception as error:  # decoders let through whatever a broken file makes them trip over
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageReadError(path, " ".join(reason.split())) from None


def _orientation(picture: Image.Image) -> int:
    """As EXIF or XMP says; 1, upright, where neither does or what is there is broken."""
    try:
        return picture.getexif().get(ORIENTATION, 1)
    except Exception:  # whatever Pillow trips over in a block that is none
        return 1


def name_of(source: Source) -> Path | str:
    """What stands for a source in errors and records: its path, or the kind of thing that has none."""
    if isinstance(source, Path | str):
        return source
    return getattr(source, "name", None) or getattr(source, "filename", None) or type(source).__name__


def _as_picture(source: Source) -> AbstractContextManager[Image.Image]:
    if isinstance(source, np.ndarray):
        return nullcontext(Image.fromarray(source))
    # A picture that another holds is neither closed nor, as a file may be, decoded at a part of its size.
    return nullcontext(source.copy()) if isinstance(source, Image.Image) else Image.open(source)


def _format_named(source: Source) -> str:
    """The one kind of picture that users meet and that Pillow does not read by itself."""
    head = b""
    if isinstance(source, ImageBytes):
        head = source.getvalue()[:12]
    elif isinstance(source, Path | str):
        with open(source, "rb") as file:
            head = file.read(12)
    is_heif = head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
    return ": it is HEIF (.heic), convert it to JPEG or PNG" if is_heif else ""


class _Quiet:
    """While anyone reads, Pillow's warnings are ignored: a broken EXIF block does not spoil a picture.

    `warnings.catch_warnings` will not do for threads, since the first to leave gives all of them the old filters, and
    the last to leave may bring back filters that another had set.
    """

    FILTER = r"PIL\."

    def __init__(self) -> None:
        self.lock, self.readers = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.readers += 1
            warnings.filterwarnings("ignore", module=self.FILTER)  # in front of what was set meanwhile; never twice
            self.entry = warnings.filters[0]

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.readers -= 1
            if not self.readers:
                with suppress(ValueError):  # someone else has put the filters back
                    cast(list[object], warnings.filters).remove(self.entry)


QUIET = _Quiet()


def _to_rgb(picture: Image.Image) -> Image.Image:
    profile = picture.info.get("icc_profile")
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        picture = _to_eight_bits(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
    elif picture.mode in ("1", "P"):
        picture = picture.convert("RGB")
    transform = _to_srgb(profile, picture.mode) if profile and picture.mode in COLOURS else None
    if transform is not None:
        picture = cast(Image.Image, ImageCms.applyTransform(picture, transform))
    if picture.mode == "RGBA":
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a colour profile to sRGB.

    Returns:
        None where the profile is broken, for another kind of picture, or moves colours by less than one level of 255 on
        average, as the many versions of sRGB do.
    """
    try:
        opened = ImageCms.ImageCmsProfile(BytesIO(profile))
        if opened.profile.xcolor_space != COLOURS[mode]:
            return None
        output = "RGBA" if mode == "RGBA" else "RGB"
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, output)
    except (OSError, ImageCms.PyCMSError):
        return None
    colours = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * len(mode)), axis=-1)
    plain = Image.frombytes(mode, (6, colours.size // len(mode) // 6), colours.tobytes())
    applied = cast(Image.Image, ImageCms.applyTransform(plain, transform))
    before, after = (np.asarray(each.convert("RGB"), np.int16) for each in (plain, applied))
    return transform if np.abs(after - before).mean() >= 1 else None


def _to_eight_bits(picture: Image.Image) -> Image.Image:
    """Gray in integers or floats to mode L: the white of its number format, or what lies above it, becomes 255.

    What is no number becomes black; a level that is transparent stays so, in mode LA.
    """
    formats = (1.0, 255.0) if picture.mode == "F" else (65535.0,)
    levels = np.asarray(picture.convert("F"))
    finite = levels[np.isfinite(levels)]
    if not finite.size:
        raise UserError("none of its gray levels is a number")
    darkest, brightest = finite.min().item(), finite.max().item()
    black = min(darkest, 0.0)
    white = next((white for white in formats if brightest <= white), brightest)
    scale = 255 / (white - black)
    levels = np.nan_to_num(levels, nan=black, posinf=brightest, neginf=darkest)
    gray = Image.fromarray((levels * scale + (0.5 - black * scale)).astype(np.uint8))
    if not isinstance(clear := picture.info.get("transparency"), int):
        return gray
    return Image.merge("LA", (gray, Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8))))
