"""Resizes weights to another image size, patch size or number of channels."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from vitmha.models.config import ViTConfig


def resize_weights(tensors: dict[str, Tensor], prefix: str, old: ViTConfig, new: ViTConfig) -> list[str]:
    """Resizes patch embedding and position embeddings in place.

    Args:
        tensors: The state dict of a model with the config `old`.
        prefix: Of the names of the encoder's tensors.
        old: Their architecture.
        new: The requested one.

    Returns:
        What was resized, one entry per change.
    """
    changes = []
    patch, channels = old.layout.patch_size, old.in_channels
    name = f"{prefix}patch_embed.proj.weight"
    if new.layout.patch_size != patch and name in tensors:
        from timm.layers.patch_embed import resample_patch_embed  # imported here since it takes seconds

        tensors[name] = resample_patch_embed(tensors[name], list(new.layout.patch_size))
        changes.append(f"{name} from patches of {_by(patch)} to {_by(new.layout.patch_size)}")
    if new.in_channels != channels and name in tensors:
        tensors[name] = _resize_channels(tensors[name], new.in_channels)
        changes.append(f"{name} from {channels} channels to {new.in_channels}")
    grid, name = old.layout.grid_size, f"{prefix}pos_embed"
    if new.layout.grid_size != grid and name in tensors:
        tensors[name] = resample_positions(tensors[name], grid, new.layout.grid_size)
        changes.append(f"{name} from a grid of {_by(grid)} to {_by(new.layout.grid_size)}")
    return changes


def _resize_channels(kernel: Tensor, channels: int) -> Tensor:
    """The sum over the channels for one channel, else the channels repeated in turn and scaled, as timm does."""
    if channels == 1:
        return kernel.sum(dim=1, keepdim=True)
    old = kernel.shape[1]
    return kernel[:, [i % old for i in range(channels)]] * (old / channels)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def resample_positions(
    positions: Float[Tensor, "1 old embed"], old: tuple[int, int], new: tuple[int, int]
) -> Float[Tensor, "1 new embed"]:
    """Interpolates learned position embeddings to another patch grid: bicubic with antialiasing, as timm does.

    Args:
        positions: Of the prefix tokens, which are not changed, followed by those of the patches, row by row.
        old: Patch grid (height, width).
        new: Patch grid (height, width); the positions are returned as they are if it equals `old`.
    """
    if old == new:
        return positions
    prefix = positions.shape[1] - old[0] * old[1]
    grid = rearrange(positions[:, prefix:], "1 (h w) d -> 1 d h w", h=old[0])
    grid = F.interpolate(grid, new, mode="bicubic", antialias=True)
    return torch.cat([positions[:, :prefix], rearrange(grid, "1 d h w -> 1 (h w) d")], dim=1)
