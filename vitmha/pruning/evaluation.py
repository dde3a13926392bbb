"""Accuracy and loss of a classifier over labeled batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmha.errors import UserError
from vitmha.models.vit import VisionTransformer

# Normalised pictures and their classes; passed through several times.
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """How well a model classifies."""

    accuracy: float
    """Share of the pictures whose class comes first."""
    loss: float
    """Mean cross-entropy in nats."""


@torch.no_grad()
def score(model: VisionTransformer, batches: Batches) -> EvalResult:
    """Accuracy and loss.

    Args:
        model: In eval mode.
        batches: Pictures and classes.

    Raises:
        UserError: There is no picture.
    """
    right, loss, count = 0, 0.0, 0
    for images, labels in to_model_device(model, batches):
        logits = model(images).float()
        right += int((logits.argmax(1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    if not count:
        raise UserError("There is no picture to measure the model on.")
    return EvalResult(accuracy=right / count, loss=loss / count)


def to_model_device(model: VisionTransformer, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches where the model is."""
    device = model.patch_embed.proj.weight.device
    return ((images.to(device), labels.to(device)) for images, labels in batches)
