"""Labeled images for evaluation, from class directories or from a built-in dataset."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from rich.progress import Progress
from torch import Tensor

import vitmha.data
from vitmha.data.class_dirs import find_images, find_splits, list_class_dirs
from vitmha.errors import UserError, printable
from vitmha.images import Preprocessing
from vitmha.images.find import load_image, subsample

if TYPE_CHECKING:
    from vitmha.data.in_memory import InMemoryData


def class_to_idx(names: Sequence[str], class_names: Sequence[str]) -> dict[str, int]:
    """The class indices of class directories, by the model's class names or by ImageNet's synsets for its 1000 classes.

    Args:
        names: Names of directories, such as "cat" or "n01440764".
        class_names: Of the model, in the order of its outputs.

    Raises:
        UserError: A name that is neither.
    """
    indices = {name: index for index, name in enumerate(class_names)}
    if len(class_names) == 1000 and any(name not in indices for name in names):
        synsets = _read_timm_file("imagenet_synsets.txt").split()
        indices = {synset: index for index, synset in enumerate(synsets)} | indices
    if unknown := [name for name in names if name not in indices]:
        known = ", ".join(map(printable, class_names[:5]))
        raise UserError(f"The model has no class {unknown[0]!r}: its {len(class_names)} classes are {known}, ...")
    return {name: indices[name] for name in names}


def real_labels(path: str | Path) -> list[int] | None:
    """The reassessed ("ReaL") labels of an image of ImageNet's validation set, by its file name.

    Returns:
        Class indices, none if the annotators saw no class; None for any other file.

    Source:
        Beyer et al. 2020 (arXiv 2006.07159), as timm ships them.
    """
    number = re.match(r"ILSVRC2012_val_(\d{8})\.", Path(path).name)
    return _all_real_labels()[int(number[1]) - 1] if number and 1 <= int(number[1]) <= 50_000 else None


@cache
def _all_real_labels() -> list[list[int]]:
    return json.loads(_read_timm_file("imagenet_real_labels.json"))


def _read_timm_file(name: str) -> str:
    """A file that timm ships, read without the seconds of importing timm."""
    [directory] = cast(ModuleSpec, find_spec("timm")).submodule_search_locations or []
    return Path(directory, "data", "_info", name).read_text()


# Functions, so that the data modules, which import Lightning and torchvision, are imported on first use.
DATASETS: Mapping[str, Callable[[str], "InMemoryData"]] = {
    "CIFAR10": lambda root: vitmha.data.CIFAR10(root),
    "CIFAR100": lambda root: vitmha.data.CIFAR100(root),
    "FashionMNIST": lambda root: vitmha.data.FashionMNIST(root),
    "FashionMNISTMini": lambda _: vitmha.data.FashionMNISTMini(),  # bundled with the package
}


class LabeledImages(NamedTuple):
    """The images of one source, each as (what `load_image` takes, class index)."""

    train: Sequence[tuple[Any, int | None]]
    """Empty if the source has no training split."""
    val: Sequence[tuple[Any, int | None]]
    """The validation or test split, or all images if the source has no splits."""


def read_labeled(source: str, class_names: Sequence[str], *, data_root: str | Path = "data") -> LabeledImages:
    """Reads a SOURCE of labeled images, with the class indices of a model.

    Args:
        source: A directory of class directories (ROOT/CLASS/x.jpg, or ROOT/train/CLASS/x.jpg and ROOT/val/CLASS/x.jpg),
            or the name of a built-in dataset in `DATASETS`. For a model of 1000 classes also the flat directory of
            ImageNet's validation images (ILSVRC2012_val_*.JPEG), whose class index is None: they have `real_labels`.
        class_names: Of the model, in the order of its outputs.
        data_root: Where a built-in dataset is stored.

    Raises:
        UserError: A source that does not exist or has no image, a class directory without images, or other classes
            than the model's.

    Example:
        >>> train, val = read_labeled("leaves", ["healthy", "rust"])  # doctest: +SKIP
    """
    root = Path(source)
    if source in DATASETS and not root.is_dir():
        return _read_dataset(source, class_names, data_root)
    if not root.is_dir():
        raise UserError(
            f"data {source} is not a directory of class directories, nor a built-in dataset ({', '.join(DATASETS)})."
        )
    if splits := find_splits(root):
        if not splits.keys() & {"val", "test"}:
            raise UserError(f"data {source} has {splits['train'].name}/ but not val/ or test/.")
        train = _read_class_dirs(splits["train"], class_names) if "train" in splits else []
        images = LabeledImages(train, _read_class_dirs(splits.get("val") or splits["test"], class_names))
    else:
        images = LabeledImages([], _read_class_dirs(root, class_names))
    if not images.val:
        raise UserError(f"data {source}: no image files found (expected ROOT/CLASS/*.jpg or ROOT/val/CLASS/*.jpg).")
    return images


class LabeledBatches:
    """Labeled images in batches, decoded once and held in memory; iterable any number of times.

    Args:
        labeled: What `load_image` takes, each with its class index.
        preprocessing: Makes them the model's input.
        batch_size: Images per batch.
        progress: Shows how many images were read and how many batches were iterated.
    """

    def __init__(
        self, labeled: Sequence[tuple[Any, int]], preprocessing: Preprocessing, batch_size: int, progress: Progress
    ) -> None:
        tracked = progress.track(labeled, description="reading")
        self.pixels = torch.stack([preprocessing.pixels(load_image(item)) for item, _ in tracked])
        self.labels = torch.tensor([label for _, label in labeled])
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
        """The images without their labels."""
        return (images for images, _ in self)


@dataclass(frozen=True, kw_only=True)
class SelectionSplit:
    """Two disjoint sets of images: evaluated on those that selected the heads, a result would be optimistic."""

    select: LabeledBatches
    """Heads are selected on these."""
    eval: LabeledBatches
    """The result is evaluated on these."""


def selection_split(
    images: LabeledImages, limit: int, preprocessing: Preprocessing, batch_size: int, progress: Progress
) -> SelectionSplit:
    """Splits labeled images into those to select heads on and those to evaluate the result on.

    Args:
        images: As `read_labeled` returns them. Without a training split, every second image is for selection. Images
            without a class index are skipped.
        limit: Largest number of images in each half.
        preprocessing: Makes them the model's input.
        batch_size: Images per batch.
        progress: Shows the progress.

    Raises:
        UserError: Fewer than two images with a class index, or one that cannot be read.
    """
    select, evaluate = ([(image, label) for image, label in split if label is not None] for split in images)
    if not select:
        both = subsample(evaluate, 2 * limit)
        select, evaluate = list(both[1::2]), list(both[::2])
    if not select or not evaluate:
        raise UserError(
            "data must have at least two images in class directories, one to select heads on and one to evaluate on, "
            f"got {len(select) + len(evaluate)}."
        )
    halves = [
        LabeledBatches(subsample(half, limit), preprocessing, batch_size, progress) for half in (select, evaluate)
    ]
    return SelectionSplit(select=halves[0], eval=halves[1])


def _read_class_dirs(root: Path, class_names: Sequence[str]) -> list[tuple[Any, int | None]]:
    class_dirs = list_class_dirs(root)
    indices = class_to_idx(class_dirs.names, class_names)
    found = find_images(class_dirs).paths  # links to nothing too, which are reported when they are read
    labeled: list[tuple[Any, int | None]] = [(path, indices[name]) for name in found for path in found[name]]
    if labeled and (empty := [printable(name) for name, paths in found.items() if not paths]):
        raise UserError(f"data {root}: class directories without images: {', '.join(empty)}; remove or fill them.")
    if len(class_names) == 1000:
        labeled += [(str(path), None) for path in sorted(root.iterdir()) if real_labels(path) is not None]
    return labeled


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
