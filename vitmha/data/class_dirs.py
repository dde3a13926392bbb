"""Directories of labeled images: their splits, their classes and the image files of each class."""

import logging
import os
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class ClassDirs:
    """The class directories in a directory."""

    directory: Path
    entries: list["os.DirEntry[str]"]
    """One of each class, sorted by name."""
    num_others: int
    """Number of hidden directories and of files next to them."""

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]


@dataclass
class ClassImages:
    """The image files in and below each class directory."""

    paths: dict[str, list[str]]
    """By class, both sorted by name."""
    broken: set[str] = field(default_factory=set)
    """Those of the paths that are links to nothing."""
    skipped: int = 0
    """Number of hidden and unknown files and directories, and of links to directories that are searched anyway."""


def list_class_dirs(directory: Path) -> ClassDirs:
    """Lists the class directories in a directory.

    Raises:
        UserError: A broken link, a name that is not UTF-8, or two names of one directory.
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
    names: dict[tuple[int, int], str] = {}
    for entry in directories:
        name, identity = printable(entry.name), _identity(entry.path)
        try:
            entry.name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{directory}: the name of class directory {name} is not UTF-8: rename it") from None
        if identity in names:
            raise UserError(
                f"{directory}: {names[identity]} and {name} are the same directory: remove one of the links"
            )
        names[identity] = name
    return ClassDirs(directory, directories, num_others)


def find_images(class_dirs: ClassDirs) -> ClassImages:
    """Finds the image files in and below class directories.

    Links to directories are followed last, and no directory is searched twice: an image has the class of the directory
    that holds it, also where another class has a link to that directory.
    """
    found = ClassImages({name: [] for name in class_dirs.names}, skipped=class_dirs.num_others)
    searched = {_identity(str(class_dirs.directory)), *(_identity(entry.path) for entry in class_dirs.entries)}
    links = []
    for entry in class_dirs.entries:
        links += [(entry.name, link) for link in _search(entry.path, found.paths[entry.name], found, searched)]
    while links:
        name, link = links.pop(0)
        if _is_new(link, searched):
            links += [(name, below) for below in _search(link, found.paths[name], found, searched)]
        else:
            found.skipped += 1
    for paths in found.paths.values():
        paths.sort()
    return found


def find_classes(directory: Path, *, nested_classes: bool = True) -> dict[str, list[str]]:
    """Finds the image files of each class for training, all sorted by name, and warns of broken links.

    Args:
        directory: Holds the class directories.
        nested_classes: Accept class directories whose images are all in subdirectories.

    Raises:
        UserError: No images, a class without images, or class directories as `list_class_dirs` refuses them.
    """
    found = find_images(list_class_dirs(directory))
    classes = {name: [path for path in paths if path not in found.broken] for name, paths in found.paths.items()}
    if not any(classes.values()):
        raise UserError(f"root {directory}: no image files found ({EXPECTED_LAYOUT}){_hint(directory)}")
    if empty := [printable(name) for name, paths in classes.items() if not paths]:
        raise UserError(
            f"root {directory}: class directories without images: {', '.join(empty)}; remove or fill them"
            f"{_hint(directory)}"
        )
    if not nested_classes:
        _check_not_nested(directory, classes)
    if found.broken:
        shown = ", ".join(printable(path) for path in sorted(found.broken)[:3])
        warn(f"{directory}: {len(found.broken)} images are broken links and are skipped: {shown}")
    if found.skipped:
        from lightning.pytorch.utilities import rank_zero_info  # see `warn`

        rank_zero_info(f"{directory}: {found.skipped} hidden or unknown files and directories skipped")
    return classes


def _search(directory: str, paths: list[str], found: ClassImages, searched: set[tuple[int, int]]) -> list[str]:
    """Adds the images in and below a directory to `paths`; returns the links to directories, which are not followed."""
    links, pending = [], [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name[0] == ".":
                    found.skipped += 1
                elif entry.is_dir():
                    if entry.is_symlink():
                        links.append(entry.path)
                    elif _is_new(entry.path, searched):
                        pending.append(entry.path)
                    else:
                        found.skipped += 1
                elif os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
                    found.skipped += 1
                elif entry.is_file():
                    paths.append(entry.path)
                elif entry.is_symlink():
                    paths.append(entry.path)
                    found.broken.add(entry.path)
                else:  # a named pipe or a device, on which reading would wait
                    found.skipped += 1
    return sorted(links)


def _is_new(directory: str, searched: set[tuple[int, int]]) -> bool:
    """Whether a directory was not yet searched; it then counts as searched."""
    identity = _identity(directory)
    if identity in searched:
        return False
    searched.add(identity)
    return True


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
