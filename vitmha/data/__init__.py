"""Data modules: small data sets held in memory, and folders of pictures."""

from vitmha.data.folder import ImageFolder
from vitmha.data.in_memory import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.data.rows import FashionMNISTRows

__all__ = ["CIFAR10", "CIFAR100", "FashionMNIST", "FashionMNISTMini", "FashionMNISTRows", "ImageFolder"]
