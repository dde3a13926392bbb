"""`metrics.csv`, the metrics of a run by epoch, and tables that a resumed run continues."""

import csv
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger

from vitmha.atomic import atomic_path
from vitmha.training.lightning_compat import get_writer

FIRST = ("epoch", "step", "train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy")
LAST = ("lr", "muon_lr")
Row = Mapping[str, Any]


class ResumableCSVLogger(CSVLogger):
    """Writes `metrics.csv` with one row per epoch, which a resumed run continues.

    A row has the metrics of training and of validation with 7 significant digits, and the learning rates after the
    epoch. Its columns are `FIRST`, then the metrics of other callbacks and modules by name, then `LAST`. A validation
    in the middle of an epoch (trainer.val_check_interval) has a row of its own. The file is complete at any moment.

    What is logged by step, `train/loss` and what comes without an epoch, is not written: other loggers get it.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return get_writer(self, _add_rows)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if "epoch" in metrics and "train/loss" not in metrics:
            super().log_metrics(dict(metrics), step)
            self.save()


def _add_rows(file: Path, rows: Collection[Row]) -> None:
    """Adds rows to a metrics.csv, each to the row of its epoch and step if there is one."""
    by_step = {(row["epoch"], row["step"]): row for row in read_table(file)}
    for row in rows:
        texts = {name: str(value) if isinstance(value, int) else f"{value:.7g}" for name, value in row.items()}
        key = texts["epoch"], texts["step"]
        by_step[key] = {**by_step.get(key, {}), **texts}
    found = {name for row in by_step.values() for name in row}
    others = sorted(found - {*FIRST, *LAST})
    write_table(file, [name for name in (*FIRST, *others, *LAST) if name in found], by_step.values())


def read_table(file: Path) -> Collection[Row]:
    """The rows of a CSV file as text by column; none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def write_table(file: Path, columns: Collection[str], rows: Collection[Row]) -> None:
    """Writes a CSV file, completely or not at all."""
    with atomic_path(file) as partial, partial.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def remove_rows(file: Path, num_kept: int, step: int) -> None:
    """Removes the rows of a table that a killed run has logged after its checkpoint, and a table without other rows.

    Args:
        file: A table with a column `step`; it need not exist.
        num_kept: Leading rows to keep unconditionally.
        step: The other rows are kept if their step is below this one.
    """
    rows = [row for index, row in enumerate(read_table(file)) if index < num_kept or int(row["step"]) < step]
    if rows:
        write_table(file, rows[0], rows)
    else:
        file.unlink(missing_ok=True)
