"""Every private member of Lightning and torchmetrics that vitmha uses, in one place.

Checked with lightning>=2.6,<2.7, as pyproject.toml requires, and torchmetrics 1.x: another minor version may rename
them. Each function says which public behavior is missing. One private member cannot be here, since only a subclass can
override it: `LightningCLI._parse_ckpt_path` in `vitmha.cli.fit`.
"""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

# --------------------------------------------------------------------------------------------------------- resuming


def restore_loader_states(trainer: Trainer) -> None:
    """Gives the training loaders the states of the checkpoint.

    Lightning does so when it builds the loaders; a schedule that asks for `estimated_stepping_batches` makes it build
    them before it has read the states.
    """
    trainer.fit_loop._load_combined_loader_states()


def restore_metric(metric: Metric, state: dict[str, Tensor], device: torch.device) -> None:
    """Sets the state of a metric that has been updated before; without the count, `compute` would warn."""
    for name, value in state.items():
        setattr(metric, name, value.to(device))
    metric._update_count = 1


def mark_validation_as_started(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint that was written just before a validation resume with that validation.

    Lightning saves the progress of a validation loop that has not started as finished, and would skip it.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    for tracker in (progress["total"], progress["current"]):
        tracker.update(ready=1, started=1, processed=0, completed=0)


def restart_validation(trainer: Trainer) -> None:
    """Starts the validation that `mark_validation_as_started` has marked at its first batch."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()


# ------------------------------------------------------------------------------------------------- weight averaging


def get_average_model(averaging: WeightAveraging) -> AveragedModel | None:
    """The averaged model; None before training."""
    return averaging._average_model


def set_average_model(averaging: WeightAveraging, model: AveragedModel) -> None:
    """Replaces the averaged model that `WeightAveraging.setup` would create."""
    averaging._average_model = model


def get_latest_update_step(averaging: WeightAveraging) -> int:
    """Number of optimizer steps after which the average was last updated."""
    return averaging._latest_update_step


def swap_weights(averaging: WeightAveraging, module: LightningModule) -> None:
    """Exchanges the weights of the module and the averaged model."""
    averaging._swap_models(module)


# ---------------------------------------------------------------------------------------------------------- loggers


def write_into_run(logger: WandbLogger, run_dir: str) -> None:
    """Makes W&B write into the run directory, unless another directory is chosen.

    The logger is built before the directory is known. W&B takes the directories of its cache, its settings and its
    staged files from the environment only; online they stay where other runs and the login find them.
    """
    if logger.save_dir in (None, "."):
        logger._save_dir = logger._wandb_init["dir"] = run_dir
        for name in ("cache", "config", "data") if logger._offline else ():
            os.environ.setdefault(f"WANDB_{name.upper()}_DIR", os.path.abspath(os.path.join(run_dir, "wandb", name)))


AddRows = Callable[[Path, Collection[Mapping[str, Any]]], None]


class _Writer(ExperimentWriter):
    """Lightning's writer, which hands its rows to a function in place of writing them itself."""

    def __init__(self, log_dir: str, add_rows: AddRows) -> None:
        super().__init__(log_dir)
        self.add_rows = add_rows

    def _check_log_dir_exists(self) -> None:
        """Does nothing: Lightning's own deletes an existing metrics.csv."""

    def save(self) -> None:
        if self.metrics:
            self.add_rows(Path(self.metrics_file_path), self.metrics)
            self.metrics = []


def get_writer(logger: CSVLogger, add_rows: AddRows) -> Any:
    """The logger's writer, which is created at the first call.

    Args:
        logger: Has a metrics.csv.
        add_rows: Adds rows to that file; called with its path.
    """
    if logger._experiment is None:
        logger._experiment = _Writer(logger.log_dir, add_rows)
    return logger._experiment
