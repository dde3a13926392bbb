"""fit, validate and test: Lightning's command line for one YAML with flags on top."""

import logging
import re
import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import CheckpointIO

import vitmha
import vitmha.data
from vitmha.cli.arguments import friendly_message, option_names
from vitmha.errors import UserError
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import ClassificationReportCallback, ProgressBar, SaveModelCallback, StopOnNonFiniteLoss
from vitmha.training.checkpoints import AtomicCheckpointIO, AutosaveCheckpoint, ResumableCSVLogger
from vitmha.training.module import LitViT
from vitmha.weights.sources import read_source

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class TrainParser(LightningArgumentParser):
    """Lightning's parser, without shortened flags, and with one message that names the nearest valid option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **{"logger": LOGGER, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002 (argparse's signature)
        missing = re.search(r'key "([^"]+)".*Expected a dot import path string: (\S+)', message, re.DOTALL)
        if missing:
            key, name = missing.groups()
            known = f"; choose from {', '.join(vitmha.data.__all__)}" if key == "data" else ""
            self.exit(2, f"error: --{key} {name}: there is no such class{known}.\n")
        self.exit(2, f"error: {friendly_message(message, option_names(self))}\n")


class WarnDiscardedArgs(logging.Handler):
    """Says which options no longer count, since a later file or flag takes another class."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "discarding init_args" in message and message not in self.said:
            self.said.add(message)
            print(f"warning: {message}", file=sys.stderr)


LOGGER = logging.getLogger("vitmha.cli.fit")
LOGGER.setLevel(logging.DEBUG)
LOGGER.propagate = False


def main(args: Sequence[str], command: str = "fit") -> None:
    """Trains or evaluates a model: `fit`, `validate` or `test`."""
    LOGGER.handlers = [WarnDiscardedArgs()]
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 on torch 2.14
    TrainingCLI(
        LitViT,
        LightningDataModule,
        subclass_mode_data=True,
        args=[command, *configs_before_flags(args)],
        command=command,
        seed_everything_default=0,
        parser_class=TrainParser,
        parser_kwargs={"prog": "vitmha", "description": vitmha.__doc__},
        auto_configure_optimizers=False,
        trainer_defaults={
            "callbacks": [
                LearningRateMonitor("step"),
                StopOnNonFiniteLoss(),
                SaveModelCallback(),
                ClassificationReportCallback(),
            ],
            # The data modules share the samples out themselves, without doubling any.
            "use_distributed_sampler": False,
        },
    )


def configs_before_flags(args: Sequence[str]) -> list[str]:
    """The arguments with config files before flags, so that flags override files in any order."""
    files: list[str] = []
    flags: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg in ("--config", "-c"):
            files += [arg, *islice(rest, 1)]
        else:
            (files if arg.startswith("--config=") else flags).append(arg)
    return files + flags


class TrainingCLI(LightningCLI):
    """Links the facts of the data to the model, finds the run to go on with, and gives every run its folder."""

    def __init__(self, *args: Any, command: str, **kwargs: Any) -> None:
        self.command = command
        super().__init__(*args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning's is static
        """The given command only: the options of each take half a second to gather."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def _parse_ckpt_path(self) -> None:
        """Lightning would read the file for hyperparameters, which ours have none of; `AtomicCheckpointIO` reads it."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_name", default="vit", help="The run is written to runs/RUN_NAME/version_N.")
        parser.add_lightning_class_args(AttentionLogger, "attention")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        # Behind the other, so that it saves the best accuracy so far with the epoch that reached it.
        parser.add_lightning_class_args(AutosaveCheckpoint, "autosave")
        # Without a counter a run that goes on writes over the best one, where it would else put a second beside it.
        best = {"monitor": "val/accuracy", "mode": "max", "filename": "best", "enable_version_counter": False}
        parser.set_defaults({f"checkpoint.{key}": value for key, value in best.items()})
        for fact in ("num_classes", "in_channels", "image_size"):
            parser.link_arguments(f"data.{fact}", f"model.vit.{fact}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Finds what `--ckpt_path last` means, and the folder in which the run goes on: that of the checkpoint."""
        if self._get(self.config, "trainer.enable_checkpointing") is False:
            raise UserError(
                "--trainer.enable_checkpointing false: every run keeps last.ckpt, to go on from, and best.ckpt. Leave "
                "it out; --autosave.every_n_minutes says how often."
            )
        given, runs = self._get(self.config, "ckpt_path"), Path("runs", self._get(self.config, "run_name"))
        if self.subcommand != "fit" and given is None and self._get(self.config, "model.pretrained") is None:
            raise UserError(
                f"{self.subcommand} measures trained weights: give --ckpt_path CHECKPOINT or --model.pretrained SOURCE."
            )
        self._inherit_preprocessing()
        self.version: int | None = None
        last: Path | None = None
        if given == "last":
            files = sorted(runs.glob("version_*/checkpoints/last.ckpt"), key=lambda file: file.stat().st_mtime)
            if not files:
                raise UserError(
                    f"--ckpt_path last: there is no {runs}/version_*/checkpoints/last.ckpt. Leave it out to begin a "
                    "run, or give the --run_name of one that was interrupted, in the folder where it was started."
                )
            last = files[-1]
            self.config[self.subcommand]["ckpt_path"] = str(last)
        elif given is not None:
            if not Path(given).exists():
                raise UserError(f"--ckpt_path: there is no checkpoint {given}.")
            is_own = Path(given).resolve().match(f"{runs.resolve()}/version_*/checkpoints/last.ckpt")
            last = Path(given) if is_own else None
        if last is not None and self.subcommand == "fit":
            folder = last.resolve().parents[1]
            self.version = int(folder.name.removeprefix("version_"))
            calls = len(list(folder.glob("config*.yaml")))
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            self.save_config_kwargs["config_filename"] = f"config_resumed_{calls}.yaml"

    def _inherit_preprocessing(self) -> None:
        """Pictures are prepared as the pretrained weights were trained with, where the data does not say how."""
        source, data = (self._get(self.config, name) for name in ("model.pretrained", "data.init_args"))
        names = ("mean", "std", "interpolation", "crop_pct", "crop_mode") if source and data else ()
        unsaid = [name for name in names if name in data and data[name] is None]
        seen = read_source(source, dict(self._get(self.config, "model.vit"))).preprocessing if unsaid else None
        if seen is not None and len(seen.mean) == 3:  # a model of gray pictures is fitted to coloured ones
            for name in unsaid:
                data[name] = getattr(seen, name)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts the run folder's logger before those of the YAML, and adds what every run has."""
        settings = self._get(self.config_init, "trainer")
        run = ResumableCSVLogger("runs", name=self._get(self.config, "run_name"), version=self.version)
        plugins = _as_list(settings["plugins"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        if settings["enable_progress_bar"] is not False:
            self.trainer_defaults["callbacks"].append(ProgressBar())
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
