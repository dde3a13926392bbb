"""Maps made of attention: weighted by values or gradients, followed through all layers, compared."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from vitmha.attention import attention_gradients, attention_probabilities
from vitmha.errors import UserError
from vitmha.inspection.adapters import get_attention_spec, observe_attention
from vitmha.models.vit import VisionTransformer

Fusion = Literal["mean", "max", "min"]


def value_weighted(
    weights: Float[Tensor, "batch heads queries keys"], value_norms: Float[Tensor, "batch heads keys"]
) -> Float[Tensor, "batch heads queries keys"]:
    """How much each key really adds to each query: |w_ij v_j W_out|. A key with an empty value disappears.

    Args:
        weights: Attention weights.
        value_norms: As `RecordedAttention.value_norms` gives them.

    Returns:
        Lengths, not shares: rows sum to anything.

    Source:
        Kobayashi et al. 2020 (arXiv 2004.10102), section 3.
    """
    return weights * value_norms[:, :, None]


def rollout(
    maps: Sequence[Float[Tensor, "batch _heads tokens tokens"]],
    queries: Sequence[int] | None = None,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    start_layer: int = 0,
) -> Float[Tensor, "batch queries tokens"]:
    """Attention followed through the layers: the product over the layers of (I + F_l) / 2, with F_l the heads fused.

    Few rows cost layers x tokens^2, as a recursion from the last layer to the first.

    Args:
        maps: All rows of every layer, first to last.
        queries: The rows wanted; all by default.
        fusion: How the heads of a layer become one: their mean, or the greatest or least weight, scaled to sum to 1.
        discard: Share in [0, 1) of the keys of each row, the least attended, that F_l leaves out; the identity stays.
        start_layer: The first layer counted, since early layers can drown the rest.

    Returns:
        For each row where it comes from, at the input of start_layer: each sums to 1.

    Raises:
        UserError: A share outside [0, 1), a layer that does not exist, or a row that no head's weight is left in.

    Source:
        Abnar and Zuidema 2020 (arXiv 2005.00928), section 3; they take the mean and discard nothing.
    """
    if not 0 <= discard < 1:
        raise UserError(f"discard must lie in [0, 1), got {discard}.")
    if not 0 <= start_layer < len(maps):
        raise UserError(f"start_layer must lie in [0, {len(maps)}), got {start_layer}.")
    rows = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    rows = (rows if queries is None else rows[list(queries)]).expand(len(maps[0]), -1, -1)
    for layer in reversed(range(start_layer, len(maps))):
        rows = (rows + rows @ _fuse_heads(maps[layer], fusion, discard, layer)) / 2
    return rows


def _fuse_heads(maps: Tensor, fusion: Fusion, discard: float, layer: int) -> Tensor:
    """One map of all heads of a layer; its rows sum to 1."""
    fused = maps.mean(1) if fusion == "mean" else maps.amax(1) if fusion == "max" else maps.amin(1)
    dropped = fused.topk(int(discard * fused.shape[-1]), dim=-1, largest=False).indices
    fused = fused.scatter(-1, dropped, 0)
    sums = fused.sum(-1, keepdim=True)
    if not (sums > 0).all():
        raise UserError(
            f"fusion {fusion!r} leaves nothing in some rows of layer {layer}, where no key is attended by all heads: "
            "take 'mean' or 'max'."
        )
    return fused / sums


def relevance(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    target: Callable[[Tensor], Tensor],
    *,
    start_layer: int = 0,
) -> Float[Tensor, "batch tokens"]:
    """How much each token served a scalar: gradient times attention, followed through the layers.

    R <- R + A R from R = I, with A the mean over the heads of (weights * gradient)+; of R the row that the head of the
    model reads, without the token's own 1: that of the class token, the mean of both with a distillation token, the
    mean of the patches' without any; with attention pooling the pooling's own map comes last. It holds one layer's
    matrix at a time, beside queries, keys and values.

    Args:
        model: Frozen or not, not compiled, in eval mode.
        images: Normalised.
        target: From the logits a scalar, such as `lambda logits: logits[:, 3].sum()`. Pictures do not mix: of a sum,
            each picture gets the relevance of its own part.
        start_layer: The first layer counted, since early layers can drown the rest.

    Returns:
        At least 0, not normalised; all 0 where the target does not depend on attention.

    Raises:
        UserError: A layer that does not exist.
        RuntimeError: A target that does not come from the logits.

    Source:
        Chefer et al. 2021 (arXiv 2103.15679), rules 5 and 6. The gradient is dy v^T, so no map is ever in the graph.
    """
    if not 0 <= start_layer < len(model.blocks):
        raise UserError(f"start_layer must lie in [0, {len(model.blocks)}), got {start_layer}.")
    with torch.enable_grad():
        kept, logits = traced_forward(model, images)
        wanted = target(logits)
        if not wanted.requires_grad:
            raise RuntimeError("The target has no gradient: compute it from the logits that it is given.")
        found = torch.autograd.grad(wanted, [y for *_, y in kept], allow_unused=True)
    if all(gradient is None for gradient in found):
        raise RuntimeError("The target does not depend on the model's attention: compute it from the logits.")
    layers = [
        (q, k, v, torch.zeros_like(y) if gradient is None else gradient)
        for (q, k, v, y), gradient in zip(kept, found, strict=True)
    ]
    if model.attn_pool is None:
        row = start = readout_weights(model, images).to(torch.promote_types(logits.dtype, torch.float32))[:, None]
    else:
        row, start = _relevant(*layers.pop()), torch.zeros((), device=images.device)
    present = [layer for layer, attention in enumerate(model.attentions) if attention.num_heads]
    for layer, tensors in zip(reversed(present), reversed(layers), strict=True):
        if layer >= start_layer:
            row = row + row @ _relevant(*tensors)
    return (row - start)[:, 0]


def _relevant(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    grad_y: Float[Tensor, "batch heads queries head_dim"],
) -> Float[Tensor, "batch queries keys"]:
    with torch.no_grad():
        weights = attention_probabilities(q, k)
        return (weights * attention_gradients(grad_y.to(weights.dtype), v.to(weights.dtype))).clamp_min(0).mean(1)


def class_target(model: VisionTransformer, classes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """A target for `relevance`: the logit of each picture's class; without a head, the length of the features."""
    if not model.config.num_classes:
        return lambda features: features.norm(dim=-1).sum()
    return lambda logits: logits.gather(1, torch.tensor(list(classes), device=logits.device)[:, None]).sum()


def readout_weights(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch tokens"]:
    """How much the head reads each token of each picture; sums to 1. Attention pooling reads what it attends to."""
    if model.attn_pool is not None:
        with torch.no_grad():
            q, k, *_ = traced_forward(model, images)[0][-1]
        return attention_probabilities(q, k).mean(1)[:, 0]
    row = torch.zeros(model.layout.num_tokens, device=images.device)
    row[model.pooled_tokens] = 1
    if model.config.pool == "cls_mean":  # half of what it reads is the class token, half the mean of the patches
        row[:] = 0
        row[0], row[model.layout.patches] = 1, 1 / model.layout.num_patches
    return (row / row.sum()).expand(len(images), -1)


def traced_forward(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Float[Tensor, "batch classes"]]:
    """The queries, keys, values and outputs of the heads of every block that has any, then of the attention pooling.

    Outputs are in the graph, which begins there in a frozen model; queries, keys and values are not.
    """
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, *_: object) -> None:
        assert y is not None  # our models always show it
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        kept.append((q.detach(), k.detach(), v.detach(), y))

    present = [layer for layer, count in enumerate(get_attention_spec(model).num_heads) if count]
    with observe_attention(model, present, lambda _layer, *shown: keep(*shown)):
        pooling: Any = model.attn_pool
        if pooling is not None:
            pooling.attn.attention_hook = keep
        try:
            logits = model(images)
        finally:
            if pooling is not None:
                pooling.attn.attention_hook = None
    return kept, logits


def gradient_weighted(
    weights: Float[Tensor, "batch heads queries keys"], gradients: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads queries keys"]:
    """The part of each weight that raises a scalar: (weight * gradient)+, what `relevance` is made of."""
    return (weights * gradients).clamp_min(0)


def js_divergence(first: Float[Tensor, "*axes keys"], second: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Jensen-Shannon divergence of attention rows in nats: 0 where equal, ln 2 where they share no key."""
    entropy = torch.special.entr
    return (entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2).sum(-1).clamp_min(0)


def head_divergences(
    first: Float[Tensor, "batch first_heads queries keys"], second: Float[Tensor, "batch second_heads queries keys"]
) -> Float[Tensor, "first_heads second_heads"]:
    """Between all heads of two models, or of one with itself: the mean over pictures and rows of `js_divergence`.

    Holds one head of the first against all of the second at a time.
    """
    return torch.stack(
        [js_divergence(head[:, None].expand_as(second), second).mean((0, 2)) for head in first.unbind(1)]
    )


def mass_mask(weights: Float[Tensor, "*axes keys"], share: float = 0.6) -> Bool[Tensor, "*axes keys"]:
    """The fewest keys that hold a share of a row's mass: what DINO draws of a head as a segment.

    Args:
        weights: At least 0; rows may sum to anything above 0, such as those of the patches alone.
        share: Of the row's sum, in (0, 1].

    Source:
        Caron et al. 2021 (DINO, arXiv 2104.14294), figure 1: 60 %.
    """
    if not 0 < share <= 1:
        raise UserError(f"share must lie in (0, 1], got {share}.")
    values, order = weights.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    is_kept = before < share * values.sum(-1, keepdim=True)
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)


def quantize_rows(rows: Float[Tensor, "*axes keys"]) -> tuple[UInt8[Tensor, "*axes keys"], Float[Tensor, "*axes"]]:
    """Attention rows in a byte for each weight: the square root of its share of the row's greatest; and that."""
    tops = rows.amax(-1)
    return (255 * (rows / tops[..., None].clamp_min(1e-30)).sqrt()).round().byte(), tops


def dequantize_rows(levels: UInt8[Tensor, "*axes keys"], tops: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes keys"]:
    """What `quantize_rows` has kept of the rows."""
    return (levels.float() / 255).square() * tops[..., None]
