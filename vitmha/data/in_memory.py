"""Data sets small enough to lie on the device as a whole, as bytes: no files, workers or copies during training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped, UInt8
from lightning import LightningDataModule
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.transforms.v2.functional import pil_to_tensor

from vitmha.data.augmentation import Change, Mix, RandomCropFlip, RandomDistortion, RandomErasing
from vitmha.data.sampling import GlobalBatches, processes
from vitmha.images import Preprocessing

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
FASHION_MNIST_PREPROCESSING = Preprocessing(image_size=(28, 28), mean=(0.2860,), std=(0.3530,))

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

# A label is a class, or a sequence of them.
Samples = tuple[UInt8[Tensor, "samples channels height width"], Int64[Tensor, "samples ..."]]
Batch = tuple[Float[Tensor, "batch channels height width"], Shaped[Tensor, "batch ..."]]


class Batches:
    """The batches of one process, made on the device where the pictures lie; what Lightning takes for a DataLoader.

    Args:
        images: All pictures, pixels 0 to 255.
        labels: Their classes, on the same device.
        preprocessing: Normalises the pictures.
        batch_sampler: Which of them come when.
        changes: What happens to the pixels in training, one after the other.
        mix: What happens to the normalised pictures and their labels then. All draws come from the batch sampler's
            generator.
    """

    def __init__(
        self,
        images: UInt8[Tensor, "samples channels height width"],
        labels: Int64[Tensor, "samples ..."],
        *,
        preprocessing: Preprocessing,
        batch_sampler: GlobalBatches,
        changes: Sequence[Change] = (),
        mix: Mix | None = None,
    ) -> None:
        self.images, self.labels = images, labels
        self.preprocessing, self.batch_sampler = preprocessing, batch_sampler
        self.changes, self.mix = changes, mix
        self.step = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        device = self.images.device
        count, share = self.batch_sampler.global_batch_size, self.batch_sampler.share
        # A generator, so that the epoch and its start are read when the first batch is, not when the loop is built.
        for step, indices in enumerate(self.batch_sampler, start=self.batch_sampler.start):
            self.step = step + 1
            # Blocking copies would make the host wait for all work queued on the device.
            chosen = torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True)
            images = self.images.index_select(0, chosen)
            labels = self.labels.index_select(0, chosen)
            generator = self.batch_sampler.generator(step)

            def drawn(change: Change | Mix, generator: torch.Generator = generator) -> Tensor:
                return change.draw(count, generator)[share(count)].to(device, non_blocking=True)

            for change in self.changes:
                images = change.apply(images, drawn(change))
            normalised = self.preprocessing.normalize(images)
            yield self.mix.apply(normalised, labels, drawn(self.mix)) if self.mix else (normalised, labels)

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves with every checkpoint: all that the batches to come depend on."""
        return {"epoch": self.batch_sampler.epoch, "start": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on behind the last batch of another; to be called before the first batch is read."""
        self.batch_sampler.go_on(**state_dict)
        self.step = self.batch_sampler.start


class InMemoryData(LightningDataModule, ABC):
    """A data set that is read once and stays on the device; its test set also serves for validation.

    Batches are (images, labels): float32, normalised, (batch, channels, height, width), and int64, (batch). The same
    seed gives the same pictures in the same order on any number of processes with the same global batch.

    Args:
        class_names: In the order of the labels.
        preprocessing: Image size, mean and standard deviation of the training set.
        batch_size: Pictures for each process and step.
        padding: Of the random crop, in pixels; 0 switches it off.
        flip: Mirror half of the pictures.
        distort: Magnitude of two random changes of geometry or colour, up to 30; 0 for none.
        random_erasing: Share of the pictures over which a rectangle is painted.
        mixup: How strongly pairs of pictures are blended, the parameter of a Beta distribution; 0 for not.
        cutmix: Likewise for a rectangle of the one pasted into the other.
    """

    def __init__(
        self,
        *,
        class_names: tuple[str, ...],
        preprocessing: Preprocessing,
        batch_size: int = 128,
        padding: int = 0,
        flip: bool = True,
        distort: float = 0.0,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"--data.batch_size must be at least 1, got {batch_size}")
        if padding < 0:
            raise ValueError(f"--data.padding must be 0 (no crop) or more, got {padding}")
        if not 0 <= distort <= 30:
            raise ValueError(f"--data.distort must lie in [0, 30], got {distort}")
        if not 0 <= random_erasing <= 1:
            raise ValueError(f"--data.random_erasing must lie in [0, 1], got {random_erasing}")
        if min(mixup, cutmix) < 0:
            raise ValueError(f"--data.mixup and --data.cutmix must be 0 (off) or more, got {mixup} and {cutmix}")
        self.class_names, self.num_classes = class_names, len(class_names)
        self.preprocessing, self.image_size = preprocessing, preprocessing.image_size
        self.in_channels = len(preprocessing.mean)
        self.batch_size = batch_size
        self.changes: list[Change] = []
        if padding or flip:
            self.changes.append(RandomCropFlip(padding=padding, flip=flip))
        if distort:
            self.changes.append(RandomDistortion(magnitude=distort))
        if random_erasing:
            colour = tuple(255 * mean for mean in preprocessing.mean)
            self.changes.append(RandomErasing(chance=random_erasing, colour=colour))
        self.mix = Mix(mixup=mixup, cutmix=cutmix, num_classes=self.num_classes) if mixup or cutmix else None
        self._samples: dict[bool, Samples] = {}

    @abstractmethod
    def read(self, train: bool) -> Samples:
        """The whole training or test set.

        Args:
            train: Which of the two.

        Returns:
            Images (pixels, 0 to 255) and labels, on the CPU.

        Raises:
            ValueError: Files are missing or damaged.
        """

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        for train in (True, False) if stage == "fit" else (False,):
            images, labels = self._samples.get(train) or self.read(train)
            self._samples[train] = images.to(device).contiguous(), labels.to(device)

    def train_dataloader(self) -> Batches:
        return self._batches(train=True)

    def val_dataloader(self) -> Batches:
        return self._batches(train=False)

    def test_dataloader(self) -> Batches:
        return self._batches(train=False)

    def _batches(self, train: bool) -> Batches:
        images, labels = self._samples[train]
        sampler = GlobalBatches(len(images), self.batch_size, training=train, **processes(self))
        return Batches(
            images,
            labels,
            preprocessing=self.preprocessing,
            batch_sampler=sampler,
            changes=self.changes if train else (),
            mix=self.mix if train else None,
        )


@final
class FashionMNISTMini(InMemoryData):
    """A part of Fashion-MNIST that comes with this package: 1000 training and 200 test pictures of each class.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT licence, FASHION_MNIST_LICENSE.

    Args:
        padding: Of the random crop, in pixels; 0 switches it off.
        options: See `InMemoryData`.
    """

    def __init__(self, *, padding: int = 2, **options: Any) -> None:
        super().__init__(
            class_names=FASHION_MNIST_CLASSES, preprocessing=FASHION_MNIST_PREPROCESSING, padding=padding, **options
        )

    def read(self, train: bool) -> Samples:
        with (files("vitmha.data") / "fashion_mnist_mini.png").open("rb") as file, Image.open(file) as sheet:
            pictures = rearrange(pil_to_tensor(sheet), "1 (row h) (column w) -> (row column) 1 h w", h=28, w=28)
        images = pictures[:10_000] if train else pictures[10_000:]
        return images, torch.arange(10).repeat_interleave(len(images) // 10)


@final
class FashionMNIST(InMemoryData):
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothes, gray, 28x28, in 10 classes.

    Source: Xiao, Rasul, Vollgraf, arXiv:1708.07747.

    Args:
        root: Holds FashionMNIST/raw/ with the official files; they are downloaded if absent.
        padding: Of the random crop, in pixels; 0 switches it off.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, padding: int = 2, **options: Any) -> None:
        super().__init__(
            class_names=FASHION_MNIST_CLASSES,
            preprocessing=FASHION_MNIST_PREPROCESSING,
            padding=padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        _download(self.root / "FashionMNIST/raw", lambda: datasets.FashionMNIST(self.root, download=True))

    def read(self, train: bool) -> Samples:
        try:
            official = datasets.FashionMNIST(self.root, train=train)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            raise _unreadable(self.root / "FashionMNIST/raw", error) from None
        return official.data[:, None], official.targets


@final
class CIFAR10(InMemoryData):
    """CIFAR-10: 50,000 training and 10,000 test pictures, RGB, 32x32, in 10 classes.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

    Args:
        root: Holds cifar-10-batches-bin/ (the official binary version) or cifar-10-batches-py/ (the Python version);
            the binary version is downloaded if both are absent.
        padding: Of the random crop, in pixels; 0 switches it off.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, padding: int = 4, **options: Any) -> None:
        super().__init__(
            class_names=CIFAR10_CLASSES,
            preprocessing=Preprocessing(
                image_size=(32, 32), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
            ),
            padding=padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        if not (self.root / "cifar-10-batches-py").is_dir():
            _download_cifar(self.root / "cifar-10-batches-bin", "cifar-10-binary", "c32a1d4ab5d03f1284b67883e8d87530")

    def read(self, train: bool) -> Samples:
        folder = self.root / "cifar-10-batches-bin"
        if not folder.is_dir():
            return _read_cifar_python(datasets.CIFAR10, self.root, train)
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
        parts = [_read_cifar_binary(folder / name, records=10_000, label_bytes=1) for name in names]
        images, labels = zip(*parts, strict=True)
        return torch.cat(images), torch.cat(labels)


@final
class CIFAR100(InMemoryData):
    """CIFAR-100 with its fine labels: 50,000 training and 10,000 test pictures, RGB, 32x32, in 100 classes.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

    Args:
        root: Holds cifar-100-binary/ (the official binary version) or cifar-100-python/ (the Python version);
            the binary version is downloaded if both are absent.
        padding: Of the random crop, in pixels; 0 switches it off.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, padding: int = 4, **options: Any) -> None:
        super().__init__(
            class_names=tuple(CIFAR100_CLASSES.split()),
            preprocessing=Preprocessing(
                image_size=(32, 32), mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
            ),
            padding=padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        if not (self.root / "cifar-100-python").is_dir():
            _download_cifar(self.root / "cifar-100-binary", "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8")

    def read(self, train: bool) -> Samples:
        folder = self.root / "cifar-100-binary"
        if not folder.is_dir():
            return _read_cifar_python(datasets.CIFAR100, self.root, train)
        name, records = ("train.bin", 50_000) if train else ("test.bin", 10_000)
        return _read_cifar_binary(folder / name, records=records, label_bytes=2)


def _read_cifar_binary(path: Path, *, records: int, label_bytes: int) -> Samples:
    expected = records * (label_bytes + 3072)
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes instead of {expected}: "
            f"delete the folder and it is downloaded again, or copy the official file there (--data.root)"
        )
    rows = torch.from_file(str(path), size=expected, dtype=torch.uint8).view(records, -1)
    # CIFAR-100's coarse label comes first; the last label byte is the one to learn.
    images = rearrange(rows[:, label_bytes:], "n (c h w) -> n c h w", c=3, h=32)
    return images, rows[:, label_bytes - 1].long()


def _read_cifar_python(dataset: type[datasets.CIFAR10], root: Path, train: bool) -> Samples:
    try:
        official = dataset(root, train=train)
    except RuntimeError as error:
        raise _unreadable(root / dataset.base_folder, error) from None
    return rearrange(torch.from_numpy(official.data), "n h w c -> n c h w"), torch.tensor(official.targets)


def _download_cifar(folder: Path, archive: str, md5: str) -> None:
    url = f"https://www.cs.toronto.edu/~kriz/{archive}.tar.gz"
    if not folder.is_dir():
        _download(folder, lambda: download_and_extract_archive(url, str(folder.parent), md5=md5))


def _download(folder: Path, download: Callable[[], object]) -> None:
    try:
        download()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder} is absent and its download failed ({reason}): put the official files there, "
            "or name the folder that holds them with --data.root"
        ) from None


def _unreadable(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder} does not hold the official files in good order ({error}): delete it and it is downloaded again, "
        "or name another folder with --data.root"
    )
