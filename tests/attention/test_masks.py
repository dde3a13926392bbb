"""Masks: what they mean, fully masked queries, containment of NaN and inf, and validation."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import (
    CPU_BACKENDS,
    MASKS,
    assert_equal,
    averaging_attention,
    gradients,
    set_linear,
    with_nonfinite,
)
from torch import Tensor
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention, query_rows


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_fully_masked_query_outputs_zeros(backend: str, num_kv_heads: int, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(6, 2, num_kv_heads=num_kv_heads, backend=backend)
    x = torch.randn(2, 5, 6, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 1] = False
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    y, weights, unmasked = attention(x, mask=mask), attention.attention_weights(x, mask=mask), attention(x)
    others = torch.arange(5) != 1
    assert_equal(y[0, 1], attention.out_proj.bias)
    assert_equal(weights[0, :, 1], torch.zeros(2, 5))
    assert_close(y[1], unmasked[1])
    assert_close(y[0, others], unmasked[0, others])
    assert_close(weights[0, :, others], attention.attention_weights(x)[0, :, others])
    for gradient in gradients(y, x, *attention.parameters()) + gradients(weights, x):
        assert gradient.isfinite().all()


def test_a_learned_mask_has_a_finite_gradient_for_a_fully_masked_query() -> None:
    attention = MultiHeadAttention(6, 2, backend="explicit")
    mask = torch.zeros(5, 5).index_fill(0, torch.tensor([1]), -torch.inf).requires_grad_()
    for y in (attention(torch.randn(2, 5, 6), mask=mask), attention.attention_weights(torch.randn(2, 5, 6), mask=mask)):
        (gradient,) = gradients(y, mask)
        assert_equal(gradient[1], torch.zeros(5))
        assert gradient[[0, 2, 3, 4]].abs().min() > 0


@pytest.fixture(params=["causal", "boolean", "float", "boolean and causal", "float per head"])
def masking(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[int]]:
    """Arguments that mask key 3 of five for some queries, and the queries that may attend to it."""
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed[[0, 2], 3] = False
    allowed[4, 1] = False
    float_mask = torch.randn(5, 5).masked_fill(~allowed, -torch.inf)
    per_head = float_mask.expand(2, 6, 5, 5).clone()
    per_head[:, 1:, 1, 3] = -torch.inf
    return {
        "causal": ({"is_causal": True}, [3, 4]),
        "boolean": ({"mask": allowed}, [1, 3, 4]),
        "float": ({"mask": float_mask}, [1, 3, 4]),
        "boolean and causal": ({"mask": allowed, "is_causal": True}, [3, 4]),
        "float per head": ({"mask": per_head}, [1, 3, 4]),
    }[request.param]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_a_nonfinite_token_affects_only_the_queries_that_may_attend_to_it(
    backend: str, value: float, num_kv_heads: int, is_self: bool, masking: tuple[dict[str, Any], list[int]]
) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=num_kv_heads, qk_norm=True, backend=backend)
    options, attending = masking
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, attending] = False
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    for attend, parameters in (
        (attention, list(attention.parameters())),
        (attention.attention_weights, [p for name, p in attention.named_parameters() if name[0] in "qk"]),
    ):
        outcomes = []
        for change in (lambda tokens: tokens, partial(with_nonfinite, value=value)):
            tokens = [change(x)] if is_self else [x.clone(), change(memory)]
            inputs = [tensor.requires_grad_() for tensor in tokens]
            y = attend(*inputs, **options)
            y = y if attend is attention else y.transpose(1, 2)
            outcomes.append((y.detach(), *gradients(y[clean], *inputs, *parameters)))
        (expected, *expected_gradients), (y, *actual) = outcomes
        assert_equal(y[clean], expected[clean])
        assert (y[~clean] if attend is attention else y[~clean][:, 0]).isnan().all()
        assert expected.isfinite().all()
        assert_close(actual, expected_gradients, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nonfinite_padding_token_affects_no_gradient(backend: str, value: float) -> None:
    attention = MultiHeadAttention(24, 6, num_kv_heads=2, backend=backend)
    clean = torch.ones(2, 5, dtype=torch.bool)
    clean[1, 3] = False
    outcomes = []
    x = torch.randn(2, 5, 24)
    for tokens in (x.clone(), with_nonfinite(x, value)):
        y = attention(tokens.requires_grad_(), mask=clean[:, None, None])
        outcomes.append((y[clean], *gradients(y[clean], tokens, *attention.parameters())))
    assert_equal(outcomes[1][0], outcomes[0][0])
    assert_close(outcomes[1], outcomes[0], rtol=0, atol=1e-6)


def test_without_a_mask_a_nan_token_makes_its_sample_nan() -> None:
    attention = MultiHeadAttention(24, 6)
    x = torch.randn(2, 5, 24)
    y = attention(with_nonfinite(x, torch.nan))
    assert y[1].isnan().all()
    assert_close(y[0], attention(x)[0])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_key_masked_per_head_is_still_used_in_the_other(backend: str) -> None:
    attention = MultiHeadAttention(2, 2, num_kv_heads=1, head_dim=1, backend=backend)
    set_linear(attention.q_proj, 0)
    set_linear(attention.v_proj, [1, 0])
    set_linear(attention.out_proj, torch.eye(2))
    mask = torch.tensor([[True, False], [True, True]])[:, None]
    y = attention(torch.tensor([[[2.0, 5], [8, 5]]]), mask=mask)
    assert_close(y, torch.tensor([[[2.0, 5.0], [2.0, 5.0]]]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("num_queries", "num_keys", "expected"), [(2, 4, [2, 2.5]), (4, 2, [0, 0, 1, 1.5])])
def test_the_causal_mask_aligns_to_the_lower_right(
    backend: str, num_queries: int, num_keys: int, expected: list[float]
) -> None:
    attention = averaging_attention(backend)
    memory = torch.arange(1.0, num_keys + 1).view(1, num_keys, 1)
    y = attention(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close(y.flatten(), torch.tensor(expected))
    weights = attention.attention_weights(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close((weights[0, 0] @ memory[0]).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_true_in_a_mask_means_may_attend(backend: str) -> None:
    y = averaging_attention(backend)(torch.tensor([[[1.0], [2], [3]]]), mask=torch.tensor([True, True, False]))
    assert_close(y, torch.full((1, 3, 1), 1.5))


@pytest.mark.parametrize("queries", [-1, 0, [4, -2, 1, 1], [], slice(1, 5, 2)])
@pytest.mark.parametrize("mask", ["none", "bool full", "float per head"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_selected_queries_equal_the_rows_of_the_full_map(
    queries: int | slice | list[int], mask: str, is_causal: bool
) -> None:
    attention = MultiHeadAttention(18, 6, num_kv_heads=3, qk_norm=True).double()
    x, memory = torch.randn(3, 5, 18, dtype=torch.float64), torch.randn(3, 7, 18, dtype=torch.float64)
    weights = partial(attention.attention_weights, x, memory, mask=MASKS[mask](3, 6, 5, 7), is_causal=is_causal)
    rows = [queries] if isinstance(queries, int) else queries
    assert_close(weights(queries=queries), weights()[:, :, rows], rtol=0, atol=1e-14)


@pytest.mark.parametrize("queries", [5, -6, [0, 5], [-6]])
def test_query_indices_out_of_range_are_rejected(queries: int | list[int]) -> None:
    with pytest.raises(ValueError, match=r"queries must lie in \[-5, 5\), got \[.*(5|-6)\]"):
        MultiHeadAttention(6, 2).attention_weights(torch.randn(2, 5, 6), queries=queries)


def test_query_rows_counts_negative_rows_from_the_end() -> None:
    assert_equal(query_rows([-1, 0, 2], 5, torch.device("cpu")), torch.tensor([4, 0, 2]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_an_integer_mask_is_rejected_with_the_fix(dtype: torch.dtype, method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must be boolean.*or float.*write mask\.bool\(\)"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(5, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 1, 1, 5), (3, 5, 5)])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_a_float_mask_of_zeros_and_ones_is_rejected_with_the_fix(
    dtype: torch.dtype, shape: tuple[int, ...], method: str
) -> None:
    attend, x = getattr(MultiHeadAttention(6, 3), method), torch.randn(2, 5, 6)
    zero_one = torch.ones(shape)
    zero_one[..., 2:] = 0
    for mask in (zero_one, torch.ones(shape)):
        with pytest.raises(ValueError, match=rf"got {dtype} zeros and ones: write mask\.bool\(\) for a 0/1 mask"):
            attend(x, mask=mask.to(dtype))
    assert_equal(
        attend(x, mask=zero_one.bool()), attend(x, mask=torch.zeros(shape).masked_fill(zero_one == 0, -torch.inf))
    )


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
def test_a_mask_that_does_not_broadcast_is_rejected(shape: tuple[int, ...], method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must broadcast to \(batch, heads, queries, keys\) = \(2, 2, 5, 5\), got"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_whose_first_axis_may_be_the_batch_or_the_heads_is_refused(method: str, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(6, 2)
    attend = partial(getattr(attention, method), torch.randn(2, 5, 6), torch.randn(2, 7, 6))
    mask = torch.zeros(2, 5, 7, dtype=dtype)
    message = (
        "mask of shape (2, 5, 7) is ambiguous. It may mean (1, heads, queries, keys) = (1, 2, 5, 7): write "
        "mask[None], or (batch, 1, queries, keys) = (2, 1, 5, 7): write mask[:, None]."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(mask=mask)
    assert attend(mask=mask[None]).isfinite().all()
    assert attend(mask=mask[:, None]).isfinite().all()
    # Not ambiguous: another batch size, or one mask for all heads.
    other = partial(getattr(attention, method), torch.randn(3, 5, 6), torch.randn(3, 7, 6))
    assert other(mask=mask).isfinite().all()
    assert attend(mask=mask[:1]).isfinite().all()


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_a_mask_of_two_axes_is_queries_by_keys_in_a_batch_of_any_size(batch: int) -> None:
    attention, x, mask = MultiHeadAttention(6, 2), torch.randn(batch, 5, 6), torch.rand(5, 5) < 0.7
    assert_close(attention(x, mask=mask), attention(x, mask=mask[None, None]), rtol=0, atol=0)


def test_each_sample_sees_the_keys_of_its_own_mask() -> None:
    attention = MultiHeadAttention(2, 2)
    set_linear(attention.q_proj, 0)
    for projection in (attention.v_proj, attention.out_proj):
        set_linear(projection, torch.eye(2))
    x = torch.tensor([1.0, 2.0, 3.0])[None, :, None].expand(2, 3, 2)
    mask = torch.tensor([[True, False, False], [True, True, True]])[:, None].expand(2, 3, 3)
    y = attention(x, mask=mask[:, None])
    assert_close(y, torch.tensor([1.0, 2.0])[:, None, None].expand(2, 3, 2))
