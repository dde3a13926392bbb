"""What `vitmha fit` prints of a run: what it will do, how long it takes, what it reached, and what can be done next."""

import logging
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from vitmha.cli.run_directory import print_directories
from vitmha.data import ImageFolder
from vitmha.data.in_memory import InMemoryData
from vitmha.errors import printable
from vitmha.models.encoder_decoder import EncoderDecoder, get_encoder
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.run_record import count_images, run_record

# Messages about products, and those that `RunReport` and `print_result` replace.
REPLACED = re.compile(
    r"Tip: For seamless cloud|Seed set to|\w+ available: |Loading `train_dataloader` to estimate|^\d+ classes \("
    r"|\(incomplete last batch\)|Automatic Mixed Precision|Restor(ing|ed all) states|Found current_model_state"
    r"|`Trainer\.fit` stopped: `max_"
)


@contextmanager
def without_replaced_messages() -> Iterator[None]:
    """Keeps what is in `REPLACED` from being printed."""
    loggers = [
        logging.getLogger(f"lightning.{name}") for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed")
    ]

    def is_needed(record: logging.LogRecord) -> bool:
        return not REPLACED.search(record.getMessage())

    for logger in loggers:
        logger.addFilter(is_needed)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_needed)


class RunReport(Callback):
    """Prints what a run will do when it starts, and after the first whole epoch how long the others will take."""

    def __init__(self) -> None:
        self.start: tuple[float, int] | None = None
        self.is_timed = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run_dir = trainer.log_dir  # a collective call: all processes make it
        if trainer.is_global_zero and run_dir is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            record = run_record(pl_module, trainer)  # type: ignore[arg-type]
            print(f"Data    {_data(trainer, run_dir)}")
            print(f"Model   {_model(pl_module)}")
            print(f"Recipe  {_recipe(pl_module, trainer, record)}")
            print(f"Device  {_device(trainer)}")
            print(f"Output  {_output(trainer, run_dir)}", flush=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        now, step = perf_counter(), trainer.global_step
        if self.start is None:  # Lightning does not call this for an epoch that is resumed in its middle
            self.start = now, step
        elif not self.is_timed:
            self.is_timed = True
            seconds, steps = now - self.start[0], step - self.start[1]
            rest = seconds * (trainer.estimated_stepping_batches - step) / steps
            if trainer.is_global_zero:
                print(f"Time    {_duration(seconds)} per epoch, about {_duration(rest)} until the end", flush=True)


def _data(trainer: Trainer, run_dir: str) -> str:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    name = str(data.root) if isinstance(data, ImageFolder) else type(data).__name__
    num_train, num_val = (
        "" if (count := count_images(loader)) is None else f"{count:,} "
        for loader in (trainer.train_dataloader, trainer.val_dataloaders)
    )
    val = f"{num_val}validation images"
    if isinstance(data, InMemoryData):
        val = f"{num_val}test images for validation"
    elif getattr(data, "is_held_out", False):
        val = f"{num_val}held out for validation, listed in {run_dir}/held_out.txt"
    return printable(f"{name}: {num_train}training images{_classes(data)}; {val}")


def _classes(data: Any) -> str:
    """The number of classes, and of images in the smallest and in the largest one."""
    counts = data.class_counts("train") if hasattr(data, "class_counts") else None
    text = f" of {data.num_classes} classes" if hasattr(data, "num_classes") else ""
    if counts is None:
        return text
    least, most = min(counts), max(counts)
    if least == most:
        return f"{text}, {least:,} each"
    names = [data.class_names[counts.index(count)] for count in (least, most)]
    return f"{text}, from {least:,} ({names[0]}) to {most:,} ({names[1]}) each"


def _model(module: Any) -> str:
    encoder, parameters = get_encoder(module.model), list(module.model.parameters())
    config, (height, width) = encoder.config, encoder.layout.image_size
    heads = sorted({attention.num_heads for attention in encoder.attentions})
    decoder = (
        f" with a decoder of {module.model.decoder.depth} layers" if isinstance(module.model, EncoderDecoder) else ""
    )
    count = f"{sum(parameter.numel() for parameter in parameters):,} parameters"
    if module.linear_probe:
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        count = f"{count}, of which the {trained:,} of the head are trained"
    source = f", weights from {module.pretrained}" if module.pretrained else ""
    return (
        f"ViT, {config.depth} layers of {' to '.join(map(str, heads[:1] + heads[1:][-1:]))} heads, width "
        f"{config.embed_dim}{decoder}; {height} x {width} pixels in {math.prod(encoder.layout.grid_size)} patches; "
        f"{count}{source}"
    )


def _recipe(module: Any, trainer: Trainer, record: dict[str, Any]) -> str:
    total, accumulated = int(trainer.estimated_stepping_batches), trainer.accumulate_grad_batches
    steps = _steps_per_epoch(trainer)
    length = f"{total:,} steps"
    if trainer.max_epochs is not None and total == steps * trainer.max_epochs:
        length = f"{trainer.max_epochs} epoch{'s' * (trainer.max_epochs != 1)} of {steps:,.0f} steps"
    rate = f"{module.optimizer}, learning rate {module.learning_rate:g}"
    if module.optimizer == "muon":
        rate = f"muon, learning rate {module.muon_learning_rate:g} (others {module.learning_rate:g})"
    batch, count = record.get("global_batch_size"), record.get("num_train_images")
    of = f" of {batch * accumulated:,} images" if batch else ""
    rest = count % batch if batch and count and count // batch == trainer.num_training_batches else 0
    left_out = f" ({rest} images are left out of each epoch)" if rest else ""
    return f"{length}{of}{left_out}; {rate}; seed {record['seed']}"


def _steps_per_epoch(trainer: Trainer) -> float:
    """Optimizer steps per epoch; infinity if the loader does not know its length."""
    batches = trainer.num_training_batches
    return float(batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches))


def _device(trainer: Trainer) -> str:
    device, count = trainer.strategy.root_device, trainer.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    if device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"CPU with {threads} thread{'s' * (threads > 1)}"
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{f'{count} processes: ' if count > 1 else ''}{name}{nodes}, precision {trainer.precision}"


def _output(trainer: Trainer, run_dir: str) -> str:
    total = int(trainer.estimated_stepping_batches)
    resumed = f", resumed after {trainer.global_step:,} of {total:,} steps" if trainer.global_step else ""
    has_more = total - trainer.global_step > _steps_per_epoch(trainer)
    return f"{run_dir}{resumed}{'; the time per epoch is printed after the first one' * has_more}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def print_result(trainer: Trainer, module: Any, run_dir: Path) -> None:
    """Prints the accuracy that was reached, where the results are, and commands that use them."""
    metrics, is_sequence_model = trainer.callback_metrics, isinstance(module.model, EncoderDecoder)
    saving = next(callback for callback in trainer.callbacks if isinstance(callback, SaveModelCallback))  # type: ignore[attr-defined]
    reached = "Trained" if saving.has_trained else "Nothing was left to do: the run was complete"
    if "val/accuracy" in metrics and saving.validated_step == trainer.global_step:  # it is that of the saved model
        name = "exact-match accuracy" if is_sequence_model else "top-1 accuracy"
        accuracy, loss = metrics["val/accuracy"], metrics["val/loss"]
        reached = f"Reached {accuracy:.2%} {name} (loss {loss:.4f}) on the validation images"
    epochs = trainer.current_epoch
    print(f"\n{reached} after {epochs} epoch{'s' * (epochs != 1)}.")
    print_directories(run_dir)
    if not is_sequence_model:
        _print_next_steps(trainer, run_dir)


def _print_next_steps(trainer: Trainer, run_dir: Path) -> None:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    files = data.val_files if isinstance(data, ImageFolder) else None
    image = shlex.quote(_short(Path(files[0][0]))) if isinstance(files, list) and files else "IMAGE"
    print(f"Next:\n  classify images  vitmha classify {image} --model {run_dir}/model")
    print(f"  evaluate         vitmha validate --ckpt_path {run_dir}")
    if (run_dir / "attention").is_dir():
        print(f"  look at heads    vitmha inspect {run_dir} --output {run_dir}/heads")


def _short(path: Path) -> str:
    """The path relative to the working directory if it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
