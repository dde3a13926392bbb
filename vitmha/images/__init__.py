"""From an image file to the input of a model: finding, decoding and preprocessing."""

from vitmha.images.decode import (
    MAX_PIXELS,
    SUFFIXES,
    TOO_LARGE,
    ImageBytes,
    ImageReadError,
    Source,
    check_header,
    read_image,
    read_reduced,
    reading,
    source_name,
)
from vitmha.images.preprocessing import Preprocessing

__all__ = [
    "MAX_PIXELS",
    "SUFFIXES",
    "TOO_LARGE",
    "ImageBytes",
    "ImageReadError",
    "Preprocessing",
    "Source",
    "check_header",
    "read_image",
    "read_reduced",
    "reading",
    "source_name",
]
