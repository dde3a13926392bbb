"""Attention weights, their gradients, and the fused kernels.

Letters in the patterns: b batch, q queries, k keys, h query heads, g key/value heads, r query heads per key/value
head (h = g r), d head_dim.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import UserError
from .masks import attends

Backend = Literal["auto", "flash", "efficient", "math", "explicit"]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_probabilities(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None = None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Computes softmax(q k^T / sqrt(head_dim) + mask), without expanding grouped keys.

    Args:
        q: Queries after projection, normalization and rotation.
        k: Keys after the same steps; kv_heads divides heads.
        mask: Boolean (True = may attend), or float (added to the scores).

    Returns:
        Probabilities in float32, or in float64 if q is float64. Half precision would be off by up to 3.5e-3. The row of
        a query that may attend to no key is all zeros.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.to(precise) * q.shape[-1] ** -0.5, k.to(precise)
        group = q.shape[1] // k.shape[1]
        # Contiguous keys: the matrix product would copy them anyway, and in column-major order, which is slower.
        scores = rearrange(q, "b (g r) q d -> b g (r q) d", r=group) @ k.contiguous().mT
        scores = rearrange(scores, "b g (r q) k -> b (g r) q k", r=group)
        if mask is None:
            return scores.softmax(-1)
        scores = scores.masked_fill(~attends(mask), -torch.inf)
        scores = scores if mask.dtype == torch.bool else scores + mask
        # A softmax over no key is 0/0, and its NaN gradient would reach other rows: replace such rows before and after.
        fully_masked = ~attends(mask).any(-1, keepdim=True)
        return scores.masked_fill(fully_masked, 0).softmax(-1).masked_fill(fully_masked, 0)


def attention_gradients(
    grad_y: Float[Tensor, "batch heads queries head_dim"], v: Float[Tensor, "batch kv_heads keys head_dim"]
) -> Float[Tensor, "batch heads queries keys"]:
    """Computes the gradient of a scalar with respect to attention weights that were never stored.

    y = A v, so dA = dy v^T, for any rows of y.

    Args:
        grad_y: The scalar's gradient with respect to the outputs of the heads, before `out_proj`.
        v: The values; kv_heads divides heads.

    Returns:
        The gradient with respect to each weight, in the dtype of the arguments.
    """
    return einsum(group_heads(grad_y, v), v, "b g r q d, b g k d -> b g r q k").flatten(1, 2)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float, backend: Backend
) -> Tensor:
    """Runs `torch.nn.functional.scaled_dot_product_attention`, with grouped heads, on the kernel of the given name.

    With "auto", half-precision training on a CPU is computed in float32, where the backward pass is several times as
    fast.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, kv_heads, keys, head_dim); kv_heads divides heads.
        v: Values, shaped like the keys.
        mask: Boolean (True = may attend), or float (added to the scores).
        is_causal: SDPA's flag, which aligns to the upper left corner: only for as many queries as keys.
        dropout: Probability of dropping an attention weight.
        backend: Any but "explicit".

    Raises:
        UserError: The kernel is not available for these tensors.
    """
    if backend == "auto" and q.device.type == "cpu" and q.dtype.itemsize == 2 and q.requires_grad:
        with torch.autocast("cpu", enabled=False):
            return fused_attention(q.float(), k.float(), v.float(), mask, is_causal, dropout, backend).to(q.dtype)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=q.shape[1] != k.shape[1])

    if mask is not None and mask.dtype != torch.bool:
        # Large float32 values must not become -inf in half precision, which would mask the key.
        limits = torch.finfo(q.dtype)
        mask = mask.clamp(limits.min, limits.max).where(attends(mask), -torch.inf).to(q.dtype)
    if backend == "auto":
        return attend()
    try:
        with sdpa_kernel(KERNELS[backend]):
            return attend()
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise UserError(
            f"backend {backend!r} cannot run here: PyTorch {torch.__version__} has no such kernel for {q.dtype} on "
            f"{q.device.type} with head_dim {q.shape[-1]}, {'no mask' if mask is None else f'a {mask.dtype} mask'} and "
            f"dropout {dropout}. Use 'auto', or 'math', which always runs."
        ) from None


def group_heads(x: Tensor, k: Tensor) -> Tensor:
    """Splits the head axis of x into (key/value heads of k, query heads per key/value head)."""
    return rearrange(x, "b (g r) ... -> b g r ...", g=k.shape[1])
