"""Logs attention maps and head metrics during training."""

import csv
import math
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib.image
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from matplotlib.figure import Figure
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection import HeadMetrics, draw_head_numbers, draw_maps
from vitmha.inspection.epochs import read_pictures, write_epoch
from vitmha.inspection.figures import denormalized, to_layer_head_grid
from vitmha.models.encoder_decoder import Model, get_encoder
from vitmha.models.vit import VisionTransformer
from vitmha.training.checkpoints import truncate_csv


class AttentionLogger(Callback):
    """Logs, for a fixed set of validation pictures, where every head of every layer looks.

    Per picture one composite: the map of the class token (or of the mean over the patches, where there is none) in
    every head. Over all pictures, per head, the numbers of `HeadMetrics`: all in heads.csv and as heat maps, the
    entropy, the mean attention distance and the mass on the strongest sink also as scalars. Everything is written to
    `attention/` in the run's folder, with a small file for each epoch, which `vitmha inspect RUN` reads where the model
    has no decoder, and given to every logger that takes it. Runs on the first process, in eval mode, and draws no
    random numbers. What it cost is printed at the end.

    Args:
        num_images: Pictures, spread evenly over the validation data; one of each first batch where its length is
            unknown. A run that goes on keeps those it has.
        every_n_epochs: Least epochs from one log to the next, at the epochs that are validated; the last of
            trainer.max_epochs is always logged. 0 switches it off.
    """

    def __init__(self, num_images: int = 4, every_n_epochs: int = 1) -> None:
        if num_images < 1 or every_n_epochs < 0:
            raise UserError(
                "--attention.num_images must be at least 1 and --attention.every_n_epochs at least 0, "
                f"got {num_images} and {every_n_epochs}."
            )
        self.num_images, self.every_n_epochs = num_images, every_n_epochs
        self.pictures: list[Tensor] = []
        self.is_chosen = False
        self.logged: int | None = None
        self.seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.every_n_epochs and isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise UserError("No process has the whole of a sharded model to draw: set --attention.every_n_epochs 0.")
        self.folder = Path(trainer.log_dir or ".") / "attention"  # asks all processes

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.sanity_checking or self.is_chosen or not trainer.is_global_zero:
            return
        images, known = batch[0], trainer.num_val_batches[0]
        batches = self.num_images if math.isinf(known) else int(known)
        for i in range(self.num_images):
            place, offset = divmod(i * batches, self.num_images)
            if place == batch_idx and len(images):
                self.pictures.append(images[len(images) * offset // self.num_images].detach().float().cpu())

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
        model = get_encoder(trained)
        epoch, numbers, rows = trainer.current_epoch, HeadMetrics(model), []
        folder = self.folder / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for i, picture in enumerate(self.pictures):
            with trainer.precision_plugin.forward_context():
                numbers.update(trainer.precision_plugin.convert_input(picture[None].to(module.device)))
            rows.append(numbers.readout_attention[0])
            shown, title = denormalized(trained.preprocessing, picture), f"{_reader(model)}, epoch {epoch}"
            figure = draw_maps(shown, to_layer_head_grid(rows[i], model), title)
            _publish(trainer, figure, folder / f"picture_{i}.png", f"attention/picture_{i}")
        write_epoch(self.folder, epoch, torch.stack(self.pictures), torch.stack(rows), model)
        title = f"all heads, mean over {len(self.pictures)} pictures, epoch {epoch}"
        _publish(trainer, draw_head_numbers(numbers.shown(), title), folder / "heads.png", "attention/heads")
        self._write_numbers(trainer, numbers)
        self.seconds += perf_counter() - begun

    def _write_numbers(self, trainer: Trainer, numbers: HeadMetrics) -> None:
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        rows = [place | record for record in numbers.records()]
        file = self.folder / "heads.csv"
        truncate_csv(file, 0, trainer.global_step)  # a run that was killed and goes on may have been here before
        is_new = not file.exists()
        with file.open("a", newline="") as table:
            writer = csv.DictWriter(table, rows[0])
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
        scalars = {
            f"{name}/layer_{row['layer']}_head_{row['head']}": row[name]
            for row in rows
            for name in ("entropy", "distance", "sink_mass")
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
