"""Going on: checkpoints with which an interrupted run ends as if it never was, and signals that interrupt it."""

import csv
import os
import pickle
import random
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from vitmha.errors import UserError


class AutosaveCheckpoint(Checkpoint):
    """Keeps `checkpoints/last.ckpt`, from which a run goes on as if it had never stopped: bit for bit on one process.

    It is written every few minutes, before every validation and after every epoch. Beside what Lightning saves it holds
    the random streams and the running metrics of every process, and the length of the schedule: a call with another one
    is refused, since the learning rate would jump.

    SIGTERM and SIGINT (Ctrl-C) make the run save it after the step under way (on several GPUs after at most
    trainer.log_every_n_steps), and leave with status 128 + the signal's
    number; a second signal ends it at once. During validation it leaves without saving, since nothing has changed.

    Args:
        every_n_minutes: The most that a killed run has to do again; 0 saves after every step.
    """

    def __init__(self, every_n_minutes: float = 5.0) -> None:
        if every_n_minutes < 0:
            raise UserError(f"--autosave.every_n_minutes must be 0 (after every step) or more, got {every_n_minutes}.")
        self.every_n_minutes = every_n_minutes
        self.signal: int | None = None
        self.is_fresh = False
        self.loaded: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = Path(trainer.log_dir or ".")  # asks all processes

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint.get("run", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not sooner: until here Lightning and the sanity check still draw, log, and set handlers of their own.
        if self.loaded:
            self._resume(trainer, pl_module)
        self.saved_at = time.monotonic()
        self.signal = signal.SIGTERM if trainer.received_sigterm else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _resume(self, trainer: Trainer, module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        if steps != self.loaded["steps"]:
            raise UserError(
                f"{trainer.ckpt_path} is of a schedule of {self.loaded['steps']} steps, and this call has {steps}: the "
                "learning rate would jump. Give --trainer.max_epochs and --data.batch_size as they were, or begin a "
                "new run from its weights with --model.pretrained."
            )
        # A schedule that asks for the number of steps makes Lightning build the loaders before it has their states.
        trainer.fit_loop._load_combined_loader_states()
        if len(self.loaded["processes"]) == trainer.world_size:
            mine = self.loaded["processes"][trainer.global_rank]
            set_rng_state(mine["random"])
            for name, values in mine["metrics"].items():
                metric: Any = module.get_submodule(name)
                for key, value in values.items():
                    setattr(metric, key, value.to(module.device))
                metric._update_count = 1  # else it would warn that it has counted nothing
        else:
            rank_zero_info("Another number of processes than before: the random streams begin anew.")
        if self.loaded["before_validation"]:
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()
        if trainer.is_global_zero:
            # Behind the hooks of a step, and so behind its checkpoint, Lightning logs what step and epoch have given.
            late = 0 if self.loaded["before_validation"] else trainer.global_step
            truncate_csv(self.folder / "metrics.csv", self.loaded["rows"], late)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        epoch = trainer.fit_loop.epoch_progress.current
        metrics = {} if epoch.processed == epoch.ready else running_metrics(pl_module)  # type: ignore[attr-defined]
        mine = {"random": rng_state(), "metrics": metrics}
        processes: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(processes, mine)
        self._flush(trainer)
        log = self.folder / "metrics.csv"
        rows = len(log.read_bytes().splitlines()) - 1 if trainer.is_global_zero and log.exists() else 0
        run = {"steps": trainer.estimated_stepping_batches, "processes": processes, "rows": rows}
        checkpoint["run"] = {**run, "before_validation": trainer.validating}
        if trainer.validating:
            # Lightning leaves out a validation that was not under way when the checkpoint was made.
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            for tracker in (progress["total"], progress["current"]):
                tracker.update(ready=1, started=1, processed=0, completed=0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A checkpoint holds no half-accumulated gradients; and behind the last batch comes one of the other two.
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.is_last_batch:
            return
        # Devices of many processes would wait for the answer: they ask each other as often as the trainer logs.
        is_cheap = trainer.world_size == 1 or pl_module.device.type == "cpu"
        if not is_cheap and trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        is_due = time.monotonic() - self.saved_at >= 60 * self.every_n_minutes
        if any_rank(trainer, is_due or self.signal is not None):
            self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_fresh:  # now all is logged that belongs to the checkpoint
            self.is_fresh = False
            self._flush(trainer)
            self._leave_if_asked(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._leave_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Where steps limit the run and not epochs, Lightning would count this epoch twice.
        if trainer.max_steps == -1 or trainer.global_step >= trainer.max_steps:
            self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, TrainingInterrupted):
            rank_zero_info(f"Interrupted; {self.file} is saved. To go on, add --ckpt_path last to the same command.")

    @property
    def file(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _leave_if_asked(self, trainer: Trainer) -> None:
        if any_rank(trainer, self.signal is not None):
            raise TrainingInterrupted(128 + (self.signal or signal.SIGTERM))

    def _save(self, trainer: Trainer) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.file, weights_only=False)
            self.saved_at, self.is_fresh = time.monotonic(), True

    @staticmethod
    def _flush(trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()


class TrainingInterrupted(SystemExit):
    """The run was asked to leave, and can go on later."""


def any_rank(trainer: Trainer, wish: bool) -> bool:
    """Whether any process wishes it; all of them must ask at the same time."""
    return wish if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(wish, all=False)


def rng_state() -> dict[str, Any]:
    """The states of all random streams of this process, of types that `torch.load` takes for safe."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }


def set_rng_state(states: dict[str, Any]) -> None:
    """Goes on with the streams of `rng_state`; one of CUDA only where there is a device."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def running_metrics(module: LightningModule) -> dict[str, dict[str, Any]]:
    """What the metrics of an epoch under way have counted so far, by the metric's name."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    return {
        name: {key: value.cpu() for key, value in each.metric_state.items() if isinstance(value, Tensor)}
        for name, each in metrics.items()
    }


def truncate_csv(file: Path, count: int, step: int) -> None:
    """Drops what a killed run had logged behind its checkpoint.

    Args:
        file: A table with a column `step`, or nothing.
        count: Rows that stay whatever they hold.
        step: Of the others those of a step below this one stay.
    """
    if not file.exists():
        return
    with file.open(newline="") as lines:
        header, *rows = csv.reader(lines)
    place = header.index("step")
    kept = [row for number, row in enumerate(rows) if number < count or int(row[place]) < step]
    partial = file.with_suffix(".partial")
    with partial.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *kept])
    partial.replace(file)


class ResumableCSVLogger(CSVLogger):
    """Writes `metrics.csv` of a run, and goes on with it, where Lightning's logger deletes what lies there."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        self._experiment = self._experiment or _Writer(self.log_dir)
        return self._experiment


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and puts it there when it is whole: a kill leaves the one before.

    Lightning's own way writes it to the folder for temporary files, from where it may have to be copied.
    """

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise UserError(
                f"{path} is damaged, or no checkpoint: {(str(error) or 'it ends too soon').splitlines()[0]}"
            ) from None
        if "vitmha" not in checkpoint:
            raise UserError(f"{path} is no checkpoint of vitmha: start from its weights with --model.pretrained.")
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):  # stores of objects are atomic by themselves
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
