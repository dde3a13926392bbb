"""Logs attention maps and head metrics during training."""

import math
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib.image
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from matplotlib.figure import Figure
from torch import Tensor

from vitmha.atomic import atomic_path
from vitmha.errors import UserError, check_argument
from vitmha.inspection import HeadMetrics, draw_head_metrics, draw_maps
from vitmha.inspection.epochs import read_images, write_epoch
from vitmha.inspection.figures import denormalized, to_layer_head_grid
from vitmha.models.encoder_decoder import Model, get_encoder
from vitmha.models.vit import VisionTransformer
from vitmha.training.batches import images_of
from vitmha.training.metrics_csv import read_table, remove_rows, write_table


class AttentionLogger(Callback):
    """Logs the attention of every head on a fixed set of validation images.

    For each image a figure shows the map of the class token (without one, the mean over the patches) in every head.
    `HeadMetrics` over all images go to heads.csv and to a figure. The files are in the run directory's `attention/`,
    with a small file per epoch that `vitmha inspect RUN` reads for models without a decoder. Every logger but those of
    metrics.csv gets entropy, distance and sink_mass as scalars such as `attention/entropy/layer0.head1`, and those that
    take images get the figures. It runs on rank 0, in eval mode, draws no random numbers, and prints its cost at the
    end.

    Args:
        num_images: Number of images, evenly spaced over the validation data, or the first of each batch if its length
            is unknown. A resumed run keeps its images.
        every_n_epochs: Minimum number of epochs between two logs, which follow a validation. The last of
            trainer.max_epochs is always logged. 0 disables the callback.

    Raises:
        UserError: A number below its minimum, or a sharded model.
    """

    def __init__(self, num_images: int = 4, every_n_epochs: int = 1) -> None:
        check_argument("num_images", num_images, num_images >= 1, "at least 1")
        check_argument("every_n_epochs", every_n_epochs, every_n_epochs >= 0, "at least 0 (0 disables the logging)")
        self.num_images, self.every_n_epochs = num_images, every_n_epochs
        self.images: list[Tensor] = []
        self.has_all_images = False
        self.last_epoch: int | None = None
        self.seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.every_n_epochs and isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise UserError("every_n_epochs must be 0 for a sharded model: no process has all of its weights to log.")
        self.directory = Path(trainer.log_dir or ".") / "attention"  # log_dir is a collective call: all ranks make it

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.sanity_checking or self.has_all_images or not trainer.is_global_zero:
            return
        images, num_batches = images_of(batch), trainer.num_val_batches[0]
        num_batches = self.num_images if math.isinf(num_batches) else int(num_batches)
        for i in range(self.num_images):
            batch_of_image, offset = divmod(i * num_batches, self.num_images)
            if batch_of_image == batch_idx and len(images):
                self.images.append(images[len(images) * offset // self.num_images].detach().float().cpu())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        self.has_all_images = True
        if not self.every_n_epochs or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epoch = trainer.current_epoch
        is_due = self.last_epoch is None or epoch - self.last_epoch >= self.every_n_epochs
        if is_due or epoch + 1 == trainer.max_epochs:
            self.log_attention(trainer, pl_module)
            self.last_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        if (images := read_images(self.directory)) is not None:
            self.images, self.has_all_images = list(images), True

    def log_attention(self, trainer: Trainer, module: LightningModule) -> None:
        """Writes and logs the maps and the head metrics of the current epoch."""
        start = perf_counter()
        model: Model = module.model  # type: ignore[assignment]
        encoder, epoch = get_encoder(model), trainer.current_epoch
        metrics, rows = HeadMetrics(encoder), []
        directory = self.directory / f"epoch_{epoch:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(self.images):
            with trainer.precision_plugin.forward_context():
                metrics.update(trainer.precision_plugin.convert_input(image[None].to(module.device)))
            rows.append(metrics.readout_attention[0])
            title = f"{_map_title(encoder)}, epoch {epoch}"
            figure = draw_maps(denormalized(model.preprocessing, image), to_layer_head_grid(rows[i], encoder), title)
            _log_figure(trainer, figure, directory / f"image_{i}.png", f"attention/image_{i}")
        write_epoch(self.directory, epoch, torch.stack(self.images), torch.stack(rows), encoder)
        title = f"all heads, mean over {len(self.images)} images, epoch {epoch}"
        _log_figure(trainer, draw_head_metrics(metrics.for_plot(), title), directory / "heads.png", "attention/heads")
        self._log_metrics(trainer, metrics)
        self.seconds += perf_counter() - start

    def _log_metrics(self, trainer: Trainer, metrics: HeadMetrics) -> None:
        progress = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        rows = [progress | record for record in metrics.records()]
        path = self.directory / "heads.csv"
        remove_rows(path, 0, trainer.global_step)  # a killed run may have logged this epoch before
        write_table(path, rows[0], [*read_table(path), *rows])
        scalars = {
            f"attention/{name}/layer{row['layer']}.head{row['head']}": row[name]
            for row in rows
            for name in ("entropy", "distance", "sink_mass")
        }
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):  # heads.csv has them
                logger.log_metrics(scalars, step=trainer.global_step)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fit_start = perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.seconds:
            fraction = self.seconds / (perf_counter() - self.fit_start)
            trainer.print(f"Logging attention took {self.seconds:.1f} s, {fraction:.2%} of the run.")


def _map_title(model: VisionTransformer) -> str:
    return "Attention of the class token" if model.layout.num_class_tokens else "Mean attention of the patches"


def _log_figure(trainer: Trainer, figure: Figure, path: Path, key: str) -> None:
    """Saves a figure, and logs it with every logger that takes images; the key is the same in every epoch."""
    with atomic_path(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    for logger in trainer.loggers:
        experiment = getattr(logger, "experiment", None)
        if hasattr(logger, "log_image"):
            logger.log_image(key=key, images=[str(path)], step=trainer.global_step)
        elif experiment is not None and hasattr(experiment, "add_image"):
            experiment.add_image(key, matplotlib.image.imread(path), trainer.global_step, dataformats="HWC")
