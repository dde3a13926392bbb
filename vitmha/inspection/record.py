"""Recording the attention weights of a model while it runs, with its fused kernel on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.attention import MultiHeadAttention, attention_gradients, attention_probabilities, mask_rows, query_rows
from vitmha.vit import Block, TokenLayout, VisionTransformer

Queries = Literal["cls", "distillation", "pooled", "registers", "patches", "all"] | Sequence[int]


@dataclass
class RecordedAttention:
    """What `record_attention` saw in the last forward pass."""

    layout: TokenLayout
    """Which token, and so which query row and key column, is what."""
    layers: list[int]
    """The blocks recorded."""
    heads: list[int] | None
    """The heads recorded in each block; all where None."""
    queries: Queries
    """The query rows recorded."""
    with_gradients: bool
    """Whether `gradients` can be asked for."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def maps(self) -> list[Float[Tensor, "batch heads queries keys"]]:
        """One tensor per recorded layer: float32, before dropout, each row summing to 1.

        Raises:
            RuntimeError: No forward pass has gone through every recorded layer.
        """
        missing = [layer for layer in self.layers if layer not in self.seen]
        if missing:
            raise RuntimeError(
                f"No attention was seen in layers {missing}: run the model, the very one that was given to "
                "record_attention, inside the `with` block."
            )
        return [self.seen[layer] for layer in self.layers]

    def gradients(self, target: Float[Tensor, ""]) -> list[Float[Tensor, "batch heads queries keys"]]:
        """The gradient of a scalar with respect to each of the maps, which the forward pass has never stored.

        Args:
            target: Anything computed from the model's output, such as the sum of a class's logits. Its graph is kept,
                and the gradients of parameters are left alone.

        Returns:
            One tensor per recorded layer, of the shape of its map.

        Raises:
            RuntimeError: Recorded without `gradients=True`, or the target does not come from the recorded pass.
        """
        if not self.with_gradients:
            raise RuntimeError("Nothing was kept for gradients: give record_attention gradients=True.")
        _ = self.maps  # each layer was seen
        outputs, values = zip(*(self.values[layer] for layer in self.layers), strict=True)
        if not target.requires_grad:
            raise RuntimeError("The target has no gradient: compute it from the recorded pass, with gradients enabled.")
        found = torch.autograd.grad(target, outputs, retain_graph=True, allow_unused=True)
        if any(gradient is None for gradient in found):
            raise RuntimeError("The target does not depend on the recorded pass: compute it from the model's output.")
        rows = _rows_of(self.queries, self.layout)
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            grad_ys = [gradient if self.heads is None else gradient[:, self.heads] for gradient in found]
            return [attention_gradients(dy[:, :, rows].float(), v) for dy, v in zip(grad_ys, values, strict=True)]

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, y: Tensor, mask: Tensor | None, is_causal: bool
    ) -> None:
        """Keeps the rows asked for; an `Observer` of `MultiHeadAttention`."""
        num_tokens, heads = q.shape[2], self.heads
        if num_tokens != self.layout.num_tokens:
            raise ValueError(
                f"The layout has {self.layout.num_tokens} tokens, layer {layer} saw {num_tokens}: with patch_dropout, "
                "record in eval mode."
            )
        if heads is not None:
            group = q.shape[1] // k.shape[1]
            served = [head // group for head in heads]
            q, k, v = q[:, heads], k[:, served], v[:, served]
            mask = mask[:, heads] if mask is not None and mask.shape[1] > 1 else mask
        rows = _rows_of(self.queries, self.layout)
        if mask is not None or is_causal:
            mask = mask_rows(mask, is_causal, query_rows(rows, num_tokens, q.device), num_tokens, num_tokens)
        with torch.no_grad():
            weights = attention_probabilities(q[:, :, rows], k, mask)
            self.seen[layer] = weights.mean(2, keepdim=True) if self.queries == "pooled" else weights
        if self.with_gradients:
            if not torch.is_grad_enabled():
                raise RuntimeError("Gradients of the maps are to be recorded: run the model with gradients enabled.")
            # A frozen model on plain pictures has no graph yet: it begins here.
            self.values[layer] = (y if y.requires_grad else y.requires_grad_(), v.detach().float())


@contextmanager
def record_attention(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Queries = "cls",
    *,
    gradients: bool = False,
) -> Iterator[RecordedAttention]:
    """Records the attention of chosen layers, heads and query rows in every forward pass of the block.

    The output of the model is the same, bit for bit: the fused kernel computes it, and the weights are recomputed
    beside it, from the same queries and keys. A second forward pass takes the place of the first.

    Args:
        model: A `VisionTransformer`, compiled or not.
        layers: Blocks by number from 0; all by default.
        heads: Heads by number from 0; all by default.
        queries: Query rows: "cls" the class token; "pooled" the mean over the rows of all patches, which is what a
            model without a class token reads; "distillation"; "registers"; "patches"; "all"; or token numbers.
        gradients: Whether to keep what `RecordedAttention.gradients` needs, the graph of the pass among it; for a model
            that is not compiled, frozen or not.

    Yields:
        The recorder; read its `maps` after the forward pass, inside the block or behind it.

    Raises:
        ValueError: A model of another kind; layers, heads or query rows that do not exist; gradients of a compiled
            model or of "pooled" rows.
        RuntimeError: The model is being recorded already; or, at the end of the block, a recorded layer saw no forward
            pass or a row does not sum to 1.
    """
    vit = getattr(model, "_orig_mod", model)
    if not isinstance(vit, VisionTransformer):
        raise ValueError(f"record_attention reads a VisionTransformer, got {type(vit).__name__}.")
    chosen = list(range(len(vit.blocks))) if layers is None else list(layers)
    _check_numbers("layers", chosen, len(vit.blocks))
    attentions = [cast(MultiHeadAttention, vit.blocks[layer].attn) for layer in chosen]
    if heads is not None:
        _check_numbers("heads", heads, min(attention.num_heads for attention in attentions))
    if any(attention.observer is not None for attention in attentions):
        raise RuntimeError("This model is being recorded already: ask for all rows and layers in one `with` block.")
    query_rows(_rows_of(queries, vit.layout), vit.layout.num_tokens, torch.device("cpu"))

    if vit.training and any(cast(Block, vit.blocks[layer]).drop_path.rate for layer in chosen):
        raise ValueError("With drop_path, a block in training runs for a part of the pictures: record in eval mode.")
    if gradients and queries == "pooled":
        raise ValueError("queries='pooled' gives means, which have no gradient of their own: take 'patches'.")
    if gradients and (vit is not model or vit._compiled_call_impl is not None):
        raise ValueError("gradients=True needs a model that is not compiled: record before `compile`, or its original.")
    recorded = RecordedAttention(vit.layout, chosen, None if heads is None else list(heads), queries, gradients)
    try:
        for layer, attention in zip(chosen, attentions, strict=True):
            attention.observer = partial(recorded.observe, layer)
        yield recorded
    finally:
        for attention in attentions:
            attention.observer = None
    errors = torch.stack([(weights.sum(-1) - 1).abs().max() for weights in recorded.maps])
    for layer, error in zip(chosen, errors.tolist(), strict=True):
        if not error < 1e-3:
            raise RuntimeError(
                f"Attention rows of layer {layer} do not sum to 1 (off by up to {error:.3g}): "
                "the model computes NaN, or another attention than the recorder."
            )


def _rows_of(queries: Queries, layout: TokenLayout) -> slice | list[int]:
    if not isinstance(queries, str):
        return list(queries)
    if queries == "cls" and not layout.num_class_tokens:
        raise ValueError("queries='cls' needs a class token and the model has none: take 'pooled'.")
    if queries == "registers" and not layout.num_registers:
        raise ValueError("queries='registers' needs register tokens and the model has none.")
    if queries == "distillation" and not layout.num_distillation_tokens:
        raise ValueError("queries='distillation' needs a distillation token and the model has none.")
    named = {
        "cls": slice(0, 1),
        "distillation": layout.distillation,
        "pooled": layout.patches,
        "registers": layout.registers,
        "patches": layout.patches,
        "all": slice(None),
    }
    if queries not in named:
        raise ValueError(f"queries must be one of {', '.join(named)} or token numbers, got {queries!r}.")
    return named[queries]


def _check_numbers(name: str, numbers: Sequence[int], count: int) -> None:
    if not numbers or not all(0 <= number < count for number in numbers):
        raise ValueError(f"{name} must be numbers in [0, {count}), got {list(numbers)}.")
