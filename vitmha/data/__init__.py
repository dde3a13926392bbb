"""Data modules: small datasets that are held in memory, and directories of images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitmha.data.cifar import CIFAR10, CIFAR100
    from vitmha.data.fashion_mnist import FashionMNIST, FashionMNISTMini
    from vitmha.data.image_folder import ImageFolder
    from vitmha.data.sequences import FashionMNISTSequences

__all__ = ["CIFAR10", "CIFAR100", "FashionMNIST", "FashionMNISTMini", "FashionMNISTSequences", "ImageFolder"]

# Where each data module is defined. It is imported on first use, since Lightning and torchvision import slowly.
_MODULES = {
    "CIFAR10": "cifar",
    "CIFAR100": "cifar",
    "FashionMNIST": "fashion_mnist",
    "FashionMNISTMini": "fashion_mnist",
    "FashionMNISTSequences": "sequences",
    "ImageFolder": "image_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"vitmha.data.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
