"""Exponential moving average of the weights."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim.swa_utils import AveragedModel

from vitmha.errors import UserError
from vitmha.training.lightning_compat import (
    get_average_model,
    get_latest_update_step,
    set_average_model,
    swap_weights,
)


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average (EMA) of the weights, which is the model that is validated and saved.

    After a step, average = d average + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)), where t is the number
    of steps before it. The small d of the first steps makes a high decay suit short runs too.

    The averaged weights are in the model during validation and from the end of training on, and in `state_dict` of a
    checkpoint, which `load_model` reads. The raw weights, from which training continues, are in `current_model_state`.
    Sharded models (FSDP) are not supported.

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
        steps = get_latest_update_step(self)
        decay = min(self.decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(averaged, current, 1 - decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves creating the average to `on_fit_start`: then the module has its pretrained weights and its device."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError("ema_decay cannot average a sharded model: remove it, or use strategy ddp.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = get_average_model(self) or self._create_average(pl_module)
        # The number of updates stays on the CPU: reading it from the device would synchronize host and device.
        average.module.to(pl_module.device)

    def _create_average(self, pl_module: LightningModule) -> AveragedModel:
        average = AveragedModel(pl_module, use_buffers=False, multi_avg_fn=self._average)
        set_average_model(self, average)
        return average

    def _swap(self, pl_module: LightningModule) -> None:
        swap_weights(self, pl_module)
        self.is_swapped = not self.is_swapped

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves swapping back to `on_validation_end`, where attention is logged with the averaged weights."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.is_swapped:
            averaged, current = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = averaged, current

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._create_average(pl_module)
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
