"""Resizes weights to another image size, patch size or number of channels."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from vitmha.models.config import ViTConfig


def _resize(tensors: dict[str, Tensor], prefix: str, old: ViTConfig, new: ViTConfig) -> list[str]:
    """Fits patches and positions to other sizes, in place; what was done, in words."""
    done = []
    patch, channels = old.layout.patch_size, old.in_channels
    name = f"{prefix}patch_embed.proj.weight"
    if new.layout.patch_size != patch and name in tensors:
        from timm.layers.patch_embed import resample_patch_embed  # takes seconds that most calls can do without

        tensors[name] = resample_patch_embed(tensors[name], list(new.layout.patch_size))
        done.append(f"{name} from patches of {_by(patch)} to {_by(new.layout.patch_size)}")
    if new.in_channels != channels and name in tensors:
        from timm.models import adapt_input_conv

        tensors[name] = adapt_input_conv(new.in_channels, tensors[name], channels)
        done.append(f"{name} from {channels} channels to {new.in_channels}")
    grid, name = old.layout.grid_size, f"{prefix}pos_embed"
    if new.layout.grid_size != grid and name in tensors:
        tensors[name] = resample_positions(tensors[name], grid, new.layout.grid_size)
        done.append(f"{name} from a grid of {_by(grid)} to {_by(new.layout.grid_size)}")
    return done


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def resample_positions(
    positions: Float[Tensor, "1 old embed"], old: tuple[int, int], new: tuple[int, int]
) -> Float[Tensor, "1 new embed"]:
    """Learned positions for another grid of patches: bicubic with antialiasing, as timm's; the same for the same grid.

    Args:
        positions: Of the prefix tokens, which stay, and then of the patches, row by row.
        old: Patches along (height, width).
        new: Likewise.
    """
    if old == new:
        return positions
    prefix = positions.shape[1] - old[0] * old[1]
    grid = rearrange(positions[:, prefix:], "1 (h w) d -> 1 d h w", h=old[0])
    grid = F.interpolate(grid, new, mode="bicubic", antialias=True)
    return torch.cat([positions[:, :prefix], rearrange(grid, "1 d h w -> 1 (h w) d")], dim=1)
