"""Rows of pictures to be read as sequences, composed of a data set held in memory."""

from typing import final

import torch
from einops import rearrange
from jaxtyping import Int64, UInt8
from torch import Tensor

from vitmha.data.fashion_mnist import FASHION_MNIST_CLASSES, FASHION_MNIST_PREPROCESSING, FashionMNISTMini
from vitmha.data.in_memory import InMemoryData, Tensors
from vitmha.errors import UserError
from vitmha.images import Preprocessing

SLOTS = 5
# What PyTorch's cross-entropy leaves out.
PADDING = -100


@final
class FashionMNISTSequences(InMemoryData):
    """Rows of 1 to 5 pictures of Fashion-MNIST's part that comes with this package, on a canvas of 28 x 140 pixels.

    The number of pictures, the places that stay empty and the pictures themselves are drawn at random, once; those of
    training and test rows come from the training and the test pictures. A label is the sequence of classes from left to
    right, then the end token (the number of classes), then -100 up to six.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT licence, FASHION_MNIST_LICENSE.

    Args:
        batch_size: Rows for each process and step.
        random_crop_padding: Of the random crop, in pixels; 0 switches it off.
        num_sequences: Training rows; a tenth as many are for validation and test.
    """

    def __init__(self, batch_size: int = 128, random_crop_padding: int = 1, num_sequences: int = 20_000) -> None:
        height, width = FASHION_MNIST_PREPROCESSING.image_size
        super().__init__(
            class_names=FASHION_MNIST_CLASSES,
            preprocessing=Preprocessing(
                image_size=(height, SLOTS * width),
                mean=FASHION_MNIST_PREPROCESSING.mean,
                std=FASHION_MNIST_PREPROCESSING.std,
            ),
            batch_size=batch_size,
            random_crop_padding=random_crop_padding,
            hflip=0.0,
        )
        if num_sequences < 10:
            raise UserError(f"--data.num_sequences must be at least 10, got {num_sequences}")
        self.num_sequences = num_sequences

    def read(self, train: bool) -> Tensors:
        images, labels = FashionMNISTMini().read(train)
        count = self.num_sequences if train else self.num_sequences // 10
        return compose_sequences(images, labels, count, self.num_classes, torch.Generator().manual_seed(int(train)))


def compose_sequences(
    images: UInt8[Tensor, "pictures 1 picture_height picture_width"],
    labels: Int64[Tensor, " pictures"],
    count: int,
    end_token: int,
    generator: torch.Generator,
) -> Tensors:
    """Puts random pictures into random slots of rows that are black elsewhere.

    Args:
        images: To choose from.
        labels: Their classes.
        count: Rows wanted.
        end_token: What stands behind the last class of a sequence.
        generator: Draws.

    Returns:
        Rows (count, 1, height, 5 width) and their sequences (count, 6): classes left to right, the end token, -100.
    """
    chosen = torch.randint(len(images), (count, SLOTS), generator=generator)
    lengths = torch.randint(1, SLOTS + 1, (count, 1), generator=generator)
    is_taken = torch.rand(count, SLOTS, generator=generator).argsort(1) < lengths
    rows = rearrange(images[chosen] * is_taken[:, :, None, None, None], "n slot c h w -> n c h (slot w)")
    left_to_right = is_taken.int().argsort(dim=1, descending=True, stable=True)
    classes = labels[chosen].gather(1, left_to_right)
    sequences = torch.cat([classes, classes[:, :1]], dim=1)
    places = torch.arange(SLOTS + 1)
    sequences = sequences.where(places != lengths, end_token).where(places <= lengths, PADDING)
    return rows, sequences
