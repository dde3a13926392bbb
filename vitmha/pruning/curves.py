"""Accuracy against the number of heads removed."""

import copy
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, EvalResult, score
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import group_by_layer, mask_heads, prune


def removal_curve(
    model: VisionTransformer,
    batches: Batches,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[EvalResult]:
    """The scores without the first heads of an order.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        order: Heads as (layer, head).
        counts: How many of them are gone, for each score.
        means: As for `mask_heads`.
    """
    scores = []
    for count in counts:
        with mask_heads(model, group_by_layer(order[:count]), means):
            scores.append(score(model, batches))
    return scores


def layer_curves(
    model: VisionTransformer,
    batches: Batches,
    values: Sequence[Float[Tensor, " _heads"]],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[list[EvalResult]]:
    """For each layer alone, the scores with ever fewer of its heads, those of the smallest values taken first.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        values: Of each head, such as its importance.
        means: As for `mask_heads`.

    Returns:
        For each layer of n heads the scores without 0, 1, ..., n of them: the last but one with a single head, the
        last without attention.
    """
    curves = []
    for layer, each in enumerate(values):
        order = [(layer, head) for head in each.argsort(stable=True).tolist()]
        curves.append(removal_curve(model, batches, order, range(len(order) + 1), means))
    return curves


def reconstruction_curve(
    model: VisionTransformer,
    batches: Batches,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    means: Sequence[Float[Tensor, "_heads head_dim"]],
    fitted_to: Batches,
) -> list[EvalResult]:
    """As `slimming.removal_curve`, with what remains fitted.

    Args:
        model: In eval mode; it stays as it is.
        batches: Pictures and classes to be measured on.
        order: Heads as (layer, head).
        counts: How many of them are gone, for each score; fewer than there are.
        means: As `mean_outputs` gives them.
        fitted_to: Other pictures.
    """
    scores = []
    for count in counts:
        slim = copy.deepcopy(model)
        prune(slim, group_by_layer(order[:count]), means)
        reconstruct(slim, model, fitted_to)
        scores.append(score(slim, batches))
    return scores
