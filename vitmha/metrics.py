"""Metrics of predictions against ground truth: accuracy, per-class accuracy, confusion and calibration."""

import csv
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitmha.atomic import atomic_files
from vitmha.errors import UserError, printable

NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Report:
    """Metrics over all images."""

    top1: float
    """Fraction of the images whose most probable class is the label, in [0, 1]."""
    top5: float
    """Fraction of the images whose label is among the five most probable classes; 1 if there are no more classes."""
    ece: float
    """Expected calibration error: the absolute difference between confidence and accuracy, averaged over `NUM_BINS`
    equal bins of confidence, weighted by the number of images."""
    confusion: Int64[Tensor, "true predicted"]
    """Number of images of each true class (row) by predicted class (column)."""

    @property
    def per_class(self) -> Float[Tensor, " classes"]:
        """Accuracy of each class; NaN for a class without images."""
        return self.confusion.diagonal() / self.confusion.sum(1)

    @property
    def summary(self) -> dict[str, Any]:
        """The number of images and the scalar metrics, rounded to 6 digits; only the number if it is 0.

        Without top5, which is always 1, if there are at most five classes.
        """
        count = int(self.confusion.sum())
        names = ("top1", "top5", "ece") if len(self.confusion) > 5 else ("top1", "ece")
        scalars = {name: round(getattr(self, name), 6) for name in names}
        return {"num_images": count, **(scalars if count else {})}  # JSON has no NaN


class Evaluation:
    """Accumulates metrics over batches. To combine several processes, sum its tensors.

    Args:
        num_classes: Number of outputs of the model.

    Source:
        Calibration error: Guo et al. 2017 (arXiv 1706.04599), equation 3.

    Example:
        >>> evaluation = Evaluation(num_classes=3)
        >>> evaluation.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]), torch.tensor([0, 2]))
        >>> evaluation.compute().top1
        0.5
    """

    def __init__(self, num_classes: int) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.in_top5 = torch.zeros((), dtype=torch.int64)
        # Images, correct predictions and the sum of confidences in each bin.
        self.bins = torch.zeros(NUM_BINS, 3, dtype=torch.float64)

    def update(self, probabilities: Float[Tensor, "batch classes"], labels: Int64[Tensor, " batch"]) -> None:
        """Adds a batch.

        Args:
            probabilities: Of all classes; rows sum to 1.
            labels: Class indices.

        Raises:
            UserError: Probabilities that are NaN or inf.
        """
        probabilities, labels = probabilities.cpu(), labels.cpu()
        if nonfinite := int((~probabilities.isfinite().all(1)).sum()):
            raise UserError(
                f"The model outputs NaN or inf for {nonfinite} of {len(labels)} images: its weights are broken or the "
                "precision is too low."
            )
        top5 = probabilities.topk(min(5, probabilities.shape[1])).indices
        predicted = top5[:, 0]
        self.confusion.index_put_((labels, predicted), torch.ones_like(labels), accumulate=True)
        self.in_top5 += (top5 == labels[:, None]).sum()
        confidence = probabilities.gather(1, top5[:, :1])[:, 0].double()
        counts = torch.stack([torch.ones_like(confidence), (predicted == labels).double(), confidence], dim=1)
        self.bins.index_add_(0, (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1), counts)

    def compute(self) -> Report:
        """The metrics over all batches; NaN without images."""
        count, (correct, confidence) = self.confusion.sum(), self.bins[:, 1:].unbind(1)
        return Report(
            top1=(self.confusion.trace() / count).item(),
            top5=(self.in_top5 / count).item(),
            ece=((correct - confidence).abs().sum() / count).item(),
            confusion=self.confusion,
        )


def is_correct(logits: Float[Tensor, "batch *length classes"], labels: Tensor) -> Float[Tensor, " batch"]:
    """Returns 1 where the most likely class is the label, for a sequence at every position, else 0.

    For sequences this equals the exact match of greedy decoding: while all tokens are correct, teacher forcing feeds
    the same prefix.

    Args:
        logits: Class logits.
        labels: Class indices, negative where a position does not count; or class probabilities, of which the largest
            is the label.

    Example:
        >>> is_correct(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor([1., 0.])
    """
    labels = labels.argmax(-1) if labels.is_floating_point() else labels
    matches = (logits.argmax(-1) == labels) | (labels < 0)
    return matches.flatten(1).all(1).float() if matches.ndim > 1 else matches.float()


def write_report(report: Report, class_names: Sequence[str], directory: str | Path, **extra: float) -> None:
    """Writes metrics.json, per_class.csv, confusion.csv (rows true, columns predicted) and confusion.png.

    Args:
        report: The metrics.
        class_names: In the order of the class indices.
        directory: Created if it does not exist.
        extra: More numbers for metrics.json.
    """
    with atomic_files(directory) as partial:
        _write_report(report, class_names, partial, extra)


def _write_report(report: Report, class_names: Sequence[str], directory: Path, extra: Mapping[str, float]) -> None:
    (directory / "metrics.json").write_text(json.dumps({**report.summary, **extra}, indent=2) + "\n")
    counts, accuracies = report.confusion.sum(1).tolist(), [round(value, 6) for value in report.per_class.tolist()]
    with (directory / "per_class.csv").open("w", newline="", encoding="utf-8") as file:
        rows = zip(class_names, counts, accuracies, strict=True)
        csv.writer(file, lineterminator="\n").writerows([("class", "num_images", "accuracy"), *rows])
    with (directory / "confusion.csv").open("w", newline="", encoding="utf-8") as file:
        lines = ([name, *row] for name, row in zip(class_names, report.confusion.tolist(), strict=True))
        csv.writer(file, lineterminator="\n").writerows([("true", *class_names), *lines])
    _draw_confusion(report, class_names, directory / "confusion.png")


def _draw_confusion(report: Report, class_names: Sequence[str], file: Path) -> None:
    from matplotlib.figure import Figure  # imported here since it takes half a second

    side = min(4 + 0.22 * len(class_names), 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    fractions = report.confusion / report.confusion.sum(1, keepdim=True).clamp_min(1)
    image = axes.imshow(fractions.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
    if len(class_names) <= 60:
        labels = [printable(name) for name in class_names]
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    top5 = f", top-5 {report.top5:.2%}" if "top5" in report.summary else ""
    axes.set_title(f"top-1 {report.top1:.2%}{top5}", fontsize=10)
    figure.colorbar(image, ax=axes, label="fraction of the true class", fraction=0.045)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of class names in a script that the font lacks
        figure.savefig(file, dpi=120)
