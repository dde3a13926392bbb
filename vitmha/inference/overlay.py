"""Overlays attention maps on images."""

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitmha.images import Preprocessing


def draw_attention(
    picture: Image.Image, attention: Float[Tensor, "heads height width"], preprocessing: Preprocessing
) -> Image.Image:
    """The picture, dark where no head looks.

    Args:
        picture: Upright, in full.
        attention: As in a `Prediction`; the mean over the heads is drawn, the largest value bright.
        preprocessing: Says which part of the picture the model has seen; around it there is no light.
    """
    mean = attention.mean(0)
    rows, columns = preprocessing.resized(picture.height, picture.width)
    (height, width), vertical, horizontal = preprocessing.image_size, picture.height / rows, picture.width / columns
    top, left = round((rows - height) / 2) * vertical, round((columns - width) / 2) * horizontal
    light = Image.fromarray((255 * mean / mean.max().clamp_min(1e-12)).round().byte().numpy())
    light = light.resize(
        (max(1, round(width * horizontal)), max(1, round(height * vertical))), Image.Resampling.BICUBIC
    )
    mask = Image.new("L", picture.size)
    mask.paste(light, (round(left), round(top)))
    return Image.composite(picture, Image.eval(picture, lambda level: level // 4), mask)
