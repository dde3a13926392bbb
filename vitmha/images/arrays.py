"""Converts an array or a tensor to an image."""

import numpy as np
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError

CHANNELS = (1, 3, 4)  # grayscale, RGB, RGBA
ROUNDING = 1e-3  # by which floats may lie outside of [0, 1]


def image_from_array(array: np.ndarray | Tensor) -> Image.Image:
    """Converts the pixels of one image to a Pillow image.

    Args:
        array: (height, width) in grayscale, or with an axis of channels, which are grayscale, RGB or RGBA: the last
            axis of an array, the first of a tensor. The other order is accepted if only that one is possible: (3, 64,
            64) is one image of 64 x 64 as an array too, while (3, 64, 3) is 3 x 64 as an array and 64 x 3 as a tensor.
            Values are uint8, 0 to 255, or floats in [0, 1]; in grayscale of two axes also booleans or other integers.

    Raises:
        UserError: Another shape, another type of values, or floats outside of [0, 1], such as those of a normalized
            image.

    Example:
        >>> image = image_from_array(np.ones((3, 5, 3)))
        >>> image.mode, image.size
        ('RGB', (5, 3))
    """
    is_tensor = isinstance(array, Tensor)
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()
    pixels = _channels_last(array, channels_first=is_tensor)
    if pixels.dtype.kind == "f":
        pixels = _to_uint8(pixels)
    elif pixels.dtype != np.uint8 and (pixels.ndim == 3 or pixels.dtype.itemsize > 4):
        raise UserError(f"values of type {pixels.dtype}: expected uint8, or floats in [0, 1]")
    return Image.fromarray(pixels)


def _channels_last(array: np.ndarray, *, channels_first: bool) -> np.ndarray:
    """The pixels as (height, width) or (height, width, channels)."""
    if array.ndim == 3 and array.size:
        own, other = (0, -1) if channels_first else (-1, 0)
        axis = own if array.shape[own] in (*CHANNELS, 2) else other  # 2: grayscale with transparency
        if axis == own or array.shape[other] in CHANNELS:
            pixels = np.moveaxis(array, axis, -1)
            return np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if array.ndim == 2 and array.size:
        return array
    layout = "(channels, height, width)" if channels_first else "(height, width, channels)"
    raise UserError(f"shape {array.shape}: expected (height, width) or {layout} with 1, 3 or 4 channels")


def _to_uint8(pixels: np.ndarray) -> np.ndarray:
    low, high = pixels.min().item(), pixels.max().item()
    if not (low >= -ROUNDING and high <= 1 + ROUNDING):
        raise UserError(
            f"float values from {low:.4g} to {high:.4g}: expected [0, 1], or uint8. Do not normalize the image: the "
            "model's own preprocessing does."
        )
    return np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)
