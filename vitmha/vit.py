"""The Vision Transformer: patches to tokens, blocks of attention and MLP with residuals, tokens to classes.

Letters in the patterns: b batch, c channels, h w the patch grid, p q one patch, n tokens, d embed_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitmha.attention import Backend, MultiHeadAttention, check_heads
from vitmha.images import Preprocessing

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

ALL_TOKENS = slice(None)


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that makes one architecture.

    Raises:
        ValueError: Sizes that do not divide, rates outside their range, or an unknown word.
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
    norm_pooled: bool = False
    """Whether the last norm stands behind the mean of the patches and not before it."""
    distillation_token: bool = False
    """Whether a second token beside the class token, with a head of its own, learns from a teacher."""
    num_registers: int = 0
    """Extra learned tokens without a place in the picture."""
    positions: Literal["learned", "sincos", "rotary", "rotary_unit"] = "learned"
    """Place of a patch: learned and added, fixed 2-D sine and cosine and added, or 2-D rotation of queries and keys,
    which counts in patches or, rotary_unit, from -1 to 1 over the picture as in DINOv3."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values add a bias."""
    qk_norm: bool = False
    """Whether queries and keys pass a LayerNorm before the scores."""
    layer_scale: float | None = None
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
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if self.distillation_token and self.pool != "cls":
            raise ValueError(f"distillation_token stands beside a class token: it needs pool 'cls', got {self.pool!r}.")
        for name in ("num_registers", "num_classes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}.")
        if self.norm_pooled and self.pool != "mean":
            raise ValueError(f"norm_pooled is for pool 'mean', got {self.pool!r}.")
        for name in ("mlp", "pool", "positions"):
            words = get_args(self.__dataclass_fields__[name].type)
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}; got {getattr(self, name)!r}.")
        for name in ("attention_dropout", "drop_path", "patch_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        image, patch = pair(self.image_size), pair(self.patch_size)
        if min(*patch, *image) < 1 or image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(
                f"image_size {image[0]} x {image[1]} is not divisible by patch_size {patch[0]} x {patch[1]}: "
                "change one of them."
            )
        check_heads(self.embed_dim, self.num_heads, self.num_kv_heads or self.num_heads, self.head_dim)
        rotated = self.head_dim or self.embed_dim // self.num_heads
        if self.positions.startswith("rotary") and rotated % 4:
            raise ValueError(
                f"positions {self.positions!r} needs a head_dim divisible by 4 (two axes, pairs), got {rotated}."
            )
        if self.positions == "sincos" and self.embed_dim % 4:
            raise ValueError(f"positions 'sincos' needs an embed_dim divisible by 4, got {self.embed_dim}.")

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

    def token_of(self, row: int, column: int) -> int:
        """The token of the patch at (row, column) of the grid.

        Raises:
            ValueError: A place outside the grid.
        """
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"The grid is {height} x {width} patches; there is none at row {row}, column {column}.")
        return self.num_prefix_tokens + row * width + column

    def to_grid(self, values: Float[Tensor, "*axes tokens"]) -> Float[Tensor, "*axes height width"]:
        """Values of all tokens to those of the patches, laid out as in the picture.

        Raises:
            ValueError: Another number of tokens than the layout has.
        """
        if values.shape[-1] != self.num_tokens:
            raise ValueError(f"The layout has {self.num_tokens} tokens, the values {values.shape[-1]}.")
        return values[..., self.patches].unflatten(-1, self.grid_size)


class PatchEmbed(nn.Module):
    """Cuts a picture into patches and maps each linearly to a token.

    The map is a convolution whose kernel and stride are the patch, which equals a linear map of the patch flattened in
    the order (channel, row, column).

    Args:
        in_channels: Colour channels.
        patch_size: Pixels of a patch along (height, width).
        embed_dim: Width of a token.
    """

    def __init__(self, in_channels: int, patch_size: tuple[int, int], embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch patches embed"]:
        return rearrange(self.proj(images), "b d h w -> b (h w) d")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": F.silu,
}


class Mlp(nn.Module):
    """Two linear maps of each token with an activation between.

    gelu: W2 gelu(W1 x), with gelu(x) = x Phi(x); gelu_tanh takes the approximation of Phi by a tanh, quick_gelu by the
    logistic function of 1.702 x (Hendrycks and Gimpel 2016, arXiv 1606.08415). swiglu: W2 (silu(g) * u) with (g, u) the
    halves of W1 x (Shazeer 2020, arXiv 2002.05202).

    Args:
        embed_dim: Width of a token.
        mlp_dim: Width between the two maps.
        activation: Which of the formulas.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu",
    ) -> None:
        super().__init__()
        self.is_gated = activation == "swiglu"
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(embed_dim, 2 * mlp_dim if self.is_gated else mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, embed_dim)

    def forward(self, x: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch tokens embed"]:
        x = self.fc1(x)
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.fc2(self.activation(gate) * up)
        return self.fc2(self.activation(x))


class LayerScale(nn.Module):
    """A learned factor on each channel (Touvron et al. 2021, arXiv 2103.17239, section 2)."""

    def __init__(self, embed_dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), initial))

    def forward(self, x: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch tokens embed"]:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth that skips the work: in training, a residual branch runs for a part of the pictures alone.

    round((1 - rate) batch) pictures are chosen anew for every branch; their branch counts batch / chosen times, so that
    the expectation stays, and the others pass it by. The number is fixed, which keeps shapes static for compilation,
    with `dynamic=False`: a batch of fewer than 1 / (2 rate) pictures loses none.

    Args:
        rate: Share of the pictures left out, in [0, 1).

    Source:
        Huang et al. 2016 (arXiv 1603.09382); choosing a part of the batch: DINOv2, Oquab et al. 2023 (arXiv
        2304.07193), section 5.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def choose(self, x: Float[Tensor, "batch tokens embed"]) -> Tensor | None:
        """The numbers of the pictures whose branch runs; None for all."""
        if not self.training:
            return None
        count = max(1, round(len(x) * (1 - self.rate)))
        return None if count >= len(x) else torch.randperm(len(x), device=x.device)[:count]

    def add(
        self,
        x: Float[Tensor, "batch tokens embed"],
        branch: Float[Tensor, "chosen tokens embed"],
        chosen: Tensor | None,
    ) -> Float[Tensor, "batch tokens embed"]:
        """All pictures, with the branch of the chosen ones added."""
        if chosen is None:
            return x + branch
        return x.index_add(0, chosen, branch.to(x.dtype), alpha=len(x) / len(branch))

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class Pick(torch.autograd.Function):
    """x[chosen] of numbers that are all different: the gradient is copied to its place, where indexing adds it up.

    Compiled for a CPU, that takes a quarter off a step with `DropPath`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.shape = x.shape
        return x.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (chosen,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy(0, chosen, gradient), None


def pick(x: Float[Tensor, "batch *axes"], chosen: Tensor | None) -> Float[Tensor, "some *axes"]:
    """The chosen pictures; all for None."""
    return x if chosen is None else Pick.apply(x, chosen)


class Block(nn.Module):
    """Attention among the tokens, then an MLP on each; both read normalised tokens and add to them.

    Args:
        config: The architecture.
        drop_path: Chance of leaving out a residual branch in training.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.attn = MultiHeadAttention(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            attention_dropout=config.attention_dropout,
            backend=config.backend,
        )
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.mlp = Mlp(config.embed_dim, config.mlp_dim or 4 * config.embed_dim, config.mlp)
        self.ls1, self.ls2 = (
            nn.Identity() if config.layer_scale is None else LayerScale(config.embed_dim, config.layer_scale)
            for _ in range(2)
        )
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "batch tokens embed"],
        rotary: Float[Tensor, "2 ... tokens head_dim"] | None = None,
        keep: slice = ALL_TOKENS,
    ) -> Float[Tensor, "batch kept embed"]:
        """One step of all tokens.

        Args:
            x: The tokens.
            rotary: Their rotation, as `MultiHeadAttention` takes it.
            keep: The tokens wanted behind the block; all are attended to, the others need no MLP.

        Returns:
            The tokens kept.
        """
        chosen = self.drop_path.choose(x)
        if rotary is not None and rotary.ndim > 3 and chosen is not None:  # each picture has a rotation of its own
            rotary = rotary[:, chosen]
        branch = self.ls1(self.attn(self.norm1(pick(x, chosen)), rotary=rotary))
        x = self.drop_path.add(x, branch, chosen)[:, keep]
        chosen = self.drop_path.choose(x)
        return self.drop_path.add(x, self.ls2(self.mlp(self.norm2(pick(x, chosen)))), chosen)


class AttentionPool(nn.Module):
    """One learned query attends to all tokens; an MLP with a residual follows.

    Source:
        Zhai et al. 2022 (arXiv 2106.04560), the "MAP" head.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.attn = MultiHeadAttention(config.embed_dim, config.num_heads, backend=config.backend)
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        activation = "gelu" if config.mlp == "swiglu" else config.mlp
        self.mlp = Mlp(config.embed_dim, config.mlp_dim or 4 * config.embed_dim, activation)

    def forward(self, tokens: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch embed"]:
        x = self.attn(self.probe.expand(tokens.shape[0], -1, -1), tokens)
        return (x + self.mlp(self.norm(x)))[:, 0]


class VisionTransformer(nn.Module):
    """A pre-norm Vision Transformer for classification.

    Args:
        config: The architecture.

    Source:
        Dosovitskiy et al. 2021 (arXiv 2010.11929); registers: Darcet et al. 2024 (arXiv 2309.16588); fixed positions
        and mean pooling: Beyer et al. 2022 (arXiv 2205.01580); distillation token: Touvron et al. 2021 (DeiT, arXiv
        2012.12877). Module names follow timm's.
    """

    sincos: Tensor | None
    rotary: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.layout = config, config.layout
        self.patch_dropout = config.patch_dropout  # ends before training does where LitViT.whole_from says so
        # What the weights were trained on travels with them.
        self.class_names: tuple[str, ...] | None = None
        self.preprocessing: Preprocessing | None = None
        dim, layout = config.embed_dim, config.layout
        self.patch_embed = PatchEmbed(config.in_channels, layout.patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if layout.num_class_tokens else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.distillation_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        # Learned positions cover the class token, as in the papers; registers have no place (Darcet et al.).
        learned = config.positions == "learned"
        placed = layout.distillation.stop + layout.num_patches
        self.pos_embed = nn.Parameter(torch.zeros(1, placed, dim)) if learned else None
        fixed = sincos_positions(layout.grid_size, dim) if config.positions == "sincos" else None
        self.register_buffer("sincos", fixed, persistent=False)
        width = config.head_dim or dim // config.num_heads
        is_unit = config.positions == "rotary_unit"
        turns = rotary_positions(layout, width, is_unit) if config.positions.startswith("rotary") else None
        self.register_buffer("rotary", turns, persistent=False)
        self.norm_pre = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn_pool = AttentionPool(config) if config.pool == "attention" else None
        # The tokens whose mean the head reads, or all that the pooling attends to.
        self.read_tokens = {"cls": slice(layout.distillation.stop), "mean": layout.patches}.get(config.pool, ALL_TOKENS)
        has_head, read = config.num_classes > 0, 2 * dim if config.pool == "cls_mean" else dim
        self.head = nn.Linear(read, config.num_classes) if has_head else nn.Identity()
        has_second = has_head and config.distillation_token
        self.head_dist = nn.Linear(dim, config.num_classes) if has_second else None
        self.initialize()

    def forward(
        self, images: Float[Tensor, "batch channels height width"], *, apart: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Scores the classes.

        Args:
            images: Normalised pictures of the size in the config.
            apart: With a distillation token, whether the logits of the two heads are wanted apart, (batch, 2, classes),
                and not their mean.

        Returns:
            Logits.

        Raises:
            ValueError: Pictures of another size or number of channels.
        """
        return self.scores(self.tokens(images, self.read_tokens), apart=apart)

    def scores(
        self, x: Float[Tensor, "batch read embed"], *, apart: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Logits from the tokens that the head reads, as `tokens` gives them."""
        if self.head_dist is None:
            return self.head(self._pool(x))
        logits = torch.stack([self.head(x[:, 0]), self.head_dist(x[:, 1])], dim=1)
        return logits if apart else logits.mean(1)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch pooled"]:
        """What the head reads: one vector per picture; the mean of the two tokens where there are two heads."""
        return self._pool(self.tokens(images, self.read_tokens))

    def _pool(self, x: Float[Tensor, "batch read embed"]) -> Float[Tensor, "batch pooled"]:
        if self.attn_pool is not None:
            return self.attn_pool(x)
        if self.config.pool == "cls_mean":
            return torch.cat([x[:, 0], x[:, self.layout.num_prefix_tokens :].mean(1)], dim=1)
        return self.norm(x.mean(1)) if self.config.norm_pooled else x.mean(1)

    def tokens(
        self, images: Float[Tensor, "batch channels height width"], keep: slice = ALL_TOKENS
    ) -> Float[Tensor, "batch kept embed"]:
        """All tokens (for a decoder) or those to keep: behind the last norm, with norm_pooled before it."""
        return self.through_blocks(*self.embed(images), keep=keep)

    def through_blocks(
        self,
        x: Float[Tensor, "batch tokens embed"],
        rotary: Float[Tensor, "2 ... tokens head_dim"] | None,
        first: int = 0,
        keep: slice = ALL_TOKENS,
    ) -> Float[Tensor, "batch kept embed"]:
        """From what the block numbered first reads to what `tokens` gives."""
        *blocks, last = self.blocks[first:]
        for block in blocks:
            x = block(x, rotary)
        x = last(x, rotary, keep=keep)
        return x if self.config.norm_pooled else self.norm(x)

    @property
    def attentions(self) -> list[MultiHeadAttention]:
        """The attention of each block."""
        return [cast(Block, block).attn for block in self.blocks]

    def embed(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch tokens embed"], Float[Tensor, "2 ... tokens head_dim"] | None]:
        """Pictures to tokens with their positions: what the first block reads, and the rotation for all of them."""
        expected = (self.config.in_channels, *pair(self.config.image_size))
        if tuple(images.shape[1:]) != expected:
            raise ValueError(f"images must be (batch, {', '.join(map(str, expected))}), got {tuple(images.shape)}.")
        x = self.patch_embed(images)
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix: list[Tensor] = [token for token in tokens if token is not None]
        if self.sincos is not None:
            x = x + self.sincos
        if self.pos_embed is not None:
            placed = self.layout.distillation.stop
            x = x + self.pos_embed[:, placed:]
            prefix[:placed] = [token + self.pos_embed[:, i : i + 1] for i, token in enumerate(prefix[:placed])]
        x = self.norm_pre(torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], dim=1))
        if self.training and self.patch_dropout:
            return self._drop_patches(x)
        return x, self.rotary

    def _drop_patches(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keeps a random choice of patches for each picture (Li et al. 2023, arXiv 2212.00794), at least one."""
        prefix, patches = self.layout.num_prefix_tokens, self.layout.num_patches
        count = max(1, round(patches * (1 - self.patch_dropout)))
        kept: Int64[Tensor, "batch kept"] = torch.rand(len(x), patches, device=x.device).topk(count).indices + prefix
        kept = torch.cat([torch.arange(prefix, device=x.device).expand(len(x), -1), kept], dim=1)
        x = x.gather(1, repeat(kept, "b n -> b n d", d=x.shape[-1]))
        return x, None if self.rotary is None else self.rotary[:, kept].unsqueeze(2)

    def initialize(self) -> None:
        """Draws new weights: Xavier for linear maps, LeCun for the patches, zeros for the heads and all biases.

        Source:
            Beyer et al. 2022 (arXiv 2205.01580), as in big_vision's models/vit.py.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        patch = self.patch_embed.proj.weight
        nn.init.trunc_normal_(patch, std=patch[0].numel() ** -0.5)
        nn.init.zeros_(cast(Tensor, self.patch_embed.proj.bias))
        for head in (self.head, self.head_dist):
            if isinstance(head, nn.Linear):
                nn.init.zeros_(head.weight)
        for token in (self.cls_token, self.dist_token, self.reg_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        if self.attn_pool is not None:
            nn.init.xavier_uniform_(self.attn_pool.probe[0])


def sincos_positions(grid_size: tuple[int, int], embed_dim: int) -> Float[Tensor, "1 patches embed"]:
    """Fixed positions: sines and cosines of the column in the first half of the channels, of the row in the second.

    Args:
        grid_size: Patches along (height, width).
        embed_dim: Channels, divisible by 4.

    Returns:
        Values in [-1, 1], patches row by row.

    Source:
        Beyer et al. 2022 (arXiv 2205.01580), big_vision's `posemb_sincos_2d`, temperature 10,000.
    """
    rows, columns = _grid(grid_size)
    frequencies = 10_000 ** -torch.linspace(0, 1, embed_dim // 4)
    angles = [axis[:, None] * frequencies for axis in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)[None]


def rotary_positions(layout: TokenLayout, head_dim: int, is_unit: bool = False) -> Float[Tensor, "2 tokens head_dim"]:
    """Cosines and sines for `apply_rotary`: the row turns the first half of the channels, the column the second.

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
    exponents, (rows, columns) = torch.arange(count) / count, _grid(layout.grid_size)
    if is_unit:
        height, width = layout.grid_size
        rows, columns = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    frequencies = 2 * torch.pi * 100**-exponents if is_unit else 10_000**-exponents
    angles = torch.cat([axis[:, None] * frequencies for axis in (rows, columns)], dim=1).repeat_interleave(2, 1)
    angles = torch.cat([torch.zeros(layout.num_prefix_tokens, head_dim), angles])
    return torch.stack([angles.cos(), angles.sin()])


def _grid(grid_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, row by row."""
    rows, columns = torch.meshgrid(*(torch.arange(float(n)) for n in grid_size), indexing="ij")
    return rows.flatten(), columns.flatten()


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of what may be one number for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
