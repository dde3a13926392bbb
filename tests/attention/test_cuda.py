"""Attention on a CUDA device: every kernel in bfloat16 against the explicit softmax on the CPU in float64."""

import copy

import pytest
import torch
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def outputs(backend: str, x: torch.Tensor, num_kv_heads: int = 4, **options: object) -> list[torch.Tensor]:
    """Outputs of a kernel and of the reference for the same weights and tokens, both on the CPU in float64."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(128, 4, num_kv_heads=num_kv_heads, backend="explicit").double()
    attention.to(torch.bfloat16).double()  # so that both have the same weights
    other = copy.deepcopy(attention).to(DEVICE, torch.bfloat16)
    other.backend = backend
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    rounded = x.to(torch.bfloat16)
    with torch.no_grad():
        return [other(rounded.to(DEVICE), **moved).double().cpu(), attention(rounded.double(), **options)]


@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_kernel_equals_the_softmax(backend: str, num_kv_heads: int, is_causal: bool) -> None:
    output, expected = outputs(backend, torch.randn(2, 37, 128), num_kv_heads, is_causal=is_causal)
    assert_close(output, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("backend", ["auto", "efficient", "math"])
def test_a_fully_masked_query_outputs_zeros_and_masked_keys_affect_nothing(backend: str) -> None:
    x, mask = torch.randn(2, 37, 128), torch.ones(2, 1, 37, 37, dtype=torch.bool)
    mask[:, :, 5] = False  # fully masked
    mask[:, :, :, 30:] = False
    with_nan = x.clone()
    with_nan[:, 30:] = torch.nan
    output, expected = outputs(backend, x, mask=mask)
    assert_close(output, expected, rtol=0, atol=2e-2)
    assert output.isfinite().all()
    again, _ = outputs(backend, with_nan, mask=mask)
    assert_close(again[:, :30], output[:, :30], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
def test_gradients_are_finite_with_a_fully_masked_query(backend: str) -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(128, 4, backend=backend).to(DEVICE, torch.bfloat16)
    x = torch.randn(2, 9, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    options = {}
    if backend != "flash":  # which supports no mask
        options["mask"] = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril(-1)
    attention(x, **options).float().square().sum().backward()
    assert x.grad is not None
    assert all(bool(gradient.isfinite().all()) for gradient in [x.grad, *(p.grad for p in attention.parameters())])
