"""The evaluation transform from one RGB image to the input of a model."""

from dataclasses import dataclass
from math import ceil, floor, inf, isfinite
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError, check_argument
from vitmha.images.decode import Source, reading

# A JPEG is decoded at a fraction of its size if that is still at least so many times the size to which it is resized.
# Over 250 images of ImageNet, at model sizes of 32, 64, 128 and 224 pixels, this changes the model's input by 0.24,
# 0.05, 0.001 and 0 of 255 levels on average, and by 11, 6, 3 and 0 at most. With 2.5 it would be up to 0.40 and 26.
OVERSAMPLING = 2.75
MAX_RESIZED_PIXELS = 2**26  # of an image that is resized as a whole before it is cropped


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """The evaluation transform from an RGB image to the input of a model; it is stored with the model.

    Args:
        image_size: (height, width) of the model's input, in pixels.
        mean: Mean of each channel on a scale of 0 to 1, for RGB or, if a single one, for grayscale.
        std: Standard deviation of each channel, on the same scale.
        interpolation: How the image is resized, always with antialiasing.
        crop_pct: Fraction of the resized image that the center crop keeps along the side that fits tightly, in (0, 1].
        crop_mode: "center" resizes the image until the crop just fits and cuts out the center; "squash" resizes both
            sides, which changes the aspect ratio.

    Raises:
        UserError: A value is out of its range.

    Example:
        >>> preprocessing = Preprocessing(image_size=(2, 3), mean=(0.5,), std=(0.5,))
        >>> preprocessing(Image.new("RGB", (9, 6), "white"))
        tensor([[[1., 1., 1.],
                 [1., 1., 1.]]])
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    crop_pct: float = 1.0
    crop_mode: Literal["center", "squash"] = "center"

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise UserError(
                "mean and std must have the same number of values, 1 (grayscale) or 3 (RGB), got "
                f"{self.mean} and {self.std}"
            )
        check_argument("mean", self.mean, all(map(isfinite, self.mean)), "finite")
        check_argument("std", self.std, all(0 < value < inf for value in self.std), "above 0")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must be above 0 and up to 1, got {self.crop_pct}")
        if self.crop_mode not in ("center", "squash"):
            raise UserError(f"crop_mode must be 'center' or 'squash', got {self.crop_mode!r}")
        if min(self.image_size) < 1:
            raise UserError(f"image_size must be (height, width) of at least 1 pixel each, got {self.image_size}")

    def __call__(self, image: Image.Image) -> Float[Tensor, "channels height width"]:
        """Resizes, crops and normalizes an image.

        Args:
            image: Upright and in mode RGB, as `read_image` returns it.

        Returns:
            The model's input, float32; channels are RGB, or one for grayscale.
        """
        return self.normalize(self.pixels(image)[None])[0]

    def read_pixels(
        self, source: Source, *, max_pixels: int | None = None, full_decode: bool = False
    ) -> UInt8[Tensor, "channels height width"]:
        """Reads, resizes and crops an image; a large JPEG is decoded at a fraction of its size.

        Args:
            source: See `read_image`.
            max_pixels: See `read_image`.
            full_decode: Decode large JPEGs at full size too.

        Raises:
            ImageReadError: The image cannot be read.
        """
        min_size = None if full_decode else lambda *size: self.min_decoded(self.resized(*size), size)
        with reading(source, min_size, max_pixels=max_pixels) as (image, box):
            return self.pixels(image, box)

    def min_decoded(self, resized: tuple[int | float, int | float], full: tuple[int, int]) -> tuple[int, int]:
        """The smallest (height, width) at which a JPEG may be decoded; with "nearest" its own.

        Args:
            resized: (height, width) in pixels to which the whole image is resized.
            full: (height, width) of the image.
        """
        if self.interpolation == "nearest":  # it picks single pixels, which a smaller image does not have
            return full
        return ceil(OVERSAMPLING * resized[0]), ceil(OVERSAMPLING * resized[1])

    def pixels(
        self, image: Image.Image, box: tuple[float, float, float, float] | None = None
    ) -> UInt8[Tensor, "channels height width"]:
        """Resizes and crops an image; `normalize` is faster for a whole batch of them at once.

        Args:
            image: Upright and in mode RGB.
            box: Its edges, as `read_reduced` returns them; by default those of the pixels.
        """
        left, top, right, bottom = box = box or (0.0, 0.0, float(image.width), float(image.height))
        full_height, full_width = bottom - top, right - left
        if image.mode != (mode := "L" if len(self.mean) == 1 else "RGB"):
            image = image.convert(mode)  # which would copy in any case
        rows, columns = self.resized(full_height, full_width)
        height, width = self.image_size
        y, x = round((rows - height) / 2), round((columns - width) / 2)
        resample = Image.Resampling[self.interpolation.upper()]
        if rows * columns <= MAX_RESIZED_PIXELS:
            image = image.resize((columns, rows), resample, box).crop((x, y, x + width, y + height))
        else:  # so thin that the resized image would fill the memory: resize the crop only; some pixels differ by 1
            row_scale, column_scale = full_height / rows, full_width / columns
            crop = (left + x * column_scale, top + y * row_scale)
            end = (left + (x + width) * column_scale, top + (y + height) * row_scale)
            image = image.resize((width, height), resample, (*crop, min(end[0], right), min(end[1], bottom)))
        pixels = np.array(image).reshape(height, width, -1)
        return rearrange(torch.from_numpy(pixels), "h w c -> c h w")

    def resized(self, height: int | float, width: int | float) -> tuple[int, int]:
        """The (height, width) to which an image is resized before the center is cut out.

        Args:
            height: Of the upright image, in pixels.
            width: Of the upright image, in pixels.
        """
        rows, columns = (floor(side / self.crop_pct) for side in self.image_size)
        if self.crop_mode == "squash":
            return rows, columns
        if rows * width >= columns * height:
            return rows, int(rows * width // height)
        return int(columns * height // width), columns

    def normalize(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Returns (pixel / 255 - mean) / std, on the device of the images.

        Args:
            images: Pixels, 0 to 255.

        Returns:
            float32, with mean about 0 and standard deviation about 1 over the training set.
        """
        mean, std = self._statistics(images)
        return images.float().mul_(1 / (255 * std)).sub_(mean / std)

    def denormalize(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """The inverse of `normalize` up to the factor 255, clipped to [0, 1].

        Args:
            images: As `normalize` returns them.

        Returns:
            Intensities, 0 to 1.
        """
        mean, std = self._statistics(images)
        return (images * std + mean).clamp(0, 1)

    def renormalize(
        self, images: Float[Tensor, "batch channels height width"], old: "Preprocessing | None"
    ) -> Float[Tensor, "batch channels height width"]:
        """Normalizes images with this mean and std that were normalized with those of another model.

        Args:
            images: As `old.normalize` returns them.
            old: The preprocessing of the other model; if None, the images are returned unchanged.
        """
        if old is None or (old.mean, old.std) == (self.mean, self.std):
            return images
        (old_mean, old_std), (mean, std) = old._statistics(images), self._statistics(images)
        return (images * old_std + (old_mean - mean)) / std

    def _statistics(self, images: Tensor) -> Tensor:
        statistics = torch.tensor([self.mean, self.std])[..., None, None]
        # A blocking copy would make the host wait for all work queued on the device.
        return statistics.to(images.device, non_blocking=True)
