"""losses.py: the losses against timm's."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F

from vitmha.training.losses import bce, cross_entropy


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_uniform_logits_cost_ln_of_the_classes_with_any_smoothing_and_mixing(label_smoothing: float) -> None:
    for labels in (torch.tensor([0, 3]), torch.tensor([[0.7, 0, 0, 0.3], [0, 1.0, 0, 0]])):
        loss = cross_entropy(torch.full((2, 4), 1.7), labels, label_smoothing)
        torch.testing.assert_close(loss, torch.tensor(math.log(4)))


def test_smoothing_is_applied_once_to_class_indices_and_to_mixed_labels() -> None:
    logits, labels = torch.randn(3, 7), torch.tensor([4, 0, 6])
    expected = timm.loss.LabelSmoothingCrossEntropy(0.2)(logits, labels)
    torch.testing.assert_close(cross_entropy(logits, labels, 0.2), expected)
    mixed = 0.3 * F.one_hot(labels, 7) + 0.7 * F.one_hot(labels.flip(0), 7)
    expected = timm.loss.SoftTargetCrossEntropy()(logits, 0.8 * mixed + 0.2 / 7)
    torch.testing.assert_close(cross_entropy(logits, mixed, 0.2), expected)


def test_bce_equals_timm_and_the_target_of_every_mixed_class_is_one() -> None:
    logits, labels = torch.randn(3, 7), torch.tensor([4, 0, 6])
    for smoothing in (0.0, 0.2):
        expected = timm.loss.BinaryCrossEntropy(smoothing)(logits, labels)
        torch.testing.assert_close(bce(logits, labels, smoothing), expected)
    mixed = 0.3 * F.one_hot(labels, 7) + 0.7 * F.one_hot(labels.flip(0), 7)
    expected = timm.loss.BinaryCrossEntropy(0, target_threshold=0)(logits, mixed)
    torch.testing.assert_close(bce(logits, mixed), expected)
    torch.testing.assert_close(bce(torch.zeros(3, 7), mixed, 0.1), torch.tensor(math.log(2)))
