"""Records the attention weights of a model during its forward pass, while the fused kernel stays on.

Letters in the patterns: b batch, k keys, g key/value heads, r query heads per key/value head, d e head_dim,
c embed_dim.
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
    """The attention of the last forward pass inside `record_attention`."""

    spec: AttentionSpec
    """The attention modules of the model."""
    layout: TokenLayout
    """The order of the tokens, and so of the query rows and key columns. For models of other packages the grid is that
    of the last pass. If the patches do not divide the image, it covers what the model reads: the image padded at the
    right and at the bottom with timm's `dynamic_img_pad`, otherwise the image without the rest there."""
    layers: list[int]
    """Indices of the recorded blocks."""
    heads: list[int] | None
    """Indices of the recorded heads of each block; None for all heads."""
    queries: Queries
    """The recorded query rows."""
    with_gradients: bool
    """Whether `gradients` can be called."""
    with_norms: bool
    """Whether `value_norms` can be read."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)

    @property
    def maps(self) -> list[Float[Tensor, "batch heads queries keys"]]:
        """One tensor per recorded layer: float32 weights before dropout; each row sums to 1.

        Raises:
            RuntimeError: No forward pass has run through every recorded layer.
        """
        self._check_complete()
        return [self.recorded[layer] for layer in self.layers]

    @property
    def value_norms(self) -> list[Float[Tensor, "batch heads keys"]]:
        """One tensor per recorded layer: `|v_j W_out|`, what key j adds to a token that attends only to it.

        Raises:
            RuntimeError: Recorded without `value_norms=True`, or no forward pass.
        """
        if not self.with_norms:
            raise RuntimeError("No value norms were recorded: pass value_norms=True to record_attention.")
        self._check_complete()
        return [self.norms[layer] for layer in self.layers]

    def gradients(self, target: Float[Tensor, ""]) -> list[Float[Tensor, "batch heads queries keys"]]:
        """Returns the gradient of a scalar with respect to each map, although the maps are not in the graph.

        Args:
            target: A scalar computed from the model's output, such as the sum of one class's logits. Its graph is
                retained, and `.grad` of the parameters does not change.

        Returns:
            One tensor per recorded layer, with the shape of its map.

        Raises:
            RuntimeError: Recorded without `gradients=True`, or the target does not depend on the recorded pass.
        """
        if not self.with_gradients:
            raise RuntimeError("Nothing was recorded for gradients: pass gradients=True to record_attention.")
        self._check_complete()
        outputs, values = zip(*(self.values[layer] for layer in self.layers), strict=True)
        if not target.requires_grad:
            raise RuntimeError("The target has no gradient: compute it from the recorded pass, with gradients enabled.")
        grads = torch.autograd.grad(target, outputs, retain_graph=True, allow_unused=True)
        if any(grad is None for grad in grads):
            raise RuntimeError("The target does not depend on the recorded pass: compute it from the model's output.")
        rows = _row_index(self.queries, self.layout)
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            grad_ys = [grad if self.heads is None else grad[:, self.heads] for grad in grads]
            return [attention_gradients(dy[:, :, rows].float(), v) for dy, v in zip(grad_ys, values, strict=True)]

    def resize(self, layout: TokenLayout) -> None:
        """Starts a pass of images whose patches form another grid, or the same; no map of an earlier pass remains.

        Raises:
            UserError: The query rows are out of range.
        """
        query_rows(_row_index(self.queries, layout), layout.num_tokens, torch.device("cpu"))
        self.layout = layout
        for record in (self.recorded, self.values, self.norms):
            record.clear()

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> None:
        """Records the chosen heads and query rows of one layer; a `LayerHook`."""
        num_tokens, heads, num_heads = q.shape[2], self.heads, q.shape[1]
        if num_tokens != self.layout.num_tokens:
            prefix, (height, width) = self.layout.num_prefix_tokens, self.layout.grid_size
            reason = "the model adds or removes tokens between its patch embedding and this layer."
            if self.spec.attentions[layer].training:
                reason = "patch dropout removes tokens in training; record in eval mode."
            raise UserError(
                f"Expected {self.layout.num_tokens} tokens in layer {layer} ({prefix} and those of {height} x {width} "
                f"patches), got {num_tokens}: {reason}"
            )
        out_proj = self.spec.out_projs[layer].weight.detach()
        if heads is not None:
            group = q.shape[1] // k.shape[1]
            kv_heads = [head // group for head in heads]
            q, k, v = q[:, heads], k[:, kv_heads], v[:, kv_heads]
            out_proj = out_proj.unflatten(1, (num_heads, -1))[:, heads].flatten(1)
            mask = mask[:, heads] if mask is not None and mask.shape[1] > 1 else mask
        rows = _row_index(self.queries, self.layout)
        if mask is not None or is_causal:
            mask = mask_rows(mask, is_causal, query_rows(rows, num_tokens, q.device), num_tokens, num_tokens)
        with torch.no_grad():
            weights = attention_probabilities(q[:, :, rows], k, mask)
            self.recorded[layer] = weights.mean(2, keepdim=True) if self.queries == "pooled" else weights
            if self.with_norms:
                self.norms[layer] = value_lengths(v, out_proj, q.shape[1])
        if self.with_gradients:
            if not torch.is_grad_enabled():
                raise RuntimeError("gradients=True needs autograd: run the model with gradients enabled.")
            assert y is not None  # `observe_attention` was called with gradients=True
            # With a frozen model and plain images there is no graph yet: it starts here.
            self.values[layer] = (y if y.requires_grad else y.requires_grad_(), v.detach().float())

    def _check_complete(self) -> None:
        missing = [layer for layer in self.layers if layer not in self.recorded]
        if missing:
            raise RuntimeError(
                f"No attention was recorded in layers {missing}: run the same model object that was passed to "
                "record_attention, inside the `with` block; if only some of its layers run, pass these as `layers`."
            )


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
    """Records the attention of the chosen layers, heads and query rows in every forward pass of the `with` block.

    The model's output stays the same, bit for bit: the fused kernel computes it, and the weights are recomputed
    separately from the same queries and keys. A second forward pass replaces the record of the first.

    Models of timm, torchvision and Hugging Face are not modified. Their calls of PyTorch's
    `scaled_dot_product_attention` are observed; it is replaced for the whole process inside the block, so no other
    thread may run such a model meanwhile. Their patch grid is that of the images, whichever method embeds them.

    Args:
        model: A `VisionTransformer`, compiled or not; or a ViT of timm or torchvision, or Hugging Face's ViT, DeiT,
            DINOv2 or DINOv3, not compiled.
        layers: Block indices, from 0; default: all blocks that have heads.
        heads: Head indices, from 0; default: all heads.
        queries: Query rows: "cls" the class token; "pooled" the mean over the rows of all patches, which is what a
            mean-pooled model reads; "distillation"; "registers"; "patches"; "all"; or token indices.
        gradients: Whether to keep what `RecordedAttention.gradients` needs, including the autograd graph. Needs a model
            that is not compiled; it may be frozen.
        value_norms: Whether to record `RecordedAttention.value_norms` too.

    Yields:
        The recorder. Read its `maps` after the forward pass, inside or after the block.

    Raises:
        UserError: An unsupported model; layers, heads or query rows out of range; gradients of a compiled model or of
            "pooled" rows; or, in the block, tokens of which the patch grid is unknown.
        RuntimeError: The model is already being recorded; or, at the end of the block, a layer saw no forward pass or a
            row does not sum to 1.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> with record_attention(model) as recorded:
        ...     logits = model(torch.randn(2, 3, 32, 32))
        >>> recorded.maps[0].shape  # (batch, heads, queries, keys)
        torch.Size([2, 3, 1, 17])
    """
    spec = get_attention_spec(model)
    layout = spec.layout
    chosen = [i for i, count in enumerate(spec.num_heads) if count] if layers is None else list(layers)
    _check_indices("layers", chosen, len(spec.attentions))
    if empty := [layer for layer in chosen if not spec.num_heads[layer]]:
        raise UserError(f"layers {empty} have no heads, all were pruned: remove them from layers.")
    if heads is not None:
        _check_indices("heads", heads, min(spec.num_heads[layer] for layer in chosen))
    rows = _row_index(queries, layout)
    if spec.is_vitmha:  # in other models the number of tokens may depend on the images
        query_rows(rows, layout.num_tokens, torch.device("cpu"))
    _check_mode(model, spec, chosen, gradients, queries)
    recorded = RecordedAttention(
        spec, layout, chosen, None if heads is None else list(heads), queries, gradients, value_norms
    )
    with observe_attention(model, chosen, recorded.observe, recorded.resize, gradients):
        yield recorded
    if not spec.is_vitmha and not recorded.recorded:
        raise RuntimeError(
            f"No call of scaled_dot_product_attention was observed: run the same {type(model).__name__} object inside "
            "the `with` block, with its fused attention on (timm.layers.set_fused_attn(True) before the model is "
            'created; attn_implementation="sdpa" for Hugging Face).'
        )
    errors = torch.stack([(weights.sum(-1) - 1).abs().max() for weights in recorded.maps])
    for layer, error in zip(chosen, errors.tolist(), strict=True):
        if not error < 1e-3:
            raise RuntimeError(
                f"Attention rows of layer {layer} do not sum to 1 (off by up to {error:.3g}): "
                "the model computes NaN, or its attention differs from softmax(q k^T)."
            )


def _check_mode(
    model: nn.Module, spec: AttentionSpec, layers: Sequence[int], gradients: bool, queries: Queries
) -> None:
    """Raises UserError for what cannot be recorded in the current state of the model."""
    vit = getattr(model, "_orig_mod", model)
    is_compiled = vit is not model or vit._compiled_call_impl is not None
    if is_compiled and not spec.is_vitmha:
        raise UserError("A compiled model of another package cannot be recorded: record the model before `compile`.")
    if gradients and queries == "pooled":
        raise UserError("queries='pooled' records means, which have no gradient of their own: use 'patches'.")
    if gradients and is_compiled:
        raise UserError("gradients=True needs a model that is not compiled: record the model before `compile`.")
    blocks = vit.blocks if isinstance(vit, VisionTransformer) and vit.training else None
    if blocks is not None and any(cast(Block, blocks[layer]).drop_path.rate for layer in layers):
        raise UserError("With drop_path, a block in training runs for a part of the images: record in eval mode.")


def value_lengths(
    v: Float[Tensor, "batch kv_heads keys head_dim"], out_proj: Float[Tensor, "embed features"], num_heads: int
) -> Float[Tensor, "batch heads keys"]:
    """Returns `|v_j W_out|` of each head without computing the vectors: its square is v_j (W W^T) v_j^T.

    Args:
        v: Values.
        out_proj: The weight of the output projection.
        num_heads: Query heads.
    """
    weight = rearrange(out_proj.float(), "c (g r d) -> g r c d", g=v.shape[1], r=num_heads // v.shape[1])
    with torch.autocast(v.device.type, enabled=False):
        products = einsum(weight, weight, "g r c d, g r c e -> g r d e")
        squares = einsum(v.float(), products, v.float(), "b g k d, g r d e, b g k e -> b g r k")
    return squares.clamp_min(0).sqrt().flatten(1, 2)


def _row_index(queries: Queries, layout: TokenLayout) -> slice | list[int]:
    if not isinstance(queries, str):
        return list(queries)
    if queries == "cls" and not layout.num_class_tokens:
        raise UserError("queries='cls' needs a class token and the model has none: use 'pooled'.")
    if queries == "registers" and not layout.num_registers:
        raise UserError("queries='registers' needs register tokens and the model has none.")
    if queries == "distillation" and not layout.num_distillation_tokens:
        raise UserError("queries='distillation' needs a distillation token and the model has none.")
    slices = {
        "cls": slice(0, 1),
        "distillation": layout.distillation,
        "pooled": layout.patches,
        "registers": layout.registers,
        "patches": layout.patches,
        "all": slice(None),
    }
    if queries not in slices:
        raise UserError(f"queries must be one of {', '.join(slices)} or token indices, got {queries!r}.")
    return slices[queries]


def _check_indices(name: str, indices: Sequence[int], count: int) -> None:
    if not indices or not all(0 <= index < count for index in indices):
        raise UserError(f"{name} must be indices in [0, {count}), got {list(indices)}.")
