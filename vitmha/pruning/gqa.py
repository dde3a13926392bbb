"""Converts multi-head attention to grouped-query attention.

Letters in the patterns: b batch, h heads, g groups (or heads), r heads of a group, n m tokens, d head_dim, e embed_dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection import record_attention
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, to_model_device


@torch.no_grad()
def head_similarity(model: VisionTransformer, batches: Batches) -> list[Float[Tensor, "_heads _heads"]]:
    """How alike the maps of two heads are: the cosine of the angle between all their attention weights.

    Args:
        model: In eval mode, with heads in every layer.
        batches: Pictures; their classes play no part.

    Returns:
        For each layer values in [0, 1]; 1 for equal maps.

    Raises:
        UserError: There is no picture.
    """
    products: list[Tensor] = []
    for images, _ in to_model_device(model, batches):
        with record_attention(model, queries="all") as recorded:
            model(images)
        each = [einsum(maps, maps, "b h n m, b g n m -> h g").double().cpu() for maps in recorded.maps]
        products = [a + b for a, b in zip(products, each, strict=True)] if products else each
    if not products:
        raise UserError("There is no picture to compare the heads on.")
    return [(each / each.diag().outer(each.diag()).sqrt()).float() for each in products]


def convert_to_gqa(
    model: VisionTransformer, num_kv_heads: int, similarity: Sequence[Float[Tensor, "_heads _heads"]] | None = None
) -> VisionTransformer:
    """Fewer key/value heads: those of a group become one, whose projections are the mean of theirs.

    Where the key/value heads of a group are equal, the model computes what it did. Train it a little afterwards.

    Args:
        model: Its heads all there.
        num_kv_heads: Groups to be made; must divide the key/value heads that there are.
        similarity: As `head_similarity` gives it: heads that are alike are put into a group, and renumbered for it.
            Heads are grouped as they stand where not given.

    Returns:
        A new model in the same mode, on the same device.

    Raises:
        UserError: A number that does not divide, pruned heads, or similarity for a model that is grouped already.

    Source:
        Ainslie et al. 2023 (arXiv 2305.13245), section 2.1.
    """
    heads, groups = model.config.num_heads, model.config.num_kv_heads or model.config.num_heads
    if any(attention.head_index is not None for attention in model.attentions):
        raise UserError("Some heads are gone already, which leaves groups of unequal size: regroup first, then prune.")
    if num_kv_heads < 1 or groups % num_kv_heads:
        raise UserError(f"num_kv_heads must divide the {groups} key/value heads that there are, got {num_kv_heads}.")
    if similarity is not None and groups != heads:
        raise UserError(f"The {heads} heads share {groups} key/value heads already: group them as they stand.")
    orders = [list(chain(*layer)) for layer in head_groups(model, num_kv_heads, similarity)]
    regrouped = VisionTransformer(replace(model.config, num_kv_heads=num_kv_heads))
    tensors = model.state_dict()
    for layer in range(model.config.depth):
        for name in [name for name in tensors if name.startswith(f"blocks.{layer}.attn.")]:
            tensors[name] = _regrouped(tensors[name], name.split(".")[3], heads, groups, num_kv_heads, orders[layer])
    regrouped.load_state_dict(tensors)
    regrouped.class_names, regrouped.preprocessing = model.class_names, model.preprocessing
    return regrouped.to(model.norm.weight).train(model.training)


def _regrouped(tensor: Tensor, part: str, heads: int, groups: int, new: int, order: Sequence[int]) -> Tensor:
    """One weight or bias of an attention: heads in their new order, key/value heads as the mean of their group."""
    if part == "out_proj":
        if tensor.ndim == 1:
            return tensor
        return rearrange(rearrange(tensor, "e (h d) -> h e d", h=heads)[list(order)], "h e d -> e (h d)")
    if part == "q_proj":
        return rearrange(tensor, "(h d) ... -> h d ...", h=heads)[list(order)].flatten(0, 1)
    if part in ("k_proj", "v_proj"):
        each = rearrange(tensor, "(h d) ... -> h d ...", h=groups)
        each = each[list(order)] if groups == heads else each
        return rearrange(each, "(g r) d ... -> g r d ...", g=new).mean(1).flatten(0, 1)
    return tensor


def head_groups(
    model: VisionTransformer, num_kv_heads: int, similarity: Sequence[Float[Tensor, "_heads _heads"]] | None = None
) -> list[list[list[int]]]:
    """For each layer, for each group that `convert_to_gqa` makes, the query heads in it.

    A group takes the first head that is left and those left that are most like it; as they stand without similarity.
    """
    heads = model.config.num_heads
    size, layers = heads // num_kv_heads, []
    for each in similarity or [torch.zeros(heads, heads)] * model.config.depth:
        left, groups = list(range(heads)), []
        while left:
            like: Tensor = each[left[0]]
            group = sorted(left, key=lambda head: -like[head].item() - 2 * (head == left[0]))[:size]
            groups.append(group)
            left = [head for head in left if head not in group]
        layers.append(groups)
    return layers
