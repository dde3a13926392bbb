"""What `--ckpt_path` names: a file, a run directory, a model directory, `last` or `best`."""

from pathlib import Path

NAMES = ("last", "best")


def run_checkpoints(run_name: str, name: str) -> list[Path]:
    """The checkpoints `last.ckpt` or `best.ckpt` of all versions of a run, the newest last."""
    found = Path("runs", run_name).glob(f"version_*/checkpoints/{name}.ckpt")
    return sorted(found, key=lambda file: file.stat().st_mtime)


def find_checkpoint(ckpt_path: str, run_name: str) -> Path | None:
    """The checkpoint file, or the model directory, that `--ckpt_path` names; None if there is none.

    Args:
        ckpt_path: A checkpoint; `last` or `best`, for the newest of the run; a run directory, for its last.ckpt; a
            model directory or the model.safetensors in it.
        run_name: Value of `--run_name`.
    """
    if ckpt_path in NAMES:
        return next(reversed(run_checkpoints(run_name, ckpt_path)), None)
    path = Path(ckpt_path)
    if not ckpt_path or not path.exists():
        return None
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return path.parent
    if path.is_file() or is_model_directory(path) or (path / ".metadata").is_file():  # the last: a sharded checkpoint
        return path
    inside = [path / "checkpoints/last.ckpt", path / "last.ckpt", *path.glob("version_*/checkpoints/last.ckpt")]
    return max((file for file in inside if file.is_file()), key=lambda file: file.stat().st_mtime, default=None)


def not_found(ckpt_path: str, run_name: str) -> str:
    """The message about a `--ckpt_path` for which `find_checkpoint` finds nothing."""
    if ckpt_path in NAMES:
        return (
            f"--ckpt_path {ckpt_path}: runs/{run_name}/version_*/checkpoints/{ckpt_path}.ckpt not found. Remove it to "
            "start a new run, or set --run_name to that of the earlier run, in the directory in which it was started."
        )
    problem = "no such file" if ckpt_path else "it is empty"
    if ckpt_path and Path(ckpt_path).is_dir():
        problem = "no checkpoint in this directory (expected checkpoints/last.ckpt)"
    return f"--ckpt_path {ckpt_path}: {problem}. Give a checkpoint, a run directory, last or best."


def is_model_directory(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


def run_config(checkpoint: Path) -> Path | None:
    """The config.yaml of the run that wrote a checkpoint or a model directory; None if it is not there."""
    run = checkpoint.parent if is_model_directory(checkpoint) else checkpoint.parent.parent
    file = run / "config.yaml"
    return file if file.is_file() else None
