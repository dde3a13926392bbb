"""Callbacks of every run: evaluation report, NaN guard, progress bar and the saved model."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from vitmha.errors import UserError
from vitmha.metrics import Evaluation, write_report
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


class ClassificationReportCallback(Callback):
    """Writes into `evaluation/` of the run's folder, after `validate` and `test`, how right the answers were.

    The measures, each class's accuracy and the confusion matrix as CSV and as a picture; over all processes.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.evaluation: Evaluation | None = None
        model = pl_module.model
        if stage in ("validate", "test") and isinstance(model, VisionTransformer):
            self.evaluation = Evaluation(model.config.num_classes)
            self.hook = pl_module.register_forward_hook(self._count)

    def _count(self, module: LightningModule, given: tuple[Tensor, Tensor], logits: Tensor) -> None:
        if self.evaluation is not None:
            self.evaluation.update(logits.float().softmax(-1), given[1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.evaluation is None:
            return
        self.hook.remove()
        for name, count in vars(self.evaluation).items():
            total = trainer.strategy.reduce(count.to(pl_module.device), reduce_op="sum")
            setattr(self.evaluation, name, total.cpu())
        folder = Path(trainer.log_dir or ".") / "evaluation"  # asks all processes
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            model: Any = pl_module.model
            names = model.class_names or [str(number) for number in range(model.config.num_classes)]
            write_report(self.evaluation.compute(), names, folder)

    on_test_end = on_validation_end


class StopOnNonFiniteLoss(Callback):
    """Stops the run before the step that a NaN or infinite loss would spoil, and saves where it stands.

    The loss is looked at in every step on one CPU; on other devices and many processes, where a look makes all of them
    wait, as often as the trainer logs.
    """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        is_cheap = trainer.world_size == 1 and loss.device.type == "cpu"
        if not is_cheap and trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        if trainer.strategy.reduce_boolean_decision(bool(loss.isfinite()), all=True):
            return
        file = Path(trainer.log_dir or ".") / "checkpoints" / "not_finite.ckpt"
        trainer.save_checkpoint(file)
        is_whole = all(bool(parameter.isfinite().all()) for parameter in pl_module.parameters())
        state = f"The state before that step is saved in {file}." if is_whole else "The weights are no longer finite."
        raise UserError(
            f"The loss became {loss.item()} at step {trainer.global_step} (epoch {trainer.current_epoch}). {state} "
            "Lower --model.learning_rate, raise --model.warmup_fraction, or clip with --trainer.gradient_clip_val 1."
        )


class ProgressBar(RichProgressBar):
    """Lightning's bar. It looks at the numbers of a step no more often than the loggers do: a look waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        interval = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if not trainer.training or trainer.global_step % interval == 0:
            self.seen = super().get_metrics(trainer, pl_module)
        return self.seen


class SaveModelCallback(Callback):
    """Writes the model folder, `model/` in the run's folder, when training has come to its end.

    It holds the weights of the last step, averaged with --model.ema_decay. No checkpoint is picked by its accuracy on the
    pictures that the run reports, since that would flatter the number.
    """

    def __init__(self) -> None:
        self.has_trained = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_trained = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(trainer.log_dir or ".")  # asks all processes
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # A sharded model is whole in its checkpoint alone; averages of a run that was at its end already, likewise.
            sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
            is_elsewhere = sharded or (not self.has_trained and getattr(pl_module, "ema_decay", None) is not None)
            model = load_model(folder / "checkpoints" / "last.ckpt") if is_elsewhere else pl_module.model
            save_model(model, folder / "model")  # type: ignore[arg-type]
