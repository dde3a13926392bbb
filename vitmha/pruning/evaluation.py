"""Accuracy and loss of a classifier over labeled batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmha.errors import UserError
from vitmha.metrics import is_correct
from vitmha.models.vit import VisionTransformer

# Normalized images and their class indices, in batches that can be iterated several times.
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Accuracy and loss of a model over labeled images."""

    accuracy: float
    """Fraction of the images whose most probable class is the label, in [0, 1]."""
    loss: float
    """Mean cross-entropy in nats."""


@torch.no_grad()
def evaluate(model: VisionTransformer, batches: Batches) -> EvalResult:
    """Evaluates a model.

    Args:
        model: In eval mode.
        batches: Images and labels.

    Raises:
        UserError: No images.

    Example:
        >>> result = evaluate(model, [(images, labels)])  # doctest: +SKIP
        >>> result.accuracy  # doctest: +SKIP
    """
    correct, loss, count = 0.0, 0.0, 0
    for images, labels in to_model_device(model, batches):
        logits = model(images).float()
        correct += is_correct(logits, labels).sum().item()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    if not count:
        raise UserError("batches holds no images: at least one is needed.")
    return EvalResult(accuracy=correct / count, loss=loss / count)


def to_model_device(model: VisionTransformer, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Moves each batch to the model's device."""
    device = model.patch_embed.proj.weight.device
    return ((images.to(device), labels.to(device)) for images, labels in batches)
