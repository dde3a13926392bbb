"""Decodes one image file to an upright RGB image in sRGB."""

import logging
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor

from vitmha.errors import UserError
from vitmha.images.arrays import image_from_array
from vitmha.images.color import to_srgb
from vitmha.images.pixel_budget import HELD_PIXELS, MAX_PIXELS
from vitmha.text import printable

ORIENTATION = 0x0112  # the EXIF tag
TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF tags
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
# File name suffixes by which a directory is searched for images.
SUFFIXES = {
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm"),
    *(".pgm", ".png", ".pnm", ".ppm", ".psd", ".tga", ".tif", ".tiff", ".webp"),
}
# What a path may lead to that is not a regular file. To open a pipe or a device may wait without end.
SPECIAL_FILES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

TOO_LARGE = "too large"
"""How the reason of an error begins if the image has too many pixels."""
AVIF_MAX_PIXELS = 2**28  # of libavif
# Above 32 MB, the C library returns freed memory to the system; it would keep Pillow's blocks of 16 MB for each thread.
Image.core.set_block_size(2**26)
# Without a handler, Python would print what Pillow logs about corrupt files, in addition to the error.
logging.getLogger("PIL").addHandler(logging.NullHandler())


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
        return printable(f"{self.path}: {self.reason}")


class ImageBytes(BytesIO):
    """The content of an image file that is in memory, for example a member of an archive or an upload.

    Args:
        content: The bytes of the file.
        name: Takes the place of the path in errors and records.
    """

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


Source = Path | str | ImageBytes | Image.Image | np.ndarray | Tensor


def read_image(
    source: Source,
    min_size: Callable[[int, int], tuple[int, int]] | None = None,
    *,
    max_pixels: int | None = None,
) -> Image.Image:
    """Reads one image: upright according to its EXIF orientation, in mode RGB, in the sRGB color space.

    Transparent pixels are composited onto white. Grayscale of more than 8 bits is scaled to 8 bits and never clipped.
    Of an animation or a file of several pages, the first is read. An embedded color profile is applied if it fits the
    image and differs from sRGB. Several threads may read at the same time; while they hold `MAX_PIXELS` pixels
    together, further ones wait.

    Args:
        source: A file in any format that Pillow reads by itself (EPS needs Ghostscript and is refused), a Pillow image,
            or an array or tensor as `image_from_array` accepts it: (height, width, channels) or (channels, height,
            width) of uint8, or of floats in [0, 1].
        min_size: Maps the (height, width) in pixels of the upright image to the smallest acceptable (height, width). A
            JPEG is then decoded at 1/2, 1/4 or 1/8 of its size if that is not smaller, which is faster. Other formats,
            and all formats without `min_size`, are decoded at full size.
        max_pixels: Refuse a file with more pixels before it is decoded. Pillow's limit, twice MAX_IMAGE_PIXELS, applies
            too: 179 million unless it is changed. `max_pixels` above `MAX_PIXELS` raises it if necessary.

    Returns:
        The image in mode RGB; its `size` is (width, height) after the rotation.

    Raises:
        ImageReadError: The file is missing or corrupt, is not a regular file or not an image, or has too many pixels.

    Example:
        >>> image = read_image(np.zeros((3, 5), dtype=np.uint8))
        >>> image.mode, image.size
        ('RGB', (5, 3))
    """
    with reading(source, min_size, max_pixels=max_pixels) as (image, _):
        return image


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
    with reading(source, min_size) as result:
        return result


@contextmanager
def reading(
    source: Source,
    min_size: Callable[[int, int], tuple[int, int]] | None = None,
    *,
    max_pixels: int | None = None,
) -> Iterator[tuple[Image.Image, tuple[float, float, float, float]]]:
    """What `read_reduced` returns; its pixels count as held by this thread until the context ends."""
    with ExitStack() as held:
        yield _decode(source, min_size, max_pixels, held)


def _decode(
    source: Source,
    min_size: Callable[[int, int], tuple[int, int]] | None,
    max_pixels: int | None,
    held: ExitStack,
) -> tuple[Image.Image, tuple[float, float, float, float]]:
    with _opened(source, max_pixels) as image:
        is_jpeg, full_size = image.format in ("JPEG", "MPO"), _decoded_size(image)
        # Only JPEGs can be decoded smaller. Pillow's TIFF reader rotates the image by itself, and the orientation of a
        # PNG may be stored after its pixels.
        if not is_jpeg:
            holds_any_size = image.format in ("ICO", "ICNS")  # the header tells a size, but not always the true one
            held.enter_context(HELD_PIXELS.reserve(MAX_PIXELS if holds_any_size else math.prod(full_size)))
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
        if is_jpeg:
            # libjpeg holds the coefficients of a whole progressive JPEG, whatever the decoded size.
            held_size = full_size if "progressive" in image.info else image.size
            held.enter_context(HELD_PIXELS.reserve(math.prod(held_size)))
            image.load()
        method = TO_UPRIGHT.get(orientation)
        upright = to_srgb(image if method is None else image.transpose(method))
        if upright is image and image.format not in ("JPEG", "PNG"):
            upright = image.copy()  # the readers of some other formats hold the decoder and the file
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
    with _opened(source, None):
        pass


def source_name(source: Source) -> Path | str:
    """The path or name of a source in errors and records; for one that has neither, the name of its type."""
    if isinstance(source, Path | str):
        return source
    return getattr(source, "name", None) or getattr(source, "filename", None) or type(source).__name__


@contextmanager
def _opened(source: Source, max_pixels: int | None) -> Iterator[Image.Image]:
    """The image as Pillow opens it; every exception in the context becomes an `ImageReadError`."""
    path = source_name(source)
    limit = _pixel_limit(max_pixels)
    try:
        with IGNORE_PILLOW_WARNINGS, _open(source) as image:
            if image.format == "EPS":
                raise UserError("EPS is not supported, since that needs Ghostscript: convert it to PNG")
            if not isinstance(source, Image.Image | np.ndarray):
                _check_size(*_decoded_size(image), limit)
            yield image
    except UnidentifiedImageError:
        reason = _tiff_reason(source) or _isobmff_reason(source, limit)
        raise ImageReadError(path, reason or "not an image in a format that Pillow reads") from None
    except Image.DecompressionBombError as error:
        found = re.search(r"\d+ pixels", str(error))
        reason = f"{TOO_LARGE}: {found[0] if found else 'more pixels'}, at most {limit} (max_pixels)"
        raise ImageReadError(path, reason) from None
    except Exception as error:  # a corrupt file makes decoders raise almost anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageReadError(path, " ".join(reason.split())) from None


def _pixel_limit(max_pixels: int | None) -> int:
    """The lower of `max_pixels` and Pillow's limit, after that was raised as `read_image` says."""
    pillows_limit = 2**63 if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS
    if max_pixels is None:
        return pillows_limit
    if max_pixels > max(MAX_PIXELS, pillows_limit):
        Image.MAX_IMAGE_PIXELS = pillows_limit = max_pixels
    return min(max_pixels, pillows_limit)


def _check_size(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise UserError(f"{TOO_LARGE}: {width} x {height} pixels, at most {limit} (max_pixels)")


def _decoded_size(image: Image.Image) -> tuple[int, int]:
    """The (width, height) in memory while an image is decoded: of a TIFF, the tile may be larger than the image."""
    if image.format != "TIFF":
        return image.size
    tile = [image.tag_v2.get(tag, 0) for tag in (TILE_WIDTH, TILE_LENGTH)]  # type: ignore[attr-defined]
    return max(image.size, (tile[0], tile[1]), key=math.prod)


def _open(source: Source) -> AbstractContextManager[Image.Image]:
    if isinstance(source, np.ndarray | Tensor):
        return nullcontext(image_from_array(source))
    if isinstance(source, Path | str):
        check_regular_file(source)
    # The caller's image must stay open, and `draft` must not change its size.
    return nullcontext(source.copy()) if isinstance(source, Image.Image) else Image.open(source)


def check_regular_file(path: Path | str) -> None:
    """Checks that a path leads to a regular file, without opening it.

    Raises:
        UserError: A named pipe or something else that is not a regular file, or a URL.
        OSError: The file is missing.
    """
    if re.match(r"[a-z][a-z0-9+.-]*://", str(path), re.IGNORECASE) and not os.path.exists(path):
        raise UserError("a URL: download the file first, and pass its path")
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise UserError(f"Is {SPECIAL_FILES.get(stat.S_IFMT(mode), 'a special file')}, expected an image file")


def _orientation(image: Image.Image) -> int:
    """The orientation in EXIF or XMP, 1 to 8; 1 (upright) if there is none or the metadata is corrupt."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # corrupt metadata makes Pillow raise almost anything
        return 1


def _tiff_reason(source: Source) -> str:
    """Why Pillow does not read a TIFF whose header is valid; empty for any other file."""
    try:
        with nullcontext(source) if isinstance(source, ImageBytes) else open(cast(str, source), "rb") as file:
            file.seek(0)
            directory = ImageFileDirectory_v2(file.read(8))
            file.seek(directory.next)
            directory.load(file)
        channels, bits = directory.get(277, 1), max(directory.get(258, (1,)))
    except Exception:  # not a TIFF, or a corrupt one
        return ""
    return f"a TIFF of {channels} channels of {bits} bits is not supported: convert it to 8-bit grayscale or RGB"


def _isobmff_reason(source: Source, limit: int) -> str:
    """Why Pillow does not read a HEIF, or an AVIF that is too large; empty for any other file."""
    head = b""
    if isinstance(source, ImageBytes):
        head = source.getvalue()[:4096]
    elif isinstance(source, Path | str):
        with open(source, "rb") as file:
            head = file.read(4096)
    if head[4:8] != b"ftyp":
        return ""
    if head[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        return "not an image in a format that Pillow reads: it is HEIF (.heic), convert it to JPEG or PNG"
    try:
        for width, height in re.findall(rb"ispe\0{4}(.{4})(.{4})", head, re.DOTALL):
            _check_size(int.from_bytes(width), int.from_bytes(height), min(limit, AVIF_MAX_PIXELS))
    except UserError as error:
        return str(error)
    return ""


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
