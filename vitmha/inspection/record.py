"""Recording the attention weights of a model while it runs, with its fused kernel on.

Letters in the patterns: b batch, k keys, g key/value heads, r query heads on each, d e head_dim, c embed_dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.attention import attention_gradients, attention_probabilities, mask_rows, query_rows
from vitmha.errors import UserError
from vitmha.inspection.adapters import AttentionSpec, get_attention_spec, observe_attention
from vitmha.models.config import TokenLayout
from vitmha.models.vit import Block, VisionTransformer

Queries = Literal["cls", "distillation", "pooled", "registers", "patches", "all"] | Sequence[int]


@dataclass
class RecordedAttention:
    """What `record_attention` saw in the last forward pass."""

    spec: AttentionSpec
    """Where the model's attention is."""
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
    with_norms: bool
    """Whether `value_norms` can be asked for."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)

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

    @property
    def value_norms(self) -> list[Float[Tensor, "batch heads keys"]]:
        """For each recorded layer the length of what each key adds to a token that attends to it alone: |v_j W_out|.

        Raises:
            RuntimeError: Recorded without `value_norms=True`, or no forward pass.
        """
        if not self.with_norms:
            raise RuntimeError("No norms of values were kept: give record_attention value_norms=True.")
        _ = self.maps  # each layer was seen
        return [self.norms[layer] for layer in self.layers]

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
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> None:
        """Keeps the rows asked for; a `Watcher`."""
        num_tokens, heads, num_heads = q.shape[2], self.heads, q.shape[1]
        if num_tokens != self.layout.num_tokens:
            raise UserError(
                f"The layout has {self.layout.num_tokens} tokens, layer {layer} saw {num_tokens}: with patch_dropout, "
                "record in eval mode."
            )
        out_proj = self.spec.out_projs[layer].weight.detach()
        if heads is not None:
            group = q.shape[1] // k.shape[1]
            served = [head // group for head in heads]
            q, k, v = q[:, heads], k[:, served], v[:, served]
            out_proj = out_proj.unflatten(1, (num_heads, -1))[:, heads].flatten(1)
            mask = mask[:, heads] if mask is not None and mask.shape[1] > 1 else mask
        rows = _rows_of(self.queries, self.layout)
        if mask is not None or is_causal:
            mask = mask_rows(mask, is_causal, query_rows(rows, num_tokens, q.device), num_tokens, num_tokens)
        with torch.no_grad():
            weights = attention_probabilities(q[:, :, rows], k, mask)
            self.seen[layer] = weights.mean(2, keepdim=True) if self.queries == "pooled" else weights
            if self.with_norms:
                self.norms[layer] = value_lengths(v, out_proj, q.shape[1])
        if self.with_gradients:
            if not torch.is_grad_enabled():
                raise RuntimeError("Gradients of the maps are to be recorded: run the model with gradients enabled.")
            assert y is not None  # `observe_attention` was told of the gradients
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
    value_norms: bool = False,
) -> Iterator[RecordedAttention]:
    """Records the attention of chosen layers, heads and query rows in every forward pass of the block.

    The output of the model is the same, bit for bit: the fused kernel computes it, and the weights are recomputed
    beside it, from the same queries and keys. A second forward pass takes the place of the first.

    Models of others stay as they are. They are watched where they call PyTorch's `scaled_dot_product_attention`, which
    is replaced for the whole process inside the block: let no other thread run such a model meanwhile.

    Args:
        model: A `VisionTransformer`, compiled or not; or timm's, torchvision's, or Hugging Face's ViT, DeiT, DINOv2 or
            DINOv3, not compiled.
        layers: Blocks by number from 0; all that have heads by default.
        heads: Heads by number from 0; all by default.
        queries: Query rows: "cls" the class token; "pooled" the mean over the rows of all patches, which is what a
            model without a class token reads; "distillation"; "registers"; "patches"; "all"; or token numbers.
        gradients: Whether to keep what `RecordedAttention.gradients` needs, the graph of the pass among it; for a model
            that is not compiled, frozen or not.
        value_norms: Whether to record `RecordedAttention.value_norms` too.

    Yields:
        The recorder; read its `maps` after the forward pass, inside the block or behind it.

    Raises:
        UserError: A model of another kind; layers, heads or query rows that do not exist; gradients of a compiled
            model or of "pooled" rows.
        RuntimeError: The model is being recorded already; or, at the end of the block, a recorded layer saw no forward
            pass or a row does not sum to 1.
    """
    spec = get_attention_spec(model)
    layout = spec.layout
    chosen = [i for i, count in enumerate(spec.num_heads) if count] if layers is None else list(layers)
    _check_numbers("layers", chosen, len(spec.attentions))
    if empty := [layer for layer in chosen if not spec.num_heads[layer]]:
        raise UserError(f"layers {empty} have lost all of their heads: leave them out.")
    if heads is not None:
        _check_numbers("heads", heads, min(spec.num_heads[layer] for layer in chosen))
    query_rows(_rows_of(queries, layout), layout.num_tokens, torch.device("cpu"))
    _check_mode(model, spec, chosen, gradients, queries)
    recorded = RecordedAttention(
        spec, layout, chosen, None if heads is None else list(heads), queries, gradients, value_norms
    )

    def resize(layout: TokenLayout) -> None:
        recorded.layout = layout

    with observe_attention(model, chosen, recorded.observe, resize, gradients):
        yield recorded
    if not spec.is_ours and not recorded.seen:
        raise RuntimeError(
            f"The model ran no scaled_dot_product_attention, or did not run: run {type(model).__name__}, the very one "
            "that was given, inside the `with` block, with its fused attention on (timm.layers.set_fused_attn(True) "
            'before the model is made; attn_implementation="sdpa" of Hugging Face).'
        )
    errors = torch.stack([(weights.sum(-1) - 1).abs().max() for weights in recorded.maps])
    for layer, error in zip(chosen, errors.tolist(), strict=True):
        if not error < 1e-3:
            raise RuntimeError(
                f"Attention rows of layer {layer} do not sum to 1 (off by up to {error:.3g}): "
                "the model computes NaN, or another attention than the recorder."
            )


def _check_mode(
    model: nn.Module, spec: AttentionSpec, layers: Sequence[int], gradients: bool, queries: Queries
) -> None:
    """Refuses what cannot be recorded in the state that the model is in."""
    vit = getattr(model, "_orig_mod", model)
    is_compiled = vit is not model or vit._compiled_call_impl is not None
    if is_compiled and not spec.is_ours:
        raise UserError("A compiled model of another package is not seen into: record its original.")
    if gradients and queries == "pooled":
        raise UserError("queries='pooled' gives means, which have no gradient of their own: take 'patches'.")
    if gradients and is_compiled:
        raise UserError("gradients=True needs a model that is not compiled: record before `compile`, or its original.")
    blocks = vit.blocks if isinstance(vit, VisionTransformer) and vit.training else None
    if blocks is not None and any(cast(Block, blocks[layer]).drop_path.rate for layer in layers):
        raise UserError("With drop_path, a block in training runs for a part of the pictures: record in eval mode.")


def value_lengths(
    v: Float[Tensor, "batch kv_heads keys head_dim"], out_proj: Float[Tensor, "embed features"], num_heads: int
) -> Float[Tensor, "batch heads keys"]:
    """|v_j W_out| of each head, without the vectors themselves: v_j (W W^T) v_j^T is its square.

    Args:
        v: Values.
        out_proj: The weight of the projection behind the heads.
        num_heads: Query heads.
    """
    weight = rearrange(out_proj.float(), "c (g r d) -> g r c d", g=v.shape[1], r=num_heads // v.shape[1])
    with torch.autocast(v.device.type, enabled=False):
        products = einsum(weight, weight, "g r c d, g r c e -> g r d e")
        squares = einsum(v.float(), products, v.float(), "b g k d, g r d e, b g k e -> b g r k")
    return squares.clamp_min(0).sqrt().flatten(1, 2)


def _rows_of(queries: Queries, layout: TokenLayout) -> slice | list[int]:
    if not isinstance(queries, str):
        return list(queries)
    if queries == "cls" and not layout.num_class_tokens:
        raise UserError("queries='cls' needs a class token and the model has none: take 'pooled'.")
    if queries == "registers" and not layout.num_registers:
        raise UserError("queries='registers' needs register tokens and the model has none.")
    if queries == "distillation" and not layout.num_distillation_tokens:
        raise UserError("queries='distillation' needs a distillation token and the model has none.")
    named = {
        "cls": slice(0, 1),
        "distillation": layout.distillation,
        "pooled": layout.patches,
        "registers": layout.registers,
        "patches": layout.patches,
        "all": slice(None),
    }
    if queries not in named:
        raise UserError(f"queries must be one of {', '.join(named)} or token numbers, got {queries!r}.")
    return named[queries]


def _check_numbers(name: str, numbers: Sequence[int], count: int) -> None:
    if not numbers or not all(0 <= number < count for number in numbers):
        raise UserError(f"{name} must be numbers in [0, {count}), got {list(numbers)}.")
