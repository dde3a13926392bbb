"""The architecture of a Vision Transformer: `ViTConfig`, the named sizes, and the token layout."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitmha.attention import Backend, check_heads
from vitmha.errors import UserError, check_argument

# Dosovitskiy et al. 2021 (arXiv 2010.11929), table 1; tiny and small: Touvron et al. 2021 (DeiT), table 1. vit_mini has
# no paper: it is for images of 28 and 32 pixels.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "vit_mini": {"patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_dim": 256},
    "vit_tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "vit_small": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "vit_base": {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
    "vit_large": {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16},
    "vit_huge": {"patch_size": 14, "embed_dim": 1280, "depth": 32, "num_heads": 16},
}


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The architecture of a Vision Transformer.

    Raises:
        UserError: Sizes that do not divide, values out of range or an unknown choice.

    Example:
        >>> from vitmha import ViTConfig
        >>> ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4).layout.num_tokens
        37
    """

    image_size: int | tuple[int, int] = 224
    """Height and width of the input images in pixels; one integer for square images."""
    in_channels: int = 3
    """Color channels of the input images."""
    num_classes: int = 1000
    """Outputs of the classification head; 0 for a model without a head, which outputs features."""
    patch_size: int | tuple[int, int] = 16
    """Height and width of a patch in pixels; must divide image_size."""
    embed_dim: int = 192
    """Width of a token."""
    depth: int = 12
    """Number of blocks."""
    num_heads: int = 3
    """Attention heads per block."""
    num_kv_heads: int | None = None
    """Key/value heads per block, fewer than num_heads for grouped-query attention; num_heads by default."""
    head_dim: int | None = None
    """Width of a head; embed_dim / num_heads by default."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; 4 * embed_dim by default."""
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    """Activation of the MLP; gelu_tanh and quick_gelu are approximations that some pretrained weights need."""
    norm_eps: float = 1e-6
    """Epsilon of LayerNorm, added to the variance."""
    pre_norm: bool = False
    """Apply a LayerNorm before the first block, as in CLIP."""
    pool: Literal["cls", "mean", "cls_mean", "attention"] = "cls"
    """Input of the head: the class token, the mean of the patch tokens, both, or an attention pooling of all tokens."""
    class_token: bool = False
    """Add a class token even if pool does not use it; pool cls and cls_mean always add it."""
    fc_norm: bool = False
    """Apply the final LayerNorm after mean pooling instead of before it."""
    distillation_token: bool = False
    """Add a distillation token with its own head next to the class token (DeiT)."""
    num_registers: int = 0
    """Number of register tokens: learned tokens that belong to no patch."""
    pos_embed: Literal["learned", "sincos2d", "rope", "rope_dinov3"] = "learned"
    """Position embedding: learned or 2-D sine-cosine, added to the tokens; or 2-D rotary (rope), applied to queries and
    keys, with positions in patches or, for rope_dinov3, from -1 to 1 across the image."""
    qkv_bias: bool = True
    """Add a bias in the query, key and value projections."""
    qk_norm: bool = False
    """Apply a LayerNorm to queries and keys."""
    layer_scale_init: float | None = None
    """Initial value of LayerScale, a learned factor per channel of each residual branch; no LayerScale by default."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight in training."""
    drop_path: float = 0.0
    """Stochastic depth: fraction of the batch that skips each residual branch of the last block in training; rises
    linearly from 0 in the first block. A batch of 1 never skips."""
    patch_dropout: float = 0.0
    """Fraction of the patches dropped in training."""
    backend: Backend = "auto"
    """Attention kernel: auto, flash, efficient, math, or explicit, which computes the weights in plain PyTorch."""

    def __post_init__(self) -> None:
        for name in ("in_channels", "embed_dim", "depth", "num_kv_heads", "head_dim", "mlp_dim"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UserError(f"{name} must be at least 1, got {count}.")
        if self.distillation_token and self.pool != "cls":
            raise UserError(f"distillation_token needs pool 'cls', got {self.pool!r}.")
        for name in ("num_registers", "num_classes"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}.")
        check_argument("norm_eps", self.norm_eps, 0 < self.norm_eps < math.inf, "positive")
        scale = self.layer_scale_init
        check_argument("layer_scale_init", scale, scale is None or 0 <= scale < math.inf, "0 or more")
        if self.fc_norm and self.pool != "mean":
            raise UserError(f"fc_norm needs pool 'mean', got {self.pool!r}.")
        for name in ("mlp", "pool", "pos_embed"):
            choices = get_args(self.__dataclass_fields__[name].type)
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        for name in ("attention_dropout", "drop_path", "patch_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        image, patch = pair(self.image_size), pair(self.patch_size)
        if min(*patch, *image) < 1 or image[0] % patch[0] or image[1] % patch[1]:
            raise UserError(
                f"image_size {image[0]} x {image[1]} is not divisible by patch_size {patch[0]} x {patch[1]}: "
                "change one of them."
            )
        check_heads(self.embed_dim, self.num_heads, self.num_kv_heads or self.num_heads, self.head_dim)
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        if self.pos_embed.startswith("rope") and head_dim % 4:
            raise UserError(
                f"pos_embed {self.pos_embed!r} needs a head_dim divisible by 4 (two axes, pairs), got {head_dim}."
            )
        if self.pos_embed == "sincos2d" and self.embed_dim % 4:
            raise UserError(f"pos_embed 'sincos2d' needs an embed_dim divisible by 4, got {self.embed_dim}.")

    @property
    def layout(self) -> "TokenLayout":
        """The token layout of the model."""
        image, patch = pair(self.image_size), pair(self.patch_size)
        return TokenLayout(
            num_class_tokens=int(self.class_token or self.pool in ("cls", "cls_mean")),
            num_distillation_tokens=int(self.distillation_token),
            num_registers=self.num_registers,
            grid_size=(image[0] // patch[0], image[1] // patch[1]),
            patch_size=patch,
        )


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """The order of the tokens: class token, distillation token, registers, then the patches in row-major order.

    Example:
        >>> from vitmha import ViTConfig
        >>> layout = ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4).layout
        >>> layout.grid_size, layout.registers, layout.patches
        ((4, 8), slice(1, 5, None), slice(5, 37, None))
        >>> layout.token_of(row=1, column=6)
        19
    """

    num_class_tokens: int
    """0 or 1."""
    num_registers: int
    """Number of register tokens."""
    grid_size: tuple[int, int]
    """Number of patches along (height, width)."""
    patch_size: tuple[int, int]
    """Height and width of a patch in pixels."""
    num_distillation_tokens: int = 0
    """0 or 1."""

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the first patch."""
        return self.num_class_tokens + self.num_distillation_tokens + self.num_registers

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the image in pixels."""
        (rows, columns), (height, width) = self.grid_size, self.patch_size
        return rows * height, columns * width

    @property
    def distillation(self) -> slice:
        return slice(self.num_class_tokens, self.num_class_tokens + self.num_distillation_tokens)

    @property
    def registers(self) -> slice:
        return slice(self.distillation.stop, self.num_prefix_tokens)

    @property
    def patches(self) -> slice:
        return slice(self.num_prefix_tokens, self.num_tokens)

    def coordinates(self, device: torch.device | None = None) -> Int64[Tensor, "2 patches"]:
        """Returns the row and the column of each patch on the grid, in the order of the tokens."""
        axes = (torch.arange(length, device=device) for length in self.grid_size)
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)

    def token_of(self, row: int, column: int) -> int:
        """Returns the token index of one patch, for example to record its attention: `queries=[layout.token_of(2, 3)]`.

        Args:
            row: Row of the patch grid, from 0 at the top.
            column: Column of the patch grid, from 0 on the left.

        Raises:
            UserError: The patch lies outside the grid.
        """
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise UserError(f"row {row}, column {column} lies outside the grid of {height} x {width} patches.")
        return self.num_prefix_tokens + row * width + column

    def to_grid(self, values: Float[Tensor, "*axes tokens"]) -> Float[Tensor, "*axes height width"]:
        """Arranges one value per token on the patch grid, without the prefix tokens.

        Args:
            values: One value for each token, prefix tokens included.

        Raises:
            UserError: The number of values is not the number of tokens.
        """
        if values.shape[-1] != self.num_tokens:
            raise UserError(f"values must have {self.num_tokens} tokens on the last axis, got {values.shape[-1]}.")
        return values[..., self.patches].unflatten(-1, self.grid_size)


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns a size as (height, width); one integer stands for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
