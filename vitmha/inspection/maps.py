"""Maps derived from attention: weighted by values or gradients, propagated through all layers, compared."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from vitmha.attention import attention_gradients, attention_probabilities
from vitmha.errors import UserError
from vitmha.inspection.trace import LayerTrace, Trace, trace, traced_forward
from vitmha.models.vit import VisionTransformer

Fusion = Literal["mean", "max", "min"]


def value_weighted(
    weights: Float[Tensor, "batch heads queries keys"], value_norms: Float[Tensor, "batch heads keys"]
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns `|w_ij v_j W_out|`, the length of what each key adds to each query. It is 0 for a key whose value is 0.

    Args:
        weights: Attention weights.
        value_norms: `|v_j W_out|`, as in `RecordedAttention.value_norms`.

    Returns:
        Lengths; rows do not sum to 1.

    Source:
        Kobayashi et al. 2020 (arXiv 2004.10102), section 3.

    Example:
        >>> value_weighted(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[4.0, 0.0]]]))
        tensor([[[[1., 0.]]]])
    """
    return weights * value_norms[:, :, None]


def rollout(
    maps: Sequence[Float[Tensor, "batch _heads tokens tokens"]],
    queries: Sequence[int] | None = None,
    *,
    fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> Float[Tensor, "batch queries tokens"]:
    """Attention rollout: the product over the layers of (I + F_l) / 2, where F_l fuses the heads of layer l.

    It is computed from the last layer to the first; a few rows cost layers x tokens^2.

    Args:
        maps: The full map (all query rows) of every layer, first to last.
        queries: Token indices of the rows to return; default: all.
        fusion: How the heads of a layer are fused: the mean, or the maximum or minimum with rows rescaled to sum to 1.
        discard_ratio: Fraction in [0, 1) of the keys of each row of F_l, those with the least weight, that is set to 0.
            The identity is kept.
        start_layer: Index of the first layer of the product, since early layers can blur the result.

    Returns:
        For each row, how much each token at the input of start_layer contributes to it; rows sum to 1.

    Raises:
        UserError: A discard_ratio outside [0, 1), a layer that does not exist, or a row without any weight left.

    Source:
        Abnar and Zuidema 2020 (arXiv 2005.00928), section 3, which uses the mean and discards nothing.

    Example:
        >>> maps = [torch.full((1, 2, 4, 4), 0.25)] * 3  # uniform attention of 2 heads in 3 layers
        >>> rollout(maps, [0])
        tensor([[[0.3438, 0.2188, 0.2188, 0.2188]]])
    """
    if not 0 <= discard_ratio < 1:
        raise UserError(f"discard_ratio must be in [0, 1), got {discard_ratio}.")
    if not 0 <= start_layer < len(maps):
        raise UserError(f"start_layer must be in [0, {len(maps)}), got {start_layer}.")
    rows = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    rows = (rows if queries is None else rows[list(queries)]).expand(len(maps[0]), -1, -1)
    for layer in reversed(range(start_layer, len(maps))):
        rows = (rows + rows @ _fuse_heads(maps[layer], fusion, discard_ratio, layer)) / 2
    return rows


def _fuse_heads(maps: Tensor, fusion: Fusion, discard_ratio: float, layer: int) -> Tensor:
    """Returns one map for all heads of a layer; its rows sum to 1."""
    fused = maps.mean(1) if fusion == "mean" else maps.amax(1) if fusion == "max" else maps.amin(1)
    discarded = fused.topk(int(discard_ratio * fused.shape[-1]), dim=-1, largest=False).indices
    fused = fused.scatter(-1, discarded, 0)
    sums = fused.sum(-1, keepdim=True)
    if not (sums > 0).all():
        raise UserError(
            f"fusion {fusion!r} leaves no weight in some rows of layer {layer}, because no key is attended to by every "
            "head: use 'mean' or 'max'."
        )
    return fused / sums


def relevance(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    target: Callable[[Tensor], Tensor],
    *,
    start_layer: int = 0,
) -> Float[Tensor, "batch tokens"]:
    """Relevance of each token for a scalar: gradient times attention, propagated through the layers.

    R <- R + A R, starting from R = I, where A is the mean over the heads of (weights * gradient)+. Returned is the row
    of R that the classification head reads, minus its initial value: the row of the class token; with a distillation
    token the mean of both; with mean pooling the mean over the patches. With attention pooling the pooling's own map is
    the last factor. In addition to queries, keys and values, one layer's matrix is in memory at a time.

    Args:
        model: In eval mode, not compiled; it may be frozen.
        images: Normalized.
        target: Maps the logits to a scalar, for example `lambda logits: logits[:, 3].sum()`. For a sum over images,
            each image gets the relevance for its own term.
        start_layer: Index of the first layer of the product, since early layers can blur the result.

    Returns:
        Values of at least 0, not normalized; all 0 if the target does not depend on the attention.

    Raises:
        UserError: A layer that does not exist.
        RuntimeError: A target that does not depend on the logits.

    Source:
        Chefer et al. 2021 (arXiv 2103.15679), rules 5 and 6. The gradient is computed as dy v^T, so that no map is in
        the graph.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> relevance(model, torch.randn(2, 3, 32, 32), lambda logits: logits[:, 3].sum()).shape
        torch.Size([2, 17])
    """
    if not 0 <= start_layer < len(model.blocks):
        raise UserError(f"start_layer must be in [0, {len(model.blocks)}), got {start_layer}.")
    return traced_relevance(model, trace(model, images, target), start_layer)


def traced_relevance(model: VisionTransformer, traced: Trace, start_layer: int = 0) -> Float[Tensor, "batch tokens"]:
    """`relevance` for the target of a trace."""
    if traced.pooling is None:
        dtype = torch.promote_types(traced.logits.dtype, torch.float32)
        row = start = traced_readout_weights(model, traced).to(dtype)[:, None]
    else:
        row, start = _positive_contribution(traced.pooling), torch.zeros((), device=traced.logits.device)
    for layer, block in zip(reversed(traced.layers), reversed(traced.blocks), strict=True):
        if layer >= start_layer:
            row = row + row @ _positive_contribution(block)
    return (row - start)[:, 0]


def _positive_contribution(layer: LayerTrace) -> Float[Tensor, "batch queries keys"]:
    """Returns the mean over the heads of (weights * gradient)+."""
    with torch.no_grad():
        weights = layer.weights
        gradients = attention_gradients(layer.grad_y.to(weights.dtype), layer.v.to(weights.dtype))
        return (weights * gradients).clamp_min(0).mean(1)


def readout_weights(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch tokens"]:
    """Returns the weight with which the classification head reads each token; each row sums to 1.

    With attention pooling these are the pooling's attention weights, the mean over its heads.
    """
    if model.attn_pool is None:
        return _pooled_readout(model, len(images), images.device)
    with torch.no_grad():
        q, k, *_ = traced_forward(model, images)[0][-1]
    return attention_probabilities(q, k).mean(1)[:, 0]


def traced_readout_weights(model: VisionTransformer, traced: Trace) -> Float[Tensor, "batch tokens"]:
    """`readout_weights` of the images of a trace."""
    if traced.pooling is None:
        return _pooled_readout(model, len(traced.logits), traced.logits.device)
    return traced.pooling.weights.mean(1)[:, 0]


def _pooled_readout(model: VisionTransformer, batch_size: int, device: torch.device) -> Float[Tensor, "batch tokens"]:
    row = torch.zeros(model.layout.num_tokens, device=device)
    row[model.pooled_tokens] = 1
    if model.config.pool == "cls_mean":  # half of the input is the class token, half the mean of the patches
        row[:] = 0
        row[0], row[model.layout.patches] = 1, 1 / model.layout.num_patches
    return (row / row.sum()).expand(batch_size, -1)


def js_divergence(first: Float[Tensor, "*axes keys"], second: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Returns the Jensen-Shannon divergence of attention rows in nats: 0 for equal rows, ln 2 for disjoint ones.

    Example:
        >>> js_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(0.6931)
    """
    entropy = torch.special.entr
    return (entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2).sum(-1).clamp_min(0)


def head_divergences(
    first: Float[Tensor, "batch first_heads queries keys"], second: Float[Tensor, "batch second_heads queries keys"]
) -> Float[Tensor, "first_heads second_heads"]:
    """Returns `js_divergence` of every pair of heads, the mean over images and rows.

    One head of the first is compared with all heads of the second at a time.
    """
    return torch.stack(
        [js_divergence(head[:, None].expand_as(second), second).mean((0, 2)) for head in first.unbind(1)]
    )


def mass_mask(weights: Float[Tensor, "*axes keys"], fraction: float = 0.6) -> Bool[Tensor, "*axes keys"]:
    """Returns the smallest set of keys that holds a fraction of each row's mass: DINO's segmentation of a head.

    Args:
        weights: At least 0; rows may have any sum above 0, for example the weights of the patches only.
        fraction: Fraction of the row's sum, in (0, 1].

    Source:
        Caron et al. 2021 (DINO, arXiv 2104.14294), figure 1, with 60 %.

    Example:
        >>> mass_mask(torch.tensor([0.1, 0.45, 0.25, 0.2]))
        tensor([False,  True,  True, False])
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction must be in (0, 1], got {fraction}.")
    values, order = weights.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    is_kept = before < fraction * values.sum(-1, keepdim=True)
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)


def quantize_rows(rows: Float[Tensor, "*axes keys"]) -> tuple[UInt8[Tensor, "*axes keys"], Float[Tensor, "*axes"]]:
    """Quantizes attention rows to 8 bits.

    Returns:
        255 * sqrt(weight / row maximum), rounded; and the maximum of each row.
    """
    maxima = rows.amax(-1)
    return (255 * (rows / maxima[..., None].clamp_min(1e-30)).sqrt()).round().byte(), maxima


def dequantize_rows(levels: UInt8[Tensor, "*axes keys"], maxima: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes keys"]:
    """Inverse of `quantize_rows`, up to rounding."""
    return (levels.float() / 255).square() * maxima[..., None]
