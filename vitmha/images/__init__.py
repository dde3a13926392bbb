"""From an image file to the input of a model: finding, decoding and preprocessing."""

from vitmha.images.decode import (
    SUFFIXES,
    ImageBytes,
    ImageReadError,
    Source,
    check_header,
    read_image,
    read_reduced,
    source_name,
)
from vitmha.images.preprocessing import Preprocessing

__all__ = [
    "SUFFIXES",
    "ImageBytes",
    "ImageReadError",
    "Preprocessing",
    "Source",
    "check_header",
    "read_image",
    "read_reduced",
    "source_name",
]
