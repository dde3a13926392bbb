"""Writes a file, several files or a directory completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_path(target: str | Path, *, fsync: bool = False) -> Iterator[Path]:
    """Yields a temporary path in the directory of `target`, and renames it to `target` at the end.

    After an exception nothing remains of it. A killed process can leave `.NAME.PID.partial` behind; `target` is then as
    it was before.

    Args:
        target: The file to create or replace, or a directory to create. Missing parent directories are created.
        fsync: Flush the file to the disk before it is renamed, so that it also survives a power failure.

    Raises:
        OSError: It could not be written, for example on a full disk; the error has the name of `target`.

    Example:
        >>> with atomic_path("runs/x/metrics.csv") as partial:
        ...     _ = partial.write_text("epoch,loss")
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")  # another process may write the same target
    try:
        yield partial
        if fsync:
            with partial.open("r+b") as file:
                os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        _set_filename(error, partial, target)
        raise
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_files(directory: str | Path) -> Iterator[Path]:
    """Yields a temporary directory inside `directory`, and at the end moves the files in it to `directory`.

    Files of the same names are replaced, others stay. After an exception `directory` is as it was before.

    Args:
        directory: Created if it does not exist.

    Raises:
        OSError: A file could not be written, for example on a full disk; the error has the name of it or of
            `directory`.

    Example:
        >>> with atomic_files("report") as partial:
        ...     _ = (partial / "metrics.json").write_text("{}")
    """
    directory = Path(directory)
    is_new = not directory.exists()
    partial = directory / f".{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in sorted(partial.iterdir()):
            file.replace(directory / file.name)
        is_new = False
    except OSError as error:
        _set_filename(error, partial, directory)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                directory.rmdir()


def _set_filename(error: OSError, partial: Path, target: Path) -> None:
    """Names the target in an error about a temporary path or without a path, such as that of a full disk."""
    if error.errno is not None:
        error.filename = str(error.filename or target).replace(str(partial), str(target))
