"""Random augmentation of a whole batch at once, on its device.

Every augmentation samples its parameters and applies them in separate steps: processes that train together sample the
parameters of the whole global batch and apply their slice of them, so the images do not depend on the number of
processes. Parameters come from a generator on the CPU, whatever the device of the images.

Letters in the einops patterns: b batch, c channels, h height, w width.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomCropFlip:
    """Random horizontal flip, then a random crop of the original size from the image padded with black.

    Args:
        padding: Pixels added on each side; 0 for no crop.
        hflip: Probability of a horizontal flip, in [0, 1].

    Example:
        >>> augmentation = RandomCropFlip(padding=4, hflip=0.5)
        >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        >>> augmentation.apply(images, augmentation.sample_params(8, torch.Generator())).shape
        torch.Size([8, 3, 32, 32])
    """

    padding: int
    hflip: float

    def sample_params(self, count: int, generator: torch.Generator) -> Int64[Tensor, "batch 3"]:
        """For each image: 1 if flipped, else 0; top and left edge of its crop, 0 to twice the padding."""
        if self.hflip in (0, 0.5):  # the random stream of published results
            flipped = torch.randint(1 + (self.hflip > 0), (count, 1), generator=generator)
        else:
            flipped = (torch.rand(count, 1, generator=generator) < self.hflip).long()
        corners = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        return torch.cat([flipped, corners], dim=1)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], params: Int64[Tensor, "batch 3"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Flips, pads and crops the images according to `params`."""
        batch, channels, height, width = images.shape
        both = F.pad(torch.stack([images, images.flip(-1)], dim=1), [self.padding] * 4)
        flipped, top, left = params.unbind(dim=1)
        # Each row of a crop is contiguous in memory: copying rows is several times faster than indexing pixels.
        image_stride, channel_stride, row_stride, _ = both[0].stride()
        first = (2 * torch.arange(batch, device=images.device) + flipped) * image_stride + top * row_stride + left
        offsets = torch.arange(channels)[:, None] * channel_stride + torch.arange(height) * row_stride
        starts = first[:, None] + offsets.flatten().to(images.device, non_blocking=True)
        return both.flatten().unfold(0, width, 1).index_select(0, starts.flatten()).view_as(images)


@dataclass(frozen=True, kw_only=True)
class BatchRandAugment:
    """RandAugment for a batch: two random operations on geometry or color for each image.

    Differs from RandAugment in three ways: the strength of an operation is drawn anew for each image between 0 and the
    magnitude, in either direction; geometric operations are applied before those on color; and AutoContrast and
    Equalize are missing.

    Args:
        magnitude: Largest strength, from 0 to 30: at 30 a shear by 0.3, a translation by 45 % of the side, a rotation
            by 30 degrees, a factor of 0.1 or 1.9 on brightness, color, contrast or sharpness, 4 bits instead of 8, or
            all pixels inverted.

    Source: Cubuk et al., arXiv:1909.13719; strengths drawn anew for each image: Müller and Hutter, arXiv:2103.10158.
    """

    magnitude: float

    OPERATIONS = (
        *("shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
        *("brightness", "color", "contrast", "sharpness", "posterize", "solarize"),
    )

    def sample_params(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch operations"]:
        """For each image the strength of every operation, -1 to 1; 0 for those that are not chosen."""
        size = (count, 2)
        chosen = torch.randint(len(self.OPERATIONS), size, generator=generator)
        strengths = (2 * torch.rand(size, generator=generator) - 1) * (self.magnitude / 30)
        return torch.zeros(count, len(self.OPERATIONS)).scatter_add(1, chosen, strengths).clamp(-1, 1)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], params: Float[Tensor, "batch operations"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Applies the operations according to `params`; what comes into view from outside the image is black."""
        strength = {
            name: rearrange(column, "b -> b 1 1 1")
            for name, column in zip(self.OPERATIONS, params.unbind(1), strict=True)
        }
        x = _affine(images.float() / 255, params)
        x = (x * (1 + 0.9 * strength["brightness"])).clamp(0, 1)
        gray = x if x.shape[1] == 1 else (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        x = torch.lerp(gray, x, 1 + 0.9 * strength["color"]).clamp(0, 1)
        x = torch.lerp(reduce(gray, "b c h w -> b 1 1 1", "mean"), x, 1 + 0.9 * strength["contrast"]).clamp(0, 1)
        blurred = F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1)
        x = torch.lerp(blurred, x, 1 + 0.9 * strength["sharpness"]).clamp(0, 1)
        # Toward 4 bits: the pixels are rounded down to multiples of 2^0 to 2^4.
        step = 2 ** (4 * strength["posterize"].abs()).round()
        pixels = (255 * x).round().div(step, rounding_mode="floor") * step
        is_bright = pixels >= 256 * (1 - strength["solarize"].abs())
        return torch.where(is_bright, 255 - pixels, pixels).to(torch.uint8)


def _affine(
    x: Float[Tensor, "batch channels height width"], params: Float[Tensor, "batch operations"]
) -> Float[Tensor, "batch channels height width"]:
    """Shears, translates and rotates each image about its center: the first five of `BatchRandAugment.OPERATIONS`."""
    shear_x, shear_y, translate_x, translate_y, rotate = params[:, :5].unbind(1)
    height, width = x.shape[2:]
    cosine, sine, one = (rotate * torch.pi / 6).cos(), (rotate * torch.pi / 6).sin(), torch.ones_like(rotate)
    rotation = rearrange([cosine, -sine, sine, cosine], "(row column) b -> b row column", row=2)
    shear = rearrange([one, 0.3 * shear_x, 0.3 * shear_y, one], "(row column) b -> b row column", row=2)
    # The sampling grid runs from -1 to 1 on both axes, whatever their length.
    aspect = x.new_tensor([[1, height / width], [width / height, 1]])
    translation = 0.9 * torch.stack([translate_x, translate_y], dim=1)
    theta = torch.cat([rotation @ shear * aspect, translation[..., None]], dim=2)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Fills a random rectangle with one color: 2 to 33 % of the image's area, with an aspect ratio of 0.3 to 3.3.

    Args:
        p: Probability that an image is erased, in [0, 1].
        color: Of the rectangle, one value per channel, 0 to 255.

    Source: Zhong et al., arXiv:1708.04896.
    """

    p: float
    color: tuple[float, ...]

    def sample_params(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch 5"]:
        """For each image, from 0 to 1: whether it is erased, area, aspect ratio, top and left edge of the rectangle."""
        return torch.rand(count, 5, generator=generator)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], params: Float[Tensor, "batch 5"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Fills the rectangles according to `params`."""
        chance, area, ratio, top, left = params.unbind(1)
        area, ratio = 0.02 + 0.31 * area, 0.3 * 11**ratio
        # Fractions of the sides; a rectangle longer than the image is clipped.
        height, width = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        box = _box(images, top * (1 - height), left * (1 - width), height, width)
        color = images.new_tensor(self.color)[:, None, None]
        return torch.where(box & rearrange(chance < self.p, "b -> b 1 1 1"), color, images)


# Each samples parameters for a batch, (batch, parameters), and changes the pixels, 0 to 255, according to them.
Augmentation = RandomCropFlip | BatchRandAugment | RandomErasing


@dataclass(frozen=True, kw_only=True)
class MixupCutmix:
    """Blends each image with its neighbor in the batch (mixup), or pastes a rectangle of the neighbor into it (cutmix).

    If both are on, each image gets one of the two with probability 0.5. The neighbors are the first and second image,
    the third and fourth, and so on, so an even batch is mixed alike by one process and by several. The last image of an
    odd batch is not mixed.

    Args:
        mixup: Parameter of the Beta distribution of the blending weight; 0 for no mixup.
        cutmix: Parameter of the Beta distribution of the area that remains; 0 for no cutmix.
        num_classes: Number of classes of the labels.

    Source: Zhang et al., arXiv:1710.09412; Yun et al., arXiv:1905.04899.
    """

    mixup: float
    cutmix: float
    num_classes: int

    def sample_params(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch 4"]:
        """For each image: 1 for cutmix, 0 for mixup; the fraction that remains; the rectangle's center, 0 to 1."""
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        is_cutmix = rng.random(count) < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        parameter = np.where(is_cutmix, self.cutmix or 1, self.mixup or 1)
        columns = [is_cutmix, rng.beta(parameter, parameter), rng.random(count), rng.random(count)]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))

    def apply(
        self,
        images: Float[Tensor, "batch channels height width"],
        labels: Int64[Tensor, " batch"],
        params: Float[Tensor, "batch 4"],
    ) -> tuple[Float[Tensor, "batch channels height width"], Float[Tensor, "batch classes"]]:
        """Returns the mixed images and the fraction of each class in them; these rows sum to 1."""
        batch = len(images)
        neighbor = (torch.arange(batch, device=images.device) ^ 1).clamp(max=batch - 1)
        is_cutmix, remaining, row, column = params.unbind(1)
        side = (1 - remaining).sqrt()
        box = _box(images, row - side / 2, column - side / 2, side, side)
        blend = rearrange(remaining, "b -> b 1 1 1")
        weight = torch.where(rearrange(is_cutmix, "b -> b 1 1 1") == 1, (~box).float(), blend)
        mixed = torch.lerp(images[neighbor], images, weight)
        fraction = reduce(weight, "b 1 h w -> b 1", "mean")
        targets = F.one_hot(labels, self.num_classes).float()
        return mixed, torch.lerp(targets[neighbor], targets, fraction)


def _box(
    images: Tensor,
    top: Float[Tensor, " batch"],
    left: Float[Tensor, " batch"],
    height: Float[Tensor, " batch"],
    width: Float[Tensor, " batch"],
) -> Shaped[Tensor, "batch 1 height width"]:
    """Which pixels lie in a rectangle of each image, whose edges are fractions of the sides."""

    def is_inside(start: Tensor, extent: Tensor, num_pixels: int) -> Tensor:
        centers = (torch.arange(num_pixels, device=images.device) + 0.5) / num_pixels
        return (centers >= start[:, None]) & (centers < (start + extent)[:, None])

    rows, columns = is_inside(top, height, images.shape[2]), is_inside(left, width, images.shape[3])
    return rows[:, None, :, None] & columns[:, None, None, :]
