"""The images and labels of a batch: a pair, or a dictionary as Hugging Face makes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitmha.errors import UserError

# The keys of Hugging Face's processors, collators and datasets.
IMAGE_KEYS, LABEL_KEYS = ("pixel_values", "image", "img"), ("labels", "label")


def images_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the images and the labels of a batch.

    Args:
        batch: A pair of tensors, or a dictionary with one of `IMAGE_KEYS` and one of `LABEL_KEYS`.

    Raises:
        UserError: Something else.

    Example:
        >>> import torch
        >>> batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
        >>> images_and_labels(batch)[1]
        tensor([0, 1])
    """
    if isinstance(batch, Mapping):
        return _value(batch, IMAGE_KEYS), _value(batch, LABEL_KEYS)
    parts = batch if isinstance(batch, list | tuple) else [batch]
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        return parts[0], parts[1]
    found = f"{type(batch).__name__} of {', '.join(type(part).__name__ for part in parts)}"
    raise UserError(f"A batch must be (images, labels), two tensors, or a dictionary of them, got a {found}.")


def images_of(batch: Any) -> Tensor:
    """Returns the images of a batch whose other parts do not matter: alone, first in a sequence, or in a dictionary."""
    if isinstance(batch, Mapping):
        return _value(batch, IMAGE_KEYS)
    return batch if isinstance(batch, Tensor) else batch[0]


def _value(batch: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the one of the keys that a batch has."""
    found = [key for key in keys if key in batch]
    if len(found) != 1:
        raise UserError(f"A batch that is a dictionary must have one of the keys {', '.join(keys)}, got {list(batch)}.")
    return batch[found[0]]
