"""What hooks into training: attention pictures, heads removed, the guard against NaN, the model folder at the end."""

import csv
import math
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib.image
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from matplotlib.figure import Figure
from torch import Tensor

from vitmha.checkpoints import keep_rows
from vitmha.decoder import Model, encoder_of
from vitmha.evaluation import Evaluation, write_report
from vitmha.inspection import HeadNumbers, draw_head_numbers, draw_maps
from vitmha.inspection.epochs import read_pictures, write_epoch
from vitmha.inspection.pictures import on_layers_and_heads, shown_of
from vitmha.pretrained import load_model, save_model
from vitmha.slimming import (
    by_layer,
    normalized,
    observed_importance,
    prune,
    weakest_first,
    without_heads,
)
from vitmha.vit import VisionTransformer


class AttentionLogger(Callback):
    """Logs, for a fixed set of validation pictures, where every head of every layer looks.

    Per picture one composite: the map of the class token (or of the mean over the patches, where there is none) in
    every head. Over all pictures, per head, the numbers of `HeadNumbers`: all in heads.csv and as heat maps, the
    entropy, the mean attention distance and the mass on the strongest sink also as scalars. Everything is written to
    `attention/` in the run's folder, with a small file for each epoch, which `vitmha inspect RUN` reads where the model
    has no decoder, and given to every logger that takes it. Runs on the first process, in eval mode, and draws no
    random numbers. What it cost is printed at the end.

    Args:
        num_pictures: Pictures, spread evenly over the validation data; one of each first batch where its length is
            unknown. A run that goes on keeps those it has.
        every_n_epochs: Least epochs from one log to the next, at the epochs that are validated; the last of
            trainer.max_epochs is always logged. 0 switches it off.
    """

    def __init__(self, num_pictures: int = 4, every_n_epochs: int = 1) -> None:
        if num_pictures < 1 or every_n_epochs < 0:
            raise ValueError(
                "--attention.num_pictures must be at least 1 and --attention.every_n_epochs at least 0, "
                f"got {num_pictures} and {every_n_epochs}."
            )
        self.num_pictures, self.every_n_epochs = num_pictures, every_n_epochs
        self.pictures: list[Tensor] = []
        self.is_chosen = False
        self.logged: int | None = None
        self.seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.every_n_epochs and isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError("No process has the whole of a sharded model to draw: set --attention.every_n_epochs 0.")
        self.folder = Path(trainer.log_dir or ".") / "attention"  # asks all processes

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.sanity_checking or self.is_chosen or not trainer.is_global_zero:
            return
        images, known = batch[0], trainer.num_val_batches[0]
        batches = self.num_pictures if math.isinf(known) else int(known)
        for i in range(self.num_pictures):
            place, offset = divmod(i * batches, self.num_pictures)
            if place == batch_idx and len(images):
                self.pictures.append(images[len(images) * offset // self.num_pictures].detach().float().cpu())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        self.is_chosen = True
        if not self.every_n_epochs or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epoch = trainer.current_epoch
        is_due = self.logged is None or epoch - self.logged >= self.every_n_epochs
        if is_due or epoch + 1 == trainer.max_epochs:
            self.log_attention(trainer, pl_module)
            self.logged = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"logged": self.logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.logged = state_dict["logged"]
        if (pictures := read_pictures(self.folder)) is not None:
            self.pictures, self.is_chosen = list(pictures), True

    def log_attention(self, trainer: Trainer, module: LightningModule) -> None:
        """Records, draws, writes and logs; see the class."""
        begun = perf_counter()
        trained: Model = module.model  # type: ignore[assignment]
        model = encoder_of(trained)
        epoch, numbers, rows = trainer.current_epoch, HeadNumbers(model), []
        folder = self.folder / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for i, picture in enumerate(self.pictures):
            with trainer.precision_plugin.forward_context():
                numbers.update(trainer.precision_plugin.convert_input(picture[None].to(module.device)))
            rows.append(numbers.reader_rows[0])
            shown, title = shown_of(trained.preprocessing, picture), f"{_reader(model)}, epoch {epoch}"
            figure = draw_maps(shown, on_layers_and_heads(rows[i], model), title)
            _publish(trainer, figure, folder / f"picture_{i}.png", f"attention/picture_{i}")
        write_epoch(self.folder, epoch, torch.stack(self.pictures), torch.stack(rows), model)
        title = f"all heads, mean over {len(self.pictures)} pictures, epoch {epoch}"
        _publish(trainer, draw_head_numbers(numbers.shown(), title), folder / "heads.png", "attention/heads")
        self._write_numbers(trainer, numbers)
        self.seconds += perf_counter() - begun

    def _write_numbers(self, trainer: Trainer, numbers: HeadNumbers) -> None:
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        rows = [place | record for record in numbers.records()]
        file = self.folder / "heads.csv"
        keep_rows(file, 0, trainer.global_step)  # a run that was killed and goes on may have been here before
        is_new = not file.exists()
        with file.open("a", newline="") as table:
            writer = csv.DictWriter(table, rows[0])
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
        scalars = {
            f"{name}/layer_{row['layer']}_head_{row['head']}": row[name]
            for row in rows
            for name in ("entropy", "distance", "to_sink")
        }
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun = perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.seconds:
            whole = perf_counter() - self.begun
            trainer.print(f"Logging attention took {self.seconds:.1f} s, {self.seconds / whole:.2%} of the run.")


def _reader(model: VisionTransformer) -> str:
    return "Attention of the class token" if model.layout.num_class_tokens else "Mean attention of the patches"


def _publish(trainer: Trainer, figure: Figure, file: Path, key: str) -> None:
    """Writes a picture and gives it to every logger that takes pictures, under a key that stays the same."""
    figure.savefig(file, dpi=110)
    for logger in trainer.loggers:
        experiment = getattr(logger, "experiment", None)
        if hasattr(logger, "log_image"):
            logger.log_image(key=key, images=[str(file)], step=trainer.global_step)
        elif experiment is not None and hasattr(experiment, "add_image"):
            experiment.add_image(key, matplotlib.image.imread(file), trainer.global_step, dataformats="HWC")


class EvaluationReport(Callback):
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
        raise ValueError(
            f"The loss became {loss.item()} at step {trainer.global_step} (epoch {trainer.current_epoch}). {state} "
            "Lower --model.learning_rate, raise --model.warmup, or clip with --trainer.gradient_clip_val 1."
        )


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


class ModelFolder(Callback):
    """Writes the model folder, `model/` in the run's folder, when training has come to its end.

    It holds the weights of the last step, averaged with --model.ema. No checkpoint is picked by its accuracy on the
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
            is_elsewhere = sharded or (not self.has_trained and getattr(pl_module, "ema", None) is not None)
            model = load_model(folder / "checkpoints" / "last.ckpt") if is_elsewhere else pl_module.model
            save_model(model, folder / "model")  # type: ignore[arg-type]
