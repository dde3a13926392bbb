"""Fashion-MNIST, and the subset of it that is bundled with the package."""

from importlib.resources import files
from pathlib import Path
from typing import Any, final

import torch
from einops import rearrange
from PIL import Image
from torchvision import datasets
from torchvision.transforms.v2.functional import pil_to_tensor

from vitmha.data.download import download_to, unreadable_files
from vitmha.data.in_memory import InMemoryData, Tensors
from vitmha.images import Preprocessing

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
FASHION_MNIST_PREPROCESSING = Preprocessing(image_size=(28, 28), mean=(0.2860,), std=(0.3530,))


@final
class FashionMNISTMini(InMemoryData):
    """The subset of Fashion-MNIST bundled with the package: 1000 training and 200 test images of each class.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT license, FASHION_MNIST_LICENSE.

    Args:
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        options: See `InMemoryData`.

    Example:
        >>> data = FashionMNISTMini(batch_size=64)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape
        torch.Size([64, 1, 28, 28])
    """

    def __init__(self, *, random_crop_padding: int = 2, **options: Any) -> None:
        super().__init__(
            class_names=FASHION_MNIST_CLASSES,
            preprocessing=FASHION_MNIST_PREPROCESSING,
            random_crop_padding=random_crop_padding,
            **options,
        )

    def read(self, train: bool) -> Tensors:
        with (files("vitmha.data") / "fashion_mnist_mini.png").open("rb") as file, Image.open(file) as sheet:
            pixels = rearrange(pil_to_tensor(sheet), "1 (row h) (column w) -> (row column) 1 h w", h=28, w=28)
        images = pixels[:10_000] if train else pixels[10_000:]
        return images, torch.arange(10).repeat_interleave(len(images) // 10)


@final
class FashionMNIST(InMemoryData):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, grayscale, 28x28, in 10 classes.

    Source: Xiao, Rasul, Vollgraf, arXiv:1708.07747.

    Args:
        root: Directory with the official files in FashionMNIST/raw/; they are downloaded if they do not exist.
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        options: See `InMemoryData`.
    """

    def __init__(self, root: Path | str = "data", *, random_crop_padding: int = 2, **options: Any) -> None:
        super().__init__(
            class_names=FASHION_MNIST_CLASSES,
            preprocessing=FASHION_MNIST_PREPROCESSING,
            random_crop_padding=random_crop_padding,
            **options,
        )
        self.root = Path(root)

    def prepare_data(self) -> None:
        download_to(self.root / "FashionMNIST/raw", lambda: datasets.FashionMNIST(self.root, download=True))

    def read(self, train: bool) -> Tensors:
        try:
            official = datasets.FashionMNIST(self.root, train=train)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            raise unreadable_files(self.root / "FashionMNIST/raw", error) from None
        return official.data[:, None], official.targets
