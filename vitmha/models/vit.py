"""The Vision Transformer: patch embedding, blocks of attention and MLP, pooling and classification head.

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
from vitmha.models.layers import DropPath, LayerScale, Mlp, PatchEmbed
from vitmha.models.positions import build_rope2d, build_sincos2d

ALL_TOKENS = slice(None)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP, each in a residual branch.

    Args:
        config: The architecture.
        drop_path: Fraction of the batch that skips each residual branch in training; a batch of 1 never does.
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
    ) -> Float[Tensor, "batch out_tokens embed"]:
        """Applies the block.

        Args:
            x: Tokens.
            rope: Their rotation, see `MultiHeadAttention.forward`.
            out_tokens: The tokens to return. All are attended to, but only these pass through the MLP.
        """
        x = self.drop_path(x, lambda x, rope: self.ls1(self.attn(self.norm1(x), rope=rope)), rope)[:, out_tokens]
        return self.drop_path(x, lambda x, _: self.ls2(self.mlp(self.norm2(x))))


class AttentionPool(nn.Module):
    """Attention pooling: a learned query attends to all tokens, followed by an MLP with a residual connection.

    Args:
        config: The architecture.

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
    """A pre-norm Vision Transformer for classification. Module names follow timm's.

    Args:
        config: The architecture.

    Source:
        Dosovitskiy et al. 2021 (arXiv 2010.11929); registers: Darcet et al. 2024 (arXiv 2309.16588); sine-cosine
        position embeddings and mean pooling: Beyer et al. 2022 (arXiv 2205.01580); distillation token: Touvron et al.
        2021 (DeiT, arXiv 2012.12877).

    Example:
        >>> import torch
        >>> from vitmha import ViTConfig, VisionTransformer
        >>> model = VisionTransformer(ViTConfig(image_size=32, patch_size=4, depth=2, num_classes=10))
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    sincos2d: Tensor | None
    rope: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.layout = config, config.layout
        self.patch_dropout = config.patch_dropout
        """Fraction of the patches dropped in training; may be changed between steps."""
        # Stored with the weights: what the model was trained on.
        self.class_names: tuple[str, ...] | None = None
        self.preprocessing: Preprocessing | None = None
        dim, layout = config.embed_dim, config.layout
        self.patch_embed = PatchEmbed(config.in_channels, layout.patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if layout.num_class_tokens else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.distillation_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        # The learned embedding includes the class token, as in the papers, but not the registers (Darcet et al.).
        is_learned = config.pos_embed == "learned"
        num_positions = layout.distillation.stop + layout.num_patches
        self.pos_embed = nn.Parameter(torch.zeros(1, num_positions, dim)) if is_learned else None
        sincos2d = build_sincos2d(layout, dim) if config.pos_embed == "sincos2d" else None
        self.register_buffer("sincos2d", sincos2d, persistent=False)
        head_dim, is_dinov3 = config.head_dim or dim // config.num_heads, config.pos_embed == "rope_dinov3"
        rope = build_rope2d(layout, head_dim, is_dinov3) if config.pos_embed.startswith("rope") else None
        self.register_buffer("rope", rope, persistent=False)
        self.norm_pre = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn_pool = AttentionPool(config) if config.pool == "attention" else None
        self.pooled_tokens = {"cls": slice(layout.distillation.stop), "mean": layout.patches}.get(
            config.pool, ALL_TOKENS
        )
        """The tokens that are pooled for the head."""
        has_head, num_features = config.num_classes > 0, 2 * dim if config.pool == "cls_mean" else dim
        self.head = nn.Linear(num_features, config.num_classes) if has_head else nn.Identity()
        has_dist_head = has_head and config.distillation_token
        self.head_dist = nn.Linear(dim, config.num_classes) if has_dist_head else None
        self.init_weights()

    def forward(
        self, images: Float[Tensor, "batch channels height width"], *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Classifies images.

        Args:
            images: Normalized images of the size in the config.
            separate_heads: Return the logits of both heads, (batch, 2, num_classes), instead of their mean; for a model
                with a distillation token.

        Returns:
            Logits.

        Raises:
            UserError: The images have another size or number of channels.
        """
        return self.forward_head(self.forward_features(images, self.pooled_tokens), separate_heads=separate_heads)

    def forward_head(
        self, x: Float[Tensor, "batch pooled_tokens embed"], *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *heads num_classes"]:
        """Pools tokens and classifies.

        Args:
            x: The `pooled_tokens` of `forward_features`.
            separate_heads: See `forward`.
        """
        if self.head_dist is None:
            return self.head(self._pool(x))
        logits = torch.stack([self.head(x[:, 0]), self.head_dist(x[:, 1])], dim=1)
        return logits if separate_heads else logits.mean(1)

    def features(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Computes the input of the head, one vector per image; with two heads, the mean of their inputs."""
        return self._pool(self.forward_features(images, self.pooled_tokens))

    def _pool(self, x: Float[Tensor, "batch pooled_tokens embed"]) -> Float[Tensor, "batch features"]:
        if self.attn_pool is not None:
            return self.attn_pool(x)
        if self.config.pool == "cls_mean":
            return torch.cat([x[:, 0], x[:, self.layout.num_prefix_tokens :].mean(1)], dim=1)
        return self.norm(x.mean(1)) if self.config.fc_norm else x.mean(1)

    def forward_features(
        self, images: Float[Tensor, "batch channels height width"], out_tokens: slice = ALL_TOKENS
    ) -> Float[Tensor, "batch out_tokens embed"]:
        """Computes the tokens after the final LayerNorm; with `fc_norm`, which applies it later, before it.

        Args:
            images: Normalized images of the size in the config.
            out_tokens: The tokens to return; all by default.
        """
        return self.forward_blocks(*self.embed(images), out_tokens=out_tokens)

    def forward_blocks(
        self,
        x: Float[Tensor, "batch tokens embed"],
        rope: Float[Tensor, "2 ... tokens head_dim"] | None,
        first: int = 0,
        out_tokens: slice = ALL_TOKENS,
    ) -> Float[Tensor, "batch out_tokens embed"]:
        """Runs blocks[first:] and the final LayerNorm.

        Args:
            x: Input of blocks[first].
            rope: Rotation of the tokens, from `embed`.
            first: Index of the first block to run.
            out_tokens: The tokens to return; all by default.

        Returns:
            The output of `forward_features`.
        """
        *blocks, last = self.blocks[first:]
        for block in blocks:
            x = block(x, rope)
        x = last(x, rope, out_tokens=out_tokens)
        return x if self.config.fc_norm else self.norm(x)

    @property
    def attentions(self) -> list[MultiHeadAttention]:
        """The attention module of each block."""
        return [cast(Block, block).attn for block in self.blocks]

    def embed(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch tokens embed"], Float[Tensor, "2 ... tokens head_dim"] | None]:
        """Computes the input of the first block.

        Args:
            images: Normalized images of the size in the config.

        Returns:
            Tokens with their position embedding, after patch dropout; and their rotation, None without rotary position
            embedding.

        Raises:
            UserError: The images have another size or number of channels.
        """
        expected = (self.config.in_channels, *pair(self.config.image_size))
        if tuple(images.shape[1:]) != expected:
            raise UserError(f"images must be (batch, {', '.join(map(str, expected))}), got {tuple(images.shape)}.")
        x = self.patch_embed(images)
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix: list[Tensor] = [token for token in tokens if token is not None]
        if self.sincos2d is not None:
            x = x + self.sincos2d
        if self.pos_embed is not None:
            with_position = self.layout.distillation.stop
            x = x + self.pos_embed[:, with_position:]
            for i in range(with_position):
                prefix[i] = prefix[i] + self.pos_embed[:, i : i + 1]
        x = self.norm_pre(torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], dim=1))
        if self.training and self.patch_dropout:
            return self._drop_patches(x)
        return x, self.rope

    def _drop_patches(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keeps a random subset of the patches of each image, at least one (Li et al. 2023, arXiv 2212.00794)."""
        prefix, patches = self.layout.num_prefix_tokens, self.layout.num_patches
        count = max(1, round(patches * (1 - self.patch_dropout)))
        kept: Int64[Tensor, "batch kept"] = torch.rand(len(x), patches, device=x.device).topk(count).indices + prefix
        kept = torch.cat([torch.arange(prefix, device=x.device).expand(len(x), -1), kept], dim=1)
        x = x.gather(1, repeat(kept, "b n -> b n d", d=x.shape[-1]))
        return x, None if self.rope is None else self.rope[:, kept].unsqueeze(2)

    def init_weights(self) -> None:
        """Initializes the weights: Xavier for linear layers, LeCun for the patch embedding, zeros for heads and biases.

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
    """Creates a model of a named size with random weights.

    Args:
        name: vit_mini, vit_tiny, vit_small, vit_base, vit_large or vit_huge.
        num_classes: Outputs of the head.
        fields: Fields of `ViTConfig`; they override those of the size.

    Returns:
        The model, in training mode.

    Raises:
        UserError: An unknown size, or invalid fields.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_small", num_classes=10, image_size=32, patch_size=4)
        >>> model.config.embed_dim, model.layout.grid_size
        (384, (8, 8))
    """
    if name not in SIZES:
        raise UserError(f"Unknown model size {name!r}; choose from {', '.join(SIZES)}.")
    return VisionTransformer(ViTConfig(**{**SIZES[name], "num_classes": num_classes, **fields}))
