"""Knowledge distillation: its configuration, and loading the teacher."""

import math
import reprlib
from dataclasses import dataclass
from typing import Any, Literal

from vitmha.errors import UserError, check_argument
from vitmha.models.encoder_decoder import Model
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How a model learns from a teacher in addition to the labels.

    Raises:
        UserError: A number outside its range.
    """

    teacher: str
    """Trained model of the same classes, as `load_model` takes it; it may have another image size and normalization."""
    type: Literal["soft", "hard"] = "soft"
    """Target: the teacher's probabilities (soft) or its most likely class (hard)."""
    alpha: float = 0.5
    """Weight of the teacher in the loss, in [0, 1]; the labels have 1 - alpha."""
    temperature: float = 1.0
    """Divides the logits of teacher and student before the softmax, for type soft."""

    def __post_init__(self) -> None:
        check_argument("teacher", self.teacher, self.teacher != "", "a model, as for load_model")
        check_argument("alpha", self.alpha, 0 <= self.alpha <= 1, "in [0, 1]")
        check_argument("temperature", self.temperature, 0 < self.temperature < math.inf, "positive")


def load_teacher(source: str, student: Model) -> VisionTransformer:
    """Loads a classifier with the student's classes, resized to the student's image size.

    Args:
        source: As `load_model` takes it.
        student: The model to be trained.

    Raises:
        UserError: The source is an encoder-decoder, or has other classes or image channels than the student.
    """
    teacher = load_model(source, image_size=student.config.layout.image_size)
    if not isinstance(teacher, VisionTransformer):
        raise UserError(f"teacher {source} is an encoder-decoder; expected a classifier.")
    found, expected = _label_space(teacher), _label_space(student)
    differences = [
        f"its {name} {reprlib.repr(found[name])}, expected {reprlib.repr(expected[name])}"
        for name in expected
        if found[name] != expected[name] and found[name] is not None and expected[name] is not None
    ]
    if differences:
        raise UserError(f"teacher {source} does not fit the data: {'; '.join(differences)}.")
    return teacher


def _label_space(model: Model) -> dict[str, Any]:
    """Returns what teacher and student must have in common; None where it is unknown."""
    return {
        "in_channels is": model.config.in_channels,
        "num_classes is": model.config.num_classes,
        "class names are": model.class_names,
    }
