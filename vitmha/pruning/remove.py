"""Masks attention heads, or removes them from a model.

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

# Heads by layer, by the numbers that they have now. In signatures, _heads may differ from layer to layer.
Heads = Mapping[int, Collection[int]]


@contextmanager
def mask_heads(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> Iterator[None]:
    """Inside, the heads give nothing, or always their mean; no weight is changed.

    Args:
        model: The model.
        heads: Which.
        means: As `mean_outputs` gives them; zeros where not given.

    Raises:
        UserError: A head that does not exist.
    """
    _check(model, heads)
    with ExitStack() as stack:
        for layer, chosen in heads.items():
            attention = model.attentions[layer]
            is_gone = torch.zeros(attention.num_heads, 1, dtype=torch.bool, device=attention.out_proj.weight.device)
            is_gone[list(chosen)] = True
            value = is_gone.new_zeros((), dtype=torch.float32) if means is None else means[layer]
            stack.enter_context(attention.out_proj.register_forward_pre_hook(partial(_replaced, is_gone, value)))
        yield


def _replaced(is_gone: Tensor, value: Tensor, _: Any, args: tuple[Tensor]) -> Tensor:
    heads = rearrange(args[0], "b n (h d) -> b n h d", h=len(is_gone))
    return rearrange(torch.where(is_gone, value.to(heads.dtype), heads), "b n h d -> b n (h d)")


def group_by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Pairs of (layer, head) as `mask_heads` and `prune` take them."""
    layers: dict[int, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)
    return layers


@torch.no_grad()
def prune(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> None:
    """Removes heads for good; a layer may lose all of them, and keeps the bias of its output.

    The model gives what it gave inside `mask_heads`: means go into the bias, b + W_out mean.

    Args:
        model: Changed in place; its parameters are new ones.
        heads: Which.
        means: As `mean_outputs` gives them; zeros where not given.

    Raises:
        UserError: A head that does not exist, or all heads of all layers; nothing is changed.
    """
    _check(model, heads)
    attentions = model.attentions
    if all(len(set(heads.get(layer, ()))) == attention.num_heads for layer, attention in enumerate(attentions)):
        raise UserError("All heads of all layers were to be removed: leave at least one.")
    for layer, chosen in heads.items():
        attention, gone = attentions[layer], sorted(set(chosen))
        if means is not None and gone:
            weight = rearrange(attention.out_proj.weight, "e (h d) -> e h d", h=attention.num_heads).float()
            folded = einsum(weight[:, gone], means[layer][gone].float(), "e h d, h d -> e")
            cast(Tensor, attention.out_proj.bias).add_(folded)  # those of a ViT have one
        attention.prune_heads(gone)


def _check(model: VisionTransformer, heads: Heads) -> None:
    attentions = model.attentions
    for layer, chosen in heads.items():
        if not 0 <= layer < len(attentions):
            raise UserError(f"The model has layers 0 to {len(attentions) - 1}; there is no layer {layer}.")
        count = attentions[layer].num_heads
        if unknown := sorted(head for head in chosen if not 0 <= head < count):
            raise UserError(f"Layer {layer} has {count} heads, counted from 0; there is no head {unknown[0]}.")
