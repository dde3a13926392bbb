"""Transforms of single images for training and evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import v2

from vitmha.images import Preprocessing, Source, read_image, read_reduced


@final
class TrainTransform:
    """From a file to the model's input in training: a random resized crop, then the given transforms.

    A JPEG is decoded at a fraction of its size if the crop is still at least 2.75 times as large as the model's input.

    Args:
        preprocessing: Size, interpolation and normalization.
        crop_scale: Smallest and largest fraction of the image's area that the crop keeps.
        transforms: Applied to the cropped image; they draw from PyTorch's global random stream.
        random_erasing: Probability that a rectangle is filled with noise, in [0, 1].

    Source: RandomResizedCrop: Szegedy et al., arXiv:1409.4842; random erasing: Zhong et al., arXiv:1708.04896.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        *,
        crop_scale: tuple[float, float],
        transforms: Sequence[v2.Transform],
        random_erasing: float,
    ) -> None:
        # The image has its final size already, so there is no center crop.
        self.preprocessing = replace(preprocessing, crop_pct=1.0)
        self.random_crop = v2.RandomResizedCrop(preprocessing.image_size, scale=crop_scale)
        self.resampling = Image.Resampling[preprocessing.interpolation.upper()]
        self.transforms = v2.Compose(
            [*transforms, self.preprocessing, v2.RandomErasing(random_erasing, value="random")]
        )

    def __call__(self, source: Source) -> Float[Tensor, "channels height width"]:
        rows, columns = self.preprocessing.image_size
        left = top = right = bottom = 0.0  # edges of the crop, as fractions of the image's sides

        def min_size(height: int, width: int) -> tuple[int, int]:
            nonlocal left, top, right, bottom
            crop = self.random_crop.make_params([torch.empty(0, height, width)])
            left, right = crop["left"] / width, (crop["left"] + crop["width"]) / width
            top, bottom = crop["top"] / height, (crop["top"] + crop["height"]) / height
            return self.preprocessing.min_decoded((rows / (bottom - top), columns / (right - left)), (height, width))

        image, (x, y, x_end, y_end) = read_reduced(source, min_size)
        width, height = x_end - x, y_end - y
        box = (x + left * width, y + top * height, x + right * width, y + bottom * height)
        return self.transforms(image.resize((columns, rows), self.resampling, box))


def three_augment() -> list[v2.Transform]:
    """3-Augment: grayscale, solarization or blur, one of the three per image, then color jitter.

    Source: DeiT III: Touvron et al., arXiv:2204.07118; facebookresearch/deit, augment.py.
    """
    choice = v2.RandomChoice([v2.Grayscale(num_output_channels=3), v2.RandomSolarize(128, p=1.0), v2.Lambda(_blur)])
    return [choice, v2.ColorJitter(0.3, 0.3, 0.3)]


def _blur(image: Image.Image) -> Image.Image:
    """Pillow's Gaussian blur; torchvision's converts to a tensor and back, which takes far longer."""
    return image.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(0.1, 2.0).item()))


@final
class EvalTransform:
    """From a file to the model's input in evaluation.

    Args:
        preprocessing: The transform that is stored with the model.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __call__(self, source: Source) -> Float[Tensor, "channels height width"]:
        return self.preprocessing(read_image(source))
