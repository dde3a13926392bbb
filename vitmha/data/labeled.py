"""Labeled images for evaluation, from class folders or from a built-in dataset."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import Progress
from torch import Tensor

from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.images import Preprocessing
from vitmha.images.find import Search, evenly, picture_of


def class_numbers(folders: Sequence[str], class_names: Sequence[str]) -> dict[str, int]:
    """The numbers of class folders: by the model's class names, or for its thousand classes by ImageNet's synsets.

    Args:
        folders: Names such as "cat" or "n01440764".
        class_names: The model's, in the order of their numbers.

    Raises:
        ValueError: A folder that is neither.
    """
    numbers = {name: number for number, name in enumerate(class_names)}
    if len(class_names) == 1000 and any(folder not in numbers for folder in folders):
        synsets = _timms("imagenet_synsets.txt").split()
        numbers = {synset: number for number, synset in enumerate(synsets)} | numbers
    if unknown := [folder for folder in folders if folder not in numbers]:
        known = ", ".join(class_names[:5])
        raise ValueError(f"The model has no class {unknown[0]!r}: its {len(class_names)} classes are {known}, ...")
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


DATA_SETS: Mapping[str, Callable[[str], CIFAR10 | CIFAR100 | FashionMNIST | FashionMNISTMini]] = {
    "CIFAR10": CIFAR10,
    "CIFAR100": CIFAR100,
    "FashionMNIST": FashionMNIST,
    "FashionMNISTMini": lambda _: FashionMNISTMini(),  # comes with the package
}


class Pictures:
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
        self.pixels = torch.stack([preprocessing.pixels(picture_of(item)) for item, _ in shown])
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
class Sets:
    """Two sets that have no picture in common, since heads that were chosen on the ones measured would flatter."""

    chosen_on: Pictures
    measured_on: Pictures


def labelled_pictures(
    given: argparse.Namespace, class_names: Sequence[str] | None, preprocessing: Preprocessing, progress: Progress
) -> Sets:
    """Every other picture of --truth, or the training set and the test set of --data.

    Raises:
        ValueError: A model that does not say how pictures become its input, or pictures of other classes than its own.
    """
    if class_names is None:
        raise ValueError(f"{given.model} does not name its classes: `vitmha convert --set class_names=[...]` does.")
    both: tuple[Sequence[tuple[Any, int]], ...]
    if given.data:
        both = _data_set(given, class_names)
    else:
        files = evenly(_files(given.truth, class_names), 2 * given.pictures)
        both = (files[1::2], files[::2])
    sets = [Pictures(evenly(each, given.pictures), preprocessing, given.batch_size, progress) for each in both]
    return Sets(chosen_on=sets[0], measured_on=sets[1])


def _files(folder: str, class_names: Sequence[str]) -> list[tuple[Any, int]]:
    search, numbers = Search(recursive=True), class_folders(folder, class_names)
    files = [(item, number) for name, number in numbers.items() for item in search.below([f"{folder}/{name}"], ())]
    if len(files) < 2:
        raise ValueError(
            f"--truth: {folder} has {len(files) or 'no'} pictures in folders, one for each class: give at least two, "
            "one to choose heads on and one to measure them on."
        )
    return files


def _data_set(given: argparse.Namespace, class_names: Sequence[str]) -> tuple[list[tuple[Any, int]], ...]:
    data = DATA_SETS[given.data](given.root)
    if tuple(class_names) != tuple(data.class_names):
        raise ValueError(
            f"--data {given.data} has the classes {', '.join(data.class_names[:3])}, ..., the model has "
            f"{', '.join(class_names[:3])}, ...: take the data that it was trained for."
        )
    data.prepare_data()
    sets = (data.read(train=True), data.read(train=False))
    return tuple(
        list(zip(images.movedim(1, -1).squeeze(-1).numpy(), labels.tolist(), strict=True)) for images, labels in sets
    )


def class_folders(folder: str | Path, class_names: Sequence[str]) -> dict[str, int]:
    """The folders of classes in a folder, hidden ones apart, in their order, each with its class's number.

    Raises:
        ValueError: There is no such folder, or one in it is of no class of the model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--truth: there is no folder {folder}.")
    names = sorted(each.name for each in Path(folder).iterdir() if each.is_dir() and each.name[0] != ".")
    return class_numbers(names, class_names)
