"""fit, validate and test: Lightning's command line, configured by YAML files and flags that override them."""

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
from vitmha.cli.arguments import option_names, refuse, unknown_option, with_flags
from vitmha.cli.fit_options import FROM_DATA
from vitmha.errors import UserError
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import ClassificationReportCallback, ProgressBar, SaveModelCallback, StopOnNonFiniteLoss
from vitmha.training.checkpoints import AtomicCheckpointIO, AutosaveCheckpoint, ResumableCSVLogger
from vitmha.training.module import LitViT, fill_from_size
from vitmha.weights.sources import read_source

set_parsing_settings(docstring_parse_attribute_docstrings=True)
for data_module in vitmha.data.__all__:
    getattr(vitmha.data, data_module)  # imports it: `--data NAME` finds only classes that are imported


# Headings of `--help-all`, in place of Lightning's first sentences, by the name of the group of options.
HEADINGS = {
    "trainer": "Lightning's Trainer",
    "model": "The model and its training",
    "data": "The data module",
    "attention": "Log of attention maps and head metrics",
    "checkpoint": "The best checkpoint (Lightning's ModelCheckpoint)",
    "autosave": "The last checkpoint, from which --ckpt_path last resumes",
    **dict.fromkeys(("fit", "validate", "test"), "Checkpoints"),
}


class TrainParser(LightningArgumentParser):
    """Lightning's parser without abbreviated options, whose errors are one line and suggest the nearest option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **{"logger": LOGGER, **kwargs})

    def add_argument_group(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        return super().add_argument_group(*([HEADINGS[name]] if name in HEADINGS else args), name=name, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002 (argparse's signature)
        missing = re.search(r'key "([^"]+)".*Expected a dot import path string: (\S+)', message, re.DOTALL)
        broken = re.search(r'key "([^"]+)".*Problem with given class_path \'(.+?)\':\s+(.+?)\n', message, re.DOTALL)
        required = re.fullmatch(r"the following arguments are required: (.+)", message)
        unknown = re.search(r"unrecognized arguments: --([^\s=]+)|[Oo]ption '([^']+)'", message)
        if missing:
            refuse(f"--{missing[1]} {missing[2]}: unknown class")
        if broken:
            refuse(f"--{broken[1]} {broken[2]}: {broken[3]}")
        if required:
            refuse("; ".join(with_flags(f"{name} is required") for name in required[1].split(", ")))
        if unknown:
            refuse(unknown_option(unknown[1] or unknown[2], option_names(self)))
        refuse(with_flags(" ".join(re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message).split())))


class WarnDiscardedArgs(logging.Handler):
    """Warns once of options that are dropped because a later file or flag chooses another class."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "discarding init_args" in message and message not in self.printed:
            self.printed.add(message)
            print(f"warning: {message}", file=sys.stderr)


LOGGER = logging.getLogger("vitmha.cli.fit")
LOGGER.setLevel(logging.DEBUG)
LOGGER.propagate = False


def main(args: Sequence[str], command: str = "fit") -> None:
    """Trains or evaluates a model: `fit`, `validate` or `test`."""
    LOGGER.handlers = [WarnDiscardedArgs()]
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 on torch 2.14
    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # it is what `main` passes the arguments by
    TrainingCLI(
        LitViT,
        LightningDataModule,
        subclass_mode_data=True,
        args=[command, *configs_before_flags(args)],
        command=command,
        seed_everything_default=0,
        parser_class=TrainParser,
        parser_kwargs={
            "prog": "vitmha",
            "description": vitmha.__doc__,
            # Without it the usage would list every option.
            command: {"usage": f"vitmha {command} --config NAME_OR_FILE [--OPTION VALUE ...]"},
        },
        auto_configure_optimizers=False,
        trainer_defaults={
            "callbacks": [
                LearningRateMonitor("step"),
                StopOnNonFiniteLoss(),
                SaveModelCallback(),
                ClassificationReportCallback(),
            ],
            # The data modules distribute the samples over the processes themselves, without repeating any.
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
    """Passes what the data determines on to the model, finds the run to resume, and gives every run its directory."""

    def __init__(self, *args: Any, command: str, **kwargs: Any) -> None:
        self.command = command
        super().__init__(*args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning's is static
        """The called command only: building the parser of each takes half a second."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would read hyperparameters from the checkpoint, and vitmha's hold none.

        Private in Lightning 2.6, which offers no option for it. `AtomicCheckpointIO` reads the file later.
        """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_name", default="vit", help="The run is written to runs/RUN_NAME/version_N.")
        parser.add_lightning_class_args(AttentionLogger, "attention")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        # After the other, so that it saves the best accuracy so far together with its epoch.
        parser.add_lightning_class_args(AutosaveCheckpoint, "autosave")
        # Without a version counter a resumed run overwrites best.ckpt; with one it would write best-v1.ckpt next to it.
        best = {"monitor": "val/accuracy", "mode": "max", "filename": "best", "enable_version_counter": False}
        parser.set_defaults({f"checkpoint.{key}": value for key, value in best.items()})
        for name in FROM_DATA:
            parser.link_arguments(f"data.{name}", f"model.vit.{name}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Checks the call, fills in what it leaves unset, and finds the run to resume."""
        if self._get(self.config, "trainer.enable_checkpointing") is False:
            raise UserError(
                "--trainer.enable_checkpointing false: every run writes last.ckpt, to resume from, and best.ckpt. "
                "Remove this option; --autosave.every_n_minutes sets how often last.ckpt is written."
            )
        ckpt_path = self._get(self.config, "ckpt_path")
        if self.subcommand != "fit" and ckpt_path is None and self._get(self.config, "model.pretrained") is None:
            raise UserError(
                f"{self.subcommand} evaluates trained weights: add --ckpt_path CHECKPOINT or --model.pretrained MODEL."
            )
        self._fill_from_size()
        self._inherit_preprocessing()
        self._find_run(ckpt_path)

    def _find_run(self, ckpt_path: str | None) -> None:
        """Resolves `--ckpt_path last`, and continues the version directory of the checkpoint if it is of this run."""
        run = Path("runs", self._get(self.config, "run_name"))
        own = sorted(run.glob("version_*/checkpoints/last.ckpt"), key=lambda file: file.stat().st_mtime)
        if ckpt_path == "last":
            if not own:
                raise UserError(
                    f"--ckpt_path last: {run}/version_*/checkpoints/last.ckpt not found. Remove it to start a new run, "
                    "or set --run_name to that of the interrupted run, in the directory in which it was started."
                )
            ckpt_path = self.config[self.subcommand]["ckpt_path"] = str(own[-1])
        elif ckpt_path is not None and not Path(ckpt_path).exists():
            raise UserError(f"--ckpt_path {ckpt_path}: no such file.")
        self.version: int | None = None
        checkpoint = Path(ckpt_path or "").resolve()
        if self.subcommand == "fit" and checkpoint in [file.resolve() for file in own]:
            run_dir = checkpoint.parents[1]
            self.version = int(run_dir.name.removeprefix("version_"))
            calls = len(list(run_dir.glob("config*.yaml")))
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            self.save_config_kwargs["config_filename"] = f"config_resumed_{calls}.yaml"

    def instantiate_classes(self) -> None:
        """Raises the `UserError` of a data module, around which jsonargparse puts one of several hundred characters."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            raise cause or error from None

    def _fill_from_size(self) -> None:
        """Writes the fields of the named size into model.vit, before it is checked and before config.yaml is saved."""
        name, vit = self._get(self.config, "model.name"), self._get(self.config, "model.vit")
        if name is not None:
            for field, value in fill_from_size(name, dict(vit)).items():
                vit[field] = value

    def _inherit_preprocessing(self) -> None:
        """Prepares images as the pretrained weights expect them, except for options of the data that are set."""
        source, data = (self._get(self.config, name) for name in ("model.pretrained", "data.init_args"))
        names = ("mean", "std", "interpolation", "crop_pct", "crop_mode") if source and data else ()
        unset = [name for name in names if name in data and data[name] is None]
        preprocessing = read_source(source, dict(self._get(self.config, "model.vit"))).preprocessing if unset else None
        if preprocessing is not None and len(preprocessing.mean) == 3:  # not of grayscale weights, used for RGB images
            for name in unset:
                data[name] = getattr(preprocessing, name)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts metrics.csv before the loggers of the config, and adds the plugins and callbacks that every run has."""
        settings = self._get(self.config_init, "trainer")
        csv_logger = ResumableCSVLogger("runs", name=self._get(self.config, "run_name"), version=self.version)
        plugins = _as_list(settings["plugins"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        if settings["enable_progress_bar"] is not False:
            self.trainer_defaults["callbacks"].append(ProgressBar())
        loggers = [csv_logger, *_as_list(settings["logger"])]
        return super().instantiate_trainer(logger=loggers, plugins=plugins, **kwargs)

    def after_fit(self) -> None:
        """Prints the accuracy that was reached and where the results are."""
        run_dir = Path(self.trainer.log_dir or ".")  # a collective call: all processes take part
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        metrics = self.trainer.callback_metrics
        reached = "Trained"
        if "val/accuracy" in metrics:
            is_sequence_model = isinstance(self.model.model, EncoderDecoder)
            name = "exact-match accuracy" if is_sequence_model else "top-1 accuracy"
            accuracy, loss = metrics["val/accuracy"], metrics["val/loss"]
            reached = f"Reached {accuracy:.2%} {name} (loss {loss:.4f}) on the validation images"
        epochs = self.trainer.current_epoch
        print(
            f"\n{reached} after {epochs} epoch{'s' if epochs != 1 else ''}.\n"
            f"  run directory    {run_dir}\n"
            f"  model directory  {run_dir / 'model'}\n"
            f"  attention maps   {run_dir / 'attention'}"
        )


def _as_list(value: Any) -> list[Any]:
    """An entry of the config as a list: a list as it is, one object as a list of it, None or a boolean as []."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list) else [value]
