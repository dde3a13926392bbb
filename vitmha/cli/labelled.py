"""Labelled pictures, from folders of classes or from a data set, to choose heads on and to measure them on."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from vitmha.cli.search import Search, class_folders, evenly, picture_of
from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.images import Preprocessing
from vitmha.pretrained import preprocessing_of
from vitmha.vit import VisionTransformer

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


def labelled_pictures(given: argparse.Namespace, model: VisionTransformer, progress: Progress) -> Sets:
    """Every other picture of --truth, or the training set and the test set of --data.

    Raises:
        ValueError: A model that does not say how pictures become its input, or pictures of other classes than its own.
    """
    preprocessing = preprocessing_of(model)
    if model.class_names is None:
        raise ValueError(f"{given.model} does not name its classes: `vitmha convert --set class_names=[...]` does.")
    both: tuple[Sequence[tuple[Any, int]], ...]
    if given.data:
        both = _data_set(given, model.class_names)
    else:
        files = evenly(_files(given.truth, model.class_names), 2 * given.pictures)
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
