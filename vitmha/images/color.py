"""Converts a decoded image of any of Pillow's modes and color profiles to 8-bit RGB in sRGB."""

import math
from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from typing import cast

import numpy as np
from PIL import Image, ImageCms

from vitmha.errors import UserError

# The ICC name of the color space that belongs to each of Pillow's modes.
ICC_COLOR_SPACES = {"L": "GRAY", "RGB": "RGB ", "RGBA": "RGB ", "CMYK": "CMYK"}
STRIP_PIXELS = 2**22  # larger images are converted in strips of about so many pixels, which bounds the memory


def to_srgb(image: Image.Image) -> Image.Image:
    """Converts a decoded image to mode RGB in sRGB, strip by strip; one that is so already is returned itself.

    Transparent pixels are composited onto white. Grayscale of more than 8 bits is scaled to 8 bits.

    Raises:
        UserError: Grayscale without a finite level.
    """
    profile = image.info.get("icc_profile")
    is_deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    is_rgb = image.mode == "RGB" and not image.has_transparency_data
    if is_rgb and not (profile and _profile_transform(profile, "RGB")):
        return image
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    if rows >= image.height:
        return _strip_to_rgb(image, profile, _gray_levels([image]) if is_deep else None)
    strips = [(0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows)]
    levels = _gray_levels(image.crop(strip) for strip in strips) if is_deep else None
    rgb = Image.new("RGB", image.size)
    for strip in strips:
        rgb.paste(_strip_to_rgb(image.crop(strip), profile, levels), strip)
    return rgb


def _strip_to_rgb(image: Image.Image, profile: bytes | None, levels: tuple[float, float] | None) -> Image.Image:
    if levels is not None:
        image = _to_8_bits(image, *levels)
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode in ("1", "P"):
        image = image.convert("RGB")
    transform = _profile_transform(profile, image.mode) if profile and image.mode in ICC_COLOR_SPACES else None
    if transform is not None:
        image = cast(Image.Image, ImageCms.applyTransform(image, transform))
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=16)
def _profile_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
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


def _gray_levels(strips: Iterable[Image.Image]) -> tuple[float, float]:
    """The darkest and the brightest level of a grayscale image of more than 8 bits, without NaN and inf."""
    darkest, brightest = math.inf, -math.inf
    for strip in strips:
        levels = np.asarray(strip.convert("F"))
        finite = levels[np.isfinite(levels)]
        if finite.size:
            darkest, brightest = min(darkest, finite.min().item()), max(brightest, finite.max().item())
    if darkest > brightest:
        raise UserError("all gray levels are NaN or inf")
    return darkest, brightest


def _to_8_bits(image: Image.Image, darkest: float, brightest: float) -> Image.Image:
    """Converts grayscale integers or floats to mode L, or to LA if one level is transparent.

    White is 1.0 or 255 for floats and 65535 for integers, or the brightest level if that is higher. NaN becomes black.
    """
    possible_whites = (1.0, 255.0) if image.mode == "F" else (65535.0,)
    levels = np.asarray(image.convert("F"))
    black = min(darkest, 0.0)
    white = next((white for white in possible_whites if brightest <= white), brightest)
    scale = 255 / (white - black)
    levels = np.nan_to_num(levels, nan=black, posinf=brightest, neginf=darkest)
    gray = Image.fromarray((levels * scale + (0.5 - black * scale)).astype(np.uint8))
    if not isinstance(transparent := image.info.get("transparency"), int):
        return gray
    return Image.merge("LA", (gray, Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8))))
