"""Callbacks of every run: evaluation report, non-finite loss, progress bar, last validation, and the saved model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from vitmha.errors import UserError
from vitmha.metrics import Evaluation, write_report
from vitmha.models.vit import VisionTransformer
from vitmha.training.batches import images_and_labels
from vitmha.training.summary import training_summary
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.training_summary import SUMMARY_FILE, TrainingSummary, read_summary


class ClassificationReportCallback(Callback):
    """Writes the run directory's `evaluation/` after `validate` and `test` of a classifier, over all processes.

    It holds the metrics, the accuracy of each class and the confusion matrix, as `vitmha.metrics.write_report` writes
    them.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.evaluation: Evaluation | None = None
        if stage in ("validate", "test") and isinstance(pl_module.model, VisionTransformer):
            self.evaluation = Evaluation(pl_module.model.config.num_classes)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.evaluation is not None and outputs is not None:
            self.evaluation.update(outputs.softmax(-1), images_and_labels(batch)[1])

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.evaluation is None:
            return
        for name, count in vars(self.evaluation).items():
            total = trainer.strategy.reduce(count.to(pl_module.device), reduce_op="sum")
            setattr(self.evaluation, name, total.cpu())
        directory = Path(trainer.log_dir or ".") / "evaluation"  # log_dir is a collective call: all ranks make it
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            model: Any = pl_module.model
            class_names = model.class_names or [str(index) for index in range(model.config.num_classes)]
            write_report(self.evaluation.compute(), class_names, directory)

    on_test_end = on_validation_end


class StopOnNonFiniteLoss(Callback):
    """Stops the run before the optimizer step of a NaN or infinite loss, and saves `checkpoints/nan_loss.ckpt`.

    The loss is checked in every step on one CPU. On other devices and with several processes, where reading it
    synchronizes host and devices, it is checked every trainer.log_every_n_steps steps.
    """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        is_cheap = trainer.world_size == 1 and loss.device.type == "cpu"
        if not is_cheap and trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        if trainer.strategy.reduce_boolean_decision(bool(loss.isfinite()), all=True):
            return
        path = Path(trainer.log_dir or ".") / "checkpoints" / "nan_loss.ckpt"
        trainer.save_checkpoint(path)
        is_finite = all(bool(parameter.isfinite().all()) for parameter in pl_module.parameters())
        state = f"The state before that step is in {path}." if is_finite else "The weights are no longer finite."
        raise UserError(
            f"The loss is {loss.item()} at step {trainer.global_step} (epoch {trainer.current_epoch}). {state} "
            "Lower learning_rate, raise warmup_fraction, or set gradient_clip_val of the trainer to 1."
        )


class ValidateLastEpoch(Callback):
    """Validates after the last epoch whatever trainer.check_val_every_n_epoch is: it measures the saved model."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # not called for an epoch that is resumed in its middle

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.check_val_every_n_epoch and trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.check_val_every_n_epoch = 1


class ProgressBar(RichProgressBar):
    """Lightning's progress bar, which reads metrics only as often as the loggers do: reading waits for a GPU.

    It shows no metrics of the sanity check, whose few images may all be of one class, and no version number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        interval = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if trainer.sanity_checking:
            return {}
        if not trainer.training or trainer.global_step % interval == 0:
            self.metrics = super().get_metrics(trainer, pl_module)
            self.metrics.pop("v_num", None)
        return self.metrics


class SaveModelCallback(Callback):
    """Writes the model directory, the run directory's `model/`, at the end of training.

    It holds the weights of the last step, averaged if ema_decay is set. It is not the best checkpoint: choosing one by
    the accuracy on the images that the run reports would flatter that accuracy.

    Args:
        command: The command that trains the model, for its model card.
    """

    def __init__(self, command: str | None = None) -> None:
        self.command = command
        self.has_trained = False
        self.validated_step = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_trained = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run_dir = Path(trainer.log_dir or ".")  # log_dir is a collective call: all ranks make it
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        summary = self._summary(trainer, pl_module, run_dir / "model")
        if trainer.is_global_zero:
            # A sharded model is whole only in the checkpoint, as is the average if the run was complete already.
            is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
            lacks_average = not self.has_trained and getattr(pl_module, "ema_decay", None) is not None
            is_partial = is_sharded or lacks_average
            model = load_model(run_dir / "checkpoints" / "last.ckpt") if is_partial else pl_module.model
            save_model(model, run_dir / "model", summary=summary)  # type: ignore[arg-type]

    def _summary(self, trainer: Trainer, pl_module: Any, directory: Path) -> TrainingSummary:
        """What the run knows; of a run that was complete before, what it wrote then."""
        if not self.has_trained and (directory / SUMMARY_FILE).is_file():
            return read_summary(directory)
        summary = replace(training_summary(pl_module, trainer), command=self.command)
        return summary if self.validated_step == trainer.global_step else replace(summary, result=None)
