"""An encoder-decoder that reads an image as a sequence of classes: a Vision Transformer, a decoder, and beam search.

Letters in the patterns: b batch, s beams, n tokens of the image, d embed_dim.
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
    """The decoder around a Vision Transformer, whose width and classes it shares.

    Raises:
        UserError: A number below 1.
    """

    max_length: int
    """Longest sequence, its end token included."""
    depth: int = 2
    """Number of blocks."""
    num_heads: int = 4
    """Attention heads in a block."""
    num_kv_heads: int | None = None
    """Key/value heads, fewer than num_heads for a smaller cache; num_heads where not given."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; 4 embed_dim where not given."""

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number is not None and number < 1:
                raise UserError(f"{name} of the decoder must be at least 1, got {number}.")


class BlockCache(NamedTuple):
    """What one `DecoderBlock` keeps from step to step."""

    tokens: KVCache
    """Of the sequence so far."""
    memory: KVCache
    """Of the picture, computed once."""


class DecoderBlock(nn.Module):
    """Attention among the tokens so far, attention to the memory, an MLP; each reads norms of tokens and adds to them.

    Args:
        embed_dim: Width of a token.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads; num_heads by default.
        memory_dim: Width of the memory; embed_dim by default.
        mlp_dim: Hidden width of the MLP; 4 embed_dim by default.
        backend: Attention kernel.

    Source:
        Vaswani et al. 2017, section 3.1, with the norms before each part instead of behind it.
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
        """One step of all tokens.

        Args:
            x: The sequence, or with a cache what follows on the part in it.
            memory: What the sequence tells of.
            cache: Of this block and this sequence.

        Returns:
            The tokens, each made of itself, those before it and the memory.
        """
        x = x + self.self_attn(self.norm1(x), is_causal=True, cache=cache and cache.tokens)
        x = x + self.cross_attn(self.norm2(x), memory, cache=cache and cache.memory)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nn.Module):
    """A Vision Transformer whose picture is read as a sequence of classes.

    The sequence is written token by token; each is chosen by the tokens before it and by all tokens of the picture.
    One token more than there are classes ends a sequence, and stands before the first.

    Args:
        config: The encoder; its head is not used.
        decoder: What reads its tokens.

    Source:
        Vaswani et al. 2017, figure 1, with a picture in the place of the first language.
    """

    def __init__(self, config: ViTConfig, decoder: DecoderConfig) -> None:
        super().__init__()
        if config.distillation_token:
            raise UserError("distillation_token is for a model with a head; a decoder reads all tokens: leave it out.")
        if config.fc_norm:
            raise UserError("fc_norm is for a model with a head; a decoder reads normalised tokens: leave it out.")
        self.config, self.decoder = config, decoder
        # What the weights were trained on travels with them.
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
        """Scores every token of known sequences, each from the picture and the true tokens before it.

        Args:
            images: Normalised pictures.
            sequences: Classes, then the end token, then anything negative.

        Returns:
            Logits; those from a negative place on mean nothing.
        """
        start = torch.full_like(sequences[:, :1], self.end_token)
        before = torch.cat([start, sequences[:, :-1]], dim=1)
        return self.decode(before.where(before >= 0, self.end_token), self.encoder.forward_features(images))

    def decode(
        self,
        tokens: Int64[Tensor, "batch length"],
        memory: Float[Tensor, "batch memory_tokens embed"],
        caches: list[BlockCache] | None = None,
    ) -> Float[Tensor, "batch length tokens"]:
        """The logits of the token behind each given one.

        Args:
            tokens: A sequence from its start token on, or with caches what follows on the part in them.
            memory: The tokens of the pictures.
            caches: Those of `new_caches`, which remember the part of the sequence that went before.

        Returns:
            Logits.

        Raises:
            UserError: More than max_length tokens.
        """
        start = caches[0].tokens.num_tokens if caches else 0
        end = start + tokens.shape[1]
        if end > self.decoder.max_length:
            raise UserError(f"A sequence has at most max_length {self.decoder.max_length} tokens, this has {end}.")
        x = self.token_embed(tokens) + self.pos_embed[:, start:end]
        for i, block in enumerate(self.blocks):
            x = block(x, memory, caches and caches[i])
        return self.head(self.norm(x))

    def new_caches(self, memory_tokens: int) -> list[BlockCache]:
        """Empty caches for one batch of sequences.

        Args:
            memory_tokens: Tokens of a picture.
        """
        return [BlockCache(KVCache(self.decoder.max_length), KVCache(memory_tokens)) for _ in self.blocks]

    @torch.no_grad()
    def generate(
        self, images: Float[Tensor, "batch channels height width"], num_beams: int = 1
    ) -> tuple[Int64[Tensor, "batch length"], Float[Tensor, "batch"]]:
        """Reads pictures: the most likely sequence that beam search finds.

        Args:
            images: Normalised pictures.
            num_beams: Sequences pursued at a time. 1 is greedy search: always the most likely next token.

        Returns:
            Sequences of max_length tokens, filled up with the end token; and the logarithm of their probability.

        Raises:
            UserError: Fewer beams than 1.
        """
        if num_beams < 1:
            raise UserError(f"num_beams must be at least 1, got {num_beams}.")
        batch, device = len(images), images.device
        memory = repeat(self.encoder.forward_features(images), "b n d -> (b s) n d", s=num_beams)
        caches = self.new_caches(memory.shape[1])
        sequences = torch.full((batch, num_beams, self.decoder.max_length), self.end_token, device=device)
        last = sequences[:, :, 0]
        is_ended = torch.zeros_like(last, dtype=torch.bool)
        # All beams begin alike: but for the first, they are out of the race until it has branched.
        scores = torch.zeros_like(last, dtype=torch.float32)
        scores[:, 1:] = -torch.inf
        free = torch.full((self.end_token + 1,), -torch.inf, device=device)
        free[self.end_token] = 0
        for place in range(self.decoder.max_length):
            logits = self.decode(rearrange(last, "b s -> (b s) 1"), memory, caches)
            steps = rearrange(logits[:, 0].float().log_softmax(-1), "(b s) t -> b s t", b=batch)
            # An ended sequence goes on with end tokens, at no cost.
            steps = steps.where(~is_ended[..., None], free)
            scores, best = (scores[..., None] + steps).flatten(1).topk(num_beams)
            parents, last = best // len(free), best % len(free)
            rows = torch.arange(batch, device=device)[:, None] * num_beams + parents
            sequences = sequences.flatten(0, 1)[rows]
            sequences[:, :, place] = last
            is_ended = is_ended.flatten()[rows] | (last == self.end_token)
            if is_ended.all():
                break
            for cache in caches if num_beams > 1 else ():  # all beams of a picture have the same memory
                cache.tokens.reorder(rows.flatten())
        return sequences[:, 0], scores[:, 0]

    def decode_labels(self, sequence: Int64[Tensor, " length"]) -> list[str]:
        """The class names of one sequence, up to its end; their numbers where the model knows no names."""
        numbers = [int(token) for token in sequence.tolist()]
        numbers = numbers[: numbers.index(self.end_token)] if self.end_token in numbers else numbers
        return [str(number) if self.class_names is None else self.class_names[number] for number in numbers]

    def init_weights(self) -> None:
        """Draws new weights for the decoder, as `VisionTransformer.init_weights` does for the encoder."""
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for embedding in (self.token_embed.weight, self.pos_embed):
            nn.init.trunc_normal_(embedding, std=0.02)


# What can be trained.
Model = VisionTransformer | EncoderDecoder


def get_encoder(model: Model) -> VisionTransformer:
    """The Vision Transformer that either is or has."""
    return model.encoder if isinstance(model, EncoderDecoder) else model


def get_preprocessing(model: Model) -> Preprocessing:
    """How pictures are prepared for a model.

    Raises:
        UserError: It does not say.
    """
    if model.preprocessing is None:
        raise UserError(
            "The model does not say how pictures are prepared for it: set its preprocessing, or make a folder that "
            "does by `vitmha convert M FOLDER --set mean=[0.5,0.5,0.5] --set std=[0.5,0.5,0.5]`, or as it was trained."
        )
    return model.preprocessing
