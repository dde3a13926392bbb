"""CIFAR-10 and CIFAR-100."""

from pathlib import Path
from typing import Any, final

import torch
from einops import rearrange
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from vitmha.data.download import download_to, unreadable_files
from vitmha.data.in_memory import InMemoryData, Tensors
from vitmha.errors import UserError
from vitmha.images import Preprocessing

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@final
class CIFAR10(InMemoryData):
    """CIFAR-10: 50,000 training and 10,000 test images, RGB, 32x32, in 10 classes.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

    Args:
        root: Directory with cifar-10-batches-bin/ (the official binary version) or cifar-10-batches-py/ (the Python
            version); the binary version is downloaded if neither exists.
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, random_crop_padding: int = 4, **options: Any) -> None:
        super().__init__(
            class_names=CIFAR10_CLASSES,
            preprocessing=Preprocessing(
                image_size=(32, 32), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
            ),
            random_crop_padding=random_crop_padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        if not (self.root / "cifar-10-batches-py").is_dir():
            _download_cifar(self.root / "cifar-10-batches-bin", "cifar-10-binary", "c32a1d4ab5d03f1284b67883e8d87530")

    def read(self, train: bool) -> Tensors:
        directory = self.root / "cifar-10-batches-bin"
        if not directory.is_dir():
            return _read_cifar_python(datasets.CIFAR10, self.root, train)
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
        parts = [_read_cifar_binary(directory / name, records=10_000, label_bytes=1) for name in names]
        images, labels = zip(*parts, strict=True)
        return torch.cat(images), torch.cat(labels)


@final
class CIFAR100(InMemoryData):
    """CIFAR-100 with its fine labels: 50,000 training and 10,000 test images, RGB, 32x32, in 100 classes.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

    Args:
        root: Directory with cifar-100-binary/ (the official binary version) or cifar-100-python/ (the Python version);
            the binary version is downloaded if neither exists.
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, random_crop_padding: int = 4, **options: Any) -> None:
        super().__init__(
            class_names=tuple(CIFAR100_CLASSES.split()),
            preprocessing=Preprocessing(
                image_size=(32, 32), mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
            ),
            random_crop_padding=random_crop_padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        if not (self.root / "cifar-100-python").is_dir():
            _download_cifar(self.root / "cifar-100-binary", "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8")

    def read(self, train: bool) -> Tensors:
        directory = self.root / "cifar-100-binary"
        if not directory.is_dir():
            return _read_cifar_python(datasets.CIFAR100, self.root, train)
        name, records = ("train.bin", 50_000) if train else ("test.bin", 10_000)
        return _read_cifar_binary(directory / name, records=records, label_bytes=2)


def _read_cifar_binary(path: Path, *, records: int, label_bytes: int) -> Tensors:
    expected = records * (label_bytes + 3072)
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes instead of {expected}: delete its directory, and it is downloaded again, or put "
            "the official file there"
        )
    rows = torch.from_file(str(path), size=expected, dtype=torch.uint8).view(records, -1)
    # CIFAR-100 has a coarse and a fine label, in this order; the last label byte is the one to learn.
    images = rearrange(rows[:, label_bytes:], "n (c h w) -> n c h w", c=3, h=32)
    return images, rows[:, label_bytes - 1].long()


def _read_cifar_python(dataset: type[datasets.CIFAR10], root: Path, train: bool) -> Tensors:
    try:
        official = dataset(root, train=train)
    except RuntimeError as error:
        raise unreadable_files(root / dataset.base_folder, error) from None
    return rearrange(torch.from_numpy(official.data), "n h w c -> n c h w"), torch.tensor(official.targets)


def _download_cifar(directory: Path, archive: str, md5: str) -> None:
    url = f"https://www.cs.toronto.edu/~kriz/{archive}.tar.gz"
    if not directory.is_dir():
        download_to(directory, lambda: download_and_extract_archive(url, str(directory.parent), md5=md5))
