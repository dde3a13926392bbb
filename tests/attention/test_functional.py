"""Attention kernels, precision, and the gradients of attention weights."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CPU_BACKENDS, MASKS, assert_equal
from torch import Tensor
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention, attention_gradients, attention_probabilities


@pytest.mark.parametrize("backend", ["math", "flash", "explicit"])
@pytest.mark.parametrize("mask", ["none", "bool full", "float full"])
def test_all_kernels_agree_in_float32(backend: str, mask: str) -> None:
    attention = MultiHeadAttention(33, 3)
    x, attn_mask = torch.randn(3, 37, 33), MASKS[mask](3, 3, 37, 37)
    expected = attention(x, mask=attn_mask)
    attention.backend = backend
    assert_close(attention(x, mask=attn_mask), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "result_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_probabilities_are_computed_in_at_least_float32(dtype: torch.dtype, result_dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 6, 3, 5).to(dtype), torch.randn(2, 3, 7, 5).to(dtype)
    expected = attention_probabilities(q.double(), k.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(attention_probabilities(q, k), expected.to(result_dtype), rtol=0, atol=1e-6)


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
def test_output_in_bfloat16_is_close_to_float32(backend: str) -> None:
    attention = MultiHeadAttention(32, 2, backend=backend)
    x, mask = torch.randn(2, 7, 32), torch.randn(2, 1, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, mask=mask)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), attention(x, mask=mask), rtol=0, atol=0.02)


@pytest.mark.parametrize("mask", [None, torch.linspace(-1, 1, 49).view(1, 1, 7, 7)])
def test_training_in_bfloat16_on_a_cpu_attends_in_float32(mask: Tensor | None) -> None:
    attention, recorded = MultiHeadAttention(64, 2).bfloat16(), []
    attention.attention_hook = lambda *arguments: recorded.extend(arguments[:4])
    attention(torch.randn(2, 7, 64).bfloat16(), mask=mask)
    *qkv, y = recorded
    precise = [tensor.detach().float().requires_grad_() for tensor in qkv]
    expected = F.scaled_dot_product_attention(*precise, mask)
    assert_equal(y, expected.bfloat16())
    upstream = torch.randn_like(y)
    references = torch.autograd.grad(expected, precise, upstream.float())
    for gradient, reference in zip(torch.autograd.grad(y, qkv, upstream), references, strict=True):
        assert_equal(gradient, reference.bfloat16())


@pytest.mark.parametrize(
    ("backend", "is_fused"), [("auto", True), ("flash", True), ("math", False), ("explicit", False)]
)
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("mask", ["none", "bool padding", "float full"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_requested_kernel_runs(backend: str, is_fused: bool, num_kv_heads: int, mask: str, is_causal: bool) -> None:
    attention = MultiHeadAttention(30, 6, num_kv_heads=num_kv_heads, backend=backend)
    attn_mask = MASKS[mask](3, 6, 7, 7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attention(torch.randn(3, 7, 30), mask=attn_mask, is_causal=is_causal)
    operators = {event.key for event in profiler.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in operators) == is_fused
    assert ("aten::_scaled_dot_product_attention_math" in operators) == (backend == "math")


def test_an_unavailable_kernel_is_rejected_and_not_replaced() -> None:
    attention = MultiHeadAttention(15, 3, backend="efficient")
    with pytest.raises(ValueError, match=r"backend 'efficient' cannot run here.*float32 on cpu.*head_dim 5.*'auto'"):
        attention(torch.randn(2, 7, 15))


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
    fully_masked = attention.out_proj.bias.expand(2, -1)
    assert torch.allclose(outputs[0][:, 3], fully_masked, atol=1e-3) == (lowest == -torch.inf)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_mask_beyond_the_range_of_half_precision_means_may_attend(backend: str) -> None:
    attention, x = MultiHeadAttention(6, 2, backend=backend).half(), torch.randn(2, 3, 6).half()
    only_first = torch.tensor([True, False, False])
    y = attention(x, mask=torch.zeros(3).masked_fill(only_first, 1e5))
    assert_close(y, attention(x, mask=only_first))
