"""Data modules: small data sets held in memory, and folders of pictures."""

from vitmha.data.cifar import CIFAR10, CIFAR100
from vitmha.data.fashion_mnist import FashionMNIST, FashionMNISTMini
from vitmha.data.image_folder import ImageFolder
from vitmha.data.sequences import FashionMNISTSequences

__all__ = ["CIFAR10", "CIFAR100", "FashionMNIST", "FashionMNISTMini", "FashionMNISTSequences", "ImageFolder"]
