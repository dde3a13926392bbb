"""Fixed 2-D position embeddings: sine-cosine, and rotary."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.models.config import TokenLayout


def build_sincos2d(layout: TokenLayout, embed_dim: int) -> Float[Tensor, "1 patches embed"]:
    """Builds 2-D sine-cosine embeddings: the column in the first half of the channels, the row in the second.

    Args:
        layout: Gives the patch grid; prefix tokens get no embedding.
        embed_dim: Channels, divisible by 4.

    Returns:
        Values in [-1, 1] for each patch, in the order of the tokens.

    Source:
        Beyer et al. 2022 (arXiv 2205.01580), big_vision's `posemb_sincos_2d`, temperature 10,000.
    """
    rows, columns = layout.coordinates()
    frequencies = 10_000 ** -torch.linspace(0, 1, embed_dim // 4)
    angles = [axis[:, None] * frequencies for axis in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)[None]


def build_rope2d(layout: TokenLayout, head_dim: int, is_dinov3: bool = False) -> Float[Tensor, "2 tokens head_dim"]:
    """Builds cosines and sines for `apply_rope`: the row rotates the first half of the channels, the column the rest.

    Args:
        layout: Gives the patch grid; prefix tokens are not rotated.
        head_dim: Channels of a head, divisible by 4.
        is_dinov3: Measure rows and columns from -1 to 1 across the image, with periods from 1 to 100; else in patches,
            with frequencies from 1 down to 1/10,000 radians per patch.

    Returns:
        Values in [-1, 1].

    Source:
        Su et al. 2021 (arXiv 2104.09864) on each image axis, base 10,000, as timm's `RotaryEmbeddingCat` measured in
        patches; is_dinov3: Siméoni et al. 2025 (DINOv3, arXiv 2508.10104), base 100.
    """
    count = head_dim // 4
    exponents, (rows, columns) = torch.arange(count) / count, layout.coordinates()
    if is_dinov3:
        height, width = layout.grid_size
        rows, columns = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    frequencies = 2 * torch.pi * 100**-exponents if is_dinov3 else 10_000**-exponents
    angles = torch.cat([axis[:, None] * frequencies for axis in (rows, columns)], dim=1).repeat_interleave(2, 1)
    angles = torch.cat([torch.zeros(layout.num_prefix_tokens, head_dim), angles])
    return torch.stack([angles.cos(), angles.sin()])
