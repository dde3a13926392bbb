"""Multi-head attention against values computed by hand, and pruned heads against zeroed ones.

Comparisons with other implementations are in test_references.py.
"""

from typing import Any

import jaxtyping
import pytest
import torch
from attention_cases import (
    CPU_BACKENDS,
    assert_equal,
    averaging_attention,
    every_pruning,
    gradients,
    pruned,
    set_linear,
    zero_heads,
)
from torch import nn
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention, attention_probabilities


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_is_applied_in_training_only(backend: str) -> None:
    with_dropout = MultiHeadAttention(15, 3, attention_dropout=0.5, backend=backend)
    without = MultiHeadAttention(15, 3, backend=backend)
    without.load_state_dict(with_dropout.state_dict())
    x = torch.randn(2, 7, 15)
    assert not torch.equal(with_dropout(x), with_dropout(x))
    with_dropout.eval()
    assert_equal(with_dropout(x), without(x))
    assert_equal(with_dropout(x), with_dropout(x))


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_scales_the_kept_weights(backend: str) -> None:
    attention = averaging_attention(backend)
    attention.attention_dropout = 0.2
    y = attention(torch.ones(97, 1, 1))
    assert set(y.flatten().tolist()) == {0.0, 1.25}


def test_attention_weights_are_those_before_dropout() -> None:
    attention = MultiHeadAttention(15, 3, attention_dropout=0.5)
    x = torch.randn(2, 7, 15)
    weights = attention.train().attention_weights(x)
    assert_close(weights.sum(-1), torch.ones(2, 3, 7))
    assert_equal(weights, attention.eval().attention_weights(x))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("values", "expected"), [([1, 2], [1, 1, 2, 2]), ([3], [3, 3, 3, 3])])
def test_query_heads_share_key_value_heads_in_groups(backend: str, values: list[float], expected: list[float]) -> None:
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


def test_weights_equal_the_explicit_softmax() -> None:
    attention = MultiHeadAttention(6, 2, head_dim=5).double()
    x, memory = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    mask = torch.randn(3, 7, dtype=torch.float64)
    weights = attention.attention_weights(x, memory, mask=mask)
    for head in range(2):
        channels = slice(5 * head, 5 * head + 5)
        scores = attention.q_proj(x)[..., channels] @ attention.k_proj(memory)[..., channels].mT / 5**0.5 + mask
        assert_close(weights[:, head], scores.exp() / scores.exp().sum(-1, keepdim=True), rtol=0, atol=1e-15)


def test_the_attention_hook_receives_the_tensors_of_the_kernel() -> None:
    attention = MultiHeadAttention(15, 3)
    recorded = []
    attention.attention_hook = lambda *arguments: recorded.append(arguments)
    x, memory, mask = torch.randn(2, 5, 15), torch.randn(2, 7, 15), torch.rand(2, 1, 1, 7) < 0.5
    attention(x, memory, mask=mask)
    ((q, k, _, _, hook_mask, is_causal),) = recorded
    expected = attention.attention_weights(x, memory, mask=mask)
    assert_equal(attention_probabilities(q, k, hook_mask), expected)
    assert is_causal is False


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@every_pruning
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_pruning_heads_equals_zeroing_them(
    backend: str, num_kv_heads: int, heads: list[int], kv_remaining: int, dtype: torch.dtype, tolerance: float
) -> None:
    full = MultiHeadAttention(
        13, 6, num_kv_heads=num_kv_heads, head_dim=5, memory_dim=11, qk_norm=True, backend=backend
    ).to(dtype)
    zeroed, smaller = zero_heads(full, heads), pruned(full, heads)
    kept = [head for head in range(6) if head not in heads]
    x, memory = torch.randn(3, 5, 13, dtype=dtype), torch.randn(3, 7, 11, dtype=dtype)
    assert (smaller.num_heads, smaller.num_kv_heads) == (len(kept), kv_remaining)
    assert smaller.head_index.tolist() == kept
    for mask in (None, torch.rand(3, 6, 5, 7) < 0.7, torch.randn(1, 6, 1, 7, dtype=dtype), torch.rand(5, 7) < 0.7):
        options = {"mask": mask[..., kept, :, :] if mask is not None and mask.ndim > 2 else mask, "is_causal": True}
        expected = zeroed(x, memory, mask=mask, is_causal=True)
        assert_close(smaller(x, memory, **options), expected, rtol=0, atol=tolerance)
        weights = full.attention_weights(x, memory, mask=mask, is_causal=True)[:, kept]
        assert_close(smaller.attention_weights(x, memory, **options), weights, rtol=0, atol=tolerance)


@every_pruning
def test_parameters_that_remain_after_pruning(num_kv_heads: int, heads: list[int], kv_remaining: int) -> None:
    attention = MultiHeadAttention(13, 6, num_kv_heads=num_kv_heads, head_dim=5, memory_dim=11)
    attention.k_proj.requires_grad_(False)
    attention.prune_heads(heads)
    remaining = 6 - len(heads)
    assert sum(p.numel() for p in attention.parameters()) == (
        5 * remaining * (13 + 1) + 2 * 5 * kv_remaining * (11 + 1) + 5 * remaining * 13 + 13
    )
    sizes = [(layer.in_features, layer.out_features) for layer in attention.children() if isinstance(layer, nn.Linear)]
    assert sizes == [(13, 5 * remaining), (11, 5 * kv_remaining), (11, 5 * kv_remaining), (5 * remaining, 13)]
    frozen = {name for name, parameter in attention.named_parameters() if not parameter.requires_grad}
    assert frozen == {"k_proj.weight", "k_proj.bias"}


def test_gradients_after_pruning_are_those_of_the_remaining_heads() -> None:
    full = MultiHeadAttention(12, 6, num_kv_heads=3, head_dim=5).double()
    zeroed, smaller = zero_heads(full, [0, 4, 5]), pruned(full, [0, 4, 5])
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    outcomes = []
    for attention in (zeroed, smaller):
        gx, gq, gk, gout = gradients(
            attention(x), x, attention.q_proj.weight, attention.k_proj.weight, attention.out_proj.weight
        )
        parts = gq.unflatten(0, (-1, 5)), gk.unflatten(0, (-1, 5)), gout.unflatten(1, (-1, 5))
        outcomes.append((gx, *parts))
    (gx, gq, gk, gout), actual = outcomes
    assert_close(actual, (gx, gq[[1, 2, 3]], gk[[0, 1]], gout[:, [1, 2, 3]]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_pruning_again_indexes_the_remaining_heads(num_kv_heads: int) -> None:
    full = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads)
    twice, once = pruned(pruned(full, [1, 4]), [0, 2]), pruned(full, [0, 1, 3, 4])
    assert twice.head_index.tolist() == once.head_index.tolist() == [2, 5]
    assert twice.num_kv_heads == once.num_kv_heads
    assert_equal(twice.state_dict(), once.state_dict())
    x = torch.randn(2, 7, 24)
    assert_equal(twice(x), once(x))


def test_pruning_no_head_keeps_the_same_parameter_objects() -> None:
    attention = MultiHeadAttention(24, 6)
    before = dict(attention.named_parameters())
    attention.prune_heads([])
    attention.keep_heads(range(6))
    assert all(parameter is before[name] for name, parameter in attention.named_parameters())
    assert attention.head_index is None
    assert "head_index" not in attention.state_dict()


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("pruned_before", [[], [0], [5, 0], [0, 3, 5]])
def test_a_pruned_state_dict_loads_into_any_module_that_has_its_heads(
    num_kv_heads: int, pruned_before: list[int]
) -> None:
    saved = pruned(MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True), [5, 0, 3])
    other = pruned(MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True), pruned_before)
    other.load_state_dict(saved.state_dict())
    x = torch.randn(2, 7, 24)
    assert_equal(other(x), saved(x))
    assert other.head_index.tolist() == [1, 2, 4]
    assert (other.num_heads, other.num_kv_heads, other.kv_head_index) == (
        saved.num_heads,
        saved.num_kv_heads,
        saved.kv_head_index,
    )


def test_a_state_dict_with_heads_that_were_pruned_is_rejected() -> None:
    full = MultiHeadAttention(24, 6)
    with pytest.raises(ValueError, match=r"Cannot keep heads \[0, 1, 2, 4\]: only \[1, 2, 3, 4, 5\] remain"):
        pruned(full, [0]).load_state_dict(pruned(full, [3, 5]).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head_index"):
        pruned(full, [0]).load_state_dict(full.state_dict())


@pytest.mark.parametrize("heads", [[-1], [6], [0, 6]])
def test_a_head_index_out_of_range_cannot_be_pruned(heads: list[int]) -> None:
    attention = MultiHeadAttention(24, 6)
    before = dict(attention.named_parameters())
    message = rf"heads must lie in \[0, 6\), the remaining heads; got \[{', '.join(map(str, heads))}\]"
    with pytest.raises(ValueError, match=message):
        attention.prune_heads(heads)
    assert all(parameter is before[name] for name, parameter in attention.named_parameters())


def test_with_all_heads_pruned_the_output_bias_remains() -> None:
    attention = pruned(MultiHeadAttention(24, 6), [1, 2])
    with pytest.raises(ValueError, match=r"heads must lie in \[0, 4\), the remaining heads; got \[5\]"):
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


def test_with_all_heads_pruned_only_the_output_bias_is_trained() -> None:
    attention = pruned(MultiHeadAttention(24, 6, qk_norm=True), range(6))
    assert [name for name, parameter in attention.named_parameters() if parameter.requires_grad] == ["out_proj.bias"]
    again = MultiHeadAttention(24, 6, qk_norm=True)
    again.load_state_dict(attention.state_dict())
    x = torch.randn(2, 3, 24)
    assert_equal(again(x), attention(x))


def test_head_index_is_on_the_device_of_the_weights() -> None:
    attention = MultiHeadAttention(24, 6).to("meta")
    attention.prune_heads([0])
    assert attention.head_index.device.type == "meta"


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
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_wrong_widths_are_rejected(method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2, memory_dim=7), method)
    with pytest.raises(ValueError, match=r"x must be \(batch, queries, 6\), got \(2, 5, 7\)"):
        attend(torch.randn(2, 5, 7), torch.randn(2, 3, 7))
    with pytest.raises(ValueError, match=r"memory must be \(2, keys, 7\), got \(2, 3, 6\)"):
        attend(torch.randn(2, 5, 6), torch.randn(2, 3, 6))
    with pytest.raises(ValueError, match="memory_dim 7 differs from embed_dim 6: pass a memory"):
        attend(torch.randn(2, 5, 6))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_rope_with_a_memory_is_rejected(method: str) -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="cannot be combined with a memory"):
        getattr(MultiHeadAttention(8, 2), method)(x, x, rope=torch.ones(2, 5, 4))


@pytest.fixture
def without_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the run-time checks of types and shapes, on in tests only, which would raise before the code does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("without_type_checks")
def test_an_unknown_backend_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of auto, explicit, flash, efficient, math; got 'fused'"):
        MultiHeadAttention(6, 2, backend="fused")


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("x", "memory", "message"),
    [
        ((5, 6), None, r"x must be \(batch, queries, 6\), got \(5, 6\)"),
        ((2, 5, 6), (2, 6), r"memory must be \(2, keys, 6\), got \(2, 6\)"),
        ((2, 5, 6), (3, 5, 6), r"memory must be \(2, keys, 6\), got \(3, 5, 6\)"),
    ],
)
def test_wrong_axes_are_rejected(x: tuple[int, ...], memory: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(6, 2)(torch.zeros(x), None if memory is None else torch.zeros(memory))
