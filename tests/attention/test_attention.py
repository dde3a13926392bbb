"""Multi-head attention against numbers worked out by hand, and its cache and its removal of heads against itself.

What compares it with the attention of others is in test_attention_references.py.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import (
    KVCache,
    MultiHeadAttention,
    apply_rope,
    attention_gradients,
    attention_probabilities,
    query_rows,
)
from vitmha.models.config import TokenLayout
from vitmha.models.positions import build_rope2d

CPU_BACKENDS = ["auto", "math", "flash", "explicit"]
exactly = partial(assert_close, rtol=0, atol=0)


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), inputs)


def set_linear(layer: nn.Linear, weight: Any, bias: Any = 0.0) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight, dtype=torch.float32).expand_as(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(torch.as_tensor(bias, dtype=torch.float32).expand_as(layer.bias))


def reading_values(backend: str) -> MultiHeadAttention:
    """Width 1, queries 0, values the memory itself: the output is the plain mean of what a query sees."""
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
    """Causal self-attention, so many tokens at a time; a mask of all pairs, or of all keys, goes along."""
    cache, outputs = KVCache(sum(chunks)) if cache is None else cache, []
    for part in x.split(list(chunks), 1):
        first, last = cache.num_tokens, cache.num_tokens + part.shape[1]
        part_mask = None if mask is None else mask[..., first:last, :last] if mask.shape[-2] > 1 else mask[..., :last]
        part_rotary = None if rope is None else rope[..., first:last, :]
        outputs.append(attention(part, is_causal=True, mask=part_mask, rope=part_rotary, cache=cache))
    return torch.cat(outputs, 1)


def zero_heads(attention: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """A copy that reads zeros from these heads."""
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
    "bool each": lambda b, h, q, k: torch.rand(b, h, q, k) < 0.6,
    "bool padding": lambda b, h, q, k: (torch.arange(k) < torch.tensor([k, k - 2, 1])[:, None])[:, None, None],
    "bool shared": lambda b, h, q, k: torch.rand(q, k) < 0.6,
    "bool per head": lambda b, h, q, k: torch.rand(h, 1, k) < 0.6,
    "float each": lambda b, h, q, k: torch.randn(b, h, q, k, dtype=torch.float64),
    "float per head": lambda b, h, q, k: torch.randn(h, q, k, dtype=torch.float64),
    "float per batch": lambda b, h, q, k: torch.randn(b, 1, 1, k, dtype=torch.float64),
    "float shared with -inf": lambda b, h, q, k: torch.randn(q, k, dtype=torch.float64).masked_fill(
        torch.rand(q, k) < 0.4, -torch.inf
    ),
}


@pytest.mark.parametrize("backend", ["math", "flash", "explicit"])
@pytest.mark.parametrize("mask", ["none", "bool each", "float each"])
def test_every_kernel_gives_the_same_in_float32(backend: str, mask: str) -> None:
    attention = MultiHeadAttention(33, 3)
    x, drawn = torch.randn(3, 37, 33), MASKS[mask](3, 3, 37, 37)
    expected = attention(x, mask=drawn)
    attention.backend = backend
    assert_close(attention(x, mask=drawn), expected, rtol=0, atol=1e-5)


def test_chosen_rows_are_rotated_as_in_the_full_map() -> None:
    layout = TokenLayout(num_class_tokens=1, num_registers=2, grid_size=(3, 5), patch_size=(7, 11))
    attention, x, rope = (
        MultiHeadAttention(24, 3, num_kv_heads=1),
        torch.randn(2, 18, 24),
        build_rope2d(layout, 8),
    )
    for each in (rope, rope[:, None, None].expand(2, 2, 1, 18, 8)):
        rows = attention.attention_weights(x, rope=each, queries=[17, 0])
        exactly(rows, attention.attention_weights(x, rope=each)[:, :, [17, 0]])
    assert not torch.allclose(attention(x, rope=rope), attention(x), atol=1e-3)


def test_rotation_turns_neighbouring_channels_by_their_angle() -> None:
    angles = torch.tensor([torch.pi / 2, torch.pi]).repeat_interleave(2)
    x = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4)
    turned = apply_rope(x, torch.stack([angles.cos(), angles.sin()])[:, None])
    assert_close(turned, torch.tensor([-2.0, 1, -3, -4]).view(1, 1, 1, 4))


def test_rotation_is_the_same_written_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    expected = apply_rope(x, rope)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(apply_rope(x, rope), expected)


def test_rotation_in_bfloat16_rounds_once() -> None:
    x, angles = torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(5, 4).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    exactly(apply_rope(x, rope), apply_rope(x.float(), rope).bfloat16())


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_acts_in_training_only(backend: str) -> None:
    with_dropout = MultiHeadAttention(15, 3, attention_dropout=0.5, backend=backend)
    without = MultiHeadAttention(15, 3, backend=backend)
    without.load_state_dict(with_dropout.state_dict())
    x = torch.randn(2, 7, 15)
    assert not torch.equal(with_dropout(x), with_dropout(x))
    with_dropout.eval()
    exactly(with_dropout(x), without(x))
    exactly(with_dropout(x), with_dropout(x))


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_scales_what_it_keeps(backend: str) -> None:
    attention = reading_values(backend)
    attention.attention_dropout = 0.2
    y = attention(torch.ones(97, 1, 1))
    assert set(y.flatten().tolist()) == {0.0, 1.25}


def test_weights_are_those_before_dropout() -> None:
    attention = MultiHeadAttention(15, 3, attention_dropout=0.5)
    x = torch.randn(2, 7, 15)
    weights = attention.train().attention_weights(x)
    assert_close(weights.sum(-1), torch.ones(2, 3, 7))
    exactly(weights, attention.eval().attention_weights(x))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_query_that_sees_nothing_gives_zeros(backend: str, num_kv_heads: int, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(6, 2, num_kv_heads=num_kv_heads, backend=backend)
    x = torch.randn(2, 5, 6, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 1] = False
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    y, weights, free = attention(x, mask=mask), attention.attention_weights(x, mask=mask), attention(x)
    others = torch.arange(5) != 1
    exactly(y[0, 1], attention.out_proj.bias)
    exactly(weights[0, :, 1], torch.zeros(2, 5))
    assert_close(y[1], free[1])
    assert_close(y[0, others], free[0, others])
    assert_close(weights[0, :, others], attention.attention_weights(x)[0, :, others])
    for gradient in gradients(y, x, *attention.parameters()) + gradients(weights, x):
        assert gradient.isfinite().all()


def test_a_learned_mask_has_a_finite_gradient_where_a_query_sees_nothing() -> None:
    attention = MultiHeadAttention(6, 2, backend="explicit")
    mask = torch.zeros(5, 5).index_fill(0, torch.tensor([1]), -torch.inf).requires_grad_()
    for y in (attention(torch.randn(2, 5, 6), mask=mask), attention.attention_weights(torch.randn(2, 5, 6), mask=mask)):
        (gradient,) = gradients(y, mask)
        exactly(gradient[1], torch.zeros(5))
        assert gradient[[0, 2, 3, 4]].abs().min() > 0


@pytest.fixture(params=["causal", "boolean", "float", "boolean and causal", "float per head"])
def hiding(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[int]]:
    """Options that hide key 3 of five from some queries, and the queries that see it."""
    sees = torch.ones(5, 5, dtype=torch.bool)
    sees[[0, 2], 3] = False
    sees[4, 1] = False
    added = torch.randn(5, 5).masked_fill(~sees, -torch.inf)
    in_one_head = added.expand(2, 6, 5, 5).clone()
    in_one_head[:, 1:, 1, 3] = -torch.inf
    return {
        "causal": ({"is_causal": True}, [3, 4]),
        "boolean": ({"mask": sees}, [1, 3, 4]),
        "float": ({"mask": added}, [1, 3, 4]),
        "boolean and causal": ({"mask": sees, "is_causal": True}, [3, 4]),
        "float per head": ({"mask": in_one_head}, [1, 3, 4]),
    }[request.param]


def spoil(tokens: Tensor, bad: float) -> Tensor:
    """The same, but for one number of token 3 of the second sample."""
    spoilt = tokens.clone()
    spoilt[1, 3, 2] = bad
    return spoilt


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_a_spoilt_token_reaches_only_the_queries_that_see_it(
    backend: str, bad: float, num_kv_heads: int, is_self: bool, hiding: tuple[dict[str, Any], list[int]]
) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True, backend=backend)
    options, seeing = hiding
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, seeing] = False
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    for attend, parameters in (
        (attention, list(attention.parameters())),
        (attention.attention_weights, [p for name, p in attention.named_parameters() if name[0] in "qk"]),
    ):
        outcomes = []
        for change in (lambda tokens: tokens, partial(spoil, bad=bad)):
            tokens = [change(x)] if is_self else [x.clone(), change(memory)]
            inputs = [each.requires_grad_() for each in tokens]
            y = attend(*inputs, **options)
            y = y if attend is attention else y.transpose(1, 2)
            outcomes.append((y.detach(), *gradients(y[clean], *inputs, *parameters)))
        (expected, *expected_gradients), (y, *found) = outcomes
        exactly(y[clean], expected[clean])
        assert (y[~clean] if attend is attention else y[~clean][:, 0]).isnan().all()
        assert expected.isfinite().all()
        assert_close(found, expected_gradients, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_spoilt_token_that_is_padding_reaches_no_gradient(backend: str, bad: float) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=2, backend=backend)
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, 3] = False
    outcomes = []
    x = torch.randn(2, 5, 24)
    for tokens in (x.clone(), spoil(x, bad)):
        y = attention(tokens.requires_grad_(), mask=clean[:, None, None])
        outcomes.append((y[clean], *gradients(y[clean], tokens, *attention.parameters())))
    exactly(outcomes[1][0], outcomes[0][0])
    assert_close(outcomes[1], outcomes[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_spoilt_token_in_the_cache_reaches_only_the_queries_that_see_it(backend: str) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=2, backend=backend)
    x = torch.randn(2, 5, 24)
    # Token 3 sees itself; token 4 sees it in the first sample only, where nothing is wrong with it.
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 4, 3] = False
    expected, y = (decode(attention, tokens, [1] * 5, mask=mask) for tokens in (x, spoil(x, torch.nan)))
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, 3] = False
    exactly(y[clean], expected[clean])
    assert y[1, 3].isnan().all()


def test_a_spoilt_memory_in_the_cache_reaches_only_the_queries_that_see_it() -> None:
    attention, cache = MultiHeadAttention(24, 6), KVCache(5)
    x, memory, mask = torch.randn(2, 7, 24), torch.randn(2, 5, 24), torch.ones(2, 1, 7, 5, dtype=torch.bool)
    mask[1, :, :6, 3] = False
    expected = attention(x, memory, mask=mask)
    with torch.no_grad():
        for _ in range(2):
            y = attention(x, spoil(memory, torch.nan), mask=mask, cache=cache)
            assert_close(y[:, :6], expected[:, :6])
            assert y[1, 6].isnan().all()
            assert_close(y[0], expected[0])


def test_where_nothing_is_hidden_a_spoilt_token_spoils_its_sample() -> None:
    attention = MultiHeadAttention(24, 6)
    x = torch.randn(2, 5, 24)
    y = attention(spoil(x, torch.nan))
    assert y[1].isnan().all()
    assert_close(y[0], attention(x)[0])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_key_hidden_from_one_head_only_still_serves_the_other(backend: str) -> None:
    attention = MultiHeadAttention(2, 2, num_kv_heads=1, head_dim=1, backend=backend)
    set_linear(attention.q_proj, 0)
    set_linear(attention.v_proj, [1, 0])
    set_linear(attention.out_proj, torch.eye(2))
    mask = torch.tensor([[True, False], [True, True]])[:, None]
    y = attention(torch.tensor([[[2.0, 5], [8, 5]]]), mask=mask)
    assert_close(y, torch.tensor([[[2.0, 5.0], [2.0, 5.0]]]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("num_queries", "seen", "expected"), [(2, 4, [2, 2.5]), (4, 2, [0, 0, 1, 1.5])])
def test_causal_hangs_on_the_lower_right(backend: str, num_queries: int, seen: int, expected: list[float]) -> None:
    attention = reading_values(backend)
    memory = torch.arange(1.0, seen + 1).view(1, seen, 1)
    y = attention(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close(y.flatten(), torch.tensor(expected))
    weights = attention.attention_weights(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close((weights[0, 0] @ memory[0]).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_true_in_a_mask_lets_attend(backend: str) -> None:
    y = reading_values(backend)(torch.tensor([[[1.0], [2], [3]]]), mask=torch.tensor([True, True, False]))
    assert_close(y, torch.full((1, 3, 1), 1.5))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("values", "expected"), [([1, 2], [1, 1, 2, 2]), ([3], [3, 3, 3, 3])])
def test_query_heads_read_key_heads_in_groups(backend: str, values: list[float], expected: list[float]) -> None:
    attention = MultiHeadAttention(4, 4, num_kv_heads=len(values), head_dim=1, backend=backend)
    set_linear(attention.q_proj, 0)
    set_linear(attention.v_proj, 0, values)
    set_linear(attention.out_proj, torch.eye(4))
    x = torch.randn(2, 3, 4)
    assert_close(attention(x), torch.tensor(expected, dtype=torch.float32).expand(2, 3, 4))
    assert attention.attention_weights(x).shape == (2, 4, 3, 3)


def test_weights_of_query_heads_use_the_keys_of_their_group() -> None:
    attention = MultiHeadAttention(4, 4, num_kv_heads=2, head_dim=1)
    set_linear(attention.q_proj, 0, 1)
    set_linear(attention.k_proj, [[1, 0, 0, 0], [0, 1, 0, 0]])
    weights = attention.attention_weights(torch.tensor([[[30.0, 0, 0, 0], [0, 30, 0, 0]]]))
    assert_close(weights[0, :, 0], torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]))


def test_weights_are_per_head_and_not_averaged() -> None:
    attention = MultiHeadAttention(2, 2)
    for layer in (attention.q_proj, attention.k_proj):
        set_linear(layer, torch.eye(2))
    weights = attention.attention_weights(torch.tensor([[[10.0, 0], [0, 10]]]))
    expected = torch.tensor([[[[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0, 1]]]])
    assert_close(weights, expected, rtol=0, atol=1e-6)


def test_weights_equal_the_softmax_written_out() -> None:
    attention = MultiHeadAttention(6, 2, head_dim=5).double()
    x, memory = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    mask = torch.randn(3, 7, dtype=torch.float64)
    weights = attention.attention_weights(x, memory, mask=mask)
    for head in range(2):
        channels = slice(5 * head, 5 * head + 5)
        scores = attention.q_proj(x)[..., channels] @ attention.k_proj(memory)[..., channels].mT / 5**0.5 + mask
        assert_close(weights[:, head], scores.exp() / scores.exp().sum(-1, keepdim=True), rtol=0, atol=1e-15)


@pytest.mark.parametrize("queries", [-1, 0, [4, -2, 1, 1], [], slice(1, 5, 2)])
@pytest.mark.parametrize("mask", ["none", "bool each", "float per head"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_chosen_queries_equal_the_rows_of_the_full_map(
    queries: int | slice | list[int], mask: str, is_causal: bool
) -> None:
    attention = MultiHeadAttention(18, 6, num_kv_heads=3, qk_norm=True).double()
    x, memory = torch.randn(3, 5, 18, dtype=torch.float64), torch.randn(3, 7, 18, dtype=torch.float64)
    weights = partial(attention.attention_weights, x, memory, mask=MASKS[mask](3, 6, 5, 7), is_causal=is_causal)
    rows = [queries] if isinstance(queries, int) else queries
    assert_close(weights(queries=queries), weights()[:, :, rows], rtol=0, atol=1e-14)


@pytest.mark.parametrize("queries", [5, -6, [0, 5], [-6]])
def test_queries_that_do_not_exist_are_refused(queries: int | list[int]) -> None:
    with pytest.raises(ValueError, match=r"queries must lie in \[-5, 5\), got \[.*(5|-6)\]"):
        MultiHeadAttention(6, 2).attention_weights(torch.randn(2, 5, 6), queries=queries)


def test_query_rows_counts_negative_rows_from_the_end() -> None:
    exactly(query_rows([-1, 0, 2], 5, torch.device("cpu")), torch.tensor([4, 0, 2]))


@pytest.mark.parametrize(("dtype", "precise"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_probabilities_are_computed_in_float32_at_least(dtype: torch.dtype, precise: torch.dtype) -> None:
    q, k = torch.randn(2, 6, 3, 5).to(dtype), torch.randn(2, 3, 7, 5).to(dtype)
    expected = attention_probabilities(q.double(), k.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(attention_probabilities(q, k), expected.to(precise), rtol=0, atol=1e-6)


def test_weights_stay_float32_under_autocast() -> None:
    attention = MultiHeadAttention(15, 3)
    x = torch.randn(2, 7, 15)
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention.attention_weights(x)
        q, k = (proj(x).unflatten(-1, (3, 5)).transpose(1, 2) for proj in (attention.q_proj, attention.k_proj))
    assert q.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert_close(weights, (q.float() @ k.float().mT / 5**0.5).softmax(-1), rtol=0, atol=1e-6)
    assert_close(weights.sum(-1), torch.ones(2, 3, 7), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_output_in_bfloat16_is_near_that_in_float32(backend: str) -> None:
    attention = MultiHeadAttention(32, 2, backend=backend)
    x, mask = torch.randn(2, 7, 32), torch.randn(2, 1, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, mask=mask)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), attention(x, mask=mask), rtol=0, atol=0.02)


@pytest.mark.parametrize("mask", [None, torch.linspace(-1, 1, 49).view(1, 1, 7, 7)])
def test_training_in_bfloat16_on_a_cpu_attends_in_float32(mask: Tensor | None) -> None:
    attention, seen = MultiHeadAttention(64, 2).bfloat16(), []
    attention.attention_hook = lambda *arguments: seen.extend(arguments[:4])
    attention(torch.randn(2, 7, 64).bfloat16(), mask=mask)
    *qkv, y = seen
    precise = [each.detach().float().requires_grad_() for each in qkv]
    expected = F.scaled_dot_product_attention(*precise, mask)
    exactly(y, expected.bfloat16())
    upstream = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, precise, upstream.float())
    for gradient, each in zip(torch.autograd.grad(y, qkv, upstream), wanted, strict=True):
        exactly(gradient, each.bfloat16())


@pytest.mark.parametrize(
    ("backend", "is_fused"), [("auto", True), ("flash", True), ("math", False), ("explicit", False)]
)
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("mask", ["none", "bool padding", "float each"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_asked_for_is_the_one_that_runs(
    backend: str, is_fused: bool, num_kv_heads: int, mask: str, is_causal: bool
) -> None:
    attention = MultiHeadAttention(30, 6, num_kv_heads=num_kv_heads, backend=backend)
    drawn = MASKS[mask](3, 6, 7, 7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attention(torch.randn(3, 7, 30), mask=drawn, is_causal=is_causal)
    ran = {event.key for event in profiler.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == is_fused
    assert ("aten::_scaled_dot_product_attention_math" in ran) == (backend == "math")


def test_a_kernel_that_cannot_run_is_refused_and_not_replaced() -> None:
    attention = MultiHeadAttention(15, 3, backend="efficient")
    with pytest.raises(ValueError, match=r"backend 'efficient' cannot run here.*float32 on cpu.*head_dim 5.*'auto'"):
        attention(torch.randn(2, 7, 15))


def test_the_attention_hook_receives_the_tensors_of_the_kernel() -> None:
    attention = MultiHeadAttention(15, 3)
    seen = []
    attention.attention_hook = lambda *arguments: seen.append(arguments)
    x, memory, mask = torch.randn(2, 5, 15), torch.randn(2, 7, 15), torch.rand(2, 1, 1, 7) < 0.5
    attention(x, memory, mask=mask)
    ((q, k, _, _, observed_mask, is_causal),) = seen
    expected = attention.attention_weights(x, memory, mask=mask)
    exactly(attention_probabilities(q, k, observed_mask), expected)
    assert is_causal is False


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"num_kv_heads": 3, "qk_norm": True}, {"num_kv_heads": 1, "head_dim": 8}],
    ids=["plain", "grouped with norm", "multi-query"],
)
@pytest.mark.parametrize("chunks", [[1] * 13, [13], [2, 3, 1, 7]], ids=str)
def test_decoding_with_a_cache_equals_one_causal_pass(
    backend: str, dtype: torch.dtype, tolerance: float, fields: dict[str, Any], chunks: list[int]
) -> None:
    attention = MultiHeadAttention(24, 6, backend=backend, **fields).to(dtype)
    x, angles = torch.randn(3, 13, 24, dtype=dtype), torch.randn(13, attention.head_dim // 2).repeat_interleave(2, 1)
    padding = torch.arange(13) >= torch.tensor([0, 2, 5])[:, None, None, None]
    for mask in (None, padding, torch.rand(3, 6, 13, 13) < 0.7, torch.randn(6, 13, 13, dtype=dtype)):
        for rope in (None, torch.stack([angles.cos(), angles.sin()])):
            expected = attention(x, is_causal=True, mask=mask, rope=rope)
            y = decode(attention, x, chunks, mask=mask, rope=rope)
            assert_close(y, expected, rtol=0, atol=tolerance)


def test_a_cache_in_self_attention_need_not_be_causal() -> None:
    attention, cache, x = MultiHeadAttention(24, 6), KVCache(7), torch.randn(2, 7, 24)
    with torch.no_grad():
        exactly(attention(x[:, :3], cache=cache), attention(x[:, :3]))
        assert_close(attention(x[:, 3:], cache=cache), attention(x)[:, 3:])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_cached_memory_is_projected_once(backend: str) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=2, memory_dim=11, backend=backend)
    cache, memory, mask = KVCache(7), torch.randn(3, 5, 11), torch.rand(3, 1, 1, 5) < 0.7
    calls = []
    for layer in (attention.k_proj, attention.v_proj):
        layer.register_forward_hook(lambda *arguments: calls.append(arguments[0]))
    with torch.no_grad():
        queries = [torch.randn(3, tokens, 24) for tokens in (1, 3, 1)]
        found = [attention(x, memory, mask=mask, cache=cache) for x in queries]
        assert calls == [attention.k_proj, attention.v_proj]
        expected = [attention(x, memory, mask=mask) for x in queries]
    assert cache.num_tokens == 5
    assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_cache_holds_normalised_and_rotated_keys_and_the_values() -> None:
    attention, cache = MultiHeadAttention(24, 6, num_kv_heads=3, qk_norm=True), KVCache(11)
    x, angles = torch.randn(2, 7, 24), torch.randn(7, 2).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    seen = []
    attention.attention_hook = lambda *arguments: seen.append(arguments)
    decode(attention, x, [2, 5], rope=rope, cache=cache)
    attention(x, rope=rope)
    _, k, v, *_ = seen[-1]
    keys, values = cache.read()
    assert_close((keys, values), (k, v))
    assert keys.shape == (2, 3, 7, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_bytes_of_a_cache(dtype: torch.dtype, num_kv_heads: int, is_self: bool) -> None:
    attention = MultiHeadAttention(30, 6, num_kv_heads=num_kv_heads).to(dtype)
    cache = KVCache(max_tokens=13)
    assert cache.nbytes == 0
    x, memory = torch.randn(3, 2, 30, dtype=dtype), torch.randn(3, 7, 30, dtype=dtype)
    with torch.no_grad():
        for _ in range(3):
            attention(x, *([] if is_self else [memory]), cache=cache)
            assert cache.nbytes == 2 * 3 * num_kv_heads * 13 * 5 * dtype.itemsize
    assert cache.num_tokens == (6 if is_self else 7)


def test_a_cache_under_autocast_takes_half_the_bytes() -> None:
    attention, cache, x = MultiHeadAttention(30, 6), KVCache(7), torch.randn(3, 7, 30)
    with torch.autocast("cpu", torch.bfloat16):
        y = decode(attention, x, [3, 4], cache=cache)
    assert cache.nbytes == 2 * 3 * 6 * 7 * 5 * 2
    assert_close(y.float(), attention(x, is_causal=True), rtol=0, atol=0.02)


@pytest.mark.parametrize("rows", [[2, 0, 0, 2], [1], [2, 1, 0]])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
def test_a_reordered_cache_goes_on_as_if_the_batch_had_been_that_from_the_start(
    rows: list[int], num_kv_heads: int
) -> None:
    attention, cache = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads), KVCache(7)
    start, rest = torch.randn(3, 4, 24), torch.randn(len(rows), 3, 24)
    decode(attention, start, [3, 1], cache=cache)
    cache.reorder(torch.tensor(rows))
    assert cache.nbytes == 2 * len(rows) * num_kv_heads * 7 * 4 * 4
    expected = attention(torch.cat([start[rows], rest], 1), is_causal=True)[:, 4:]
    assert_close(decode(attention, rest, [1, 2], cache=cache), expected)


def test_a_reordered_memory_is_that_of_the_chosen_rows() -> None:
    attention, cache = MultiHeadAttention(24, 6), KVCache(5)
    memory, x, rows = torch.randn(3, 5, 24), torch.randn(4, 1, 24), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        attention(torch.randn(3, 1, 24), memory, cache=cache)
        cache.reorder(rows)
        assert_close(attention(x, memory[rows], cache=cache), attention(x, memory[rows]))


def holding(tokens: int, is_cross: bool = False) -> tuple[MultiHeadAttention, KVCache, Tensor]:
    """A cache with room for five tokens that holds so many of a batch of two, and what went into it."""
    attention, cache, x = MultiHeadAttention(24, 6, num_kv_heads=2), KVCache(5), torch.randn(2, 5, 24)
    with torch.no_grad():
        attention(x[:, :tokens], *([x[:, :tokens]] if is_cross else []), cache=cache)
    return attention, cache, x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": (2, 3, 24)}, r"room for max_tokens 5; 3 are in it and 3 more came"),
        (
            {"x": (3, 1, 24)},
            r"holds \(batch, kv_heads, head_dim\) = \(2, 2, 4\), the call has \(3, 2, 4\).*`reorder` changes a batch",
        ),
        ({"x": (2, 1, 24), "fields": {"num_kv_heads": 3}}, r"= \(2, 2, 4\), the call has \(2, 3, 4\): each attention"),
        ({"x": (2, 1, 24), "fields": {"num_kv_heads": 2, "head_dim": 5}}, r"= \(2, 2, 4\), the call has \(2, 2, 5\)"),
        ({"x": (2, 1, 24), "memory": (2, 3, 24)}, "filled in self-attention and cannot serve in cross-attention"),
        ({"x": (2, 1, 24), "mask": (1, 3)}, r"\(batch, heads, queries, keys\) = \(2, 6, 1, 4\), got \(1, 1, 1, 3\)"),
        ({"x": (2, 1, 23)}, r"x must be \(batch, queries, 24\), got \(2, 1, 23\)"),
    ],
    ids=["full", "batch", "heads", "width", "kind", "mask", "embed_dim"],
)
def test_what_a_cache_refuses_changes_nothing_in_it(arguments: dict[str, Any], message: str) -> None:
    attention, cache, x = holding(3)
    fields = arguments.get("fields")
    caller = MultiHeadAttention(24, 6, **fields) if fields else attention
    memory = [torch.randn(arguments["memory"])] if "memory" in arguments else []
    mask = torch.ones(arguments["mask"], dtype=torch.bool) if "mask" in arguments else None
    before, nbytes = cache.read().clone(), cache.nbytes
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        caller(torch.randn(arguments["x"]), *memory, mask=mask, cache=cache)
    exactly(cache.read(), before)
    assert (cache.num_tokens, cache.nbytes) == (3, nbytes)
    assert_close(decode(attention, x[:, 3:], [1, 1], cache=cache), attention(x, is_causal=True)[:, 3:])


def test_what_a_cached_memory_refuses_changes_nothing_in_it() -> None:
    attention, cache, x = holding(3, is_cross=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match="The cache holds a memory of 3 tokens, the call has one of 4"):
            attention(x, x[:, :4], cache=cache)
        with pytest.raises(ValueError, match="filled in cross-attention and cannot serve in self-attention"):
            attention(x[:, :2], cache=cache)
        assert_close(attention(x, x[:, :3], cache=cache), attention(x, x[:, :3]))


def test_a_memory_that_a_cache_has_no_room_for_is_refused() -> None:
    x = torch.randn(2, 7, 24)
    with pytest.raises(ValueError, match="room for max_tokens 5; 0 are in it and 7 more came"):
        MultiHeadAttention(24, 6)(x[:, :1], x, cache=KVCache(5))


def test_a_first_call_that_is_refused_leaves_the_cache_to_any_other() -> None:
    attention, cache, x = MultiHeadAttention(24, 6), KVCache(5), torch.randn(2, 5, 24)
    for refused in ({"mask": torch.ones(4, 4, dtype=torch.bool)}, {"mask": torch.ones(5, 5)}):
        with pytest.raises(ValueError, match="mask must"):
            attention(x, cache=cache, **refused)
    assert (cache.num_tokens, cache.nbytes) == (0, 0)
    with torch.no_grad():
        assert_close(attention(x[:, :2], x, cache=cache), attention(x[:, :2], x))


def test_a_kernel_that_refuses_leaves_the_cache_as_it_was() -> None:
    attention, cache = MultiHeadAttention(6, 2, backend="efficient"), KVCache(5)
    with pytest.raises(ValueError, match="backend 'efficient' cannot run here"):
        attention(torch.randn(2, 3, 6), cache=cache)
    assert cache.num_tokens == 0
    attention.backend = "auto"
    x = torch.randn(4, 5, 6)
    with torch.no_grad():
        assert_close(attention(x, is_causal=True, cache=cache), attention(x, is_causal=True))


def test_another_precision_than_the_cache_holds_is_refused() -> None:
    attention, cache, x = MultiHeadAttention(6, 2), KVCache(5), torch.randn(2, 3, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        attention(x, cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match=r"holds torch\.bfloat16, the call computes torch\.float32"):
        attention(x[:, :1], cache=cache)
    assert cache.num_tokens == 3


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_cache_without_room_is_refused(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        KVCache(max_tokens)


def test_an_empty_cache_can_be_neither_read_nor_reordered() -> None:
    for use in (KVCache(5).read, partial(KVCache(5).reorder, torch.tensor([0]))):
        with pytest.raises(ValueError, match="The cache is empty: call the attention with it first"):
            use()


# Key/value heads, the heads removed, and the key/value heads that stay: of 6 query heads.
REMOVALS = [
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
every_removal = pytest.mark.parametrize(("num_kv_heads", "heads", "kv_left"), REMOVALS, ids=str)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@every_removal
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_removing_heads_equals_zeros_for_them(
    backend: str, num_kv_heads: int, heads: list[int], kv_left: int, dtype: torch.dtype, tolerance: float
) -> None:
    whole = MultiHeadAttention(
        13, 6, num_kv_heads=num_kv_heads, head_dim=5, memory_dim=11, qk_norm=True, backend=backend
    ).to(dtype)
    zeroed, slim = zero_heads(whole, heads), pruned(whole, heads)
    kept = [head for head in range(6) if head not in heads]
    x, memory = torch.randn(3, 5, 13, dtype=dtype), torch.randn(3, 7, 11, dtype=dtype)
    assert (slim.num_heads, slim.num_kv_heads) == (len(kept), kv_left)
    assert slim.head_index.tolist() == kept
    for mask in (None, torch.rand(3, 6, 5, 7) < 0.7, torch.randn(6, 1, 7, dtype=dtype), torch.rand(5, 7) < 0.7):
        options = {"mask": mask[..., kept, :, :] if mask is not None and mask.ndim > 2 else mask, "is_causal": True}
        expected = zeroed(x, memory, mask=mask, is_causal=True)
        assert_close(slim(x, memory, **options), expected, rtol=0, atol=tolerance)
        weights = whole.attention_weights(x, memory, mask=mask, is_causal=True)[:, kept]
        assert_close(slim.attention_weights(x, memory, **options), weights, rtol=0, atol=tolerance)


@every_removal
def test_parameters_that_removed_heads_leave(num_kv_heads: int, heads: list[int], kv_left: int) -> None:
    attention = MultiHeadAttention(13, 6, num_kv_heads=num_kv_heads, head_dim=5, memory_dim=11)
    attention.k_proj.requires_grad_(False)
    attention.prune_heads(heads)
    left = 6 - len(heads)
    assert sum(p.numel() for p in attention.parameters()) == (
        5 * left * (13 + 1) + 2 * 5 * kv_left * (11 + 1) + 5 * left * 13 + 13
    )
    sizes = [(layer.in_features, layer.out_features) for layer in attention.children() if isinstance(layer, nn.Linear)]
    assert sizes == [(13, 5 * left), (11, 5 * kv_left), (11, 5 * kv_left), (5 * left, 13)]
    frozen = {name for name, parameter in attention.named_parameters() if not parameter.requires_grad}
    assert frozen == {"k_proj.weight", "k_proj.bias"}


def test_gradients_with_heads_removed_are_those_of_the_kept_ones() -> None:
    whole = MultiHeadAttention(12, 6, num_kv_heads=3, head_dim=5).double()
    zeroed, slim = zero_heads(whole, [0, 4, 5]), pruned(whole, [0, 4, 5])
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    outcomes = []
    for attention in (zeroed, slim):
        gx, gq, gk, gout = gradients(
            attention(x), x, attention.q_proj.weight, attention.k_proj.weight, attention.out_proj.weight
        )
        parts = gq.unflatten(0, (-1, 5)), gk.unflatten(0, (-1, 5)), gout.unflatten(1, (-1, 5))
        outcomes.append((gx, *parts))
    (gx, gq, gk, gout), found = outcomes
    assert_close(found, (gx, gq[[1, 2, 3]], gk[[0, 1]], gout[:, [1, 2, 3]]), rtol=0, atol=1e-12)


@every_removal
def test_a_cache_of_an_attention_without_some_heads(num_kv_heads: int, heads: list[int], kv_left: int) -> None:
    whole, cache = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads), KVCache(7)
    slim, x = pruned(whole, heads), torch.randn(3, 7, 24)
    y = decode(slim, x, [3, 1, 3], cache=cache)
    assert_close(y, zero_heads(whole, heads)(x, is_causal=True), rtol=0, atol=1e-6)
    assert cache.nbytes == 2 * 3 * kv_left * 7 * 4 * 4


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_a_second_removal_counts_the_heads_that_the_first_left(num_kv_heads: int) -> None:
    whole = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads)
    twice, once = pruned(pruned(whole, [1, 4]), [0, 2]), pruned(whole, [0, 1, 3, 4])
    assert twice.head_index.tolist() == once.head_index.tolist() == [2, 5]
    assert twice.num_kv_heads == once.num_kv_heads
    exactly(twice.state_dict(), once.state_dict())
    x = torch.randn(2, 7, 24)
    exactly(twice(x), once(x))


def test_removing_no_head_leaves_the_very_parameters() -> None:
    attention = MultiHeadAttention(24, 6)
    before = dict(attention.named_parameters())
    attention.prune_heads([])
    attention.keep_heads(range(6))
    assert all(parameter is before[name] for name, parameter in attention.named_parameters())
    assert attention.head_index is None
    assert "head_index" not in attention.state_dict()


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("already", [[], [0], [5, 0], [0, 3, 5]])
def test_a_state_dict_without_some_heads_loads_wherever_the_others_are(num_kv_heads: int, already: list[int]) -> None:
    saved = pruned(MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True), [5, 0, 3])
    other = pruned(MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True), already)
    other.load_state_dict(saved.state_dict())
    x = torch.randn(2, 7, 24)
    exactly(other(x), saved(x))
    assert other.head_index.tolist() == [1, 2, 4]
    assert (other.num_heads, other.num_kv_heads, other.kv_head_index) == (
        saved.num_heads,
        saved.num_kv_heads,
        saved.kv_head_index,
    )


def test_a_state_dict_with_heads_that_are_gone_is_refused() -> None:
    whole = MultiHeadAttention(24, 6)
    with pytest.raises(ValueError, match=r"Heads \[0, 1, 2, 4\] are to be kept, but only \[1, 2, 3, 4, 5\] are there"):
        pruned(whole, [0]).load_state_dict(pruned(whole, [3, 5]).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head_index"):
        pruned(whole, [0]).load_state_dict(whole.state_dict())


@pytest.mark.parametrize("heads", [[-1], [6], [0, 6]])
def test_a_head_that_does_not_exist_cannot_be_removed(heads: list[int]) -> None:
    attention = MultiHeadAttention(24, 6)
    before = dict(attention.named_parameters())
    message = rf"heads must lie in \[0, 6\), those that there are; got \[{', '.join(map(str, heads))}\]"
    with pytest.raises(ValueError, match=message):
        attention.prune_heads(heads)
    assert all(parameter is before[name] for name, parameter in attention.named_parameters())


def test_without_any_head_the_bias_of_the_output_remains() -> None:
    attention = pruned(MultiHeadAttention(24, 6), [1, 2])
    with pytest.raises(ValueError, match=r"heads must lie in \[0, 4\), those that there are; got \[5\]"):
        attention.prune_heads([5])
    attention.prune_heads(range(4))
    nn.init.normal_(attention.out_proj.bias)
    x = torch.randn(2, 5, 24, requires_grad=True)
    assert_close(attention(x), attention.out_proj.bias.expand(2, 5, 24))
    attention(x).sum().backward()
    assert_close(attention.out_proj.bias.grad, torch.full((24,), 10.0))
    assert attention.attention_weights(x, queries=[1]).shape == (2, 0, 1, 5)
    again = MultiHeadAttention(24, 6)
    again.load_state_dict(attention.state_dict())
    assert_close(again(x), attention(x))
    assert sum(parameter.numel() for parameter in again.parameters()) == 24


def test_without_any_head_only_the_bias_of_the_output_is_trained() -> None:
    attention = pruned(MultiHeadAttention(24, 6, qk_norm=True), range(6))
    assert [name for name, each in attention.named_parameters() if each.requires_grad] == ["out_proj.bias"]
    again = MultiHeadAttention(24, 6, qk_norm=True)
    again.load_state_dict(attention.state_dict())
    x = torch.randn(2, 3, 24)
    exactly(again(x), attention(x))


def test_numbers_of_head_index_lie_where_the_weights_lie() -> None:
    attention = MultiHeadAttention(24, 6).to("meta")
    attention.prune_heads([0])
    assert attention.head_index.device.type == "meta"


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_gradients_of_weights_that_were_never_stored(num_kv_heads: int) -> None:
    q, k, v = (
        torch.randn(2, heads, n, 5, dtype=torch.float64) for heads, n in ((6, 3), (num_kv_heads, 7), (num_kv_heads, 7))
    )
    weights = attention_probabilities(q, k).requires_grad_()
    y = weights @ v.repeat_interleave(6 // num_kv_heads, 1)
    grad_y = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(y, weights, grad_y)
    assert_close(attention_gradients(grad_y, v), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"embed_dim": 4096, "num_heads": 32, "qkv_bias": False, "out_bias": False}, 67_108_864),
        ({"embed_dim": 512, "num_heads": 8, "qkv_bias": False, "out_bias": False}, 1_048_576),
        ({"embed_dim": 512, "num_heads": 16, "qkv_bias": False, "out_bias": False}, 1_048_576),
        ({"embed_dim": 512, "num_heads": 8}, 1_048_576 + 4 * 512),
        ({"embed_dim": 512, "num_heads": 8, "qkv_bias": False}, 1_048_576 + 512),
        ({"embed_dim": 512, "num_heads": 8, "out_bias": False}, 1_048_576 + 3 * 512),
        (
            {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 2, "qkv_bias": False, "out_bias": False},
            2 * 512**2 + 2 * 512 * 2 * 64,
        ),
        ({"embed_dim": 6, "num_heads": 2, "head_dim": 5, "memory_dim": 7}, 6 * 10 + 2 * 7 * 10 + 10 * 6 + 3 * 10 + 6),
    ],
)
def test_parameter_count(arguments: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        attention = MultiHeadAttention(**arguments)
    assert sum(parameter.numel() for parameter in attention.parameters()) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 6, "num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not divisible by num_kv_heads 2"),
        ({"embed_dim": 7, "num_heads": 2}, "embed_dim 7 is not divisible by num_heads 2.*set head_dim"),
        ({"embed_dim": 6, "num_heads": 0}, "must be at least 1, got 0 and 0"),
        ({"embed_dim": 6, "num_heads": 2, "num_kv_heads": 0}, "must be at least 1, got 2 and 0"),
        ({"embed_dim": 6, "num_heads": 2, "head_dim": 0}, "head_dim must be at least 1, got 0"),
        (
            {"embed_dim": 6, "num_heads": 2, "attention_dropout": 1.0},
            r"attention_dropout must lie in \[0, 1\), got 1.0",
        ),
        ({"embed_dim": 6, "num_heads": 2, "attention_dropout": -0.1}, r"must lie in \[0, 1\), got -0.1"),
    ],
)
def test_what_does_not_fit_is_refused_when_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_an_integer_mask_is_refused_with_the_remedy(dtype: torch.dtype, method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must be boolean.*or float.*write mask\.bool\(\)"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(5, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 1, 1, 5), (2, 5, 5)])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_a_float_mask_of_zeros_and_ones_is_refused_with_the_remedy(
    dtype: torch.dtype, shape: tuple[int, ...], method: str
) -> None:
    attend, x = getattr(MultiHeadAttention(6, 2), method), torch.randn(2, 5, 6)
    seen = torch.ones(shape)
    seen[..., 2:] = 0
    for mask in (seen, torch.ones(shape)):
        with pytest.raises(ValueError, match=rf"got {dtype} zeros and ones: write mask\.bool\(\) for a 0/1 mask"):
            attend(x, mask=mask.to(dtype))
    exactly(attend(x, mask=seen.bool()), attend(x, mask=torch.zeros(shape).masked_fill(seen == 0, -torch.inf)))


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(5),
        torch.tensor([1, 1, 0, 0, 0.5]),
        torch.tensor([1, 0, -1, 0, 1.0]),
        torch.tensor([1, 0, 2, 0, 1.0]),
        torch.tensor([1, 0, -torch.inf, 0, 1.0]),
        torch.tensor([0, 0, -torch.inf, 0, -torch.inf]),
        torch.tensor([1, 1, 1, 0, 0.0], requires_grad=True),
    ],
    ids=["zeros", "half", "minus one", "two", "one and -inf", "zero and -inf", "learned"],
)
def test_other_float_masks_are_added(mask: Tensor) -> None:
    attention, x = MultiHeadAttention(6, 2, backend="explicit"), torch.randn(2, 5, 6)
    weights = attention.attention_weights(x, mask=mask)
    assert_close(weights, (attention.attention_weights(x).log() + mask).softmax(-1))
    y = (weights @ attention.v_proj(x).unflatten(-1, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2)
    assert_close(attention(x, mask=mask), attention.out_proj(y))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 5, 5), (5, 2, 1, 5), (2, 2, 4, 5), (1, 2, 2, 5, 5)])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_a_mask_that_does_not_broadcast_is_refused(shape: tuple[int, ...], method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must broadcast to \(batch, heads, queries, keys\) = \(2, 2, 5, 5\), got"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_wrong_widths_are_refused(method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2, memory_dim=7), method)
    with pytest.raises(ValueError, match=r"x must be \(batch, queries, 6\), got \(2, 5, 7\)"):
        attend(torch.randn(2, 5, 7), torch.randn(2, 3, 7))
    with pytest.raises(ValueError, match=r"memory must be \(2, keys, 7\), got \(2, 3, 6\)"):
        attend(torch.randn(2, 5, 6), torch.randn(2, 3, 6))
    with pytest.raises(ValueError, match="memory_dim 7 differs from embed_dim 6: give a memory"):
        attend(torch.randn(2, 5, 6))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_rotary_with_a_memory_is_refused(method: str) -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="cannot be used with a memory"):
        getattr(MultiHeadAttention(8, 2), method)(x, x, rope=torch.ones(2, 5, 4))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run-time checks of types and shapes, on in tests only, which would refuse before the code does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of auto, explicit, flash, efficient, math; got 'fused'"):
        MultiHeadAttention(6, 2, backend="fused")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("x", "memory", "message"),
    [
        ((5, 6), None, r"x must be \(batch, queries, 6\), got \(5, 6\)"),
        ((2, 5, 6), (2, 6), r"memory must be \(2, keys, 6\), got \(2, 6\)"),
        ((2, 5, 6), (3, 5, 6), r"memory must be \(2, keys, 6\), got \(3, 5, 6\)"),
    ],
)
def test_wrong_axes_are_refused(x: tuple[int, ...], memory: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(6, 2)(torch.zeros(x), None if memory is None else torch.zeros(memory))


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_float32_mask_means_the_same_in_half_precision(lowest: float) -> None:
    x = torch.randn(2, 5, 12)
    mask = torch.zeros(5, 5)
    mask[3] = lowest
    outputs = []
    for backend in ("auto", "explicit"):
        torch.manual_seed(1)
        attention = MultiHeadAttention(12, 3, backend=backend)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(attention(x, mask=mask).float())
    torch.testing.assert_close(*outputs, rtol=0, atol=0.02)
    hidden = attention.out_proj.bias.expand(2, -1)
    assert torch.allclose(outputs[0][:, 3], hidden, atol=1e-3) == (lowest == -torch.inf)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_mask_beyond_the_range_of_half_precision_lets_attend(backend: str) -> None:
    attention, x = MultiHeadAttention(6, 2, backend=backend).half(), torch.randn(2, 3, 6).half()
    only_first = torch.tensor([True, False, False])
    y = attention(x, mask=torch.zeros(3).masked_fill(only_first, 1e5))
    assert_close(y, attention(x, mask=only_first))
