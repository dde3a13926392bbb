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
    """Cosine similarity of the attention maps of all pairs of heads in a layer, over all images.

    Args:
        model: In eval mode, with heads in every layer.
        batches: Images; their labels are not used.

    Returns:
        For each layer values in [0, 1]; 1 for equal maps.

    Raises:
        UserError: No images.
    """
    products: list[Tensor] = []
    for images, _ in to_model_device(model, batches):
        with record_attention(model, queries="all") as recorded:
            model(images)
        batch = [einsum(maps, maps, "b h n m, b g n m -> h g").double().cpu() for maps in recorded.maps]
        products = [a + b for a, b in zip(products, batch, strict=True)] if products else batch
    if not products:
        raise UserError("batches holds no images: at least one is needed.")
    return [(layer / layer.diag().outer(layer.diag()).sqrt()).float() for layer in products]


def convert_to_gqa(
    model: VisionTransformer, num_kv_heads: int, similarity: Sequence[Float[Tensor, "_heads _heads"]] | None = None
) -> VisionTransformer:
    """Converts a model to fewer key/value heads, whose projections are the means over the heads of each group.

    If the key/value heads of each group are equal, the outputs do not change. Otherwise fine-tune, or `reconstruct`.

    Args:
        model: Without pruned heads.
        num_kv_heads: Number of key/value heads; must divide the current number.
        similarity: As `head_similarity` returns it: similar heads are grouped, and the heads reordered accordingly.
            If not given, neighboring heads are grouped.

    Returns:
        A new model in the same mode, on the same device.

    Raises:
        UserError: A number that does not divide, pruned heads, or similarity for a model that is already grouped.

    Source:
        Ainslie et al. 2023 (arXiv 2305.13245), section 2.1.
    """
    heads, groups = model.config.num_heads, model.config.num_kv_heads or model.config.num_heads
    if any(attention.head_index is not None for attention in model.attentions):
        raise UserError("The model has pruned heads, so its groups would have unequal sizes: group first, then prune.")
    if num_kv_heads < 1 or groups % num_kv_heads:
        raise UserError(f"num_kv_heads must divide the {groups} key/value heads of the model, got {num_kv_heads}.")
    if similarity is not None and groups != heads:
        raise UserError(f"The {heads} heads already share {groups} key/value heads: group without similarity.")
    orders = [list(chain(*layer)) for layer in head_groups(model, num_kv_heads, similarity)]
    grouped = VisionTransformer(replace(model.config, num_kv_heads=num_kv_heads))
    tensors = model.state_dict()
    for layer in range(model.config.depth):
        for name in [name for name in tensors if name.startswith(f"blocks.{layer}.attn.")]:
            tensors[name] = _group_tensor(tensors[name], name.split(".")[3], heads, groups, num_kv_heads, orders[layer])
    grouped.load_state_dict(tensors)
    grouped.class_names, grouped.preprocessing = model.class_names, model.preprocessing
    return grouped.to(model.norm.weight).train(model.training)


def _group_tensor(tensor: Tensor, part: str, heads: int, groups: int, new: int, order: Sequence[int]) -> Tensor:
    """A weight or bias of an attention module, with heads reordered and key/value heads averaged over each group."""
    if part == "out_proj":
        if tensor.ndim == 1:
            return tensor
        return rearrange(rearrange(tensor, "e (h d) -> h e d", h=heads)[list(order)], "h e d -> e (h d)")
    if part == "q_proj":
        return rearrange(tensor, "(h d) ... -> h d ...", h=heads)[list(order)].flatten(0, 1)
    if part in ("k_proj", "v_proj"):
        kv_heads = rearrange(tensor, "(h d) ... -> h d ...", h=groups)
        kv_heads = kv_heads[list(order)] if groups == heads else kv_heads
        return rearrange(kv_heads, "(g r) d ... -> g r d ...", g=new).mean(1).flatten(0, 1)
    return tensor


def head_groups(
    model: VisionTransformer, num_kv_heads: int, similarity: Sequence[Float[Tensor, "_heads _heads"]] | None = None
) -> list[list[list[int]]]:
    """The query heads of each group that `convert_to_gqa` makes, for each layer.

    Each group consists of the first remaining head and the remaining heads most similar to it; without similarity, of
    neighboring heads.
    """
    heads = model.config.num_heads
    size, layers = heads // num_kv_heads, []
    for matrix in similarity or [torch.zeros(heads, heads)] * model.config.depth:
        remaining, groups = list(range(heads)), []
        while remaining:
            to_first: Tensor = matrix[remaining[0]]
            group = sorted(remaining, key=lambda head: -to_first[head].item() - 2 * (head == remaining[0]))[:size]
            groups.append(group)
            remaining = [head for head in remaining if head not in group]
        layers.append(groups)
    return layers
