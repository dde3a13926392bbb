"""Prunes attention heads during training."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from vitmha.errors import UserError
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.importance import accumulate_importance, normalized, rank_heads
from vitmha.pruning.remove import group_by_layer, mask_heads, prune


class HeadPruning(Callback):
    """Removes the least important heads while a classifier trains, a few at a time, so that the others take over.

    Importance is what `vitmha.slimming.accumulate_importance` sees in the training steps since the last removal: it comes
    with their backward passes and needs none of its own. A removed head gives zeros from then on; at the end its
    weights are gone, before the model folder is written.

    Args:
        amount: Of the heads, gone at the end.
        num_rounds: Removals, evenly spaced.
        end_fraction: Share of all optimiser steps after which the last is done; the rest is for recovering.
    """

    def __init__(self, amount: float, num_rounds: int = 8, end_fraction: float = 0.5) -> None:
        if not (0 < amount < 1 and num_rounds >= 1 and 0 < end_fraction < 1):
            raise UserError(
                "HeadPruning takes amount and end_fraction in (0, 1) and num_rounds of at least 1, "
                f"got {amount}, {end_fraction} and {num_rounds}."
            )
        self.amount, self.num_rounds, self.end_fraction = amount, num_rounds, end_fraction
        self.removed: list[tuple[int, int]] = []
        self.done = 0
        self.importance: list[Tensor] = []
        self.inside = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module.model
        is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if not isinstance(model, VisionTransformer) or is_sharded:
            raise UserError("HeadPruning is for classifiers that are not sharded: leave it out of trainer.callbacks.")
        if getattr(pl_module, "is_compiled", False) or getattr(pl_module, "ema_decay", None) is not None:
            raise UserError(
                "HeadPruning changes the model in training: leave out --model.compile and --model.ema_decay."
            )
        if getattr(pl_module, "linear_probe", False):
            raise UserError("HeadPruning needs gradients from below the head: leave out --model.linear_probe.")
        total, steps = sum(each.num_heads for each in model.attentions), trainer.estimated_stepping_batches
        is_late = self.end_fraction * steps > steps - 1 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if round(self.amount * total) in (0, total) or is_late:
            raise UserError(
                f"HeadPruning would remove {round(self.amount * total)} of {total} heads, the last of them before step "
                f"{self.end_fraction * steps:.0f} of {steps}: change amount or end_fraction."
            )
        self.model, self.reduce, kept = model, trainer.strategy.reduce, self.importance
        self._switch_off()
        for now, before in zip(self.importance, kept, strict=False):
            now.copy_(before if trainer.is_global_zero else torch.zeros_like(before))  # a run that goes on

    def _switch_off(self) -> None:
        """Heads that are gone give zeros; the importance of the others is counted anew."""
        self._erase()
        self.inside.close()
        self.inside.enter_context(mask_heads(self.model, group_by_layer(self.removed)))
        self.importance = self.inside.enter_context(accumulate_importance(self.model))

    def _erase(self) -> None:
        """What is masked is zero in the weights too, so that whoever loads a checkpoint gets the model as it is."""
        for layer, heads in group_by_layer(self.removed).items():
            attention = self.model.attentions[layer]
            columns = attention.out_proj.weight.detach().unflatten(1, (-1, attention.head_dim))
            columns[:, heads] = 0

    def _sums(self) -> list[Tensor]:
        """The importance over all processes."""
        return [self.reduce(each.clone(), reduce_op="sum") for each in self.importance]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress = trainer.global_step / (self.end_fraction * trainer.estimated_stepping_batches)
        due = min(math.floor(progress * self.num_rounds), self.num_rounds)
        if due > self.done:
            left = [head for head in rank_heads(normalized(self._sums())) if head not in self.removed]
            total = len(left) + len(self.removed)
            self.removed += left[: round(self.amount * total * due / self.num_rounds) - len(self.removed)]
            self.done = due
            self._switch_off()

    def on_train_batch_end(self, *_: Any) -> None:
        self._erase()  # optimisers with momentum move what has no gradient

    def state_dict(self) -> dict[str, Any]:
        plan = {"amount": self.amount, "num_rounds": self.num_rounds, "end_fraction": self.end_fraction}
        return {"plan": plan, "removed": self.removed, "done": self.done, "importance": self._sums()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any(getattr(self, name) != value for name, value in state_dict["plan"].items()):
            raise UserError(f"The checkpoint is of a run with HeadPruning of {state_dict['plan']}: give the same.")
        self.removed, self.done = [(layer, head) for layer, head in state_dict["removed"]], state_dict["done"]
        self.importance = state_dict["importance"]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.inside.close()
        prune(self.model, group_by_layer(self.removed))
        self.removed = []  # those that are left have other numbers now
        trainer.print(f"Heads left by layer: {' '.join(str(each.num_heads) for each in self.model.attentions)}")
