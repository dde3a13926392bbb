"""The key/value cache against one causal pass, and what it rejects."""

from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import CPU_BACKENDS, assert_equal, decode, every_pruning, pruned, with_nonfinite, zero_heads
from torch import Tensor
from torch.testing import assert_close

from vitmha.attention import KVCache, MultiHeadAttention


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_nonfinite_cached_token_affects_only_the_queries_that_may_attend_to_it(backend: str) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=2, backend=backend)
    x = torch.randn(2, 5, 24)
    # Token 3 attends to itself; token 4 attends to it in the first sample only, where it is finite.
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 4, 3] = False
    expected, y = (decode(attention, tokens, [1] * 5, mask=mask) for tokens in (x, with_nonfinite(x, torch.nan)))
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, 3] = False
    assert_equal(y[clean], expected[clean])
    assert y[1, 3].isnan().all()


def test_a_nonfinite_cached_memory_affects_only_the_queries_that_may_attend_to_it() -> None:
    attention, cache = MultiHeadAttention(24, 6), KVCache(5)
    x, memory, mask = torch.randn(2, 7, 24), torch.randn(2, 5, 24), torch.ones(2, 1, 7, 5, dtype=torch.bool)
    mask[1, :, :6, 3] = False
    expected = attention(x, memory, mask=mask)
    with torch.no_grad():
        for _ in range(2):
            y = attention(x, with_nonfinite(memory, torch.nan), mask=mask, cache=cache)
            assert_close(y[:, :6], expected[:, :6])
            assert y[1, 6].isnan().all()
            assert_close(y[0], expected[0])


def filled_cache(tokens: int, is_cross: bool = False) -> tuple[MultiHeadAttention, KVCache, Tensor]:
    """A module, its cache for five tokens that holds `tokens` of a batch of two, and all five tokens."""
    attention, cache, x = MultiHeadAttention(24, 6, num_kv_heads=2), KVCache(5), torch.randn(2, 5, 24)
    with torch.no_grad():
        attention(x[:, :tokens], *([x[:, :tokens]] if is_cross else []), cache=cache)
    return attention, cache, x


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
        assert_equal(attention(x[:, :3], cache=cache), attention(x[:, :3]))
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
        actual = [attention(x, memory, mask=mask, cache=cache) for x in queries]
        assert calls == [attention.k_proj, attention.v_proj]
        expected = [attention(x, memory, mask=mask) for x in queries]
    assert cache.num_tokens == 5
    assert_close(actual, expected, rtol=0, atol=1e-6)


def test_a_cache_holds_normalized_and_rotated_keys_and_the_values() -> None:
    attention, cache = MultiHeadAttention(24, 6, num_kv_heads=3, qk_norm=True), KVCache(11)
    x, angles = torch.randn(2, 7, 24), torch.randn(7, 2).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    recorded = []
    attention.attention_hook = lambda *arguments: recorded.append(arguments)
    decode(attention, x, [2, 5], rope=rope, cache=cache)
    attention(x, rope=rope)
    _, k, v, *_ = recorded[-1]
    keys, values = cache.read()
    assert_close((keys, values), (k, v))
    assert keys.shape == (2, 3, 7, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_nbytes_of_a_cache(dtype: torch.dtype, num_kv_heads: int, is_self: bool) -> None:
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
def test_a_reordered_cache_decodes_as_if_the_batch_had_been_in_that_order_from_the_start(
    rows: list[int], num_kv_heads: int
) -> None:
    attention, cache = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads), KVCache(7)
    start, rest = torch.randn(3, 4, 24), torch.randn(len(rows), 3, 24)
    decode(attention, start, [3, 1], cache=cache)
    cache.reorder(torch.tensor(rows))
    assert cache.nbytes == 2 * len(rows) * num_kv_heads * 7 * 4 * 4
    expected = attention(torch.cat([start[rows], rest], 1), is_causal=True)[:, 4:]
    assert_close(decode(attention, rest, [1, 2], cache=cache), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": (2, 3, 24)}, r"max_tokens 5 is too small: the cache holds 3 tokens and the call adds 3"),
        (
            {"x": (3, 1, 24)},
            r"holds \(batch, kv_heads, head_dim\) = \(2, 2, 4\), the call has \(3, 2, 4\).*`reorder` changes the batch",
        ),
        (
            {"x": (2, 1, 24), "fields": {"num_kv_heads": 3}},
            r"= \(2, 2, 4\), the call has \(2, 3, 4\): each attention module",
        ),
        ({"x": (2, 1, 24), "fields": {"num_kv_heads": 2, "head_dim": 5}}, r"= \(2, 2, 4\), the call has \(2, 2, 5\)"),
        ({"x": (2, 1, 24), "memory": (2, 3, 24)}, "filled in self-attention and cannot be used in cross-attention"),
        ({"x": (2, 1, 24), "mask": (1, 3)}, r"\(batch, heads, queries, keys\) = \(2, 6, 1, 4\), got \(1, 1, 1, 3\)"),
        ({"x": (2, 1, 23)}, r"x must be \(batch, queries, 24\), got \(2, 1, 23\)"),
    ],
    ids=["full", "batch", "heads", "width", "kind", "mask", "embed_dim"],
)
def test_a_rejected_call_does_not_change_the_cache(arguments: dict[str, Any], message: str) -> None:
    attention, cache, x = filled_cache(3)
    fields = arguments.get("fields")
    caller = MultiHeadAttention(24, 6, **fields) if fields else attention
    memory = [torch.randn(arguments["memory"])] if "memory" in arguments else []
    mask = torch.ones(arguments["mask"], dtype=torch.bool) if "mask" in arguments else None
    before, nbytes = cache.read().clone(), cache.nbytes
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        caller(torch.randn(arguments["x"]), *memory, mask=mask, cache=cache)
    assert_equal(cache.read(), before)
    assert (cache.num_tokens, cache.nbytes) == (3, nbytes)
    assert_close(decode(attention, x[:, 3:], [1, 1], cache=cache), attention(x, is_causal=True)[:, 3:])


def test_a_rejected_call_does_not_change_the_cached_memory() -> None:
    attention, cache, x = filled_cache(3, is_cross=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match="The cache holds a memory of 3 tokens, the call has one of 4"):
            attention(x, x[:, :4], cache=cache)
        with pytest.raises(ValueError, match="filled in cross-attention and cannot be used in self-attention"):
            attention(x[:, :2], cache=cache)
        assert_close(attention(x, x[:, :3], cache=cache), attention(x, x[:, :3]))


def test_a_memory_larger_than_the_cache_is_rejected() -> None:
    x = torch.randn(2, 7, 24)
    with pytest.raises(ValueError, match="max_tokens 5 is too small: the cache holds 0 tokens and the call adds 7"):
        MultiHeadAttention(24, 6)(x[:, :1], x, cache=KVCache(5))


def test_a_rejected_first_call_leaves_the_cache_empty() -> None:
    attention, cache, x = MultiHeadAttention(24, 6), KVCache(5), torch.randn(2, 5, 24)
    for arguments in ({"mask": torch.ones(4, 4, dtype=torch.bool)}, {"mask": torch.ones(5, 5)}):
        with pytest.raises(ValueError, match="mask must"):
            attention(x, cache=cache, **arguments)
    assert (cache.num_tokens, cache.nbytes) == (0, 0)
    with torch.no_grad():
        assert_close(attention(x[:, :2], x, cache=cache), attention(x[:, :2], x))


def test_an_unavailable_kernel_does_not_change_the_cache() -> None:
    attention, cache = MultiHeadAttention(6, 2, backend="efficient"), KVCache(5)
    with pytest.raises(ValueError, match="backend 'efficient' cannot run here"):
        attention(torch.randn(2, 3, 6), cache=cache)
    assert cache.num_tokens == 0
    attention.backend = "auto"
    x = torch.randn(4, 5, 6)
    with torch.no_grad():
        assert_close(attention(x, is_causal=True, cache=cache), attention(x, is_causal=True))


def test_another_dtype_than_the_cached_one_is_rejected() -> None:
    attention, cache, x = MultiHeadAttention(6, 2), KVCache(5), torch.randn(2, 3, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        attention(x, cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match=r"holds torch\.bfloat16, the call computes torch\.float32"):
        attention(x[:, :1], cache=cache)
    assert cache.num_tokens == 3


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_cache_without_capacity_is_rejected(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        KVCache(max_tokens)


def test_an_empty_cache_can_be_neither_read_nor_reordered() -> None:
    for use in (KVCache(5).read, partial(KVCache(5).reorder, torch.tensor([0]))):
        with pytest.raises(ValueError, match="The cache is empty: pass it to an attention call first"):
            use()


@every_pruning
def test_a_cache_of_a_pruned_attention(num_kv_heads: int, heads: list[int], kv_remaining: int) -> None:
    full, cache = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads), KVCache(7)
    smaller, x = pruned(full, heads), torch.randn(3, 7, 24)
    y = decode(smaller, x, [3, 1, 3], cache=cache)
    assert_close(y, zero_heads(full, heads)(x, is_causal=True), rtol=0, atol=1e-6)
    assert cache.nbytes == 2 * 3 * kv_remaining * 7 * 4 * 4


def test_a_reordered_cache_holds_the_memory_of_the_selected_rows() -> None:
    attention, cache = MultiHeadAttention(24, 6), KVCache(5)
    memory, x, rows = torch.randn(3, 5, 24), torch.randn(4, 1, 24), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        attention(torch.randn(3, 1, 24), memory, cache=cache)
        cache.reorder(rows)
        assert_close(attention(x, memory[rows], cache=cache), attention(x, memory[rows]))
