"""Metrics of predictions against ground truth: accuracy, per-class accuracy, confusion and calibration."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitmha.errors import UserError

NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came out over all pictures."""

    top1: float
    """Share of the pictures whose most probable class is the right one."""
    top5: float
    """Share of those whose right class is among the five most probable."""
    ece: float
    """Expected calibration error: how far the probability of the answer lies from the share of right answers, the mean
    over `NUM_BINS` equal bins of probability, weighted by their pictures."""
    confusion: Int64[Tensor, "truth answer"]
    """Pictures of each class (row) by the class they were taken for (column)."""

    @property
    def per_class(self) -> Float[Tensor, " classes"]:
        """Share of right answers for each class; NaN for one without a picture."""
        return self.confusion.diagonal() / self.confusion.sum(1)

    @property
    def numbers(self) -> dict[str, Any]:
        """All but the classes."""
        count = int(self.confusion.sum())
        names = ("top1", "top5", "ece") if count else ()  # JSON knows no NaN
        return {"pictures": count, **{name: round(getattr(self, name), 6) for name in names}}


class Evaluation:
    """Counts answers; its tensors of several processes may be added up.

    Args:
        num_classes: Of the model.

    Source:
        The calibration error: Guo et al. 2017 (arXiv 1706.04599), equation 3.
    """

    def __init__(self, num_classes: int) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.in_five = torch.zeros((), dtype=torch.int64)
        # Pictures, right answers and the sum of probabilities in each bin.
        self.bins = torch.zeros(NUM_BINS, 3, dtype=torch.float64)

    def update(self, probabilities: Float[Tensor, "batch classes"], labels: Int64[Tensor, " batch"]) -> None:
        """Counts a batch.

        Raises:
            UserError: Probabilities that are no numbers.
        """
        probabilities, labels = probabilities.cpu(), labels.cpu()
        if broken := int((~probabilities.isfinite().all(1)).sum()):
            raise UserError(
                f"What the model gives is no number for {broken} of {len(labels)} pictures: its weights are broken or "
                "the precision is too low."
            )
        best = probabilities.topk(min(5, probabilities.shape[1])).indices
        answers = best[:, 0]
        self.confusion.index_put_((labels, answers), torch.ones_like(labels), accumulate=True)
        self.in_five += (best == labels[:, None]).sum()
        sure = probabilities.gather(1, best[:, :1])[:, 0].double()
        seen = torch.stack([torch.ones_like(sure), (answers == labels).double(), sure], dim=1)
        self.bins.index_add_(0, (sure * NUM_BINS).long().clamp(max=NUM_BINS - 1), seen)

    def compute(self) -> Report:
        """What came out; NaN without a picture."""
        count, (right, sure) = self.confusion.sum(), self.bins[:, 1:].unbind(1)
        return Report(
            top1=(self.confusion.trace() / count).item(),
            top5=(self.in_five / count).item(),
            ece=((right - sure).abs().sum() / count).item(),
            confusion=self.confusion,
        )


def write_report(report: Report, class_names: Sequence[str], folder: str | Path, **further: float) -> None:
    """metrics.json, classes.csv (pictures and accuracy), confusion.csv (truth by answer) and confusion.png.

    Args:
        report: What came out.
        class_names: In the order of their numbers.
        folder: Where to; made where it is not there.
        further: Numbers to go into metrics.json too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({**report.numbers, **further}, indent=2) + "\n")
    counts, shares = report.confusion.sum(1).tolist(), report.per_class.tolist()
    with (folder / "classes.csv").open("w", newline="", encoding="utf-8") as file:
        rows = zip(class_names, counts, shares, strict=True)
        csv.writer(file, lineterminator="\n").writerows([("class", "pictures", "accuracy"), *rows])
    with (folder / "confusion.csv").open("w", newline="", encoding="utf-8") as file:
        lines = ([name, *row] for name, row in zip(class_names, report.confusion.tolist(), strict=True))
        csv.writer(file, lineterminator="\n").writerows([("truth", *class_names), *lines])
    _draw_confusion(report, class_names, folder / "confusion.png")


def _draw_confusion(report: Report, class_names: Sequence[str], file: Path) -> None:
    from matplotlib.figure import Figure  # takes half a second that only a report has to spare

    side = min(4 + 0.22 * len(class_names), 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = report.confusion / report.confusion.sum(1, keepdim=True).clamp_min(1)
    painted = axes.imshow(shares.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
    if len(class_names) <= 60:
        axes.set_xticks(range(len(class_names)), class_names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(class_names)), class_names, fontsize=8)
    axes.set_xlabel("answer")
    axes.set_ylabel("truth")
    axes.set_title(f"top-1 {report.top1:.2%}, top-5 {report.top5:.2%}", fontsize=10)
    figure.colorbar(painted, ax=axes, label="share of the class", fraction=0.045)
    figure.savefig(file, dpi=120)
