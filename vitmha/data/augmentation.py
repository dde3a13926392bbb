"""Random crop and mirror of a whole batch at once, on the device where the batch lies."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomCropFlip:
    """Pad with black on all sides, cut out a window of the former size, and mirror half of the pictures.

    Drawing and applying are apart: processes that train together draw for the whole global batch and apply their share,
    so the pictures do not depend on how many they are.

    Args:
        padding: Pixels added on each side, 0 for no crop.
        flip: Mirror left and right with probability one half.
    """

    padding: int
    flip: bool

    def draw(self, count: int, generator: torch.Generator) -> Int64[Tensor, "batch 3"]:
        """The random part.

        Args:
            count: Pictures to draw for.
            generator: On the CPU, whatever device the pictures are on.

        Returns:
            For each picture: 1 if mirrored, else 0; top and left edge of its window, 0 to twice the padding.
        """
        mirrored = torch.randint(1 + self.flip, (count, 1), generator=generator)
        corners = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        return torch.cat([mirrored, corners], dim=1)

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Int64[Tensor, "batch 3"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """The pictures, first mirrored, then padded and cropped, as drawn.

        Args:
            images: Pixels, 0 to 255.
            draws: From `draw`, on the images' device.

        Returns:
            Pictures of the same size.
        """
        batch, channels, height, width = images.shape
        both = F.pad(torch.stack([images, images.flip(-1)], dim=1), [self.padding] * 4)
        mirrored, top, left = draws.unbind(dim=1)
        # Every row of every window is a run of bytes: one copy each, several times faster than an index per pixel.
        picture, channel, row, _ = both[0].stride()
        first = (2 * torch.arange(batch, device=images.device) + mirrored) * picture + top * row + left
        offsets = torch.arange(channels)[:, None] * channel + torch.arange(height) * row
        starts = first[:, None] + offsets.flatten().to(images.device, non_blocking=True)
        return both.flatten().unfold(0, width, 1).index_select(0, starts.flatten()).view_as(images)
