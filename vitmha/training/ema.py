"""Exponential moving average of the weights."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim.swa_utils import AveragedModel

from vitmha.errors import UserError


class EMAWeightAveraging(WeightAveraging):
    """Keeps a running average of the weights, which is validated, saved and classified with.

    After a step, average = d average + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)) at t steps before it:
    the average follows closely while little is learned, so that short runs may have a high decay too.

    One rule: wherever the weights are looked at, they are the averaged ones. These are in the model during validation
    and from the end of training on, and in `state_dict` of a checkpoint, which `load_model` reads. The others, with
    which a resumed run goes on, are beside them in `current_model_state`. Not for sharded models (FSDP).

    Args:
        decay: The largest d, in [0, 1).

    Source:
        Polyak and Juditsky 1992; the rising decay: TensorFlow's `ExponentialMovingAverage`.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, multi_avg_fn=self._average)
        self.decay = decay
        self.is_swapped = False

    def _average(self, averaged: Any, current: Any, _: Any) -> None:
        steps = self._latest_update_step
        decay = min(self.decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(averaged, current, 1 - decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for `on_fit_start`: by then the module has its pretrained weights and lies on its device."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError(
                "--model.ema_decay cannot average a sharded model: leave it out, or take --trainer.strategy ddp."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = self._average_model or self._begin(pl_module)
        # The count of updates stays on the CPU: reading it would make the host wait for the device.
        average.module.to(pl_module.device)

    def _begin(self, pl_module: LightningModule) -> AveragedModel:
        self._average_model = AveragedModel(pl_module, use_buffers=False, multi_avg_fn=self._average)
        return self._average_model

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self.is_swapped = not self.is_swapped

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap_models(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for `on_validation_end`: attention is drawn there, with the same weights."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap_models(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap_models(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.is_swapped:
            averaged, current = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = averaged, current

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._begin(pl_module)
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
