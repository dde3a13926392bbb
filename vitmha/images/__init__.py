"""From an image file to the input of a model: finding, decoding and preprocessing."""

from vitmha.images.decode import SUFFIXES, ImageReadError, PictureBytes, Source, name_of, read_image
from vitmha.images.preprocessing import Preprocessing

__all__ = ["SUFFIXES", "ImageReadError", "PictureBytes", "Preprocessing", "Source", "name_of", "read_image"]
