"""evaluation.py: accuracy and loss against numbers made by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from builders import small_model
from torch import nn

from vitmha.inspection.ablation import mean_outputs
from vitmha.pruning.evaluation import evaluate
from vitmha.pruning.gqa import head_similarity
from vitmha.pruning.importance import ablation_scores, head_importance


def test_evaluate_by_hand() -> None:
    model = small_model()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    images = torch.randn(3, 3, 14, 33)
    result = evaluate(model, [(images[:2], torch.tensor([2, 0])), (images[2:], torch.tensor([2]))])
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.loss == pytest.approx(math.log(math.e + 4) - 2 / 3, rel=1e-6)


@pytest.mark.parametrize("function", [evaluate, head_importance, ablation_scores, head_similarity, mean_outputs])
def test_no_images_are_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="batches holds no images: at least one is needed"):
        function(small_model(), [])
