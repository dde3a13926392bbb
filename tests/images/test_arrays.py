"""Arrays and tensors of every layout become the same image, or are refused with their shape or range."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitmha.images import ImageReadError, read_image

PIXELS = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
TENSOR = torch.from_numpy(PIXELS).permute(2, 0, 1)


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        PIXELS / 255,
        (PIXELS / 255).astype(np.float32).transpose(2, 0, 1),
        PIXELS[::-1][::-1],
        TENSOR,
        TENSOR.permute(1, 2, 0),
        TENSOR / 255,
        (TENSOR.double() / 255).requires_grad_(),
        torch.cat([TENSOR, torch.full((1, 5, 7), 255, dtype=torch.uint8)]),
    ],
    ids=lambda pixels: f"{type(pixels).__name__}-{pixels.dtype}-{tuple(pixels.shape)}",
)
def test_every_layout_is_the_same_image(pixels: np.ndarray | torch.Tensor) -> None:
    assert np.array_equal(np.asarray(read_image(pixels)), PIXELS)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (1, 5, 7)])
def test_grayscale_has_two_axes_or_one_channel(shape: tuple[int, ...]) -> None:
    gray = PIXELS[..., 0].reshape(shape)
    for pixels in (gray, torch.from_numpy(gray), gray / 255, torch.from_numpy(gray).half() / 255):
        image = read_image(pixels)
        assert image.size == (7, 5)
        assert np.array_equal(np.asarray(image)[..., 1], PIXELS[..., 0])


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 7, 3), (3, 7, 4), (1, 7, 3)])
def test_where_both_axes_could_be_channels_those_of_an_array_are_last_and_of_a_tensor_first(
    shape: tuple[int, int, int],
) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    assert read_image(pixels).size == (shape[1], shape[0])
    image = read_image(torch.from_numpy(pixels))
    assert image.size == (shape[2], shape[1])
    assert np.asarray(image)[0, 0, 0] == pixels[0, 0, 0]


def test_grayscale_of_more_bits_is_scaled() -> None:
    for levels in (np.full((5, 7), 32768, np.uint16), np.full((5, 7), 32768, np.int32)):
        assert np.asarray(read_image(levels)).mean() == pytest.approx(128, abs=1)


NORMALIZED = (TENSOR / 255 - 0.45) / 0.22


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (
            NORMALIZED,
            rf"float values from {NORMALIZED.min():.4g} to 2.\d+: expected \[0, 1\], or uint8. Do not normalize",
        ),
        (NORMALIZED.permute(1, 2, 0).numpy(), "expected \\[0, 1\\]"),
        (NORMALIZED[0].numpy(), "expected \\[0, 1\\]"),  # grayscale, whose range Pillow would stretch
        (PIXELS.astype(np.float64), "float values from .* to 255"),
        (np.full((5, 7, 3), np.nan), "float values from nan to nan"),
        (PIXELS.astype(np.int64), "values of type int64: expected uint8, or floats"),
        (
            np.zeros((5, 7, 5), np.uint8),
            r"shape \(5, 7, 5\): expected \(height, width\) or \(height, width, channels\)",
        ),
        (
            torch.zeros(5, 5, 7),
            r"shape \(5, 5, 7\): expected .* or \(channels, height, width\) with 1, 3 or 4 channels",
        ),
        (np.zeros(7, np.uint8), r"shape \(7,\)"),
        (torch.zeros(2, 2, 3, 5, 7), r"shape \(2, 2, 3, 5, 7\)"),
        (np.zeros((0, 7, 3), np.uint8), r"shape \(0, 7, 3\)"),
    ],
)
def test_what_is_not_an_image_is_refused_with_its_shape_or_range(
    pixels: np.ndarray | torch.Tensor, reason: str
) -> None:
    with pytest.raises(ImageReadError, match=reason):
        read_image(pixels)


def test_an_array_is_read_like_its_file() -> None:
    assert np.array_equal(np.asarray(read_image(Image.fromarray(PIXELS))), np.asarray(read_image(PIXELS)))
