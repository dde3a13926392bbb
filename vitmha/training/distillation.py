"""Knowledge distillation: its configuration and the teacher."""

import reprlib
from dataclasses import dataclass
from typing import Any, Literal

from vitmha.errors import UserError
from vitmha.models.encoder_decoder import Model
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What a model learns from a teacher, beside the labels.

    Raises:
        UserError: A number outside its range.
    """

    teacher: str
    """A model of the same classes, as `load_model` takes it; its pictures may be of another size and normalisation."""
    type: Literal["soft", "hard"] = "soft"
    """The teacher's probabilities, or its most likely class."""
    alpha: float = 0.5
    """Weight of the teacher in the loss; the rest is that of the labels."""
    temperature: float = 1.0
    """Divides the logits of both before the soft probabilities are taken."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"--model.distillation.alpha must lie in [0, 1], got {self.alpha}.")
        if self.temperature <= 0:
            raise UserError(f"--model.distillation.temperature must be positive, got {self.temperature}.")


def load_teacher(source: str, student: Model) -> VisionTransformer:
    """A model whose logits mean what the student's are to mean, fitted to pictures of the student's size.

    Raises:
        UserError: It knows other classes than the student, or pictures of other channels.
    """
    teacher = load_model(source, image_size=student.config.layout.image_size)
    if not isinstance(teacher, VisionTransformer):
        raise UserError(f"--model.distillation.teacher {source} reads sequences; a model that classifies is needed.")
    given, wanted = _facts(teacher), _facts(student)
    faults = [
        f"its {fact} {reprlib.repr(given[fact])}, here {reprlib.repr(wanted[fact])}"
        for fact in wanted
        if given[fact] != wanted[fact] and given[fact] is not None and wanted[fact] is not None
    ]
    if faults:
        raise UserError(f"--model.distillation.teacher {source} is for other data: {'; '.join(faults)}.")
    return teacher


def _facts(model: Model) -> dict[str, Any]:
    """What a model expects and knows; None where it is not known."""
    return {
        "channels are": model.config.in_channels,
        "number of classes is": model.config.num_classes,
        "classes are": model.class_names,
    }
