"""Labeled images for evaluation, from class folders or from a built-in dataset."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.progress import Progress
from torch import Tensor

from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.images.find import ImageFinder, load_image, subsample


def class_to_idx(folders: Sequence[str], class_names: Sequence[str]) -> dict[str, int]:
    """The numbers of class folders: by the model's class names, or for its thousand classes by ImageNet's synsets.

    Args:
        folders: Names such as "cat" or "n01440764".
        class_names: The model's, in the order of their numbers.

    Raises:
        UserError: A folder that is neither.
    """
    numbers = {name: number for number, name in enumerate(class_names)}
    if len(class_names) == 1000 and any(folder not in numbers for folder in folders):
        synsets = _timms("imagenet_synsets.txt").split()
        numbers = {synset: number for number, synset in enumerate(synsets)} | numbers
    if unknown := [folder for folder in folders if folder not in numbers]:
        known = ", ".join(class_names[:5])
        raise UserError(f"The model has no class {unknown[0]!r}: its {len(class_names)} classes are {known}, ...")
    return {folder: numbers[folder] for folder in folders}


def real_labels(path: str | Path) -> list[int] | None:
    """The labels that people found right for a picture of ImageNet's validation set, by its file name.

    Returns:
        Class numbers, none where people saw no class; None for another file.

    Source:
        Beyer et al. 2020 (arXiv 2006.07159), "ReaL", as timm ships them.
    """
    number = re.match(r"ILSVRC2012_val_(\d{8})\.", Path(path).name)
    return _all_real_labels()[int(number[1]) - 1] if number and 1 <= int(number[1]) <= 50_000 else None


@cache
def _all_real_labels() -> list[list[int]]:
    return json.loads(_timms("imagenet_real_labels.json"))


def _timms(name: str) -> str:
    """A file that timm ships, read without importing timm, which takes seconds."""
    [folder] = cast(ModuleSpec, find_spec("timm")).submodule_search_locations or []
    return Path(folder, "data", "_info", name).read_text()


DATASETS: Mapping[str, Callable[[str], CIFAR10 | CIFAR100 | FashionMNIST | FashionMNISTMini]] = {
    "CIFAR10": CIFAR10,
    "CIFAR100": CIFAR100,
    "FashionMNIST": FashionMNIST,
    "FashionMNISTMini": lambda _: FashionMNISTMini(),  # bundled with the package
}


class LabeledImages(NamedTuple):
    """The labeled images of one source: what `read_image` takes, with the index of its class."""

    train: Sequence[tuple[Any, int]]
    """Empty if the source has no training split."""
    val: Sequence[tuple[Any, int]]
    """The validation or test split, or all images if the source has no splits."""


def read_labeled(source: str, class_names: Sequence[str], *, data_root: str | Path = "data") -> LabeledImages:
    """Reads a SOURCE of labeled images, with the class indices of a model.

    Args:
        source: A directory of class directories (ROOT/CLASS/x.jpg, or ROOT/train/CLASS/x.jpg and ROOT/val/CLASS/x.jpg),
            or the name of a built-in dataset in `DATASETS`.
        class_names: Of the model, in the order of its outputs.
        data_root: Where a built-in dataset is stored.

    Raises:
        UserError: No such source, or other classes than the model's.

    Example:
        >>> splits = read_labeled("leaves", ["healthy", "rust"])  # doctest: +SKIP
    """
    if source in DATASETS and not Path(source).is_dir():
        return _read_dataset(source, class_names, data_root)
    root = Path(source)
    if not root.is_dir():
        raise UserError(
            f"data {source!r} is not a directory of class directories, nor a built-in dataset ({', '.join(DATASETS)})."
        )
    if (root / "train").is_dir() and (root / "val").is_dir():
        return LabeledImages(_read_class_dirs(root / "train", class_names), _read_class_dirs(root / "val", class_names))
    return LabeledImages([], _read_class_dirs(root, class_names))


class LabeledBatches:
    """Labelled pictures in batches, as often as they are asked for; how many were is shown.

    Args:
        labelled: What `read_image` takes, each with its class.
        preprocessing: Makes them the model's input.
        batch_size: How many at a time.
        progress: Where the batches are counted.
    """

    def __init__(
        self, labelled: Sequence[tuple[Any, int]], preprocessing: Preprocessing, batch_size: int, progress: Progress
    ) -> None:
        shown = progress.track(labelled, description="reading")
        self.pixels = torch.stack([preprocessing.pixels(load_image(item)) for item, _ in shown])
        self.labels = torch.tensor([number for _, number in labelled])
        self.preprocessing, self.batch_size = preprocessing, batch_size
        self.progress, self.task = progress, progress.add_task("batches", total=None)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in zip(self.pixels.split(self.batch_size), self.labels.split(self.batch_size), strict=True):
            yield self.preprocessing.normalize(pixels), labels
            self.progress.advance(self.task)

    @property
    def images(self) -> Iterator[Tensor]:
        """Without the labels."""
        return (images for images, _ in self)


@dataclass(frozen=True, kw_only=True)
class SelectionSplit:
    """Two sets that have no picture in common, since heads that were chosen on the ones measured would flatter."""

    select: LabeledBatches
    eval: LabeledBatches


def selection_split(
    images: LabeledImages, limit: int, preprocessing: Preprocessing, batch_size: int, progress: Progress
) -> SelectionSplit:
    """Splits labeled images into those that select heads and those that evaluate the result.

    Args:
        images: As `read_labeled` returns them. Without a training split, every second image selects.
        limit: Largest number of images in each half.
        preprocessing: Makes them the model's input.
        batch_size: Images per batch.
        progress: Shows the progress.

    Raises:
        UserError: Fewer than two images.
    """
    select, evaluate = images
    if not select:
        both = subsample(images.val, 2 * limit)
        select, evaluate = both[1::2], both[::2]
    if not select or not evaluate:
        raise UserError(
            f"data has {len(select) + len(evaluate) or 'no'} images in class directories: at least two are needed, one "
            "to select heads and one to evaluate them."
        )
    halves = [
        LabeledBatches(subsample(half, limit), preprocessing, batch_size, progress) for half in (select, evaluate)
    ]
    return SelectionSplit(select=halves[0], eval=halves[1])


def _read_class_dirs(root: Path, class_names: Sequence[str]) -> list[tuple[Any, int]]:
    finder = ImageFinder(recursive=True)
    return [
        (item, index)
        for name, index in class_folders(root, class_names).items()
        for item in finder.below([str(root / name)], ())
    ]


def _read_dataset(name: str, class_names: Sequence[str], data_root: str | Path) -> LabeledImages:
    data = DATASETS[name](str(data_root))
    if tuple(class_names) != tuple(data.class_names):
        raise UserError(
            f"data {name} has the classes {', '.join(data.class_names[:3])}, ..., the model has "
            f"{', '.join(class_names[:3])}, ...: use the dataset that the model was trained on."
        )
    data.prepare_data()
    splits = (data.read(train=True), data.read(train=False))
    return LabeledImages(
        *(
            list(zip(images.movedim(1, -1).squeeze(-1).numpy(), labels.tolist(), strict=True))
            for images, labels in splits
        )
    )


def class_folders(folder: str | Path, class_names: Sequence[str]) -> dict[str, int]:
    """The class directories in a directory, without hidden ones, sorted by name, each with its class index.

    Raises:
        UserError: A directory that does not exist, or one of no class of the model.
    """
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a directory.")
    names = sorted(each.name for each in Path(folder).iterdir() if each.is_dir() and each.name[0] != ".")
    return class_to_idx(names, class_names)
