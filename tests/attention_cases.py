"""Masks, small modules and helpers that the tests of vitmha.attention share."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import KVCache, MultiHeadAttention

CPU_BACKENDS = ["auto", "math", "flash", "explicit"]

assert_equal = partial(assert_close, rtol=0, atol=0)


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), inputs)


def set_linear(layer: nn.Linear, weight: Any, bias: Any = 0.0) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight, dtype=torch.float32).expand_as(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(torch.as_tensor(bias, dtype=torch.float32).expand_as(layer.bias))


def averaging_attention(backend: str) -> MultiHeadAttention:
    """A module whose output is the mean of the memory tokens that a query may attend to (width 1)."""
    attention = MultiHeadAttention(1, 1, head_dim=2, backend=backend)
    for layer, weight in (
        (attention.q_proj, 0),
        (attention.k_proj, 1),
        (attention.v_proj, [[1], [0]]),
        (attention.out_proj, [[1, 0]]),
    ):
        set_linear(layer, weight)
    return attention


@torch.no_grad()
def decode(
    attention: MultiHeadAttention,
    x: Tensor,
    chunks: Sequence[int],
    *,
    mask: Tensor | None = None,
    rope: Tensor | None = None,
    cache: KVCache | None = None,
) -> Tensor:
    """Causal self-attention with a cache, in chunks of tokens; the mask is for all pairs, or for all keys."""
    cache, outputs = KVCache(sum(chunks)) if cache is None else cache, []
    for part in x.split(list(chunks), 1):
        first, last = cache.num_tokens, cache.num_tokens + part.shape[1]
        part_mask = None if mask is None else mask[..., first:last, :last] if mask.shape[-2] > 1 else mask[..., :last]
        part_rope = None if rope is None else rope[..., first:last, :]
        outputs.append(attention(part, is_causal=True, mask=part_mask, rope=part_rope, cache=cache))
    return torch.cat(outputs, 1)


def zero_heads(attention: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """A copy whose output projection ignores these heads."""
    zeroed = copy.deepcopy(attention)
    with torch.no_grad():
        zeroed.out_proj.weight.unflatten(1, (-1, attention.head_dim))[:, list(heads)] = 0
    return zeroed


def pruned(attention: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    attention = copy.deepcopy(attention)
    attention.prune_heads(heads)
    return attention


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, q, k: None,
    "bool full": lambda b, h, q, k: torch.rand(b, h, q, k) < 0.6,
    "bool padding": lambda b, h, q, k: (torch.arange(k) < torch.tensor([k, k - 2, 1])[:, None])[:, None, None],
    "bool shared": lambda b, h, q, k: torch.rand(q, k) < 0.6,
    "bool per head": lambda b, h, q, k: torch.rand(h, 1, k) < 0.6,
    "float full": lambda b, h, q, k: torch.randn(b, h, q, k, dtype=torch.float64),
    "float per head": lambda b, h, q, k: torch.randn(h, q, k, dtype=torch.float64),
    "float per batch": lambda b, h, q, k: torch.randn(b, 1, 1, k, dtype=torch.float64),
    "float shared with -inf": lambda b, h, q, k: torch.randn(q, k, dtype=torch.float64).masked_fill(
        torch.rand(q, k) < 0.4, -torch.inf
    ),
}


def with_nonfinite(tokens: Tensor, value: float) -> Tensor:
    """A copy with one non-finite value, in token 3 of the second sample."""
    tokens = tokens.clone()
    tokens[1, 3, 2] = value
    return tokens


# Of 6 query heads: the number of key/value heads, the pruned heads, and the number of remaining key/value heads.
PRUNED_HEADS = [
    (6, [0], 5),
    (6, [4, 1], 4),
    (6, [5, 0, 3, 2, 1], 1),
    (3, [2, 3], 2),
    (3, [0], 3),
    (3, [1, 4, 5], 2),
    (3, [0, 3, 4], 3),
    (2, [0, 1], 2),
    (1, [5, 0], 1),
]

every_pruning = pytest.mark.parametrize(("num_kv_heads", "heads", "kv_remaining"), PRUNED_HEADS, ids=str)
