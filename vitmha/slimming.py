"""Heads measured, removed and regrouped: a smaller and faster model whose accuracy is known.

Letters in the patterns: b batch, h heads, g groups (or heads), r heads of a group, n m tokens, d head_dim, e embed_dim.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection import record_attention
from vitmha.inspection.ablation import switched_off
from vitmha.vit import VisionTransformer

# Normalised pictures and their classes; passed through several times.
Batches = Iterable[tuple[Tensor, Tensor]]
# Heads by layer, by the numbers that they have now. In signatures, _heads may differ from layer to layer.
Heads = Mapping[int, Collection[int]]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model classifies."""

    accuracy: float
    """Share of the pictures whose class comes first."""
    loss: float
    """Mean cross-entropy in nats."""


@torch.no_grad()
def score(model: VisionTransformer, batches: Batches) -> Score:
    """Accuracy and loss.

    Args:
        model: In eval mode.
        batches: Pictures and classes.

    Raises:
        ValueError: There is no picture.
    """
    right, loss, count = 0, 0.0, 0
    for images, labels in on_its_device(model, batches):
        logits = model(images).float()
        right += int((logits.argmax(1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    if not count:
        raise ValueError("There is no picture to measure the model on.")
    return Score(accuracy=right / count, loss=loss / count)


def head_importance(model: VisionTransformer, batches: Batches) -> list[Float[Tensor, " _heads"]]:
    """How much the loss hangs on each head: the mean over pictures of |dL/dg|, with g = 1 a gate on the head's output.

    For head outputs O (before `out_proj`) that is |<O, dL/dO>|, so that no gate and no map is needed. The absolute
    value is taken for each picture: the result is the same for all batch sizes. Divide by the norm of each layer
    (`normalized`) to compare layers, as the paper does.

    Args:
        model: In eval mode; its parameters may be frozen and keep their gradients as they are.
        batches: Pictures and classes.

    Returns:
        For each layer the importance of the heads that it has, at least 0, in nats.

    Raises:
        ValueError: There is no picture.

    Source:
        Michel et al. 2019 (arXiv 1905.10650), equation 2.
    """
    count = 0
    with observed_importance(model) as sums:
        for images, labels in on_its_device(model, batches):
            pixels = images.detach().requires_grad_()  # what leads there passes all heads, frozen ones too
            with torch.enable_grad():
                loss = F.cross_entropy(model(pixels), labels, reduction="sum")
            torch.autograd.grad(loss, pixels)
            count += len(labels)
    if not count:
        raise ValueError("There is no picture to measure the heads on.")
    return [each / count for each in sums]


@contextmanager
def observed_importance(model: VisionTransformer) -> Iterator[list[Float[Tensor, " _heads"]]]:
    """Inside, every backward pass of a loss that is a sum over pictures adds to the importance of each head.

    Yields:
        For each layer the sums over the pictures, as `head_importance` has them before it divides.
    """
    attentions = model.attentions
    sums = [each.out_proj.weight.new_zeros(each.num_heads, dtype=torch.float64) for each in attentions]

    def add(layer: int, y: Tensor, gradient: Tensor) -> None:
        gates = reduce(y.float() * gradient.float(), "b n (h d) -> b h", "sum", h=len(sums[layer])).abs()
        sums[layer] += gates.where(gates.isfinite(), 0).sum(0, dtype=torch.float64)

    def observe(layer: int, _: Any, args: tuple[Tensor]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(partial(add, layer, args[0].detach()))

    with ExitStack() as stack:
        for layer, attention in enumerate(attentions):
            stack.enter_context(attention.out_proj.register_forward_pre_hook(partial(observe, layer)))
        yield sums


def normalized(importance: Sequence[Tensor]) -> list[Tensor]:
    """Each layer divided by its norm (l2); a layer of zeros stays."""
    return [F.normalize(each, dim=0) for each in importance]


@contextmanager
def without_heads(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> Iterator[None]:
    """Inside, the heads give nothing, or always their mean; no weight is changed.

    Args:
        model: The model.
        heads: Which.
        means: As `mean_outputs` gives them; zeros where not given.

    Raises:
        ValueError: A head that does not exist.
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


def ablated(
    model: VisionTransformer, batches: Batches, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> list[list[Score]]:
    """The scores without one head, for each head of each layer.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        means: As for `without_heads`.

    Raises:
        ValueError: There is no picture.
    """
    counts = [attention.num_heads for attention in model.attentions]
    right, loss, count = torch.zeros(sum(counts)), torch.zeros(sum(counts), dtype=torch.float64), 0
    for images, labels in on_its_device(model, batches):
        logits = torch.cat(switched_off(model, images, means)).float()
        right += (logits.argmax(2) == labels).sum(1).cpu()
        losses = F.cross_entropy(logits.mT, labels.expand(len(logits), -1), reduction="none")
        loss += losses.sum(1, dtype=torch.float64).cpu()
        count += len(labels)
    if not count:
        raise ValueError("There is no picture to measure the model on.")
    each = iter(zip((right / count).tolist(), (loss / count).tolist(), strict=True))
    return [[Score(accuracy=a, loss=b) for a, b in islice(each, heads)] for heads in counts]


def weakest_first(values: Sequence[Float[Tensor, " _heads"]]) -> list[tuple[int, int]]:
    """All heads as (layer, head), from the smallest value to the largest; the first of equal ones first."""
    heads = [(layer, head) for layer, each in enumerate(values) for head in range(len(each))]
    return sorted(heads, key=lambda place: values[place[0]][place[1]].item())


def in_random_order(model: VisionTransformer, seed: int) -> list[tuple[int, int]]:
    """All heads as (layer, head), shuffled: the baseline for any other order."""
    heads = [(layer, head) for layer, each in enumerate(model.attentions) for head in range(each.num_heads)]
    random.Random(seed).shuffle(heads)
    return heads


def removal_curve(
    model: VisionTransformer,
    batches: Batches,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[Score]:
    """The scores without the first heads of an order.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        order: Heads as (layer, head).
        counts: How many of them are gone, for each score.
        means: As for `without_heads`.
    """
    scores = []
    for count in counts:
        with without_heads(model, by_layer(order[:count]), means):
            scores.append(score(model, batches))
    return scores


def layer_curves(
    model: VisionTransformer,
    batches: Batches,
    values: Sequence[Float[Tensor, " _heads"]],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[list[Score]]:
    """For each layer alone, the scores with ever fewer of its heads, those of the smallest values taken first.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        values: Of each head, such as its importance.
        means: As for `without_heads`.

    Returns:
        For each layer of n heads the scores without 0, 1, ..., n of them: the last but one with a single head, the
        last without attention.
    """
    curves = []
    for layer, each in enumerate(values):
        order = [(layer, head) for head in each.argsort(stable=True).tolist()]
        curves.append(removal_curve(model, batches, order, range(len(order) + 1), means))
    return curves


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Pairs of (layer, head) as `without_heads` and `prune` take them."""
    layers: dict[int, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)
    return layers


@torch.no_grad()
def prune(
    model: VisionTransformer, heads: Heads, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> None:
    """Removes heads for good; a layer may lose all of them, and keeps the bias of its output.

    The model gives what it gave inside `without_heads`: means go into the bias, b + W_out mean.

    Args:
        model: Changed in place; its parameters are new ones.
        heads: Which.
        means: As `mean_outputs` gives them; zeros where not given.

    Raises:
        ValueError: A head that does not exist, or all heads of all layers; nothing is changed.
    """
    _check(model, heads)
    attentions = model.attentions
    if all(len(set(heads.get(layer, ()))) == attention.num_heads for layer, attention in enumerate(attentions)):
        raise ValueError("All heads of all layers were to be removed: leave at least one.")
    for layer, chosen in heads.items():
        attention, gone = attentions[layer], sorted(set(chosen))
        if means is not None and gone:
            weight = rearrange(attention.out_proj.weight, "e (h d) -> e h d", h=attention.num_heads).float()
            folded = einsum(weight[:, gone], means[layer][gone].float(), "e h d, h d -> e")
            cast(Tensor, attention.out_proj.bias).add_(folded)  # those of a ViT have one
        attention.prune_heads(gone)


@torch.no_grad()
def head_similarity(model: VisionTransformer, batches: Batches) -> list[Float[Tensor, "_heads _heads"]]:
    """How alike the maps of two heads are: the cosine of the angle between all their attention weights.

    Args:
        model: In eval mode, with heads in every layer.
        batches: Pictures; their classes play no part.

    Returns:
        For each layer values in [0, 1]; 1 for equal maps.

    Raises:
        ValueError: There is no picture.
    """
    products: list[Tensor] = []
    for images, _ in on_its_device(model, batches):
        with record_attention(model, queries="all") as recorded:
            model(images)
        each = [einsum(maps, maps, "b h n m, b g n m -> h g").double().cpu() for maps in recorded.maps]
        products = [a + b for a, b in zip(products, each, strict=True)] if products else each
    if not products:
        raise ValueError("There is no picture to compare the heads on.")
    return [(each / each.diag().outer(each.diag()).sqrt()).float() for each in products]


def regroup(
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
        ValueError: A number that does not divide, pruned heads, or similarity for a model that is grouped already.

    Source:
        Ainslie et al. 2023 (arXiv 2305.13245), section 2.1.
    """
    heads, groups = model.config.num_heads, model.config.num_kv_heads or model.config.num_heads
    if any(attention.kept_heads is not None for attention in model.attentions):
        raise ValueError("Some heads are gone already, which leaves groups of unequal size: regroup first, then prune.")
    if num_kv_heads < 1 or groups % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {groups} key/value heads that there are, got {num_kv_heads}.")
    if similarity is not None and groups != heads:
        raise ValueError(f"The {heads} heads share {groups} key/value heads already: group them as they stand.")
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
    """For each layer, for each group that `regroup` makes, the query heads in it.

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


def on_its_device(model: VisionTransformer, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches where the model is."""
    device = model.patch_embed.proj.weight.device
    return ((images.to(device), labels.to(device)) for images, labels in batches)


def _check(model: VisionTransformer, heads: Heads) -> None:
    attentions = model.attentions
    for layer, chosen in heads.items():
        if not 0 <= layer < len(attentions):
            raise ValueError(f"The model has layers 0 to {len(attentions) - 1}; there is no layer {layer}.")
        count = attentions[layer].num_heads
        if unknown := sorted(head for head in chosen if not 0 <= head < count):
            raise ValueError(f"Layer {layer} has {count} heads, counted from 0; there is no head {unknown[0]}.")
