"""fit, validate and test: Lightning's command line, configured by YAML files and flags that override them."""

import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning import LightningDataModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

import vitmha
import vitmha.data
from vitmha.cli.arguments import add_flags
from vitmha.cli.checkpoint_path import find_checkpoint, is_model_directory, not_found, run_checkpoints
from vitmha.cli.fit_options import FROM_DATA
from vitmha.cli.fit_parser import LOGGER, TrainParser, WarnDiscardedArgs
from vitmha.cli.fit_report import RunReport, print_result, without_replaced_messages
from vitmha.cli.fit_values import check_values, plain_message
from vitmha.cli.run_directory import SaveConfigAtStart, print_directories, remove_run_without_results, written_command
from vitmha.errors import UserError
from vitmha.models.config import SIZES, ViTConfig, pair
from vitmha.models.encoder_decoder import get_encoder
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import ClassificationReportCallback, ProgressBar, SaveModelCallback, StopOnNonFiniteLoss
from vitmha.training.checkpoints import AtomicCheckpointIO, AutosaveCheckpoint, read_checkpoint
from vitmha.training.lightning_compat import write_into_run
from vitmha.training.metrics_csv import ResumableCSVLogger
from vitmha.training.module import LitViT, fill_from_size
from vitmha.training.run_record import (
    PREPROCESSING,
    TRAINER,
    TRAINING,
    check_against_record,
    data_record,
    model_record,
    plain_options,
    recorded_in,
    training_record,
)
from vitmha.weights.load import FREE
from vitmha.weights.sources import read_source

set_parsing_settings(docstring_parse_attribute_docstrings=True)
for data_module in vitmha.data.__all__:
    getattr(vitmha.data, data_module)  # imports it: `--data NAME` finds only classes that are imported


def main(args: Sequence[str], command: str = "fit") -> None:
    """Trains or evaluates a model: `fit`, `validate` or `test`."""
    LOGGER.handlers = [WarnDiscardedArgs()]
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 on torch 2.14
    if command != "fit":
        warnings.filterwarnings("ignore", "The dirpath has changed")  # of ModelCheckpoint, which does not evaluate
    warnings.filterwarnings("ignore", ".*could not find the monitored key")  # no validation has run: `check_values`
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # it is what `main` passes the arguments by
    try:
        with without_replaced_messages():
            run(configs_before_flags(args), command)
    except MisconfigurationException as error:  # Lightning's error for wrong options
        raise UserError(plain_message(error)) from None
    except ValueError as error:
        if "`val_check_interval`" not in str(error):  # Lightning's only ValueError: it is larger than an epoch
            raise
        raise UserError(plain_message(error)) from None
    except SIGTERMException:  # before training, or in an evaluation
        sys.exit(128 + signal.SIGTERM)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Ctrl-C, for which Lightning exits with status 1
            sys.exit(128 + signal.SIGINT)
        raise


def run(args: Sequence[str], command: str) -> None:
    """Runs Lightning's command line."""
    add_flags(f"--trainer.{name}" for name in signature(Trainer).parameters)
    TrainingCLI(
        LitViT,
        LightningDataModule,
        subclass_mode_data=True,
        args=[command, *args],
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
        save_config_callback=SaveConfigAtStart,
        trainer_defaults={
            "callbacks": [
                RunReport(),
                LearningRateMonitor("step"),
                StopOnNonFiniteLoss(),
                SaveModelCallback(written_command(args)),
                ClassificationReportCallback(),
            ],
            # Its table has a column of FLOPs that are 0 without an example input; `RunReport` prints the size.
            "enable_model_summary": False,
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
        self.command, self.args = command, kwargs.get("args") or []
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
        best["auto_insert_metric_name"] = False  # its slash would make a directory: best-{val/accuracy:.2f}
        parser.set_defaults({f"checkpoint.{key}": value for key, value in best.items()})
        for name in FROM_DATA:
            parser.link_arguments(f"data.{name}", f"model.vit.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Checks the values of Lightning's options right after they are parsed, before the data is looked at."""
        super().parse_arguments(parser, args)
        check_values(self.config[self.command])

    def before_instantiate_classes(self) -> None:
        """Checks the call, fills in what it leaves unset, and finds the run to resume."""
        if self._get(self.config, "trainer.enable_checkpointing") is False:
            raise UserError(
                "--trainer.enable_checkpointing false: every run writes last.ckpt, to resume from, and best.ckpt. "
                "Remove this option; --autosave.every_n_minutes sets how often last.ckpt is written."
            )
        run_name = self._get(self.config, "run_name")
        if run_name in ("", ".", "..") or set(run_name) & set("/\\\0"):
            raise UserError(f"--run_name {run_name!r} must be a directory name without a path: runs are in runs/NAME.")
        ckpt_path = self._get(self.config, "ckpt_path")
        checkpoint = None if ckpt_path is None else self._find_checkpoint(ckpt_path, run_name)
        source = self._get(self.config, "model.pretrained")
        if self.subcommand != "fit" and checkpoint is None and source is None:
            raise UserError(
                f"{self.subcommand} evaluates trained weights: add --ckpt_path CHECKPOINT or --model.pretrained MODEL."
            )
        self._fill_from_size()
        if checkpoint is not None and not checkpoint.is_dir():
            self._use_checkpoint(checkpoint)
        elif source is not None:
            self._use_pretrained(source)
        self._continue_version(checkpoint, run_name)

    def _find_checkpoint(self, ckpt_path: str, run_name: str) -> Path | None:
        """Resolves `--ckpt_path`; a model directory becomes `--model.pretrained`, and None is returned."""
        config = self.config[self.subcommand]
        found = find_checkpoint(ckpt_path, run_name)
        if found is None:
            raise UserError(not_found(ckpt_path, run_name))
        if is_model_directory(found):
            if self.subcommand == "fit":
                raise UserError(
                    f"--ckpt_path {ckpt_path} holds the weights only. To resume its run, give {found.parent}; to start "
                    f"a new run from the weights: --model.pretrained {found}."
                )
            config["ckpt_path"], config["model"]["pretrained"] = None, str(found)
            return None
        if self.subcommand != "fit":
            if any(arg.partition("=")[0] == "--model.pretrained" for arg in self.args):
                raise UserError("--ckpt_path and --model.pretrained name two sets of weights: remove one of them.")
            config["model"]["pretrained"], config["model"]["linear_probe"] = None, False
        config["ckpt_path"] = str(found)
        return found

    def _continue_version(self, checkpoint: Path | None, run_name: str) -> None:
        """Continues the version directory of the checkpoint if it is of this run."""
        self.version: int | None = None
        own = [file.resolve() for file in run_checkpoints(run_name, "last")]
        if self.subcommand == "fit" and checkpoint is not None and checkpoint.resolve() in own:
            run_dir = checkpoint.resolve().parents[1]
            self.version = int(run_dir.name.removeprefix("version_"))
            calls = len(list(run_dir.glob("config*.yaml")))
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            self.save_config_kwargs["config_filename"] = f"config_resumed_{calls}.yaml"

    def _use_checkpoint(self, checkpoint: Path) -> None:
        """Takes what the call leaves unset from the checkpoint, and refuses what is set and differs."""
        stage: Any = self.command
        content = read_checkpoint(checkpoint)
        record = recorded_in(content)
        trained = content["vitmha"]
        model, trainer = (self._get(self.config, name) for name in ("model", "trainer"))
        call = self._adopt(trained["architecture"], trained["preprocessing"], with_size=True)
        if model["decoder"] is None and trained.get("decoder"):
            model["decoder"] = Namespace(**trained["decoder"])
        call["decoder"] = model["decoder"] and dict(model["decoder"])
        data = self._get(self.config, "data")
        call |= data_record(data["class_path"].rpartition(".")[2], dict(data.get("init_args") or {}))
        if stage == "fit":
            arguments = {**model, "distillation": model["distillation"] and dict(model["distillation"])}
            call |= training_record({name: arguments[name] for name in TRAINING})
            call |= {name: trainer[name] for name in TRAINER}
            call["seed"] = self._get(self.config, "seed_everything")
        check_against_record(str(checkpoint), record, call, stage)

    def _use_pretrained(self, source: str) -> None:
        """Takes what the call leaves unset of architecture and preprocessing from the weights."""
        vit = self._get(self.config, "model.vit")
        weights = read_source(source, dict(vit))
        preprocessing = weights.preprocessing
        is_rgb = preprocessing is not None and len(preprocessing.mean) == 3  # not grayscale weights, for RGB images
        expected = asdict(preprocessing) if preprocessing is not None and is_rgb else None
        # A bare file does not say all of its architecture: `LitViT` checks what is assumed.
        fields = {} if weights.assumed else asdict(ViTConfig(**weights.fields))
        architecture = {name: value for name, value in fields.items() if name not in FREE} or None
        call = self._adopt(architecture, expected, with_size=False)
        if "patch_size" in call:
            vit["patch_size"] = pair(vit["patch_size"])  # unlike an integer never the default, which means unset
        if architecture is not None:
            stage: Any = "pretrained" if self.command == "fit" else self.command
            record = model_record({"architecture": architecture, "class_names": None, "preprocessing": expected})
            check_against_record(f"pretrained {source}", record, call, stage)

    @cached_property
    def _typed(self) -> Namespace:
        """What flags and config files set, without defaults."""
        return self.parser.parse_args(self.args, defaults=False)[self.command]

    def _typed_options(self, group: str) -> set[str]:
        """The names of the options of a group that flags or config files set, to something other than null."""
        return {name for name, value in dict(self._typed.get(group) or {}).items() if value is not None}

    def _adopt(self, architecture: Any, preprocessing: Any, *, with_size: bool) -> dict[str, Any]:
        """Writes the fields that the call does not set into the config, and returns the record of those that it sets.

        Args:
            architecture: Fields of `ViTConfig`; None to leave the config's.
            preprocessing: Fields of `Preprocessing`; None to leave the config's.
            with_size: Whether the data's image size is taken from the preprocessing too.
        """
        vit, data = self._get(self.config, "model.vit"), self._get(self.config, "data.init_args") or {}
        name = self._get(self.config, "model.name")
        typed_vit = {*(SIZES[name] if name else ()), *self._typed_options("model.vit")} - set(FROM_DATA)
        call: dict[str, Any] = {}
        if architecture is not None:
            for field in architecture.keys() - typed_vit - set(FROM_DATA):
                vit[field] = architecture[field]
            final = model_record({"architecture": {**architecture, **vit}, "class_names": None, "preprocessing": None})
            call |= {field: final[field] for field in typed_vit}
        typed_data = self._typed_options("data.init_args")
        for field in (*PREPROCESSING, *(["image_size"] if with_size else [])):
            if preprocessing is not None and field in data:
                if field in typed_data:
                    call |= {field: data[field]} if field != "image_size" else {field: pair(data[field])}
                else:
                    data[field] = preprocessing[field]
        return call

    def instantiate_classes(self) -> None:
        """Raises the `UserError` of a class that may be null, which jsonargparse puts into a longer message."""
        errors: list[UserError] = []

        def instantiate(class_type: type, *args: Any, **kwargs: Any) -> Any:
            try:
                return class_type(*args, **kwargs)
            except UserError as error:
                errors.append(error)
                raise

        self.parser.add_instantiator(instantiate, object)
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise (errors[-1] if errors else error) from None

    def _fill_from_size(self) -> None:
        """Writes the fields of the named size into model.vit, before it is checked and before config.yaml is saved."""
        name, vit = self._get(self.config, "model.name"), self._get(self.config, "model.vit")
        if name is not None:
            typed = self._typed_options("model.vit")
            for field, value in fill_from_size(name, dict(vit)).items():
                if field in typed and vit[field] != value:
                    raise UserError(
                        f"{field} {vit[field]} cannot be combined with name {name}, whose {field} is {value}, since it "
                        "is also the default: remove name and set its fields."
                    )
                vit[field] = value

    def after_instantiate_classes(self) -> None:
        """Writes the architecture into the config, and gives the data module its arguments, which the record holds."""
        architecture = asdict(get_encoder(self.model.model).config)
        for field in architecture.keys() - set(FROM_DATA):  # of a bare file it is known only now
            self._get(self.config, "model.vit")[field] = architecture[field]
        options = plain_options(dict(self._get(self.config, "data.init_args") or {}))
        self.datamodule.save_hyperparameters(options, logger=False)

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
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                write_into_run(logger, csv_logger.log_dir)
        try:
            trainer = super().instantiate_trainer(logger=loggers, plugins=plugins, **kwargs)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(plain_message(error)) from None
        if str(settings["precision"]).startswith("16") and isinstance(trainer.accelerator, CPUAccelerator):
            raise UserError(
                f"--trainer.precision {settings['precision']} needs a GPU, and this run uses the CPU: use 32-true, or "
                "bf16-mixed."
            )
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Called by Lightning in place of the trainer's method, as the next two."""
        with remove_run_without_results(self.trainer):
            self.trainer.fit(**kwargs)

    def validate(self, **kwargs: Any) -> None:
        with remove_run_without_results(self.trainer):
            self.trainer.validate(**kwargs)

    def test(self, **kwargs: Any) -> None:
        with remove_run_without_results(self.trainer):
            self.trainer.test(**kwargs)

    def after_fit(self) -> None:
        """Prints what was reached."""
        run_dir = Path(self.trainer.log_dir or ".")  # a collective call: all processes take part
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_result(self.trainer, self.model, run_dir)

    def after_validate(self) -> None:
        """Prints where the results are."""
        run_dir = Path(self.trainer.log_dir or ".")
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_directories(run_dir)

    after_test = after_validate


def _as_list(value: Any) -> list[Any]:
    """An entry of the config as a list: a list as it is, one object as a list of it, None or a boolean as []."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list) else [value]
