"""From an image file to the input of a model: finding, decoding and preprocessing."""

from vitmha.images.decode import SUFFIXES, ImageBytes, ImageReadError, Source, name_of, read_image
from vitmha.images.preprocessing import Preprocessing

__all__ = ["SUFFIXES", "ImageBytes", "ImageReadError", "Preprocessing", "Source", "name_of", "read_image"]
