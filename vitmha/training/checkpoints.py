"""Checkpoints from which an interrupted run resumes bit for bit, and the signals that interrupt it."""

import math
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from vitmha.atomic import atomic_path
from vitmha.errors import UserError, check_argument
from vitmha.training.lightning_compat import (
    mark_validation_as_started,
    restart_validation,
    restore_loader_states,
    restore_metric,
)
from vitmha.training.metrics_csv import read_table, remove_rows


class AutosaveCheckpoint(Checkpoint):
    """Keeps `checkpoints/last.ckpt`, from which a run resumes as if it had not stopped: bit for bit on one process.

    It is written every few minutes, before every validation and after every epoch; with accumulate_grad_batches only
    after whole optimizer steps, since it holds no gradients. In addition to what Lightning saves it holds, under
    `resume`, the states of the random number generators and the running metrics of every process, and the number of
    rows in metrics.csv.

    After SIGTERM or SIGINT (Ctrl-C) the run saves the checkpoint at the end of the step (on several GPUs after at most
    trainer.log_every_n_steps steps) and exits with status 128 + the signal's number. A second Ctrl-C ends it at once; a
    second SIGTERM does not, since torchrun passes on the one that a process may have received with all others.
    During validation it exits without saving, since nothing has changed.

    Args:
        every_n_minutes: Minutes between checkpoints, at least 0; 0 saves after every step.

    Raises:
        UserError: Negative minutes.
    """

    def __init__(self, every_n_minutes: float = 5.0) -> None:
        is_valid = 0 <= every_n_minutes < math.inf
        check_argument("every_n_minutes", every_n_minutes, is_valid, "at least 0 (0 saves after every step)")
        self.every_n_minutes = every_n_minutes
        self.signal: int | None = None
        self.just_saved = False
        self.loaded: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.run_dir = Path(trainer.log_dir or ".")  # log_dir is a collective call: all ranks make it

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self.loaded = checkpoint.get("resume", {})
        if self.loaded.get("accumulating"):
            raise UserError(
                f"{trainer.ckpt_path} was saved between the batches of one optimizer step and does not hold their "
                "gradients: resume from last.ckpt of the same run."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: until here Lightning and the sanity check draw random numbers, log, and set signal handlers.
        if self.loaded:
            self._resume(trainer, pl_module)
        self.saved_at = time.monotonic()
        self.signal = signal.SIGTERM if trainer.received_sigterm else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _resume(self, trainer: Trainer, module: LightningModule) -> None:
        restore_loader_states(trainer)
        if len(self.loaded["ranks"]) == trainer.world_size:
            state = self.loaded["ranks"][trainer.global_rank]
            set_rng_state(state["rng"])
            for name, values in state["metrics"].items():
                metric: Any = module.get_submodule(name)
                restore_metric(metric, values, module.device)
        else:
            rank_zero_info("Resuming with another number of processes: the random number generators start anew.")
        if self.loaded["before_validation"]:
            restart_validation(trainer)
        if trainer.is_global_zero:
            # Lightning logs the step and the epoch after their hooks, hence after the checkpoint.
            step = 0 if self.loaded["before_validation"] else trainer.global_step
            remove_rows(self.run_dir / "metrics.csv", self.loaded["csv_rows"], step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        epoch = trainer.fit_loop.epoch_progress.current
        metrics = {} if epoch.processed == epoch.ready else running_metrics(pl_module)  # type: ignore[attr-defined]
        state = {"rng": rng_state(), "metrics": metrics}
        ranks: list[Any] = [state] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(ranks, state)
        self._flush(trainer)
        csv_rows = len(read_table(self.run_dir / "metrics.csv")) if trainer.is_global_zero else 0
        checkpoint["resume"] = {
            "ranks": ranks,
            "csv_rows": csv_rows,
            "before_validation": trainer.validating,
            "accumulating": not trainer.is_last_batch and is_accumulating(trainer, trainer.fit_loop.batch_idx),
        }
        if trainer.validating:
            mark_validation_as_started(checkpoint)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A checkpoint holds no accumulated gradients; after the last batch, validation or the epoch's end saves.
        if is_accumulating(trainer, batch_idx) or trainer.is_last_batch:
            return
        # Agreeing on it synchronizes the devices of several processes: they do so only as often as the trainer logs.
        is_cheap = trainer.world_size == 1 or pl_module.device.type == "cpu"
        if not is_cheap and trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        is_due = time.monotonic() - self.saved_at >= 60 * self.every_n_minutes
        is_due |= validates_while_accumulating(trainer, batch_idx)
        if any_rank(trainer, is_due or self.signal is not None):
            self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.just_saved:  # by now Lightning has logged the step of the checkpoint
            self.just_saved = False
            self._flush(trainer)
            self._exit_if_signaled(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_between_steps = trainer.is_last_batch or not is_accumulating(trainer, trainer.fit_loop.batch_idx)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and is_between_steps:
            self._save(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._exit_if_signaled(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # In a run that is limited by steps and not by epochs, Lightning would count this epoch twice.
        if trainer.max_steps == -1 or trainer.global_step >= trainer.max_steps:
            self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, TrainingInterrupted):
            rank_zero_info(
                f"Interrupted; the checkpoint is {self.path}. To resume, add --ckpt_path last to the same command."
                if self.path.exists()
                else "Interrupted before the first checkpoint was saved."
            )

    @property
    def path(self) -> Path:
        return self.run_dir / "checkpoints" / "last.ckpt"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def _exit_if_signaled(self, trainer: Trainer) -> None:
        if any_rank(trainer, self.signal is not None):
            raise TrainingInterrupted(128 + (self.signal or signal.SIGTERM))

    def _save(self, trainer: Trainer) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved_at, self.just_saved = time.monotonic(), True

    @staticmethod
    def _flush(trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()


def is_accumulating(trainer: Trainer, batch_idx: int) -> bool:
    """Whether gradients are accumulated after a batch that are not yet in the weights, and in no checkpoint."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches != 0


def validates_while_accumulating(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the next validation comes in the middle of the accumulation that starts after a batch."""
    interval: Any = trainer.val_check_batch  # None or inf if it does not count batches
    following = range(batch_idx + 2, batch_idx + 1 + trainer.accumulate_grad_batches)
    return isinstance(interval, int) and any(batch % interval == 0 for batch in following)


class TrainingInterrupted(SystemExit):
    """Ends a run after a signal; it can be resumed."""


def any_rank(trainer: Trainer, flag: bool) -> bool:
    """Returns whether the flag is set on any process; all processes must call it."""
    return flag if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(flag, all=False)


def rng_state() -> dict[str, Any]:
    """Returns the state of all random number generators of this process, as types that `weights_only=True` loads."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned; CUDA's only where there is a device."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def running_metrics(module: LightningModule) -> dict[str, dict[str, Any]]:
    """Returns the state of each metric of the module within the current epoch, by the metric's name."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    return {
        name: {key: value.cpu() for key, value in metric.metric_state.items() if isinstance(value, Tensor)}
        for name, metric in metrics.items()
    }


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint completely or not at all: after a kill the previous one is still there.

    Lightning writes to the directory for temporary files, from where the checkpoint may have to be copied.
    """

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with _one_line_errors(path):
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        return _check_is_ours(path, checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):  # object stores write atomically
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_path(path, fsync=True) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint without running code; its tensors stay in the file until they are used.

    Raises:
        UserError: A corrupt file, or a checkpoint of another package.
    """
    with _one_line_errors(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return _check_is_ours(path, checkpoint)


@contextmanager
def _one_line_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a corrupt file makes the unpickler raise almost anything
        reason = (str(error) or "unexpected end of file").splitlines()[0]
        if "weights_only" in str(error):  # PyTorch's message advises to allow running code
            found = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it holds {found[1] if found else 'something'}, not only tensors, numbers and strings"
        raise UserError(f"{path} is corrupt or not a checkpoint: {reason}") from None


def _check_is_ours(path: str | Path, checkpoint: Any) -> dict[str, Any]:
    if not (isinstance(checkpoint, dict) and "vitmha" in checkpoint):
        raise UserError(f"{path} is not a vitmha checkpoint; to start from its weights, use pretrained.")
    return checkpoint
