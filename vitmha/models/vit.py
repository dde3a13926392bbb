"""The Vision Transformer: patches to tokens, blocks of attention and MLP with residuals, tokens to classes.

Letters in the patterns: b batch, c channels, h w the patch grid, p q one patch, n tokens, d embed_dim.
"""

from typing import Any, cast

import torch
from einops import repeat
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitmha.attention import MultiHeadAttention
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import SIZES, ViTConfig, pair
from vitmha.models.layers import DropPath, LayerScale, Mlp, PatchEmbed, pick
from vitmha.models.positions import build_rope2d, build_sincos2d

ALL_TOKENS = slice(None)


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
            nn.Identity() if config.layer_scale_init is None else LayerScale(config.embed_dim, config.layer_scale_init)
            for _ in range(2)
        )
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "batch tokens embed"],
        rope: Float[Tensor, "2 ... tokens head_dim"] | None = None,
        out_tokens: slice = ALL_TOKENS,
    ) -> Float[Tensor, "batch kept embed"]:
        """One step of all tokens.

        Args:
            x: The tokens.
            rope: Their rotation, as `MultiHeadAttention` takes it.
            out_tokens: The tokens wanted behind the block; all are attended to, the others need no MLP.

        Returns:
            The tokens kept.
        """
        chosen = self.drop_path.choose(x)
        if rope is not None and rope.ndim > 3 and chosen is not None:  # each picture has a rotation of its own
            rope = rope[:, chosen]
        branch = self.ls1(self.attn(self.norm1(pick(x, chosen)), rope=rope))
        x = self.drop_path.add(x, branch, chosen)[:, out_tokens]
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

    sincos2d: Tensor | None
    rope: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.layout = config, config.layout
        self.patch_dropout = config.patch_dropout  # ends before training does where LitViT.patch_dropout_until says so
        # What the weights were trained on travels with them.
        self.class_names: tuple[str, ...] | None = None
        self.preprocessing: Preprocessing | None = None
        dim, layout = config.embed_dim, config.layout
        self.patch_embed = PatchEmbed(config.in_channels, layout.patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if layout.num_class_tokens else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.distillation_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        # Learned positions cover the class token, as in the papers; registers have no place (Darcet et al.).
        learned = config.pos_embed == "learned"
        placed = layout.distillation.stop + layout.num_patches
        self.pos_embed = nn.Parameter(torch.zeros(1, placed, dim)) if learned else None
        fixed = build_sincos2d(layout, dim) if config.pos_embed == "sincos2d" else None
        self.register_buffer("sincos2d", fixed, persistent=False)
        width = config.head_dim or dim // config.num_heads
        is_unit = config.pos_embed == "rope_dinov3"
        turns = build_rope2d(layout, width, is_unit) if config.pos_embed.startswith("rope") else None
        self.register_buffer("rope", turns, persistent=False)
        self.norm_pre = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn_pool = AttentionPool(config) if config.pool == "attention" else None
        # The tokens whose mean the head reads, or all that the pooling attends to.
        self.pooled_tokens = {"cls": slice(layout.distillation.stop), "mean": layout.patches}.get(
            config.pool, ALL_TOKENS
        )
        has_head, read = config.num_classes > 0, 2 * dim if config.pool == "cls_mean" else dim
        self.head = nn.Linear(read, config.num_classes) if has_head else nn.Identity()
        has_second = has_head and config.distillation_token
        self.head_dist = nn.Linear(dim, config.num_classes) if has_second else None
        self.init_weights()

    def forward(
        self, images: Float[Tensor, "batch channels height width"], *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Scores the classes.

        Args:
            images: Normalised pictures of the size in the config.
            separate_heads: Return the logits of both heads, (batch, 2, num_classes), instead of their mean; for a model
                with a distillation token.

        Returns:
            Logits.

        Raises:
            UserError: Pictures of another size or number of channels.
        """
        return self.forward_head(self.forward_features(images, self.pooled_tokens), separate_heads=separate_heads)

    def forward_head(
        self, x: Float[Tensor, "batch read embed"], *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Logits from the tokens that the head reads, as `tokens` gives them."""
        if self.head_dist is None:
            return self.head(self._pool(x))
        logits = torch.stack([self.head(x[:, 0]), self.head_dist(x[:, 1])], dim=1)
        return logits if separate_heads else logits.mean(1)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch pooled"]:
        """What the head reads: one vector per picture; the mean of the two tokens where there are two heads."""
        return self._pool(self.forward_features(images, self.pooled_tokens))

    def _pool(self, x: Float[Tensor, "batch read embed"]) -> Float[Tensor, "batch pooled"]:
        if self.attn_pool is not None:
            return self.attn_pool(x)
        if self.config.pool == "cls_mean":
            return torch.cat([x[:, 0], x[:, self.layout.num_prefix_tokens :].mean(1)], dim=1)
        return self.norm(x.mean(1)) if self.config.fc_norm else x.mean(1)

    def forward_features(
        self, images: Float[Tensor, "batch channels height width"], out_tokens: slice = ALL_TOKENS
    ) -> Float[Tensor, "batch kept embed"]:
        """All tokens (for a decoder) or those to keep: behind the last norm, with fc_norm before it."""
        return self.forward_blocks(*self.embed(images), out_tokens=out_tokens)

    def forward_blocks(
        self,
        x: Float[Tensor, "batch tokens embed"],
        rope: Float[Tensor, "2 ... tokens head_dim"] | None,
        first: int = 0,
        out_tokens: slice = ALL_TOKENS,
    ) -> Float[Tensor, "batch kept embed"]:
        """From what the block numbered first reads to what `tokens` gives."""
        *blocks, last = self.blocks[first:]
        for block in blocks:
            x = block(x, rope)
        x = last(x, rope, out_tokens=out_tokens)
        return x if self.config.fc_norm else self.norm(x)

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
            raise UserError(f"images must be (batch, {', '.join(map(str, expected))}), got {tuple(images.shape)}.")
        x = self.patch_embed(images)
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix: list[Tensor] = [token for token in tokens if token is not None]
        if self.sincos2d is not None:
            x = x + self.sincos2d
        if self.pos_embed is not None:
            placed = self.layout.distillation.stop
            x = x + self.pos_embed[:, placed:]
            prefix[:placed] = [token + self.pos_embed[:, i : i + 1] for i, token in enumerate(prefix[:placed])]
        x = self.norm_pre(torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], dim=1))
        if self.training and self.patch_dropout:
            return self._drop_patches(x)
        return x, self.rope

    def _drop_patches(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keeps a random choice of patches for each picture (Li et al. 2023, arXiv 2212.00794), at least one."""
        prefix, patches = self.layout.num_prefix_tokens, self.layout.num_patches
        count = max(1, round(patches * (1 - self.patch_dropout)))
        kept: Int64[Tensor, "batch kept"] = torch.rand(len(x), patches, device=x.device).topk(count).indices + prefix
        kept = torch.cat([torch.arange(prefix, device=x.device).expand(len(x), -1), kept], dim=1)
        x = x.gather(1, repeat(kept, "b n -> b n d", d=x.shape[-1]))
        return x, None if self.rope is None else self.rope[:, kept].unsqueeze(2)

    def init_weights(self) -> None:
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


def create_model(name: str, *, num_classes: int = 1000, **fields: Any) -> VisionTransformer:
    """A new model of a named size.

    Args:
        name: A name in `SIZES`: vit_mini, vit_tiny, vit_small, vit_base, vit_large or vit_huge.
        num_classes: Outputs of the head.
        fields: Any field of `ViTConfig`; goes before the size's own.

    Returns:
        The model with random weights.

    Raises:
        UserError: An unknown size, or fields that do not fit together.
    """
    if name not in SIZES:
        raise UserError(f"There is no size {name!r}; choose from {', '.join(SIZES)}.")
    return VisionTransformer(ViTConfig(**{**SIZES[name], "num_classes": num_classes, **fields}))
