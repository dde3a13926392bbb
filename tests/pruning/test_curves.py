"""curves.py and ablation_scores against evaluations of pruned models."""

import pytest
import torch
from builders import batches, images_of, small_model

from vitmha.inspection.ablation import mean_outputs
from vitmha.pruning.curves import layer_curves, removal_curve
from vitmha.pruning.evaluation import EvalResult, evaluate
from vitmha.pruning.importance import ablation_scores, random_order
from vitmha.pruning.remove import group_by_layer, mask_heads, prune


def test_ablation_and_removal_curves_equal_evaluations_of_pruned_models() -> None:
    def evaluate_pruned(heads: dict[int, list[int]]) -> EvalResult:
        pruned = small_model()
        pruned.load_state_dict(model.state_dict())
        prune(pruned, heads)
        return evaluate(pruned, batches())

    model = small_model()
    ablated = ablation_scores(model, batches())
    assert [len(layer) for layer in ablated] == [6, 6, 6]
    assert ablated[1][4].loss == pytest.approx(evaluate_pruned({1: [4]}).loss, rel=1e-5)
    order = random_order(model, seed=3)
    assert sorted(order) == [(layer, head) for layer in range(3) for head in range(6)]
    assert order == random_order(model, seed=3) != random_order(model, seed=4)
    curve = removal_curve(model, batches(), order, [0, 5, 18])
    assert curve[0] == evaluate(model, batches())
    assert curve[1].loss == pytest.approx(evaluate_pruned(group_by_layer(order[:5])).loss, rel=1e-5)
    layers = layer_curves(model, batches(), [torch.arange(6.0), torch.tensor([]), torch.arange(6.0).flip(0)])
    assert [len(curve) for curve in layers] == [7, 1, 7]
    assert layers[1] == [evaluate(model, batches())]
    assert layers[0][5].loss == pytest.approx(evaluate_pruned({0: [0, 1, 2, 3, 4]}).loss, rel=1e-5)
    assert layers[2][2].loss == pytest.approx(evaluate_pruned({2: [5, 4]}).loss, rel=1e-5)
    means = mean_outputs(model, images_of(batches()))
    with_means = layer_curves(model, batches(), [torch.arange(6.0)] * 3, means)
    with mask_heads(model, {1: [0, 1]}, means):
        assert with_means[1][2] == evaluate(model, batches())
