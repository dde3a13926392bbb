"""Random changes of a whole batch at once, on the device where it lies.

Drawing and applying are apart: processes that train together draw for the whole global batch and apply their share, so
the pictures do not depend on how many they are. Draws come from a generator on the CPU, whatever the device.

Letters in the patterns: b batch, c channels, h w pixels.
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
    """Pad with black on all sides, cut out a window of the former size, and mirror half of the pictures.

    Args:
        padding: Pixels added on each side, 0 for no crop.
        hflip: Probability of a horizontal flip, in [0, 1].
    """

    padding: int
    hflip: float

    def draw(self, count: int, generator: torch.Generator) -> Int64[Tensor, "batch 3"]:
        """For each picture: 1 if mirrored, else 0; top and left edge of its window, 0 to twice the padding."""
        if self.hflip in (0, 0.5):  # the random stream of published results
            mirrored = torch.randint(1 + (self.hflip > 0), (count, 1), generator=generator)
        else:
            mirrored = (torch.rand(count, 1, generator=generator) < self.hflip).long()
        corners = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        return torch.cat([mirrored, corners], dim=1)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Int64[Tensor, "batch 3"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """The pictures, first mirrored, then padded and cropped, as drawn."""
        batch, channels, height, width = images.shape
        both = F.pad(torch.stack([images, images.flip(-1)], dim=1), [self.padding] * 4)
        mirrored, top, left = draws.unbind(dim=1)
        # Every row of every window is a run of bytes: one copy each, several times faster than an index per pixel.
        picture, channel, row, _ = both[0].stride()
        first = (2 * torch.arange(batch, device=images.device) + mirrored) * picture + top * row + left
        offsets = torch.arange(channels)[:, None] * channel + torch.arange(height) * row
        starts = first[:, None] + offsets.flatten().to(images.device, non_blocking=True)
        return both.flatten().unfold(0, width, 1).index_select(0, starts.flatten()).view_as(images)


@dataclass(frozen=True, kw_only=True)
class BatchRandAugment:
    """Two changes of geometry or colour for each picture, chosen and measured at random.

    Differs from RandAugment in that each picture's strength is drawn up to the magnitude instead of being the
    magnitude, that geometry comes before colour, and that autocontrast and equalise are left out.

    Args:
        magnitude: Largest strength, from 0 to 30: at 30 a shear by 0.3, a shift by 45 % of the side, a rotation by 30
            degrees, a factor of 0.1 or 1.9 on brightness, colour, contrast or sharpness, 4 bits instead of 8, or all
            pixels inverted.

    Source: Cubuk et al., arXiv:1909.13719; strengths drawn anew for each picture: Müller and Hutter, arXiv:2103.10158.
    """

    magnitude: float

    CHANGES = (
        *("shear_x", "shear_y", "shift_x", "shift_y", "rotation"),
        *("brightness", "colour", "contrast", "sharpness", "posterise", "solarise"),
    )

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch changes"]:
        """For each picture the strength of every change, -1 to 1; 0 for those not chosen."""
        size = (count, 2)
        kinds = torch.randint(len(self.CHANGES), size, generator=generator)
        strengths = (2 * torch.rand(size, generator=generator) - 1) * (self.magnitude / 30)
        return torch.zeros(count, len(self.CHANGES)).scatter_add(1, kinds, strengths).clamp(-1, 1)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Float[Tensor, "batch changes"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """The pictures with their two changes; what comes into view from outside is black."""
        amount = {
            name: rearrange(column, "b -> b 1 1 1") for name, column in zip(self.CHANGES, draws.unbind(1), strict=True)
        }
        x = _affine(images.float() / 255, draws)
        x = (x * (1 + 0.9 * amount["brightness"])).clamp(0, 1)
        gray = x if x.shape[1] == 1 else (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        x = torch.lerp(gray, x, 1 + 0.9 * amount["colour"]).clamp(0, 1)
        x = torch.lerp(reduce(gray, "b c h w -> b 1 1 1", "mean"), x, 1 + 0.9 * amount["contrast"]).clamp(0, 1)
        blurred = F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1)
        x = torch.lerp(blurred, x, 1 + 0.9 * amount["sharpness"]).clamp(0, 1)
        # Towards 4 bits: the pixels are rounded down to steps of 2^0 to 2^4.
        step = 2 ** (4 * amount["posterise"].abs()).round()
        pixels = (255 * x).round().div(step, rounding_mode="floor") * step
        bright = pixels >= 256 * (1 - amount["solarise"].abs())
        return torch.where(bright, 255 - pixels, pixels).to(torch.uint8)


def _affine(
    x: Float[Tensor, "batch channels height width"], draws: Float[Tensor, "batch changes"]
) -> Float[Tensor, "batch channels height width"]:
    """Shears, shifts and rotates each picture about its centre, by the first five of `BatchRandAugment.CHANGES`."""
    shear_x, shear_y, shift_x, shift_y, rotation = draws[:, :5].unbind(1)
    height, width = x.shape[2:]
    cosine, sine, one = (rotation * torch.pi / 6).cos(), (rotation * torch.pi / 6).sin(), torch.ones_like(rotation)
    turn = rearrange([cosine, -sine, sine, cosine], "(row column) b -> b row column", row=2)
    shear = rearrange([one, 0.3 * shear_x, 0.3 * shear_y, one], "(row column) b -> b row column", row=2)
    # The grid counts -1 to 1 on both axes, whatever their length.
    sides = x.new_tensor([[1, height / width], [width / height, 1]])
    shift = 0.9 * torch.stack([shift_x, shift_y], dim=1)
    theta = torch.cat([turn @ shear * sides, shift[..., None]], dim=2)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Paint a rectangle over some pictures: 2 to 33 % of the area, sides in a ratio of 0.3 to 3.3.

    Args:
        chance: Share of the pictures.
        colour: Of the rectangle, for each channel, 0 to 255.

    Source: Zhong et al., arXiv:1708.04896.
    """

    chance: float
    colour: tuple[float, ...]

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch 5"]:
        """For each picture, from 0 to 1: whether, area, ratio, and the place of the upper left corner."""
        return torch.rand(count, 5, generator=generator)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Float[Tensor, "batch 5"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """The pictures, erased as drawn."""
        whether, area, ratio, top, left = draws.unbind(1)
        area, ratio = 0.02 + 0.31 * area, 0.3 * 11**ratio
        # As shares of the sides; a rectangle longer than the picture is cut.
        height, width = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        box = _box(images, top * (1 - height), left * (1 - width), height, width)
        colour = images.new_tensor(self.colour)[:, None, None]
        return torch.where(box & rearrange(whether < self.chance, "b -> b 1 1 1"), colour, images)


# Each draws numbers for a batch, (batch, numbers), and changes its pixels, 0 to 255, by them.
Augmentation = RandomCropFlip | BatchRandAugment | RandomErasing


@dataclass(frozen=True, kw_only=True)
class MixupCutmix:
    """Blends each picture with its neighbour in the batch (mixup), or pastes a rectangle of it (cutmix).

    Where both are on, each takes half of the pictures, by chance. Neighbours are the first and the second, the third
    and the fourth, and so on: an even batch is mixed alike by one process and by several. The last of an odd one stays.

    Args:
        mixup: Parameter of the Beta distribution of the blend; 0 for no mixup.
        cutmix: Parameter of that of the area that stays; 0 for no cutmix.
        num_classes: Of the labels.

    Source: Zhang et al., arXiv:1710.09412; Yun et al., arXiv:1905.04899.
    """

    mixup: float
    cutmix: float
    num_classes: int

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "batch 4"]:
        """For each picture: 1 for cutmix, 0 for mixup; the share that stays; the centre of the rectangle, 0 to 1."""
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        pastes = rng.random(count) < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        parameter = np.where(pastes, self.cutmix or 1, self.mixup or 1)
        columns = [pastes, rng.beta(parameter, parameter), rng.random(count), rng.random(count)]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))

    def apply(
        self,
        images: Float[Tensor, "batch channels height width"],
        labels: Int64[Tensor, " batch"],
        draws: Float[Tensor, "batch 4"],
    ) -> tuple[Float[Tensor, "batch channels height width"], Float[Tensor, "batch classes"]]:
        """The mixed pictures, and the share of each class in them: rows that sum to 1."""
        batch = len(images)
        other = (torch.arange(batch, device=images.device) ^ 1).clamp(max=batch - 1)
        pastes, stays, row, column = draws.unbind(1)
        side = (1 - stays).sqrt()
        box = _box(images, row - side / 2, column - side / 2, side, side)
        weight = torch.where(rearrange(pastes, "b -> b 1 1 1") == 1, (~box).float(), rearrange(stays, "b -> b 1 1 1"))
        mixed = torch.lerp(images[other], images, weight)
        share = reduce(weight, "b 1 h w -> b 1", "mean")
        classes = F.one_hot(labels, self.num_classes).float()
        return mixed, torch.lerp(classes[other], classes, share)


def _box(
    images: Tensor,
    top: Float[Tensor, " batch"],
    left: Float[Tensor, " batch"],
    height: Float[Tensor, " batch"],
    width: Float[Tensor, " batch"],
) -> Shaped[Tensor, "batch 1 height width"]:
    """Which pixels lie in a rectangle of each picture, given in shares of the sides."""

    def inside(start: Tensor, extent: Tensor, pixels: int) -> Tensor:
        places = (torch.arange(pixels, device=images.device) + 0.5) / pixels
        return (places >= start[:, None]) & (places < (start + extent)[:, None])

    rows, columns = inside(top, height, images.shape[2]), inside(left, width, images.shape[3])
    return rows[:, None, :, None] & columns[:, None, None, :]
