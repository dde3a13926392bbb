"""Preprocessing: from one RGB image to the input of a model."""

from dataclasses import dataclass
from math import floor
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError

MOST_RESIZED = 2**26  # pixels of a picture before its centre is cut out


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What stands between a picture and a model, at evaluation; it is stored with the model.

    Args:
        image_size: (height, width) of the model's input, in pixels.
        mean: One for each channel, on a scale of 0 to 1; a single one makes the pictures gray.
        std: Likewise.
        interpolation: How the picture is resized, always with antialiasing.
        crop_pct: The share of the resized picture's tight side that the centre crop keeps, above 0 and up to 1.
        crop_mode: "center" resizes the short side and cuts out the center; "squash" resizes both sides, which
            changes the aspect ratio.
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
                f"mean and std hold one number for each channel, 1 (gray) or 3 (RGB): got {self.mean} and {self.std}"
            )
        if min(self.std) <= 0:
            raise UserError(f"std must be above 0, got {self.std}")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop is a share, above 0 and up to 1: got {self.crop_pct}")
        if self.crop_mode not in ("center", "squash"):
            raise UserError(f"crop_mode must be 'center' or 'squash', got {self.crop_mode!r}")
        if min(self.image_size) < 1:
            raise UserError(f"image_size is (height, width) in pixels, each at least 1: got {self.image_size}")

    def __call__(self, picture: Image.Image) -> Float[Tensor, "channels height width"]:
        """Resize until the crop just fits, cut out the centre, normalise.

        Args:
            picture: Upright and in mode RGB, as `read_image` gives it.

        Returns:
            The model's input, float32, channels in the order RGB, or one of gray.
        """
        return self.normalize(self.pixels(picture)[None])[0]

    def pixels(self, picture: Image.Image) -> UInt8[Tensor, "channels height width"]:
        """The model's input before it is normalised, which is quicker for a whole batch at once."""
        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        rows, columns = self.resized(picture.height, picture.width)
        height, width = self.image_size
        top, left = round((rows - height) / 2), round((columns - width) / 2)
        resample = Image.Resampling[self.interpolation.upper()]
        if rows * columns <= MOST_RESIZED:
            picture = picture.resize((columns, rows), resample).crop((left, top, left + width, top + height))
        else:  # so thin that the whole would fill the memory: the part alone, where some pixels differ by 1
            down, across = picture.height / rows, picture.width / columns
            right, bottom = min((left + width) * across, picture.width), min((top + height) * down, picture.height)
            picture = picture.resize((width, height), resample, (left * across, top * down, right, bottom))
        pixels = np.array(picture).reshape(height, width, -1)
        return rearrange(torch.from_numpy(pixels), "h w c -> c h w")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which a picture is resized, before the centre is cut out.

        Args:
            height: Of the upright picture, in pixels.
            width: Likewise.
        """
        rows, columns = (floor(side / self.crop_pct) for side in self.image_size)
        if self.crop_mode == "squash":
            return rows, columns
        if rows * width >= columns * height:
            return rows, rows * width // height
        return columns * height // width, columns

    def normalize(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Pixels to the numbers that the model reads: (pixel / 255 - mean) / std, on the images' device.

        Args:
            images: Pixels, 0 to 255.

        Returns:
            float32, mean about 0 and standard deviation about 1 over the training set.
        """
        mean, std = self._statistics(images)
        return images.float().mul_(1 / (255 * std)).sub_(mean / std)

    def denormalize(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """The way back, for drawing.

        Args:
            images: As `normalize` gives them.

        Returns:
            Intensities, 0 to 1; what lies outside is clipped.
        """
        mean, std = self._statistics(images)
        return (images * std + mean).clamp(0, 1)

    def renormalize(
        self, images: Float[Tensor, "batch channels height width"], was: "Preprocessing | None"
    ) -> Float[Tensor, "batch channels height width"]:
        """Pictures that were normalised for another model, for this one.

        Args:
            images: As `was.normalize` gives them.
            was: What they were normalised by; they stay as they are where it is not known.
        """
        if was is None or (was.mean, was.std) == (self.mean, self.std):
            return images
        (old_mean, old_std), (mean, std) = was._statistics(images), self._statistics(images)
        return (images * old_std + (old_mean - mean)) / std

    def _statistics(self, images: Tensor) -> Tensor:
        statistics = torch.tensor([self.mean, self.std])[..., None, None]
        # A blocking copy would make the host wait for all work queued on the device.
        return statistics.to(images.device, non_blocking=True)
