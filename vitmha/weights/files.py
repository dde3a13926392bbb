"""Reads files of weights as tensors; no file can run code.

Every weight that vitmha loads from a file is read here and never by the loader of another package: safetensors and
NumPy arrays hold no objects, and torch's pickles are read with `weights_only`.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from vitmha.errors import UserError

FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".npz")
# Under these entries the checkpoints of other packages store their tensors; averaged weights first.
ENTRIES = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model")
# The weight files of a model directory: those of the first pattern that matches any.
WEIGHT_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "*.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights of a model directory: safetensors if there are any."""
    return next((files for pattern in WEIGHT_FILES if (files := sorted(directory.glob(pattern)))), [])


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Reads the tensors of a model directory.

    Raises:
        UserError: A file is corrupt, or holds something other than tensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        tensors |= tensors_in(read_file(file), file)
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        UserError: It cannot be read, or it holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is corrupt: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a config: expected a JSON object, got {shorten(content)}.")
    return content


def tensors_in(content: dict[str, Any], file: Path) -> dict[str, Tensor]:
    """The state dict in the content of a file, with the names of the file.

    Raises:
        UserError: There is none.
    """
    entry = next((name for name in ENTRIES if isinstance(content.get(name), dict)), None)
    tensors = content[entry] if entry else content
    if not (tensors and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
        raise UserError(f"{file}: the file has no state dict.")
    return tensors


def read_file(path: Path) -> dict[str, Any]:
    """Reads a file of weights; the result is empty for a file that holds no dictionary.

    Raises:
        UserError: A file that is empty, truncated or corrupt, of another kind, or holds objects that could run code.
    """
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments that DeiT and others save too
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt file makes torch's unpickler raise almost any: IndexError, struct.error
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{path}: {error.strerror}.") from None
        raise UserError(f"{path} {_defect(path, error)}.") from None
    return content if isinstance(content, dict) else {}


def _defect(path: Path, error: Exception) -> str:
    """What is wrong with a file that cannot be read."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "is empty (0 bytes)"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer without the weights: run `git lfs pull`"
    found = re.search(r"GLOBAL (\S+) was not", str(error))  # of torch's unpickler
    if found or "allow_pickle" in str(error):
        content = found[1] if found else "Python objects"
        return f"contains {content}, which could run code: only tensors, numbers and strings are read"
    starts = {".safetensors": (), ".npz": (b"PK",)}.get(path.suffix, (b"PK", b"\x80"))
    if starts and not head.startswith(starts):
        return f"is not a {path.suffix} file of {'NumPy' if path.suffix == '.npz' else 'PyTorch'}"
    return "is corrupt or truncated"


def first_line(error: Exception) -> str:
    """The first line of an exception's message, at most 200 characters."""
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]


def shorten(value: object) -> str:
    """The value as Python writes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
