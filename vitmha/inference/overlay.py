"""Overlays attention maps on images."""

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitmha.images import Preprocessing


def draw_attention(
    image: Image.Image, attention: Float[Tensor, "heads height width"], preprocessing: Preprocessing
) -> Image.Image:
    """Returns the image, darkened where no head attends and lightened where heads do, so that black shows the map too.

    Args:
        image: Upright, at full size.
        attention: As in a `Prediction`. The mean over the heads is drawn; its largest value is brightest.
        preprocessing: Determines which part of the image the model receives; the rest is dark.
    """
    mean = attention.mean(0)
    rows, columns = preprocessing.resized(image.height, image.width)
    (height, width), y_scale, x_scale = preprocessing.image_size, image.height / rows, image.width / columns
    top, left = round((rows - height) / 2) * y_scale, round((columns - width) / 2) * x_scale
    brightness = Image.fromarray((255 * mean / mean.max().clamp_min(1e-12)).round().byte().numpy())
    size = (max(1, round(width * x_scale)), max(1, round(height * y_scale)))
    mask = Image.new("L", image.size)
    mask.paste(brightness.resize(size, Image.Resampling.BICUBIC), (round(left), round(top)))
    dark = Image.eval(image, lambda level: level // 4)
    light = Image.eval(image, lambda level: 64 + level * 3 // 4)
    return Image.composite(light, dark, mask)
