"""The cost of a model: parameters, MACs and memory of each layer, and the time and memory of a forward pass."""

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
    """The cost of one layer, or of all layers, in one forward pass of a batch.

    MACs (multiply-accumulate operations) are half the FLOPs of `torch.utils.flop_counter`. As there, biases, norms,
    softmax and activations are not counted.
    """

    name: str
    """Name of the layer."""
    parameters: int
    """Number of parameters."""
    projections: int = 0
    """MACs of q_proj, k_proj, v_proj and out_proj."""
    scores: int = 0
    """MACs of q k^T and of the weighted sum of v."""
    mlp: int = 0
    """MACs of the MLP."""
    other: int = 0
    """MACs of the patch embedding or of the head."""
    score_bytes: int = 0
    """Bytes of the full attention scores; a fused kernel never stores them."""
    cache_bytes: int = 0
    """Bytes of the keys and values of all tokens, as a key/value cache of this layer stores them."""

    @property
    def macs(self) -> int:
        """MACs of the layer: projections, scores, MLP and other."""
        return self.projections + self.scores + self.mlp + self.other


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of a forward pass."""

    backend: Backend
    """The attention kernel."""
    seconds: float
    """Median time in seconds."""
    peak_bytes: int
    """Peak memory in bytes, in addition to the parameters and the images."""


def layer_costs(model: Model, batch_size: int = 1) -> list[LayerCost]:
    """Computes the cost of each layer from the shapes of its weights and the number of tokens.

    Args:
        model: The model, on any device; its heads may have been pruned. An encoder-decoder is counted for target
            sequences of max_length tokens.
        batch_size: Number of images.

    Returns:
        The costs in the order of the forward pass: the patch embedding with position embedding and prefix tokens, each
        block, the attention pooling if any, the decoder if any, and the head with the LayerNorm before it.
    """
    encoder = get_encoder(model)
    patches, tokens = encoder.layout.num_patches, encoder.layout.num_tokens
    # In the last block, the MLP runs on the pooled tokens only.
    pooled = tokens if isinstance(model, EncoderDecoder) else len(range(tokens)[model.pooled_tokens])
    embedding = LayerCost(
        name="patches",
        parameters=_count(encoder, recurse=False) + _count(encoder.patch_embed) + _count(encoder.norm_pre),
        other=batch_size * patches * encoder.patch_embed.proj.weight.numel(),
    )
    costs = [embedding]
    for i, block in enumerate(encoder.blocks):
        mlp_tokens = tokens if i + 1 < len(encoder.blocks) else pooled
        costs.append(_cost(f"block {i}", cast(Block, block), batch_size, tokens, tokens, mlp_tokens))
    if encoder.attn_pool is not None:
        costs.append(_cost("pooling", encoder.attn_pool, batch_size, 1, pooled, 1))
    outputs = 1
    if isinstance(model, EncoderDecoder):
        outputs = model.decoder.max_length
        costs.append(LayerCost(name="tokens", parameters=_count(model, recurse=False) + _count(model.token_embed)))
        costs += [
            _decoder_cost(f"decoder {i}", cast(DecoderBlock, block), batch_size, outputs, tokens)
            for i, block in enumerate(model.blocks)
        ]
    norms, heads = {encoder.norm, model.norm}, [model.head]
    if encoder.head_dist is not None:
        heads.append(encoder.head_dist)
    head = LayerCost(
        name="head",
        parameters=sum(map(_count, [*norms, *heads])),
        other=batch_size * outputs * sum(head.weight.numel() for head in heads if isinstance(head, nn.Linear)),
    )
    return [*costs, head]


def total_cost(costs: Sequence[LayerCost]) -> LayerCost:
    """Sums the costs of layers.

    The sum of the score bytes is reached only if a backward pass follows; without one, each layer frees its own.
    """
    counts = [field.name for field in fields(LayerCost) if field.name != "name"]
    return LayerCost(name="total", **{name: sum(getattr(cost, name) for cost in costs) for name in counts})


def at_image_size(model: Model, image_size: int | tuple[int, int]) -> Model:
    """Creates the same architecture for another image size, for measuring: all weights but the blocks' are random.

    Args:
        model: The model; its blocks are copied, including their pruned heads.
        image_size: Height and width in pixels; one integer for square images.

    Returns:
        A model on the same device, in the same mode.

    Raises:
        UserError: The patch size does not divide the image size.
    """
    config = replace(model.config, image_size=image_size)
    if isinstance(model, EncoderDecoder):
        sequence_model = EncoderDecoder(config, model.decoder)
        sequence_model.encoder.blocks, sequence_model.blocks = deepcopy(model.encoder.blocks), deepcopy(model.blocks)
        return sequence_model.to(model.encoder.patch_embed.proj.weight).train(model.training)
    resized = VisionTransformer(config)
    resized.blocks, resized.attn_pool = deepcopy(model.blocks), deepcopy(model.attn_pool)
    return resized.to(model.patch_embed.proj.weight).train(model.training)


def measure(
    model: Model,
    images: Float[Tensor, "batch channels height width"],
    backend: Backend = "auto",
) -> Measurement:
    """Measures the time and the peak memory of a forward pass without gradients.

    Args:
        model: The model, on the device and in the mode to be measured. An encoder-decoder gets target sequences of
            max_length tokens.
        images: Images on the same device.
        backend: The attention kernel; the model's own is restored afterwards.

    Raises:
        UserError: The kernel is not available.
    """
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    backends = [attention.backend for attention in attentions]
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
        for attention, original in zip(attentions, backends, strict=True):
            attention.backend = original


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measures the median time of a call in seconds, including its work on the device.

    After one warm-up call, ten calls are timed; fewer, but at least three, if they take more than five seconds.
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
    """Measures the peak memory of a call in bytes, in addition to what was allocated before.

    CUDA's allocator counts whole blocks. On the CPU, PyTorch's profiler counts the allocations of tensors, but not what
    the libraries that PyTorch calls allocate.
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
    """Returns the cost of an attention from `queries` to `keys` tokens, and of an MLP on `mlp_tokens`."""
    cost = _attention_cost(layer.attn, batch_size, queries, keys)
    mlp = batch_size * mlp_tokens * (layer.mlp.fc1.weight.numel() + layer.mlp.fc2.weight.numel())
    return replace(cost, name=name, parameters=_count(layer), mlp=mlp)


def _decoder_cost(name: str, block: DecoderBlock, batch_size: int, outputs: int, tokens: int) -> LayerCost:
    """Returns the cost of a decoder block for sequences of `outputs` tokens and a memory of `tokens`."""
    self_attention = _attention_cost(block.self_attn, batch_size, outputs, outputs)
    cross_attention = _attention_cost(block.cross_attn, batch_size, outputs, tokens)
    mlp = batch_size * outputs * (block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel())
    return replace(total_cost([self_attention, cross_attention]), name=name, parameters=_count(block), mlp=mlp)


def _attention_cost(attention: MultiHeadAttention, batch_size: int, queries: int, keys: int) -> LayerCost:
    per_query = attention.q_proj.weight.numel() + attention.out_proj.weight.numel()
    per_key = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
    itemsize = attention.k_proj.weight.element_size()
    return LayerCost(
        name="attention",
        parameters=_count(attention),
        projections=batch_size * (queries * per_query + keys * per_key),
        scores=batch_size * 2 * queries * keys * attention.num_heads * attention.head_dim,
        score_bytes=batch_size * queries * keys * attention.num_heads * itemsize,
        cache_bytes=batch_size * 2 * keys * attention.num_kv_heads * attention.head_dim * itemsize,
    )


def _count(module: nn.Module, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse))
