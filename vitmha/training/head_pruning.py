"""Prunes attention heads during training."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from vitmha.errors import UserError, check_argument
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.importance import accumulate_importance, normalize_importance, rank_heads
from vitmha.pruning.remove import group_by_layer, mask_heads, prune


class HeadPruning(Callback):
    """Prunes the least important heads of a classifier in several rounds while it trains.

    The importance of a head is accumulated from the backward passes of the training steps since the previous round
    (`vitmha.pruning.importance.accumulate_importance`), without passes of its own. A pruned head outputs zeros from
    then on; its weights are removed at the end, before the model directory is written.

    Args:
        amount: Fraction of the heads to prune, in (0, 1).
        num_rounds: Number of rounds, evenly spaced.
        end_fraction: Fraction of training after which the last round is done, in (0, 1); the rest is for recovery.

    Raises:
        UserError: A number outside its range; at the start of training, a model or settings that cannot be combined
            with pruning.
    """

    def __init__(self, amount: float, num_rounds: int = 8, end_fraction: float = 0.5) -> None:
        check_argument("amount", amount, 0 < amount < 1, "in (0, 1)")
        check_argument("num_rounds", num_rounds, num_rounds >= 1, "at least 1")
        check_argument("end_fraction", end_fraction, 0 < end_fraction < 1, "in (0, 1)")
        self.amount, self.num_rounds, self.end_fraction = amount, num_rounds, end_fraction
        self.pruned: list[tuple[int, int]] = []
        self.rounds_done = 0
        self.importance: list[Tensor] = []
        self.hooks = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module.model
        self._check_supported(trainer, pl_module)
        assert isinstance(model, VisionTransformer)
        total = sum(attention.num_heads for attention in model.attentions)
        steps = trainer.estimated_stepping_batches
        is_late = self.end_fraction * steps > steps - 1 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if round(self.amount * total) in (0, total) or is_late:
            raise UserError(
                f"HeadPruning would prune {round(self.amount * total)} of {total} heads, the last of them at step "
                f"{self.end_fraction * steps:.0f} of {steps}: change amount or end_fraction."
            )
        self.model, self.reduce, loaded = model, trainer.strategy.reduce, self.importance
        self._mask_pruned()
        for importance, value in zip(self.importance, loaded, strict=False):  # of a checkpoint, the sum over all ranks
            importance.copy_(value if trainer.is_global_zero else torch.zeros_like(value))

    @staticmethod
    def _check_supported(trainer: Trainer, module: LightningModule) -> None:
        is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if not isinstance(module.model, VisionTransformer) or is_sharded:
            raise UserError("HeadPruning supports classifiers that are not sharded: remove it from trainer.callbacks.")
        if getattr(module, "is_compiled", False) or getattr(module, "ema_decay", None) is not None:
            raise UserError("HeadPruning changes the model and cannot be combined with compile or ema_decay.")
        if getattr(module, "linear_probe", False):
            raise UserError("HeadPruning needs gradients of the blocks and cannot be combined with linear_probe.")

    def _mask_pruned(self) -> None:
        """Masks the pruned heads, and starts to accumulate the importance of the others anew."""
        self._zero_weights()
        self.hooks.close()
        self.hooks.enter_context(mask_heads(self.model, group_by_layer(self.pruned)))
        self.importance = self.hooks.enter_context(accumulate_importance(self.model))

    def _zero_weights(self) -> None:
        """Sets the output weights of the masked heads to zero, so that a checkpoint loads as the masked model."""
        for layer, heads in group_by_layer(self.pruned).items():
            attention = self.model.attentions[layer]
            columns = attention.out_proj.weight.detach().unflatten(1, (-1, attention.head_dim))
            columns[:, heads] = 0

    def _reduced_importance(self) -> list[Tensor]:
        """Returns the sum of the importance over all processes."""
        return [self.reduce(importance.clone(), reduce_op="sum") for importance in self.importance]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress = trainer.global_step / (self.end_fraction * trainer.estimated_stepping_batches)
        rounds = min(math.floor(progress * self.num_rounds), self.num_rounds)
        if rounds > self.rounds_done:
            ranking = rank_heads(normalize_importance(self._reduced_importance()))
            remaining = [head for head in ranking if head not in self.pruned]
            num_pruned = round(self.amount * len(ranking) * rounds / self.num_rounds)
            self.pruned += remaining[: num_pruned - len(self.pruned)]
            self.rounds_done = rounds
            self._mask_pruned()

    def on_train_batch_end(self, *_: Any) -> None:
        self._zero_weights()  # an optimizer with momentum changes weights without a gradient

    def state_dict(self) -> dict[str, Any]:
        settings = {"amount": self.amount, "num_rounds": self.num_rounds, "end_fraction": self.end_fraction}
        return {
            "settings": settings,
            "pruned": self.pruned,
            "rounds_done": self.rounds_done,
            "importance": self._reduced_importance(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any(getattr(self, name) != value for name, value in state_dict["settings"].items()):
            raise UserError(f"The checkpoint is from a run with HeadPruning {state_dict['settings']}: use the same.")
        self.pruned = [(layer, head) for layer, head in state_dict["pruned"]]
        self.rounds_done, self.importance = state_dict["rounds_done"], state_dict["importance"]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hooks.close()
        prune(self.model, group_by_layer(self.pruned))
        self.pruned = []  # the remaining heads have new indices
        counts = " ".join(str(attention.num_heads) for attention in self.model.attentions)
        trainer.print(f"Heads per layer after pruning: {counts}")
