"""Image files packed into a few large shards, for network disks, object stores and data larger than the local disk.

The format is litdata's and not webdataset's: litdata reads any sample by its index, from a disk in place and from an
object store as a range of bytes. So order, slices and resume are those of `GlobalBatchSampler` on any number of nodes,
bit for bit. webdataset returns the samples of a shard as they come, without a count, a position to resume from, or
equal slices.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.images import ImageBytes

SHARD_BYTES = "64MB"


@final
class ShardedFiles:
    """The files of one split and their class indices; each process opens the shards for itself.

    Args:
        root: The directory or address of the shards.
        split: "train", "val" or "test".
        count: Number of files in the split.
    """

    def __init__(self, root: str, split: str, count: int) -> None:
        self.root, self.split, self.count = root, split, count
        self._opened: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[ImageBytes, int]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), _open(self.root, self.split)
        header, _, content = bytes(self._opened[1][index]).partition(b"\n")
        path, label = json.loads(header)
        return ImageBytes(content, f"{path} in {self.root}"), label


def is_sharded(root: str) -> bool:
    """Whether a directory was written by `write_shards`; an address such as s3://BUCKET/NAME is assumed to be."""
    return "://" in root or Path(root, "summary", "index.json").is_file()


def open_shards(root: str) -> tuple[tuple[str, ...], ShardedFiles, ShardedFiles, ShardedFiles]:
    """Opens what `write_shards` wrote.

    Args:
        root: A directory, or an address that litdata reads.

    Returns:
        Class names in the order of their indices; the training, the validation and the test files, of which there may
        be none.

    Raises:
        UserError: litdata is not installed.
    """
    summary = json.loads(bytes(_open(root, "summary")[0]))
    train, val, test = (ShardedFiles(root, split, summary.get(split, 0)) for split in ("train", "val", "test"))
    return tuple(summary["class_names"]), train, val, test


def write_shards(
    source: Path,
    class_names: Sequence[str],
    train_files: Sequence[tuple[str, int]],
    val_files: Sequence[tuple[str, int]],
    output: Path,
    test_files: Sequence[tuple[str, int]] = (),
) -> None:
    """Writes the files of a directory into shards, byte for byte. `output` appears only when it is complete.

    Args:
        source: The directory; paths are stored relative to it.
        class_names: In the order of their indices.
        train_files: (path, class index) of each training image.
        val_files: (path, class index) of each validation image.
        output: The directory to create.
        test_files: (path, class index) of each test image.

    Raises:
        UserError: `output` exists, or litdata is not installed.

    Example:
        >>> write_shards(Path("leaves"), *find_files(Path("leaves"), 0.1, 0), Path("shards"))  # doctest: +SKIP
    """
    if output.exists():
        raise UserError(f"output {output} already exists: choose another directory, or remove it")
    with atomic_path(output) as partial:
        partial.mkdir()
        counts = {}
        for split, files in (("train", train_files), ("val", val_files), ("test", test_files)):
            counts[split] = len(files)
            if files:
                _write(partial / split, (_sample(path, os.path.relpath(path, source), label) for path, label in files))
        _write(partial / "summary", [json.dumps({"class_names": class_names, **counts}).encode()])


def _sample(path: str, name: str, label: int) -> bytes:
    """A header line, then the file. Without the header, litdata would recognize the image and decode it."""
    return json.dumps([name, label]).encode() + b"\n" + Path(path).read_bytes()


def _write(directory: Path, samples: Iterable[bytes]) -> None:
    directory.mkdir()
    shards = _litdata().streaming.Cache(str(directory), chunk_bytes=SHARD_BYTES)
    for index, sample in enumerate(samples):
        shards[index] = sample
    shards.done()
    shards.merge()


def _open(root: str, split: str) -> Any:
    return _litdata().StreamingDataset(f"{root.rstrip('/')}/{split}")


def _litdata() -> ModuleType:
    try:
        import litdata
        import litdata.streaming
    except ModuleNotFoundError:
        raise UserError("shards need the package litdata: pip install 'vitmha[shards]'") from None
    return litdata
