"""Accuracy against the number of heads removed."""

import copy
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, EvalResult, evaluate
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import group_by_layer, mask_heads, prune


def removal_curve(
    model: VisionTransformer,
    batches: Batches,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[EvalResult]:
    """Evaluates a model with more and more heads masked.

    Args:
        model: In eval mode.
        batches: Images and labels.
        order: Heads as (layer, head), the first to be masked first.
        counts: For each result, the number of heads masked.
        means: For mean ablation, as `mean_outputs` returns them; zero ablation if not given.
    """
    results = []
    for count in counts:
        with mask_heads(model, group_by_layer(order[:count]), means):
            results.append(evaluate(model, batches))
    return results


def layer_curves(
    model: VisionTransformer,
    batches: Batches,
    values: Sequence[Float[Tensor, " _heads"]],
    means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None,
) -> list[list[EvalResult]]:
    """Evaluates a model with more and more heads of one layer masked, for each layer separately.

    Args:
        model: In eval mode.
        batches: Images and labels.
        values: A value per head, such as its importance; the heads with the smallest values are masked first.
        means: For mean ablation, as `mean_outputs` returns them; zero ablation if not given.

    Returns:
        For each layer of n heads the results with 0, 1, ..., n of them masked: with one head remaining in the last but
        one, and without attention in the last.
    """
    curves = []
    for layer, row in enumerate(values):
        order = [(layer, head) for head in row.argsort(stable=True).tolist()]
        curves.append(removal_curve(model, batches, order, range(len(order) + 1), means))
    return curves


def reconstruction_curve(
    model: VisionTransformer,
    batches: Batches,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    means: Sequence[Float[Tensor, "_heads head_dim"]],
    calibration: Batches,
) -> list[EvalResult]:
    """Evaluates a model with more and more heads pruned and the remaining weights reconstructed.

    Args:
        model: In eval mode; it is not changed.
        batches: Images and labels to evaluate on.
        order: Heads as (layer, head), the first to be pruned first.
        counts: For each result, the number of heads pruned; fewer than the model has.
        means: As `mean_outputs` returns them.
        calibration: Other images, which the remaining weights are fitted to.
    """
    results = []
    for count in counts:
        pruned = copy.deepcopy(model)
        prune(pruned, group_by_layer(order[:count]), means)
        reconstruct(pruned, model, calibration)
        results.append(evaluate(pruned, batches))
    return results
