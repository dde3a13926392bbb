"""What a model costs: parameters, arithmetic and memory layer by layer, and the time and memory of a forward pass."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.attention import Backend, MultiHeadAttention
from vitmha.models.encoder_decoder import DecoderBlock, EncoderDecoder, Model, get_encoder
from vitmha.models.vit import AttentionPool, Block, VisionTransformer


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one layer, or of all, in one forward pass of a batch.

    Arithmetic is counted in multiply-adds, half the operations of `torch.utils.flop_counter`. As there, additions of a
    bias, norms, softmax and activations are left out.
    """

    name: str
    """Which layer."""
    parameters: int
    """Numbers that are learned."""
    projections: int = 0
    """Multiply-adds of q_proj, k_proj, v_proj and out_proj."""
    scores: int = 0
    """Multiply-adds of q k^T and of the weighted sum of v."""
    mlp: int = 0
    """Multiply-adds of the MLP."""
    other: int = 0
    """Multiply-adds of the patch embedding or of the head."""
    score_bytes: int = 0
    """Bytes of the attention scores where they are stored as a whole; a fused kernel never does."""
    cache_bytes: int = 0
    """Bytes of the keys and values of all tokens: what a cache of this layer holds."""

    @property
    def macs(self) -> int:
        return self.projections + self.scores + self.mlp + self.other


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A forward pass as it ran."""

    backend: Backend
    """The attention kernel."""
    seconds: float
    """Median time."""
    peak_bytes: int
    """Most bytes held at once, beside the parameters and the pictures."""


def layer_costs(model: Model, batch_size: int = 1) -> list[LayerCost]:
    """Counts what each layer costs, from the shapes of its weights and the number of tokens.

    Args:
        model: The model, on any device; its heads may have been pruned. One with a decoder scores sequences of its
            max_length tokens.
        batch_size: Pictures in the batch.

    Returns:
        The costs in the order of the forward pass: the patches with their positions and prefix tokens, each block, the
        attention pooling where there is one, the decoder where there is one, and the head with the norm before it.
    """
    encoder = get_encoder(model)
    patches, tokens = encoder.layout.num_patches, encoder.layout.num_tokens
    # Behind the last block nobody reads the other tokens.
    read = tokens if isinstance(model, EncoderDecoder) else len(range(tokens)[model.pooled_tokens])
    embedding = LayerCost(
        name="patches",
        parameters=_count(encoder, recurse=False) + _count(encoder.patch_embed) + _count(encoder.norm_pre),
        other=batch_size * patches * encoder.patch_embed.proj.weight.numel(),
    )
    costs = [embedding]
    for i, block in enumerate(encoder.blocks):
        mlp_tokens = tokens if i + 1 < len(encoder.blocks) else read
        costs.append(_cost(f"block {i}", cast(Block, block), batch_size, tokens, tokens, mlp_tokens))
    if encoder.attn_pool is not None:
        costs.append(_cost("pooling", encoder.attn_pool, batch_size, 1, read, 1))
    written = 1
    if isinstance(model, EncoderDecoder):
        written = model.decoder.max_length
        costs.append(LayerCost(name="tokens", parameters=_count(model, recurse=False) + _count(model.token_embed)))
        costs += [
            _decoder_cost(f"decoder {i}", cast(DecoderBlock, block), batch_size, written, tokens)
            for i, block in enumerate(model.blocks)
        ]
    norms, heads = {encoder.norm, model.norm}, [model.head]
    if encoder.head_dist is not None:
        heads.append(encoder.head_dist)
    head = LayerCost(
        name="head",
        parameters=sum(map(_count, [*norms, *heads])),
        other=batch_size * written * sum(head.weight.numel() for head in heads if isinstance(head, nn.Linear)),
    )
    return [*costs, head]


def total_cost(costs: Sequence[LayerCost]) -> LayerCost:
    """The sum over layers.

    The bytes of scores add up only where a backward pass waits for them; without one, a layer frees its own.
    """
    counted = [field.name for field in fields(LayerCost) if field.name != "name"]
    return LayerCost(name="total", **{name: sum(getattr(cost, name) for cost in costs) for name in counted})


def at_image_size(model: Model, image_size: int | tuple[int, int]) -> Model:
    """The same architecture for pictures of another size, to be measured: what depends on the size is new and random.

    Args:
        model: The model; its blocks are copied as they are, pruned heads included.
        image_size: Height and width in pixels; one number for a square.

    Returns:
        A model on the same device, in the same mode.

    Raises:
        UserError: The model's patch_size does not divide the size.
    """
    config = replace(model.config, image_size=image_size)
    if isinstance(model, EncoderDecoder):
        reader = EncoderDecoder(config, model.decoder)
        reader.encoder.blocks, reader.blocks = deepcopy(model.encoder.blocks), deepcopy(model.blocks)
        return reader.to(model.encoder.patch_embed.proj.weight).train(model.training)
    resized = VisionTransformer(config)
    resized.blocks, resized.attn_pool = deepcopy(model.blocks), deepcopy(model.attn_pool)
    return resized.to(model.patch_embed.proj.weight).train(model.training)


def measure(
    model: Model,
    images: Float[Tensor, "batch channels height width"],
    backend: Backend = "auto",
) -> Measurement:
    """Runs a model forward, without gradients, for its time and its peak of memory.

    Args:
        model: The model, on the device and in the mode to be measured. One with a decoder scores sequences of its
            max_length tokens.
        images: Pictures on that device.
        backend: The attention kernel; the model has its own again afterwards.

    Raises:
        UserError: The kernel cannot run here.
    """
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    own = [attention.backend for attention in attentions]
    inputs = [images]
    if isinstance(model, EncoderDecoder):
        inputs.append(torch.zeros(len(images), model.decoder.max_length, dtype=torch.int64, device=images.device))
    try:
        for attention in attentions:
            attention.backend = backend
        with torch.no_grad():
            return Measurement(
                backend=backend,
                seconds=median_seconds(lambda: model(*inputs), images.device),
                peak_bytes=peak_bytes(lambda: model(*inputs), images.device),
            )
    finally:
        for attention, kernel in zip(attentions, own, strict=True):
            attention.backend = kernel


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a call up to the end of its work on the device.

    One call warms up; ten are timed, fewer where they take more than five seconds together, but at least three.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 10 and sum(times) < 5):
        start = now()
        run()
        times.append(now() - start)
    return median(times)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that a call holds at once on a device, beside what was allocated before.

    CUDA's allocator counts in whole blocks. On the CPU PyTorch's profiler counts each tensor as it comes and goes, but
    not what a library under PyTorch allocates for itself.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        run()
    changes = (event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(changes, initial=0))


def _cost(
    name: str, layer: Block | AttentionPool, batch_size: int, queries: int, keys: int, mlp_tokens: int
) -> LayerCost:
    """The cost of an attention from `queries` to `keys` tokens, and of the MLP of `mlp_tokens`."""
    cost = _attention_cost(layer.attn, batch_size, queries, keys)
    mlp = batch_size * mlp_tokens * (layer.mlp.fc1.weight.numel() + layer.mlp.fc2.weight.numel())
    return replace(cost, name=name, parameters=_count(layer), mlp=mlp)


def _decoder_cost(name: str, block: DecoderBlock, batch_size: int, written: int, tokens: int) -> LayerCost:
    """The cost of a block that writes so many tokens about a picture of so many."""
    self_mass = _attention_cost(block.self_attn, batch_size, written, written)
    to_picture = _attention_cost(block.cross_attn, batch_size, written, tokens)
    mlp = batch_size * written * (block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel())
    return replace(total_cost([self_mass, to_picture]), name=name, parameters=_count(block), mlp=mlp)


def _attention_cost(attention: MultiHeadAttention, batch_size: int, queries: int, keys: int) -> LayerCost:
    per_query = attention.q_proj.weight.numel() + attention.out_proj.weight.numel()
    per_key = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
    bytes_each = attention.k_proj.weight.element_size()
    return LayerCost(
        name="attention",
        parameters=_count(attention),
        projections=batch_size * (queries * per_query + keys * per_key),
        scores=batch_size * 2 * queries * keys * attention.num_heads * attention.head_dim,
        score_bytes=batch_size * queries * keys * attention.num_heads * bytes_each,
        cache_bytes=batch_size * 2 * keys * attention.num_kv_heads * attention.head_dim * bytes_each,
    )


def _count(module: nn.Module, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse))
