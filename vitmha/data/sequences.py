"""Images of several items in a row, whose labels are sequences of classes; composed of a dataset held in memory."""

from typing import final

import torch
from einops import rearrange
from jaxtyping import Int64, UInt8
from torch import Tensor

from vitmha.data.fashion_mnist import FASHION_MNIST_CLASSES, FASHION_MNIST_PREPROCESSING, FashionMNISTMini
from vitmha.data.in_memory import InMemoryData, Tensors
from vitmha.errors import check_argument
from vitmha.images import Preprocessing

NUM_SLOTS = 5
PADDING = -100  # `ignore_index` of PyTorch's cross-entropy


@final
class FashionMNISTSequences(InMemoryData):
    """Rows of 1 to 5 images of the bundled subset of Fashion-MNIST, on a canvas of 28 x 140 pixels.

    The number of images, the slots that stay empty and the images themselves are drawn at random, once. Training rows
    are composed of training images, test rows of test images. A label is the sequence of classes from left to right,
    then the end token (the number of classes), then -100 up to a length of six.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT license, FASHION_MNIST_LICENSE.

    Args:
        batch_size: Rows per process and step.
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        num_sequences: Number of training rows, at least 10; validation and test have a tenth of it.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, batch_size: int = 128, random_crop_padding: int = 1, num_sequences: int = 20_000) -> None:
        height, width = FASHION_MNIST_PREPROCESSING.image_size
        super().__init__(
            class_names=FASHION_MNIST_CLASSES,
            preprocessing=Preprocessing(
                image_size=(height, NUM_SLOTS * width),
                mean=FASHION_MNIST_PREPROCESSING.mean,
                std=FASHION_MNIST_PREPROCESSING.std,
            ),
            batch_size=batch_size,
            random_crop_padding=random_crop_padding,
            hflip=0.0,
        )
        check_argument("num_sequences", num_sequences, num_sequences >= 10, "at least 10")
        self.num_sequences = num_sequences

    def read(self, train: bool) -> Tensors:
        images, labels = FashionMNISTMini().read(train)
        count = self.num_sequences if train else self.num_sequences // 10
        return compose_sequences(images, labels, count, self.num_classes, torch.Generator().manual_seed(int(train)))


def compose_sequences(
    images: UInt8[Tensor, "images 1 slot_height slot_width"],
    labels: Int64[Tensor, " images"],
    count: int,
    end_token: int,
    generator: torch.Generator,
) -> Tensors:
    """Puts random images into random slots of rows that are black elsewhere.

    Args:
        images: To choose from.
        labels: Their classes.
        count: Number of rows.
        end_token: Follows the last class of a sequence.
        generator: Draws the images and the slots.

    Returns:
        Rows (count, 1, height, 5 width) and their sequences (count, 6): classes left to right, the end token, -100.
    """
    chosen = torch.randint(len(images), (count, NUM_SLOTS), generator=generator)
    lengths = torch.randint(1, NUM_SLOTS + 1, (count, 1), generator=generator)
    is_filled = torch.rand(count, NUM_SLOTS, generator=generator).argsort(1) < lengths
    rows = rearrange(images[chosen] * is_filled[:, :, None, None, None], "n slot c h w -> n c h (slot w)")
    left_to_right = is_filled.int().argsort(dim=1, descending=True, stable=True)
    classes = labels[chosen].gather(1, left_to_right)
    sequences = torch.cat([classes, classes[:, :1]], dim=1)
    positions = torch.arange(NUM_SLOTS + 1)
    sequences = sequences.where(positions != lengths, end_token).where(positions <= lengths, PADDING)
    return rows, sequences
