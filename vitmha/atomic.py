"""Writes a file or a directory completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(target: str | Path, *, fsync: bool = False) -> Iterator[Path]:
    """Yields a temporary path in the directory of `target`, and renames it to `target` at the end.

    After an exception nothing remains of it. A killed process can leave `.NAME.PID.partial` behind; `target` is then as
    it was before.

    Args:
        target: The file to create or replace, or a directory to create. Missing parent directories are created.
        fsync: Flush the file to the disk before it is renamed, so that it also survives a power failure.

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
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
