"""Every word of the command line."""

import argparse
import difflib
import json
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import set_parsing_settings
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import CheckpointIO
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import vitmha
import vitmha.data
from vitmha.attention import Backend
from vitmha.callbacks import AttentionLogger, ModelFolder, StopOnNonFiniteLoss
from vitmha.checkpoints import AtomicCheckpointIO, LastCheckpoint, RunLogger
from vitmha.data import shards
from vitmha.data.folder import find_files
from vitmha.decoder import EncoderDecoder
from vitmha.pretrained import create_model, load_model
from vitmha.profiling import LayerCost, Measurement, at_image_size, layer_costs, measure, total_cost
from vitmha.training import LitViT
from vitmha.vit import SIZES, VisionTransformer

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Parser(LightningArgumentParser):
    """Lightning's parser, without shortened flags, and with one message that names the nearest valid option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002 (argparse's signature)
        self.exit(2, f"error: {_plain(message, list(_options(self)))}\n")


class TrainingCLI(LightningCLI):
    """fit, validate and test: one YAML, flags on top, and the facts of the data."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        words = LightningCLI.subcommands()
        return {word: words[word] for word in ("fit", "validate", "test")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", default="vit", help="The run is written to runs/NAME/version_N.")
        parser.add_lightning_class_args(AttentionLogger, "attention")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        # Behind the other, so that it saves the best accuracy so far with the epoch that reached it.
        parser.add_lightning_class_args(LastCheckpoint, "last")
        # Without a counter a run that goes on writes over the best one, where it would else put a second beside it.
        best = {"monitor": "val/accuracy", "mode": "max", "filename": "best", "enable_version_counter": False}
        parser.set_defaults({f"checkpoint.{key}": value for key, value in best.items()})
        for fact in ("num_classes", "in_channels", "image_size"):
            parser.link_arguments(f"data.{fact}", f"model.vit.{fact}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Finds what `--ckpt_path last` means, and the folder in which the run goes on: that of the checkpoint."""
        given, runs = self._get(self.config, "ckpt_path"), Path("runs", self._get(self.config, "name"))
        self.version: int | None = None
        if given == "last":
            files = sorted(runs.glob("version_*/checkpoints/last.ckpt"), key=lambda file: file.stat().st_mtime)
            if not files:
                raise ValueError(
                    f"--ckpt_path last: there is no {runs}/version_*/checkpoints/last.ckpt. Leave it out to begin a "
                    "run, or give the --name of one that was interrupted, in the folder where it was started."
                )
            self.config[self.subcommand]["ckpt_path"] = str(files[-1])
            if self.subcommand == "fit":
                folder = files[-1].parents[1]
                self.version = int(folder.name.removeprefix("version_"))
                calls = len(list(folder.glob("config*.yaml")))
                warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
                self.save_config_kwargs["config_filename"] = f"config_resumed_{calls}.yaml"
        elif given is not None and not Path(given).exists():
            raise ValueError(f"--ckpt_path: there is no checkpoint {given}.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts the run folder's logger before those of the YAML, and adds what every run has."""
        settings = self._get(self.config_init, "trainer")
        run = RunLogger("runs", name=self._get(self.config, "name"), version=self.version)
        plugins = _as_list(settings["plugins"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        if settings["enable_progress_bar"] is not False:
            self.trainer_defaults["callbacks"].append(RichProgressBar())
        return super().instantiate_trainer(logger=[run, *_as_list(settings["logger"])], plugins=plugins, **kwargs)

    def after_fit(self) -> None:
        """Says in plain words what was reached and where it lies."""
        folder = Path(self.trainer.log_dir or ".")  # asks all processes
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        metrics = self.trainer.callback_metrics
        reached = "Trained"
        if "val/accuracy" in metrics:
            accuracy, loss = metrics["val/accuracy"], metrics["val/loss"]
            what = "of the sequences without a fault" if isinstance(self.model.model, EncoderDecoder) else "top-1"
            reached = f"Reached {accuracy:.2%} {what} (loss {loss:.4f}) on the validation pictures"
        print(
            f"\n{reached} after {self.trainer.current_epoch} epochs.\n"
            f"  run                 {folder}\n"
            f"  model folder        {folder / 'model'}\n"
            f"  attention pictures  {folder / 'attention'}"
        )


def _as_list(chosen: Any) -> list[Any]:
    """What the YAML gives as one, as several or, with nothing or a yes or no, as none."""
    if chosen is None or isinstance(chosen, bool):
        return []
    return list(chosen) if isinstance(chosen, list) else [chosen]


class WordParser(argparse.ArgumentParser):
    """argparse's parser, without shortened flags, and with one message that names the nearest valid option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {_plain(message, list(_options(self)))}\n")


def main(args: Sequence[str] | None = None) -> None:
    """The command `vitmha`.

    Args:
        args: The words behind the command; those of the process by default.
    """
    if args is not None:
        sys.argv[1:] = args
    parser = WordParser(prog="vitmha", description=vitmha.__doc__)
    words = parser.add_subparsers(title="words", metavar="WORD", dest="word", required=True)
    for word, (_, purpose) in COMMANDS.items():
        words.add_parser(word, help=purpose)
    run, _ = COMMANDS[parser.parse_args(sys.argv[1:2] or ["--help"]).word]
    try:
        run()
    except ValueError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not _is_ours(cause):
            raise
        parser.exit(2, f"error: {cause}\n")


def train() -> None:
    """fit, validate and test."""
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 on torch 2.14
    TrainingCLI(
        LitViT,
        LightningDataModule,
        subclass_mode_data=True,
        seed_everything_default=0,
        parser_class=Parser,
        parser_kwargs={"prog": "vitmha", "description": vitmha.__doc__},
        auto_configure_optimizers=False,
        trainer_defaults={
            "callbacks": [LearningRateMonitor("step"), StopOnNonFiniteLoss(), ModelFolder()],
            # The data modules share the samples out themselves, without doubling any.
            "use_distributed_sampler": False,
        },
    )


def profile() -> None:
    """Counts and measures, as tables or as JSON."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler would write notes of its own to stderr
    given = _profile_arguments()
    device = _device(given.device)
    model = _profiled(given.model, _size(given, "image_size"), _size(given, "patch_size")).to(device).eval()
    costs, layout = layer_costs(model, given.batch_size), model.config.layout
    height, width = (patches * pixels for patches, pixels in zip(layout.grid_size, layout.patch_size, strict=True))
    if given.format == "table":
        size = f"{height} x {width} pixels, {layout.num_tokens} tokens, batch of {given.batch_size}"
        Console().print(_cost_table(f"{given.model}: {size}", costs))
    images = torch.zeros(given.batch_size, model.config.in_channels, height, width, device=device)
    measured = [measure(model, images, backend) for backend in _compared(model, costs)]
    if given.format == "table":
        Console().print(_time_table(images, measured))
        return
    facts = {"model": given.model, "image_size": [height, width], "num_tokens": layout.num_tokens}
    facts |= {"batch_size": given.batch_size, "device": device.type, "measured": [asdict(run) for run in measured]}
    facts |= {"layers": [_numbers(cost) for cost in costs], "total": _numbers(total_cost(costs))}
    print(json.dumps(facts, indent=2))


def pack() -> None:
    """Packs a folder of pictures into shards."""
    parser = WordParser(prog="vitmha pack", description="Put a folder of pictures into a few large files, to train on.")
    parser.add_argument("folder", metavar="FOLDER", help="as for --data.root")
    parser.add_argument("dest", metavar="DEST", help="the folder to make; then give it as --data.root")
    parser.add_argument("--val-fraction", type=_share, default=0.1, metavar="SHARE", help="as for --data.val_fraction")
    parser.add_argument("--split-seed", type=int, default=0, metavar="N", help="as for --data.split_seed")
    given = parser.parse_args(sys.argv[2:])
    names, train_files, val_files = find_files(Path(given.folder), given.val_fraction, given.split_seed)
    shards.pack(Path(given.folder), names, train_files, val_files, Path(given.dest))
    print(f"{given.dest}: {len(names)} classes, {len(train_files)} training and {len(val_files)} validation pictures")


COMMANDS: Mapping[str, tuple[Callable[[], None], str]] = {
    "fit": (train, "train a model"),
    "validate": (train, "measure a model on the validation pictures"),
    "test": (train, "measure a model on the test pictures"),
    "pack": (pack, "put a folder of pictures into a few large files"),
    "profile": (profile, "count and measure what a model costs"),
}


def _profile_arguments() -> argparse.Namespace:
    parser = WordParser(prog="vitmha profile", description="What a model costs, layer by layer and in a forward pass.")
    parser.add_argument("model", metavar="MODEL", help=f"a model folder, a .ckpt, or a size: {', '.join(SIZES)}")
    pixels: dict[str, Any] = {"type": _count, "nargs": "+", "metavar": ("HEIGHT", "WIDTH")}
    parser.add_argument("--image-size", **pixels, help="pixels of a picture; one number for a square")
    parser.add_argument("--patch-size", **pixels, help="pixels of a patch; only with the name of a size")
    parser.add_argument("--batch-size", type=_count, default=1, metavar="N", help="pictures in the batch; default 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="for people or for programs")
    return parser.parse_args(sys.argv[2:])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return share


def _size(given: argparse.Namespace, name: str) -> tuple[int, int] | None:
    """(height, width), where given."""
    pixels = getattr(given, name)
    if pixels is not None and len(pixels) > 2:
        raise ValueError(f"--{name.replace('_', '-')} takes height and width, or one number for both; got {pixels}.")
    return pixels and (pixels[0], pixels[-1])


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device here; take cpu or auto.")
    return torch.device(name)


def _profiled(
    source: str, image_size: tuple[int, int] | None, patch_size: tuple[int, int] | None
) -> VisionTransformer | EncoderDecoder:
    if source in SIZES:
        sizes: dict[str, Any] = {"image_size": image_size, "patch_size": patch_size}
        return create_model(source, **{name: size for name, size in sizes.items() if size is not None})
    if patch_size is not None:
        raise ValueError(f"--patch-size goes with the name of a size ({', '.join(SIZES)}); {source} has its own.")
    try:
        model = load_model(source)
    except ValueError as error:
        raise ValueError(f"{error} The sizes that need no weights are {', '.join(SIZES)}.") from None
    return model if image_size is None else at_image_size(model, image_size)


def _compared(model: VisionTransformer | EncoderDecoder, costs: Sequence[LayerCost]) -> list[Backend]:
    """The model's own kernel, and the one that stores the scores, unless a layer has more than 1 GiB of them."""
    has_room = max(cost.score_bytes for cost in costs) <= 2**30
    return list(dict.fromkeys([model.config.backend, "explicit"] if has_room else [model.config.backend]))


def _numbers(cost: LayerCost) -> dict[str, Any]:
    return {**asdict(cost), "multiply_adds": cost.multiply_adds}


def _cost_table(title: str, costs: Sequence[LayerCost]) -> Table:
    caption = "Columns 3 to 7 count multiply-adds. A fused kernel stores no scores."
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("layer", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for column in ("q k v out", "scores", "MLP", "other", "all", "scores stored", "k/v cache"):
        table.add_column(column, justify="right")
    for cost in (*costs, total_cost(costs)):
        arithmetic = (cost.projections, cost.scores, cost.mlp, cost.other, cost.multiply_adds)
        memory = (_short(cost.score_bytes, "B"), _short(cost.cache_bytes, "B"))
        table.add_row(cost.name, f"{cost.parameters:,}", *map(_short, arithmetic), *memory)
    table.rows[-2].end_section = True
    return table


def _time_table(images: Tensor, measured: Sequence[Measurement]) -> Table:
    on_cpu = images.device.type == "cpu"
    device = f"CPU, threads: {torch.get_num_threads()}" if on_cpu else torch.cuda.get_device_name(images.device)
    caption = "Median time; memory beside parameters and pictures."
    table = Table(title=f"A forward pass in float32 on {device}", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("attention kernel")
    for column in ("time", "pictures/s", "peak memory"):
        table.add_column(column, justify="right")
    for run in measured:
        pace = _short(len(images) / run.seconds)
        table.add_row(run.backend, f"{1000 * run.seconds:,.2f} ms", pace, _short(run.peak_bytes, "B"))
    return table


def _short(number: int | float, unit: str = "") -> str:
    """Three digits: 22050664 is 22.1M."""
    prefix = ""
    for larger in "kMGT":
        if number < 999.5:
            break
        number, prefix = number / 1000, larger
    return f"{number:.3g}{prefix}{unit}"


def _is_ours(error: BaseException) -> bool:
    """Whether the error is a message of this package, meant for its user."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(name.startswith("vitmha.") for name in (frame.f_globals["__name__"], type(error).__module__))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names a user may give, those of the subcommands included."""
    for action in parser._actions:
        for choice in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _options(choice)
        yield max(action.option_strings, key=len).lstrip("-") if action.option_strings else action.dest


def _plain(message: str, options: list[str]) -> str:
    """A refusal of the parser in one sentence, with the nearest valid name."""
    unknown = re.search(r"unrecognized arguments: --([^\s=]+)|[Oo]ption '([^']+)'", message)
    if unknown:
        key = unknown[1] or unknown[2]
        near = difflib.get_close_matches(key, options, n=1, cutoff=0)
        return f"there is no option {key!r}; the nearest is {near[0]!r}."
    missing_class = re.search(r'key "([^"]+)".*Expected a dot import path string: (\S+)', message, re.DOTALL)
    if missing_class:
        key, name = missing_class.groups()
        known = f"; choose from {', '.join(vitmha.data.__all__)}" if key == "data" else ""
        return f"--{key} {name}: there is no such class{known}."
    return re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message)
