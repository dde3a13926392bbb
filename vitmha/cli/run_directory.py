"""The run directory of fit, validate and test: its config.yaml, its removal after a refusal, what is printed of it."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

from vitmha.cli.configs import shipped_configs


class SaveConfigAtStart(SaveConfigCallback):
    """Writes config.yaml when training or evaluation starts, and not for a call that is refused before."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Does nothing: the checkpoint has not been read."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            super().setup(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "test")


@contextmanager
def remove_run_without_results(trainer: Trainer) -> Iterator[None]:
    """Removes the run directory of a call that fails before there is more in it than config.yaml."""
    logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
    if logger is None:  # fast_dev_run writes nothing
        yield
        return
    directory = Path(logger.log_dir)
    is_new = not directory.exists()
    try:
        yield
    except BaseException:
        written = {file.name for file in directory.iterdir()} if directory.is_dir() else None
        if is_new and trainer.is_global_zero and written is not None and written <= {"config.yaml"}:
            shutil.rmtree(directory)
            for parent in (directory.parent, directory.parent.parent):  # runs/NAME and runs
                if not any(parent.iterdir()):
                    parent.rmdir()
        raise


def written_command(args: Sequence[str]) -> str:
    """The call of `vitmha fit` that trains a model, for its model card: with names of shipped configs, from the start.

    A run that was interrupted has the result of one that was not, so `--ckpt_path` is left out.
    """
    names = {f"{flag}{path}": f"{flag}{name}" for name, path in shipped_configs().items() for flag in ("", "--config=")}
    kept = [
        names.get(arg, arg)
        for previous, arg in zip(["", *args], args, strict=False)
        if "--ckpt_path" not in (previous, arg.partition("=")[0])
    ]
    return shlex.join(["vitmha", "fit", *kept])


def print_directories(run_dir: Path) -> None:
    """Prints a run directory and what there is in it."""
    contents = {"run directory": ".", "model directory": "model", "attention maps": "attention"}
    for title, name in {**contents, "evaluation": "evaluation"}.items():
        if (run_dir / name).is_dir():
            print(f"  {title:<15}  {run_dir / name}")
