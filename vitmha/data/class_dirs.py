"""Directories of labeled images: their splits, their classes and the image files of each class."""

import logging
import os
from pathlib import Path

from vitmha.errors import UserError, printable
from vitmha.images import SUFFIXES

logger = logging.getLogger(__name__)
EXPECTED_LAYOUT = "expected ROOT/train/CLASS/*.jpg or ROOT/CLASS/*.jpg"
# The names of a split's directory, in any case, as in torchvision, Keras, Roboflow and Hugging Face.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow")


def warn(message: str) -> None:
    """Logs a warning on the main process."""
    from lightning.pytorch.utilities import rank_zero_only  # takes seconds to import, which `find_splits` needs not

    rank_zero_only(logger.warning)(message)


def find_splits(root: Path) -> dict[str, Path]:
    """Finds the directories of the splits "train", "val" and "test"; none if `root` holds class directories.

    Raises:
        UserError: Two directories for one split.

    Example:
        >>> find_splits(Path("leaves"))  # doctest: +SKIP
        {'train': PosixPath('leaves/Training'), 'val': PosixPath('leaves/valid')}
    """
    splits: dict[str, Path] = {}
    for path in sorted(path for path in root.iterdir() if path.is_dir()):
        for split, names in SPLIT_NAMES.items():
            if path.name.lower() in names:
                if split in splits:
                    raise UserError(f"root {root} has {splits[split].name}/ and {path.name}/: keep one of them")
                splits[split] = path
    return splits


def list_class_dirs(directory: Path) -> tuple[list["os.DirEntry[str]"], int]:
    """Lists the class directories in a directory, sorted by name, and counts the other entries.

    Raises:
        UserError: A broken link, or a class directory whose name is not UTF-8.
    """
    directories, num_others = [], 0
    for entry in sorted(os.scandir(directory.absolute()), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not (entry.is_dir() or entry.is_symlink()):
            num_others += 1
        elif entry.is_dir():
            directories.append(entry)
        elif os.path.exists(entry.path):  # a link to a file
            num_others += 1
        else:
            target = printable(os.readlink(entry.path))
            raise UserError(f"{directory}: {printable(entry.name)} is a broken link to {target}: remove or repair it")
    for entry in directories:
        try:
            entry.name.encode()
        except UnicodeEncodeError:
            name = printable(entry.name)
            raise UserError(f"{directory}: the name of class directory {name} is not UTF-8: rename it") from None
    return directories, num_others


def find_classes(directory: Path, *, nested_classes: bool = True) -> dict[str, list[str]]:
    """Finds the image files in and below each class directory, all sorted by name.

    Symbolic links are followed, but no directory is searched twice.

    Args:
        directory: Holds the class directories.
        nested_classes: Accept class directories whose images are all in subdirectories.

    Raises:
        UserError: No images, a class without images, a broken link or a name that is not UTF-8 as a class directory.
    """
    directories, skipped = list_class_dirs(directory)
    searched = {_identity(str(directory)), *(_identity(entry.path) for entry in directories)}
    classes: dict[str, list[str]] = {}
    broken: list[str] = []
    for entry in directories:
        paths: list[str] = []
        skipped += _search(entry.path, paths, broken, searched)
        classes[entry.name] = sorted(paths)
    if not any(classes.values()):
        raise UserError(f"root {directory}: no image files found ({EXPECTED_LAYOUT}){_hint(directory)}")
    if empty := [printable(name) for name, paths in classes.items() if not paths]:
        raise UserError(
            f"root {directory}: class directories without images: {', '.join(empty)}; remove or fill them"
            f"{_hint(directory)}"
        )
    if not nested_classes:
        _check_not_nested(directory, classes)
    if broken:
        shown = ", ".join(printable(path) for path in broken[:3])
        warn(f"{directory}: {len(broken)} images are broken links and are skipped: {shown}")
    if skipped:
        from lightning.pytorch.utilities import rank_zero_info  # see `warn`

        rank_zero_info(f"{directory}: {skipped} hidden or unknown files and directories skipped")
    return classes


def _search(directory: str, images: list[str], broken: list[str], searched: set[tuple[int, int]]) -> int:
    """Adds the images in and below a directory to the lists; returns the number of skipped files and directories."""
    skipped, pending = 0, [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name[0] == ".":
                    skipped += 1
                elif entry.is_dir():
                    identity = _identity(entry.path)
                    if identity in searched:  # a link to a directory that is searched anyway
                        skipped += 1
                    else:
                        searched.add(identity)
                        pending.append(entry.path)
                elif os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
                    skipped += 1
                elif entry.is_file():
                    images.append(entry.path)
                elif entry.is_symlink():
                    broken.append(entry.path)
                else:  # a named pipe or a device, on which reading would wait
                    skipped += 1
    return skipped


def _check_not_nested(directory: Path, classes: dict[str, list[str]]) -> None:
    nested = [
        printable(name)
        for name, paths in classes.items()
        if all(os.path.dirname(path) != str(directory.absolute() / name) for path in paths)
    ]
    if nested:
        shown = ", ".join(nested[:5]) + (", ..." if len(nested) > 5 else "")
        raise UserError(
            f"root {directory}: class directories that hold only directories: {shown}; pass the directory that holds "
            "the classes, or set nested_classes to true if all images below belong to that class"
        )


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _hint(directory: Path) -> str:
    """Names the first label table in or just below a directory, which would be ignored; empty if there is none."""
    for pattern in ("*", "*/*"):
        for path in sorted(directory.glob(pattern)):
            if path.suffix.lower() in TABLES:
                return f"; {printable(path.name)} is not read: labels are the names of class directories"
    return ""
