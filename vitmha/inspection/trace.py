"""One traced pass of a model: everything that the maps, the head metrics and the page need of an image."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.attention import attention_probabilities
from vitmha.inspection.adapters import get_attention_spec, observe_attention
from vitmha.inspection.record import value_lengths
from vitmha.models.vit import VisionTransformer


class LayerTrace(NamedTuple):
    """The heads of one attention module."""

    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys head_dim"]
    y: Float[Tensor, "batch heads queries head_dim"]
    """Output of the heads, before `out_proj`."""
    grad_y: Float[Tensor, "batch heads queries head_dim"]
    """Gradient of the target with respect to y."""

    @property
    def weights(self) -> Float[Tensor, "batch heads queries keys"]:
        """The attention weights, computed anew on each access."""
        return attention_probabilities(self.q, self.k)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one forward and one backward pass compute; all tensors are detached."""

    logits: Float[Tensor, "batch classes"]
    """Output of the model."""
    blocks: list[LayerTrace]
    """The blocks that have heads, first to last."""
    layers: list[int]
    """The index of each of these blocks."""
    pooling: LayerTrace | None
    """The attention pooling, if the model has one."""


def trace(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    target: Callable[[Tensor], Tensor],
) -> Trace:
    """Runs the model once, forward and backward, and returns what happened in its attention.

    Args:
        model: In eval mode, not compiled; it may be frozen.
        images: Normalized.
        target: Maps the logits to the scalar whose gradient is computed.

    Raises:
        RuntimeError: A target that does not depend on the logits.
    """
    with torch.enable_grad():
        traced, logits = traced_forward(model, images)
        scalar = target(logits)
        if not scalar.requires_grad:
            raise RuntimeError("The target has no gradient: compute it from the logits passed to it.")
        grads = torch.autograd.grad(scalar, [y for *_, y in traced], allow_unused=True)
    if all(grad is None for grad in grads):
        raise RuntimeError("The target does not depend on the model's attention: compute it from the logits.")
    blocks = [
        LayerTrace(q, k, v, y.detach(), torch.zeros_like(y) if grad is None else grad)
        for (q, k, v, y), grad in zip(traced, grads, strict=True)
    ]
    pooling = None if model.attn_pool is None else blocks.pop()
    return Trace(logits=logits.detach(), blocks=blocks, layers=_layers_with_heads(model), pooling=pooling)


def traced_forward(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Float[Tensor, "batch classes"]]:
    """Returns (q, k, v, y) of the heads of every block that has heads, then of the attention pooling; and the logits.

    The outputs y are in the graph, which starts there in a frozen model; q, k and v are detached.
    """
    traced: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, *_: object) -> None:
        assert y is not None  # vitmha's attention always passes it
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        traced.append((q.detach(), k.detach(), v.detach(), y))

    with observe_attention(model, _layers_with_heads(model), lambda _layer, *tensors: keep(*tensors)):
        pooling: Any = model.attn_pool
        if pooling is not None:
            pooling.attn.attention_hook = keep
        try:
            logits = model(images)
        finally:
            if pooling is not None:
                pooling.attn.attention_hook = None
    return traced, logits


def _layers_with_heads(model: VisionTransformer) -> list[int]:
    return [layer for layer, count in enumerate(get_attention_spec(model).num_heads) if count]


def class_target(model: VisionTransformer, classes: Sequence[int] | None = None) -> Callable[[Tensor], Tensor]:
    """Returns a target for `trace` and `relevance`: the sum over the images of the logit of each image's class.

    Args:
        model: Without a classification head, the target is the norm of the features.
        classes: Class index of each image; default: the predicted one.
    """
    if not model.config.num_classes:
        return lambda features: features.norm(dim=-1).sum()
    if classes is None:
        return lambda logits: logits.max(1).values.sum()
    return lambda logits: logits.gather(1, torch.tensor(list(classes), device=logits.device)[:, None]).sum()


def traced_value_norms(model: VisionTransformer, trace: Trace, index: int) -> Float[Tensor, "batch heads keys"]:
    """Returns `|v_j W_out|` of the heads of `trace.blocks[index]`."""
    block = trace.blocks[index]
    out_proj = get_attention_spec(model).out_projs[trace.layers[index]]
    return value_lengths(block.v, out_proj.weight.detach(), block.q.shape[1])
