"""Transforms of single images for training and evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import final

import torch
from jaxtyping import Float
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import v2

from vitmha.images import Preprocessing, Source, read_image


@final
class TrainTransform:
    """From a file to the model's input in training: a random crop, and what else is asked for.

    A JPEG is decoded at a part of its size where the crop keeps as many pixels as the model's input has.

    Args:
        preprocessing: Size, interpolation and normalisation.
        crop_scale: Smallest share of the picture's area that the crop keeps.
        changes: On the cropped picture; they draw from PyTorch's global stream.
        random_erasing: Chance that a rectangle is painted over with noise.

    Source: RandomResizedCrop: Szegedy et al., arXiv:1409.4842; random erasing: Zhong et al., arXiv:1708.04896.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        *,
        crop_scale: tuple[float, float],
        changes: Sequence[v2.Transform],
        random_erasing: float,
    ) -> None:
        # The crop of evaluation is off: the picture already has its size.
        self.preprocessing = replace(preprocessing, crop_pct=1.0)
        self.window = v2.RandomResizedCrop(preprocessing.image_size, scale=crop_scale)
        self.resampling = Image.Resampling[preprocessing.interpolation.upper()]
        self.changes = v2.Compose([*changes, self.preprocessing, v2.RandomErasing(random_erasing, value="random")])

    def __call__(self, source: Source) -> Float[Tensor, "channels height width"]:
        rows, columns = self.preprocessing.image_size
        left = top = right = bottom = 0.0  # edges of the crop, as shares of the picture's sides

        def min_size(height: int, width: int) -> tuple[int, int]:
            nonlocal left, top, right, bottom
            crop = self.window.make_params([torch.empty(0, height, width)])
            left, right = crop["left"] / width, (crop["left"] + crop["width"]) / width
            top, bottom = crop["top"] / height, (crop["top"] + crop["height"]) / height
            return ceil(rows / (bottom - top)), ceil(columns / (right - left))

        picture = read_image(source, min_size)
        width, height = picture.size
        crop = (left * width, top * height, right * width, bottom * height)
        return self.changes(picture.resize((columns, rows), self.resampling, crop))


def three_augment_changes() -> list[v2.Transform]:
    """Gray, inverted above half or blurred, one of the three for each picture; then brightness, contrast and colour.

    Source: 3-Augment of DeiT III: Touvron et al., arXiv:2204.07118; facebookresearch/deit, augment.py.
    """
    choice = v2.RandomChoice([v2.Grayscale(num_output_channels=3), v2.RandomSolarize(128, p=1.0), v2.Lambda(_blur)])
    return [choice, v2.ColorJitter(0.3, 0.3, 0.3)]


def _blur(picture: Image.Image) -> Image.Image:
    """By Pillow's Gaussian: torchvision's takes the way over tensors and far longer."""
    return picture.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(0.1, 2.0).item()))


@final
class EvalTransform:
    """From a file to the model's input in evaluation.

    Args:
        preprocessing: What is stored with the model.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __call__(self, source: Source) -> Float[Tensor, "channels height width"]:
        return self.preprocessing(read_image(source))
