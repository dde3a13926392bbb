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
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vitmha.errors import UserError

ORIENTATION = 0x0112  # the EXIF tag
TRANSPOSED = (5, 6, 7, 8)  # the orientations whose files hold columns as rows
# The orientations whose last stored row or column becomes the left, or the top, of the upright image.
RIGHT_TO_LEFT, BOTTOM_TO_TOP = (2, 3, 6, 7), (3, 4, 7, 8)
TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The ICC name of the color space that belongs to each of Pillow's modes.
ICC_COLOR_SPACES = {"L": "GRAY", "RGB": "RGB ", "RGBA": "RGB ", "CMYK": "CMYK"}
# File name suffixes by which a directory is searched for images.
SUFFIXES = {
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm"),
    *(".pgm", ".png", ".pnm", ".ppm", ".psd", ".tga", ".tif", ".tiff", ".webp"),
}


class ImageReadError(UserError):
    """An image that cannot be read. The message is one line, `PATH: REASON`; it can be pickled.

    Args:
        path: The file, or the name of a source that is not a file.
        reason: Why it cannot be read, on one line.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ImageBytes(BytesIO):
    """The content of an image file that is in memory, for example a member of an archive or an upload.

    Args:
        content: The bytes of the file.
        name: Takes the place of the path in errors and records.
    """

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


Source = Path | str | ImageBytes | Image.Image | np.ndarray


def read_image(source: Source, min_size: Callable[[int, int], tuple[int, int]] | None = None) -> Image.Image:
    """Reads one image: upright according to its EXIF orientation, in mode RGB, in the sRGB color space.

    Transparent pixels are composited onto white. Grayscale of more than 8 bits is scaled to 8 bits and never clipped.
    Of an animation or a file of several pages, the first is read. An embedded color profile is applied if it fits the
    image and differs from sRGB. Several threads may read at the same time.

    Args:
        source: A file in any format that Pillow reads, a Pillow image, or an array: (height, width) or (height, width,
            channels) of uint8, or grayscale (height, width) of another type.
        min_size: Maps the (height, width) in pixels of the upright image to the smallest acceptable (height, width). A
            JPEG is then decoded at 1/2, 1/4 or 1/8 of its size if that is not smaller, which is faster. Other formats,
            and all formats without `min_size`, are decoded at full size.

    Returns:
        The image in mode RGB; its `size` is (width, height) after the rotation.

    Raises:
        ImageReadError: The file is missing or corrupt, is not an image, or has more pixels than twice Pillow's
            MAX_IMAGE_PIXELS, which is 179 million unless it is changed.

    Example:
        >>> image = read_image(np.zeros((3, 5), dtype=np.uint8))
        >>> image.mode, image.size
        ('RGB', (5, 3))
    """
    return read_reduced(source, min_size)[0]


def read_reduced(
    source: Source, min_size: Callable[[int, int], tuple[int, int]] | None
) -> tuple[Image.Image, tuple[float, float, float, float]]:
    """Reads one image as `read_image` does, and returns where in it the whole image lies.

    The sides of a JPEG need not be multiples of 8: decoded at a fraction, its outermost row and column lie partly
    outside. Taken for whole ones, they would shift an image of 32 pixels by up to half a pixel.

    Args:
        source: See `read_image`.
        min_size: See `read_image`.

    Returns:
        The image, and the edges (left, top, right, bottom) of the whole image in its pixels, as the `box` of Pillow's
        `Image.resize`.

    Raises:
        ImageReadError: See `read_image`.
    """
    with _opened(source) as image:
        # Only JPEGs can be decoded smaller. Pillow's TIFF reader rotates the image by itself, and the orientation of a
        # PNG may be stored after its pixels.
        if image.format not in ("JPEG", "MPO"):
            image.load()
        orientation = _orientation(image)
        width, height = image.size
        if min_size is not None:
            if orientation in TRANSPOSED:
                image.draft(None, min_size(width, height))
            else:
                rows, columns = min_size(height, width)
                image.draft(None, (columns, rows))
        scale = max(1, round(width / image.width))
        method = TO_UPRIGHT.get(orientation)
        upright = _to_rgb(image.copy() if method is None else image.transpose(method))
        upright.info.clear()  # otherwise reading the result again would rotate it again
        if orientation in TRANSPOSED:
            width, height = height, width
        left = upright.width - width / scale if orientation in RIGHT_TO_LEFT else 0.0
        top = upright.height - height / scale if orientation in BOTTOM_TO_TOP else 0.0
        return upright, (left, top, left + width / scale, top + height / scale)


def check_header(source: Source) -> None:
    """Opens an image without decoding it.

    Raises:
        ImageReadError: The file is missing, or its header is not that of an image that `read_image` supports.
    """
    with _opened(source):
        pass


def source_name(source: Source) -> Path | str:
    """The path or name of a source in errors and records; for one that has neither, the name of its type."""
    if isinstance(source, Path | str):
        return source
    return getattr(source, "name", None) or getattr(source, "filename", None) or type(source).__name__


@contextmanager
def _opened(source: Source) -> Iterator[Image.Image]:
    """The image as Pillow opens it; every exception in the context becomes an `ImageReadError`."""
    path = source_name(source)
    try:
        with IGNORE_PILLOW_WARNINGS, _open(source) as image:
            yield image
    except UnidentifiedImageError:
        reason = _tiff_reason(source) or f"not an image in a format that Pillow reads{_heif_hint(source)}"
        raise ImageReadError(path, reason) from None
    except Exception as error:  # a corrupt file makes decoders raise almost anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageReadError(path, " ".join(reason.split())) from None


def _open(source: Source) -> AbstractContextManager[Image.Image]:
    if isinstance(source, np.ndarray):
        return nullcontext(Image.fromarray(source))
    # The caller's image must stay open, and `draft` must not change its size.
    return nullcontext(source.copy()) if isinstance(source, Image.Image) else Image.open(source)


def _orientation(image: Image.Image) -> int:
    """The orientation in EXIF or XMP, 1 to 8; 1 (upright) if there is none or the metadata is corrupt."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # corrupt metadata makes Pillow raise almost anything
        return 1


def _tiff_reason(source: Source) -> str:
    """Why Pillow does not read a TIFF whose header is valid; empty for any other file."""
    try:
        with source if isinstance(source, ImageBytes) else open(cast(str, source), "rb") as file:
            file.seek(0)
            directory = ImageFileDirectory_v2(file.read(8))
            file.seek(directory.next)
            directory.load(file)
        channels, bits = directory.get(277, 1), max(directory.get(258, (1,)))
    except Exception:  # not a TIFF, or a corrupt one
        return ""
    return f"a TIFF of {channels} channels of {bits} bits is not supported: convert it to 8-bit grayscale or RGB"


def _heif_hint(source: Source) -> str:
    """Advice for HEIF, the one common format that Pillow does not read by itself; otherwise empty."""
    head = b""
    if isinstance(source, ImageBytes):
        head = source.getvalue()[:12]
    elif isinstance(source, Path | str):
        with open(source, "rb") as file:
            head = file.read(12)
    is_heif = head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
    return ": it is HEIF (.heic), convert it to JPEG or PNG" if is_heif else ""


class _IgnorePillowWarnings:
    """Ignores Pillow's warnings while any thread reads, so that corrupt EXIF does not make an image unreadable.

    A filter set once at import would be simpler, but it would also silence Pillow for the user's own code, and any
    filter that is set later would win over it: with `-W error`, images with corrupt EXIF would fail to be read.
    `warnings.catch_warnings` is not thread-safe: the first thread to leave restores the filters for all of them, and
    the last one to leave may undo filters that other code has set meanwhile.
    """

    def __init__(self) -> None:
        self.lock, self.num_readers = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.num_readers += 1
            # Moves the filter ahead of those set meanwhile; it is never in the list twice.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            self.filter = warnings.filters[0]

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.num_readers -= 1
            if not self.num_readers:
                with suppress(ValueError):  # other code has restored the filters already
                    cast(list[object], warnings.filters).remove(self.filter)


IGNORE_PILLOW_WARNINGS = _IgnorePillowWarnings()


def _to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode in ("1", "P"):
        image = image.convert("RGB")
    transform = _to_srgb(profile, image.mode) if profile and image.mode in ICC_COLOR_SPACES else None
    if transform is not None:
        image = cast(Image.Image, ImageCms.applyTransform(image, transform))
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from a color profile to sRGB.

    Returns:
        None if the profile is corrupt, belongs to another color space, or changes colors by less than one of 255 levels
        on average, as the many versions of sRGB do.
    """
    try:
        opened = ImageCms.ImageCmsProfile(BytesIO(profile))
        if opened.profile.xcolor_space != ICC_COLOR_SPACES[mode]:
            return None
        output = "RGBA" if mode == "RGBA" else "RGB"
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, output)
    except (OSError, ImageCms.PyCMSError):
        return None
    colors = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * len(mode)), axis=-1)
    unchanged = Image.frombytes(mode, (6, colors.size // len(mode) // 6), colors.tobytes())
    transformed = cast(Image.Image, ImageCms.applyTransform(unchanged, transform))
    before, after = (np.asarray(image.convert("RGB"), np.int16) for image in (unchanged, transformed))
    return transform if np.abs(after - before).mean() >= 1 else None


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Converts grayscale integers or floats to mode L, or to LA if one level is transparent.

    White is 1.0 or 255 for floats and 65535 for integers, or the brightest level if that is higher. NaN becomes black.
    """
    possible_whites = (1.0, 255.0) if image.mode == "F" else (65535.0,)
    levels = np.asarray(image.convert("F"))
    finite = levels[np.isfinite(levels)]
    if not finite.size:
        raise UserError("all gray levels are NaN or inf")
    darkest, brightest = finite.min().item(), finite.max().item()
    black = min(darkest, 0.0)
    white = next((white for white in possible_whites if brightest <= white), brightest)
    scale = 255 / (white - black)
    levels = np.nan_to_num(levels, nan=black, posinf=brightest, neginf=darkest)
    gray = Image.fromarray((levels * scale + (0.5 - black * scale)).astype(np.uint8))
    if not isinstance(transparent := image.info.get("transparency"), int):
        return gray
    return Image.merge("LA", (gray, Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8))))
