"""Every word of the command line."""

import argparse
import difflib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger

import vitmha
import vitmha.data
from vitmha.callbacks import AttentionLogger, ModelFolder, StopOnNonFiniteLoss
from vitmha.training import LitViT

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
        best = {"monitor": "val/accuracy", "mode": "max", "filename": "best", "save_last": True}
        parser.set_defaults({f"checkpoint.{key}": value for key, value in best.items()})
        for fact in ("num_classes", "in_channels", "image_size"):
            parser.link_arguments(f"data.{fact}", f"model.vit.{fact}", apply_on="instantiate")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts the run folder's logger before those of the YAML."""
        chosen = self._get(self.config_init, "trainer")["logger"]
        others = [] if chosen is None or isinstance(chosen, bool) else chosen if isinstance(chosen, list) else [chosen]
        run = CSVLogger("runs", name=self._get(self.config, "name"))
        return super().instantiate_trainer(logger=[run, *others], **kwargs)

    def after_fit(self) -> None:
        """Says in plain words what was reached and where it lies."""
        folder = Path(self.trainer.log_dir or ".")  # asks all processes
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        metrics = self.trainer.callback_metrics
        reached = "Trained"
        if "val/accuracy" in metrics:
            accuracy, loss = metrics["val/accuracy"], metrics["val/loss"]
            reached = f"Reached {accuracy:.2%} top-1 (loss {loss:.4f}) on the validation pictures"
        print(  # noqa: T201
            f"\n{reached} after {self.trainer.current_epoch} epochs.\n"
            f"  run                 {folder}\n"
            f"  model folder        {folder / 'model'}\n"
            f"  attention pictures  {folder / 'attention'}"
        )


def main(args: Sequence[str] | None = None) -> None:
    """The command `vitmha`.

    Args:
        args: The words behind the command; those of the process by default.
    """
    if args is not None:
        sys.argv[1:] = args
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 on torch 2.14
    try:
        TrainingCLI(
            LitViT,
            LightningDataModule,
            subclass_mode_data=True,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={"prog": "vitmha", "description": vitmha.__doc__},
            auto_configure_optimizers=False,
            trainer_defaults={
                "callbacks": [RichProgressBar(), LearningRateMonitor("step"), StopOnNonFiniteLoss(), ModelFolder()],
                # The data modules share the samples out themselves, without doubling any.
                "use_distributed_sampler": False,
            },
        )
    except ValueError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not _is_ours(cause):
            raise
        sys.exit(f"error: {cause}")


def _is_ours(error: BaseException) -> bool:
    """Whether the error is a message of this package, meant for its user."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(name.startswith("vitmha.") for name in (frame.f_globals["__name__"], type(error).__module__))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names a user may give, those of the subcommands included."""
    for action in parser._actions:
        for choice in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _options(choice)
        yield action.dest


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
