"""Fixed 2-D position embeddings: sine and cosine, and rotary."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.models.config import TokenLayout


def build_sincos2d(layout: TokenLayout, embed_dim: int) -> Float[Tensor, "1 patches embed"]:
    """Fixed positions: sines and cosines of the column in the first half of the channels, of the row in the second.

    Args:
        layout: The patch grid; prefix tokens have no position.
        embed_dim: Channels, divisible by 4.

    Returns:
        Values in [-1, 1], patches row by row.

    Source:
        Beyer et al. 2022 (arXiv 2205.01580), big_vision's `posemb_sincos_2d`, temperature 10,000.
    """
    rows, columns = layout.coordinates()
    frequencies = 10_000 ** -torch.linspace(0, 1, embed_dim // 4)
    angles = [axis[:, None] * frequencies for axis in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)[None]


def build_rope2d(layout: TokenLayout, head_dim: int, is_unit: bool = False) -> Float[Tensor, "2 tokens head_dim"]:
    """Cosines and sines for `apply_rope`: the row turns the first half of the channels, the column the second.

    Args:
        layout: Which token is what; prefix tokens are not turned.
        head_dim: Channels of a head, divisible by 4.
        is_unit: Whether rows and columns count from -1 to 1 over the picture, with periods of 1 to 100, and not in
            patches, with 1 to 1/10,000 radians for each.

    Returns:
        Values in [-1, 1].

    Source:
        Su et al. 2021 (arXiv 2104.09864) on each axis of the picture, base 10,000, as timm's `RotaryEmbeddingCat`
        counted in patches; is_unit: Siméoni et al. 2025 (DINOv3, arXiv 2508.10104), base 100.
    """
    count = head_dim // 4
    exponents, (rows, columns) = torch.arange(count) / count, layout.coordinates()
    if is_unit:
        height, width = layout.grid_size
        rows, columns = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    frequencies = 2 * torch.pi * 100**-exponents if is_unit else 10_000**-exponents
    angles = torch.cat([axis[:, None] * frequencies for axis in (rows, columns)], dim=1).repeat_interleave(2, 1)
    angles = torch.cat([torch.zeros(layout.num_prefix_tokens, head_dim), angles])
    return torch.stack([angles.cos(), angles.sin()])
