"""The architecture of a Vision Transformer: `ViTConfig`, the named sizes, and the layout of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitmha.attention import Backend, check_heads
from vitmha.errors import UserError

# Dosovitskiy et al. 2021 (arXiv 2010.11929), table 1; tiny and small: Touvron et al. 2021 (DeiT), table 1. Mini is
# ours, for pictures of 28 and 32 pixels.
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
    """Everything that makes one architecture.

    Raises:
        UserError: Sizes that do not divide, rates outside their range, or an unknown word.
    """

    image_size: int | tuple[int, int] = 224
    """Height and width of a picture in pixels; one number for a square."""
    in_channels: int = 3
    """Colour channels of a picture."""
    num_classes: int = 1000
    """Outputs of the head; 0 for a model without one, which gives features."""
    patch_size: int | tuple[int, int] = 16
    """Height and width of a patch in pixels; must divide the picture's."""
    embed_dim: int = 192
    """Width of a token."""
    depth: int = 12
    """Number of blocks."""
    num_heads: int = 3
    """Attention heads in a block."""
    num_kv_heads: int | None = None
    """Key/value heads, fewer than num_heads for grouped-query attention; num_heads where not given."""
    head_dim: int | None = None
    """Width of a head; embed_dim / num_heads where not given."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; 4 embed_dim where not given."""
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    """The MLP's activation; gelu_tanh and quick_gelu are approximations that some weights were trained with."""
    norm_eps: float = 1e-6
    """What LayerNorm adds to the variance."""
    pre_norm: bool = False
    """Whether tokens are normalised before the first block too, as in CLIP."""
    pool: Literal["cls", "mean", "cls_mean", "attention"] = "cls"
    """What the head reads: the class token, the mean of the patches, both, or a learned query that attends to all."""
    class_token: bool = False
    """Whether there is a class token though the head does not read it; with pool cls and cls_mean there always is."""
    fc_norm: bool = False
    """Whether the last norm stands behind the mean of the patches and not before it."""
    distillation_token: bool = False
    """Whether a second token beside the class token, with a head of its own, learns from a teacher."""
    num_registers: int = 0
    """Extra learned tokens without a place in the picture."""
    pos_embed: Literal["learned", "sincos2d", "rope", "rope_dinov3"] = "learned"
    """Place of a patch: learned and added, fixed 2-D sine and cosine and added, or 2-D rotation of queries and keys,
    which counts in patches or, rope_dinov3, from -1 to 1 over the picture as in DINOv3."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values add a bias."""
    qk_norm: bool = False
    """Whether queries and keys pass a LayerNorm before the scores."""
    layer_scale_init: float | None = None
    """First value of a learned factor on each channel of each residual branch; no factor where not given."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped in training."""
    drop_path: float = 0.0
    """Share of the batch that the last block's residual branches leave out in training; rises linearly from 0."""
    patch_dropout: float = 0.0
    """Share of patches left out in training."""
    backend: Backend = "auto"
    """Attention kernel."""

    def __post_init__(self) -> None:
        for name in ("in_channels", "embed_dim", "depth", "num_kv_heads", "head_dim", "mlp_dim"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UserError(f"{name} must be at least 1, got {count}.")
        if self.distillation_token and self.pool != "cls":
            raise UserError(f"distillation_token stands beside a class token: it needs pool 'cls', got {self.pool!r}.")
        for name in ("num_registers", "num_classes"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.norm_eps <= 0:
            raise UserError(f"norm_eps must be positive, got {self.norm_eps}.")
        if self.fc_norm and self.pool != "mean":
            raise UserError(f"fc_norm is for pool 'mean', got {self.pool!r}.")
        for name in ("mlp", "pool", "pos_embed"):
            words = get_args(self.__dataclass_fields__[name].type)
            if getattr(self, name) not in words:
                raise UserError(f"{name} must be one of {', '.join(words)}; got {getattr(self, name)!r}.")
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
        rotated = self.head_dim or self.embed_dim // self.num_heads
        if self.pos_embed.startswith("rope") and rotated % 4:
            raise UserError(
                f"pos_embed {self.pos_embed!r} needs a head_dim divisible by 4 (two axes, pairs), got {rotated}."
            )
        if self.pos_embed == "sincos2d" and self.embed_dim % 4:
            raise UserError(f"pos_embed 'sincos2d' needs an embed_dim divisible by 4, got {self.embed_dim}.")

    @property
    def layout(self) -> "TokenLayout":
        """Which token is what."""
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
    """Which token is what: the class token, the distillation token, the registers, then the patches row by row."""

    num_class_tokens: int
    """0 or 1."""
    num_registers: int
    """Tokens without a place in the picture, before the patches."""
    grid_size: tuple[int, int]
    """Patches along (height, width)."""
    patch_size: tuple[int, int]
    """Pixels of a patch along (height, width)."""
    num_distillation_tokens: int = 0
    """0 or 1."""

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the first patch."""
        return self.num_class_tokens + self.num_distillation_tokens + self.num_registers

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def image_size(self) -> tuple[int, int]:
        """Pixels of a picture along (height, width)."""
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
        """The token of the patch at (row, column) of the grid.

        Raises:
            UserError: A place outside the grid.
        """
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise UserError(f"The grid is {height} x {width} patches; there is none at row {row}, column {column}.")
        return self.num_prefix_tokens + row * width + column

    def to_grid(self, values: Float[Tensor, "*axes tokens"]) -> Float[Tensor, "*axes height width"]:
        """Values of all tokens to those of the patches, laid out as in the picture.

        Raises:
            UserError: Another number of tokens than the layout has.
        """
        if values.shape[-1] != self.num_tokens:
            raise UserError(f"The layout has {self.num_tokens} tokens, the values {values.shape[-1]}.")
        return values[..., self.patches].unflatten(-1, self.grid_size)


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of what may be one number for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
