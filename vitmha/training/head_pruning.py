"""Prunes attention heads during training."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from vitmha.models.vit import VisionTransformer
from vitmha.pruning.importance import normalized, observed_importance, weakest_first
from vitmha.pruning.remove import by_layer, prune, without_heads


class HeadPruning(Callback):
    """Removes the least important heads while a classifier trains, a few at a time, so that the others take over.

    Importance is what `vitmha.slimming.observed_importance` sees in the training steps since the last removal: it comes
    with their backward passes and needs none of its own. A removed head gives zeros from then on; at the end its
    weights are gone, before the model folder is written.

    Args:
        share: Of the heads, gone at the end.
        times: Removals, evenly spaced.
        until: Share of all optimiser steps after which the last is done; the rest is for recovering.
    """

    def __init__(self, share: float, times: int = 8, until: float = 0.5) -> None:
        if not (0 < share < 1 and times >= 1 and 0 < until < 1):
            raise ValueError(
                "HeadPruning takes share and until in (0, 1) and times of at least 1, "
                f"got {share}, {until} and {times}."
            )
        self.share, self.times, self.until = share, times, until
        self.gone: list[tuple[int, int]] = []
        self.done = 0
        self.importance: list[Tensor] = []
        self.inside = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module.model
        is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if not isinstance(model, VisionTransformer) or is_sharded:
            raise ValueError("HeadPruning is for classifiers that are not sharded: leave it out of trainer.callbacks.")
        if getattr(pl_module, "is_compiled", False) or getattr(pl_module, "ema", None) is not None:
            raise ValueError("HeadPruning changes the model in training: leave out --model.compile and --model.ema.")
        if getattr(pl_module, "head_only", False):
            raise ValueError("HeadPruning needs gradients from below the head: leave out --model.head_only.")
        total, steps = sum(each.num_heads for each in model.attentions), trainer.estimated_stepping_batches
        is_late = self.until * steps > steps - 1 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if round(self.share * total) in (0, total) or is_late:
            raise ValueError(
                f"HeadPruning would remove {round(self.share * total)} of {total} heads, the last of them before step "
                f"{self.until * steps:.0f} of {steps}: change share or until."
            )
        self.model, self.reduce, kept = model, trainer.strategy.reduce, self.importance
        self._switch_off()
        for now, before in zip(self.importance, kept, strict=False):
            now.copy_(before if trainer.is_global_zero else torch.zeros_like(before))  # a run that goes on

    def _switch_off(self) -> None:
        """Heads that are gone give zeros; the importance of the others is counted anew."""
        self._erase()
        self.inside.close()
        self.inside.enter_context(without_heads(self.model, by_layer(self.gone)))
        self.importance = self.inside.enter_context(observed_importance(self.model))

    def _erase(self) -> None:
        """What is masked is zero in the weights too, so that whoever loads a checkpoint gets the model as it is."""
        for layer, heads in by_layer(self.gone).items():
            attention = self.model.attentions[layer]
            columns = attention.out_proj.weight.detach().unflatten(1, (-1, attention.head_dim))
            columns[:, heads] = 0

    def _sums(self) -> list[Tensor]:
        """The importance over all processes."""
        return [self.reduce(each.clone(), reduce_op="sum") for each in self.importance]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress = trainer.global_step / (self.until * trainer.estimated_stepping_batches)
        due = min(math.floor(progress * self.times), self.times)
        if due > self.done:
            left = [head for head in weakest_first(normalized(self._sums())) if head not in self.gone]
            total = len(left) + len(self.gone)
            self.gone += left[: round(self.share * total * due / self.times) - len(self.gone)]
            self.done = due
            self._switch_off()

    def on_train_batch_end(self, *_: Any) -> None:
        self._erase()  # optimisers with momentum move what has no gradient

    def state_dict(self) -> dict[str, Any]:
        plan = {"share": self.share, "times": self.times, "until": self.until}
        return {"plan": plan, "gone": self.gone, "done": self.done, "importance": self._sums()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any(getattr(self, name) != value for name, value in state_dict["plan"].items()):
            raise ValueError(f"The checkpoint is of a run with HeadPruning of {state_dict['plan']}: give the same.")
        self.gone, self.done = [(layer, head) for layer, head in state_dict["gone"]], state_dict["done"]
        self.importance = state_dict["importance"]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.inside.close()
        prune(self.model, by_layer(self.gone))
        self.gone = []  # those that are left have other numbers now
        trainer.print(f"Heads left by layer: {' '.join(str(each.num_heads) for each in self.model.attentions)}")
