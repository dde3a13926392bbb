"""From an image file to the input of a model: finding, decoding and preprocessing."""

from vitmha.images.decode import SUFFIXES, ImageBytes, ImageReadError, Source, read_image, source_name
from vitmha.images.preprocessing import Preprocessing

__all__ = ["SUFFIXES", "ImageBytes", "ImageReadError", "Preprocessing", "Source", "read_image", "source_name"]
