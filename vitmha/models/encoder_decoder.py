"""An encoder-decoder that predicts a sequence of classes for an image: a Vision Transformer, a decoder and beam search.

Letters in the patterns: b batch, s beams, n tokens of the image, d embed_dim, t classes and the end token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitmha.attention import Backend, KVCache, MultiHeadAttention
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.layers import Mlp
from vitmha.models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture of the decoder; its width and its classes are those of the encoder.

    Raises:
        UserError: A value below 1.
    """

    max_length: int
    """Maximum length of a sequence, including its end token."""
    depth: int = 2
    """Number of blocks."""
    num_heads: int = 4
    """Attention heads per block."""
    num_kv_heads: int | None = None
    """Key/value heads per block, fewer than num_heads for a smaller cache; num_heads by default."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; 4 * embed_dim by default."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise UserError(f"{name} of the decoder must be at least 1, got {value}.")


class BlockCache(NamedTuple):
    """The key/value caches of one `DecoderBlock`."""

    tokens: KVCache
    """Of self-attention, over the sequence so far."""
    memory: KVCache
    """Of cross-attention, over the encoded image, which is projected once."""


class DecoderBlock(nn.Module):
    """A pre-norm decoder block: causal self-attention, cross-attention, then an MLP, each in a residual branch.

    Args:
        embed_dim: Width of a token.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads; num_heads by default.
        memory_dim: Width of the memory; embed_dim by default.
        mlp_dim: Hidden width of the MLP; 4 * embed_dim by default.
        backend: Attention kernel, as in `ViTConfig`.

    Source:
        Vaswani et al. 2017, section 3.1, but with each LayerNorm before its layer instead of after it.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        memory_dim: int | None = None,
        mlp_dim: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(embed_dim, eps=1e-6) for _ in range(3))
        self.self_attn = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads, backend=backend)
        self.cross_attn = MultiHeadAttention(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, memory_dim=memory_dim, backend=backend
        )
        self.mlp = Mlp(embed_dim, mlp_dim or 4 * embed_dim)

    def forward(
        self,
        x: Float[Tensor, "batch tokens embed"],
        memory: Float[Tensor, "batch memory_tokens memory_embed"],
        cache: BlockCache | None = None,
    ) -> Float[Tensor, "batch tokens embed"]:
        """Applies the block.

        Args:
            x: Tokens of the sequence; with a cache, those that continue the cached ones.
            memory: Tokens of the encoder.
            cache: The caches of this block; extended in place.
        """
        x = x + self.self_attn(self.norm1(x), is_causal=True, cache=cache and cache.tokens)
        x = x + self.cross_attn(self.norm2(x), memory, cache=cache and cache.memory)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nn.Module):
    """A Vision Transformer and a decoder that predicts a sequence of classes, token by token.

    Each token is predicted from all tokens of the image and from the tokens before it. The vocabulary is the classes
    and one more token, which ends a sequence and is also the start token.

    Args:
        config: The architecture of the encoder; its classification head is not used.
        decoder: The architecture of the decoder.

    Raises:
        UserError: The encoder has `distillation_token` or `fc_norm`, which belong to a classification head.

    Source:
        Vaswani et al. 2017, figure 1, with an image encoder in place of the text encoder.

    Example:
        >>> import torch
        >>> from vitmha import DecoderConfig, EncoderDecoder, ViTConfig
        >>> encoder = ViTConfig(image_size=(8, 32), patch_size=8, num_classes=10, depth=1)
        >>> model = EncoderDecoder(encoder, DecoderConfig(max_length=6)).eval()
        >>> sequences, log_probabilities = model.generate(torch.randn(2, 3, 8, 32), num_beams=3)
        >>> sequences.shape, log_probabilities.shape
        (torch.Size([2, 6]), torch.Size([2]))
    """

    def __init__(self, config: ViTConfig, decoder: DecoderConfig) -> None:
        super().__init__()
        if config.distillation_token:
            raise UserError("distillation_token cannot be combined with a decoder, which attends to all tokens.")
        if config.fc_norm:
            raise UserError("fc_norm cannot be combined with a decoder, which attends to normalized tokens.")
        self.config, self.decoder = config, decoder
        # Stored with the weights: what the model was trained on.
        self.class_names: tuple[str, ...] | None = None
        self.preprocessing: Preprocessing | None = None
        self.end_token = config.num_classes
        dim = config.embed_dim
        self.encoder = VisionTransformer(config)
        self.encoder.head, self.encoder.attn_pool = nn.Identity(), None
        self.token_embed = nn.Embedding(config.num_classes + 1, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, decoder.max_length, dim))
        self.blocks = nn.ModuleList(
            DecoderBlock(
                dim,
                decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                mlp_dim=decoder.mlp_dim,
                backend=config.backend,
            )
            for _ in range(decoder.depth)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, config.num_classes + 1)
        self.init_weights()

    def forward(
        self,
        images: Float[Tensor, "batch channels height width"],
        sequences: Int64[Tensor, "batch length"],
    ) -> Float[Tensor, "batch length tokens"]:
        """Computes the logits of target sequences by teacher forcing: each token from the true tokens before it.

        Args:
            images: Normalized images.
            sequences: Target classes, then the end token, then padding with any negative value.

        Returns:
            Logits; those of padding are meaningless.
        """
        start = torch.full_like(sequences[:, :1], self.end_token)
        inputs = torch.cat([start, sequences[:, :-1]], dim=1)
        return self.decode(inputs.where(inputs >= 0, self.end_token), self.encoder.forward_features(images))

    def decode(
        self,
        tokens: Int64[Tensor, "batch length"],
        memory: Float[Tensor, "batch memory_tokens embed"],
        caches: list[BlockCache] | None = None,
    ) -> Float[Tensor, "batch length tokens"]:
        """Computes the logits of the next token after each token.

        Args:
            tokens: The sequence from its start token on; with caches, the tokens that continue the cached ones.
            memory: Tokens of the encoder.
            caches: The result of `new_caches`; extended in place.

        Returns:
            Logits.

        Raises:
            UserError: The sequence is longer than max_length.
        """
        start = caches[0].tokens.num_tokens if caches else 0
        end = start + tokens.shape[1]
        if end > self.decoder.max_length:
            raise UserError(f"tokens must have at most max_length {self.decoder.max_length} tokens, got {end}.")
        x = self.token_embed(tokens) + self.pos_embed[:, start:end]
        for i, block in enumerate(self.blocks):
            x = block(x, memory, caches and caches[i])
        return self.head(self.norm(x))

    def new_caches(self, memory_tokens: int) -> list[BlockCache]:
        """Creates empty caches, one per block, for one batch of sequences.

        Args:
            memory_tokens: Number of tokens of the encoder.
        """
        return [BlockCache(KVCache(self.decoder.max_length), KVCache(memory_tokens)) for _ in self.blocks]

    @torch.no_grad()
    def generate(
        self, images: Float[Tensor, "batch channels height width"], num_beams: int = 1
    ) -> tuple[Int64[Tensor, "batch length"], Float[Tensor, "batch"]]:
        """Predicts the most likely sequence of each image by beam search.

        Args:
            images: Normalized images.
            num_beams: Number of beams; 1 is greedy search.

        Returns:
            Sequences of max_length tokens, padded with the end token; and their log-probabilities.

        Raises:
            UserError: `num_beams` is below 1.
        """
        if num_beams < 1:
            raise UserError(f"num_beams must be at least 1, got {num_beams}.")
        batch, device = len(images), images.device
        memory = repeat(self.encoder.forward_features(images), "b n d -> (b s) n d", s=num_beams)
        caches = self.new_caches(memory.shape[1])
        sequences = torch.full((batch, num_beams, self.decoder.max_length), self.end_token, device=device)
        last = sequences[:, :, 0]
        is_ended = torch.zeros_like(last, dtype=torch.bool)
        # All beams start out equal: only the first may branch in the first step.
        scores = torch.zeros_like(last, dtype=torch.float32)
        scores[:, 1:] = -torch.inf
        only_end = torch.full((self.end_token + 1,), -torch.inf, device=device)
        only_end[self.end_token] = 0
        for position in range(self.decoder.max_length):
            logits = self.decode(rearrange(last, "b s -> (b s) 1"), memory, caches)
            steps = rearrange(logits[:, 0].float().log_softmax(-1), "(b s) t -> b s t", b=batch)
            # An ended sequence continues with end tokens, of probability 1.
            steps = steps.where(~is_ended[..., None], only_end)
            scores, best = (scores[..., None] + steps).flatten(1).topk(num_beams)
            parents, last = best // len(only_end), best % len(only_end)
            rows = torch.arange(batch, device=device)[:, None] * num_beams + parents
            sequences = sequences.flatten(0, 1)[rows]
            sequences[:, :, position] = last
            is_ended = is_ended.flatten()[rows] | (last == self.end_token)
            if is_ended.all():
                break
            for cache in caches if num_beams > 1 else ():  # all beams of an image have the same memory
                cache.tokens.reorder(rows.flatten())
        return sequences[:, 0], scores[:, 0]

    def decode_labels(self, sequence: Int64[Tensor, " length"]) -> list[str]:
        """Returns the class names of one sequence up to its end token; class indices if the model has no names."""
        labels = [int(token) for token in sequence.tolist()]
        labels = labels[: labels.index(self.end_token)] if self.end_token in labels else labels
        return [str(label) if self.class_names is None else self.class_names[label] for label in labels]

    def init_weights(self) -> None:
        """Initializes the weights of the decoder, as `VisionTransformer.init_weights` does those of the encoder."""
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for embedding in (self.token_embed.weight, self.pos_embed):
            nn.init.trunc_normal_(embedding, std=0.02)


Model = VisionTransformer | EncoderDecoder


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the model inside a compiled one or inside a LightningModule, such as `LitViT`; else the module itself."""
    module = getattr(module, "_orig_mod", module)
    inner = getattr(module, "model", None)
    return inner if isinstance(inner, VisionTransformer | EncoderDecoder) else module


def get_encoder(model: Model) -> VisionTransformer:
    """Returns the encoder of an encoder-decoder, or the Vision Transformer itself."""
    return model.encoder if isinstance(model, EncoderDecoder) else model


def get_preprocessing(model: Model) -> Preprocessing:
    """Returns how the images of a model are preprocessed.

    Raises:
        UserError: The model has no preprocessing.
    """
    if model.preprocessing is None:
        raise UserError(
            "The model has no preprocessing: set `model.preprocessing` to the image size, mean and std that it was "
            "trained with, or convert it with them."
        )
    return model.preprocessing
