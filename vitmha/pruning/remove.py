"""Masks attention heads, or prunes them.

Letters in the patterns: b batch, h heads, n tokens, d head_dim, e embed_dim.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from vitmha.errors import UserError
from vitmha.models.vit import VisionTransformer

# From layer to its current head indices. In signatures, _heads may differ from layer to layer.
Heads = Mapping[int, Collection[int]]


@contextmanager
def mask_heads(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> Iterator[None]:
    """Replaces the outputs of heads by zeros, or by their means, inside the block; no weight is changed.

    Args:
        model: On any device.
        heads: From layer to the indices of the heads to mask.
        means: For mean ablation, as `mean_outputs` returns them; zeros if not given.

    Raises:
        UserError: A head that does not exist.

    Example:
        >>> with mask_heads(model, {0: [1, 3]}):  # doctest: +SKIP
        ...     logits = model(images)
    """
    _check(model, heads)
    with ExitStack() as stack:
        for layer, indices in heads.items():
            attention = model.attentions[layer]
            is_masked = torch.zeros(attention.num_heads, 1, dtype=torch.bool, device=attention.out_proj.weight.device)
            is_masked[list(indices)] = True
            value = is_masked.new_zeros((), dtype=torch.float32) if means is None else means[layer]
            stack.enter_context(
                attention.out_proj.register_forward_pre_hook(partial(_replace_outputs, is_masked, value))
            )
        yield


def _replace_outputs(is_masked: Tensor, value: Tensor, _: Any, args: tuple[Tensor]) -> Tensor:
    heads = rearrange(args[0], "b n (h d) -> b n h d", h=len(is_masked))
    return rearrange(torch.where(is_masked, value.to(heads.dtype), heads), "b n h d -> b n (h d)")


def group_by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Groups pairs of (layer, head) by layer, as `mask_heads` and `prune` take them."""
    layers: dict[int, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)
    return layers


@torch.no_grad()
def prune(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> None:
    """Removes heads with their weights. A layer may lose all of its heads; the bias of its `out_proj` remains.

    The outputs of the model are those inside `mask_heads`: means are folded into the bias, b + W_out mean.

    Args:
        model: Changed in place. Its parameters are new tensors, so create the optimizer afterwards.
        heads: From layer to the indices of the heads to remove.
        means: For mean ablation, as `mean_outputs` returns them; zeros if not given.

    Raises:
        UserError: A head that does not exist, or all heads of all layers. The model is then unchanged.

    Example:
        >>> prune(model, group_by_layer(rank_heads(head_importance(model, batches))[:4]))  # doctest: +SKIP
    """
    _check(model, heads)
    attentions = model.attentions
    if all(len(set(heads.get(layer, ()))) == attention.num_heads for layer, attention in enumerate(attentions)):
        raise UserError("heads includes every head of every layer: at least one must remain.")
    for layer, indices in heads.items():
        attention, removed = attentions[layer], sorted(set(indices))
        if means is not None and removed:
            weight = rearrange(attention.out_proj.weight, "e (h d) -> e h d", h=attention.num_heads).float()
            folded = einsum(weight[:, removed], means[layer][removed].float(), "e h d, h d -> e")
            cast(Tensor, attention.out_proj.bias).add_(folded)  # out_proj of a ViT always has one
        attention.prune_heads(removed)


def _check(model: VisionTransformer, heads: Heads) -> None:
    attentions = model.attentions
    for layer, indices in heads.items():
        if not 0 <= layer < len(attentions):
            raise UserError(f"layer {layer} does not exist: the model has layers 0 to {len(attentions) - 1}.")
        count = attentions[layer].num_heads
        if unknown := sorted(head for head in indices if not 0 <= head < count):
            raise UserError(f"head {unknown[0]} of layer {layer} does not exist: the layer has heads 0 to {count - 1}.")
