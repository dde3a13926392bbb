"""attention.py on a CUDA device: every kernel, in bfloat16, against the explicit softmax of the CPU in float64."""

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
    """What a kernel and the reference give for the same weights and tokens, both on the CPU in float64."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(128, 4, num_kv_heads=num_kv_heads, backend="explicit").double()
    attention.to(torch.bfloat16).double()  # so that both have the same weights
    other = copy.deepcopy(attention).to(DEVICE, torch.bfloat16)
    other.backend = backend
    moved = {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    given = x.to(torch.bfloat16)
    with torch.no_grad():
        return [other(given.to(DEVICE), **moved).double().cpu(), attention(given.double(), **options)]


@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_kernel_equals_the_softmax(backend: str, num_kv_heads: int, is_causal: bool) -> None:
    ours, expected = outputs(backend, torch.randn(2, 37, 128), num_kv_heads, is_causal=is_causal)
    assert_close(ours, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("backend", ["auto", "efficient", "math"])
def test_a_query_that_may_see_nothing_gives_zeros_and_what_is_masked_reaches_nothing(backend: str) -> None:
    x, mask = torch.randn(2, 37, 128), torch.ones(2, 1, 37, 37, dtype=torch.bool)
    mask[:, :, 5] = False  # sees nothing
    mask[:, :, :, 30:] = False
    spoilt = x.clone()
    spoilt[:, 30:] = torch.nan
    ours, expected = outputs(backend, x, mask=mask)
    assert_close(ours, expected, rtol=0, atol=2e-2)
    assert ours.isfinite().all()
    again, _ = outputs(backend, spoilt, mask=mask)
    assert_close(again[:, :30], ours[:, :30], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "math"])
def test_gradients_are_finite_where_a_query_sees_nothing(backend: str) -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(128, 4, backend=backend).to(DEVICE, torch.bfloat16)
    x = torch.randn(2, 9, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    options = {}
    if backend != "flash":  # which takes no mask
        options["mask"] = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril(-1)
    attention(x, **options).float().square().sum().backward()
    assert x.grad is not None
    assert all(bool(each.isfinite().all()) for each in [x.grad, *(p.grad for p in attention.parameters())])
