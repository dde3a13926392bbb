"""Pictures packed into a few large files, for data on network disks and object stores, larger than a disk of one's own.

The engine is litdata and not webdataset: it reads any sample by its number, on a disk in place and from an object store
as a range of bytes, so that order, shares and resume are those of `GlobalBatchSampler` on any number of nodes, to the bit.
webdataset gives out what its shards hold as they come, without a count, a position to go back to or equal shares.
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

from vitmha.errors import UserError
from vitmha.images import ImageBytes

SHARD_BYTES = "64MB"


@final
class ShardedFiles:
    """The files of one part and their classes, by number; each process opens the shards for itself.

    Args:
        root: Where the folder is packed.
        part: "train" or "val".
        count: Files in it.
    """

    def __init__(self, root: str, part: str, count: int) -> None:
        self.root, self.part, self.count = root, part, count
        self._opened: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[ImageBytes, int]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), _read(self.root, self.part)
        head, _, content = bytes(self._opened[1][index]).partition(b"\n")
        path, label = json.loads(head)
        return ImageBytes(content, f"{path} in {self.root}"), label


def is_packed(root: str) -> bool:
    """Whether a folder or address is one that `pack` has written; every address is taken for one."""
    return "://" in root or Path(root, "summary", "index.json").is_file()


def open_packed(root: str) -> tuple[tuple[str, ...], ShardedFiles, ShardedFiles]:
    """What `pack` has put away.

    Args:
        root: A folder, or an address that litdata reads.

    Returns:
        Class names in the order of their numbers; the training and the validation files.

    Raises:
        UserError: litdata is not installed.
    """
    summary = json.loads(bytes(_read(root, "summary")[0]))
    train, val = (ShardedFiles(root, part, summary[part]) for part in ("train", "val"))
    return tuple(summary["class_names"]), train, val


def pack(
    folder: Path,
    class_names: Sequence[str],
    train_files: Sequence[tuple[str, int]],
    val_files: Sequence[tuple[str, int]],
    dest: Path,
) -> None:
    """Writes the files of a folder, byte for byte, into shards; what stands at `dest` in the end is whole.

    Args:
        folder: Paths are stored as seen from here.
        class_names: In the order of their numbers.
        train_files: (path, label) of each.
        val_files: Likewise.
        dest: The folder to make.

    Raises:
        UserError: `dest` exists, or litdata is not installed.
    """
    if dest.exists():
        raise UserError(f"{dest} exists: name a folder that does not, or remove it")
    partial = dest.with_name(f".{dest.name}-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        counts = {}
        for part, files in (("train", train_files), ("val", val_files)):
            counts[part] = len(files)
            _write(partial / part, (_packed(path, os.path.relpath(path, folder), label) for path, label in files))
        _write(partial / "summary", [json.dumps({"class_names": class_names, **counts}).encode()])
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _packed(path: str, name: str, label: int) -> bytes:
    """One sample. It does not begin as a picture does, since litdata would decode that."""
    return json.dumps([name, label]).encode() + b"\n" + Path(path).read_bytes()


def _write(folder: Path, samples: Iterable[bytes]) -> None:
    folder.mkdir()
    shards = _litdata().streaming.Cache(str(folder), chunk_bytes=SHARD_BYTES)
    for number, sample in enumerate(samples):
        shards[number] = sample
    shards.done()
    shards.merge()


def _read(root: str, part: str) -> Any:
    return _litdata().StreamingDataset(f"{root.rstrip('/')}/{part}")


def _litdata() -> ModuleType:
    try:
        import litdata
        import litdata.streaming
    except ModuleNotFoundError:
        raise UserError("packed folders need litdata: pip install 'vitmha[shards]'") from None
    return litdata
