"""Accuracy and loss by hand."""

import math

import pytest
import torch
from builders import small_model
from torch import nn

from vitmha.inspection.ablation import mean_outputs
from vitmha.pruning.evaluation import evaluate
from vitmha.pruning.gqa import head_similarity
from vitmha.pruning.importance import (
    ablation_scores,
    head_importance,
)


def test_evaluate_by_hand() -> None:
    model = small_model()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    images = torch.randn(3, 3, 14, 33)
    measured = evaluate(model, [(images[:2], torch.tensor([2, 0])), (images[2:], torch.tensor([2]))])
    assert measured.accuracy == pytest.approx(2 / 3)
    assert measured.loss == pytest.approx(math.log(math.e + 4) - 2 / 3, rel=1e-6)


def test_no_images_are_refused() -> None:
    for measure in (evaluate, head_importance, ablation_scores, head_similarity, mean_outputs):
        with pytest.raises(ValueError, match=r"image|picture"):
            measure(small_model(), [])
