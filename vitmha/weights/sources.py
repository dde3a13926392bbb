"""Reads weights from directories, checkpoints, files and hubs as `SourceWeights`; no file can run code."""

import argparse
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import SIZES
from vitmha.weights.convert import from_module, from_tensors
from vitmha.weights.convert.big_vision import from_big_vision
from vitmha.weights.convert.canonical import SourceWeights, strip_prefixes
from vitmha.weights.convert.hugging_face import from_hugging_face
from vitmha.weights.convert.timm import from_timm
from vitmha.weights.convert.torchvision import from_torchvision
from vitmha.weights.shipped import SHIPPED, list_models

FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".npz")
# Under these entries the checkpoints of other packages store their tensors; averaged weights first.
ENTRIES = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model")


def read_source(source: str | Path | nn.Module, hints: Mapping[str, Any]) -> SourceWeights:
    """Reads the weights of any source.

    Args:
        source: See `load_model`.
        hints: Fields of `ViTConfig` given by the user, for files that do not contain their architecture.

    Raises:
        UserError: A source that does not exist, is corrupt or of another kind, or an architecture that
            `VisionTransformer` cannot represent.
    """
    if isinstance(source, nn.Module):
        return from_module(source)
    hub, _, name = str(source).partition(":")
    if name and hub in HUBS:
        return HUBS[hub](name)
    path = Path(source)
    if str(source) in list_models() and not (path / "config.json").is_file():
        path = SHIPPED / path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    if path.is_file() and path.suffix in FILE_SUFFIXES:
        return _from_file(path, hints)
    if not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        raise UserError(_not_a_source(str(source), path))
    return _from_directory(path)


def _not_a_source(source: str, path: Path) -> str:
    bundled = f"a bundled model ({', '.join(list_models())})"
    if source in SIZES:
        return (
            f"{source} is a model size without trained weights: expected {bundled}, a model directory, timm:NAME or "
            "hf:REPO. `vitmha fit --model.name` and `vitmha profile` take a size."
        )
    problem = "no such file or directory" if not path.exists() else "not a model"
    return (
        f"{source}: {problem} (expected a directory with config.json and model.safetensors, a "
        f"{', '.join(FILE_SUFFIXES)} file, timm:NAME, torchvision:NAME, hf:REPO, or {bundled})."
    )


def _from_directory(directory: Path) -> SourceWeights:
    """Reads a model directory of vitmha, Hugging Face or timm; each has its own kind of config.json."""
    try:
        config = json.loads((directory / "config.json").read_text())
        if isinstance(config.get("architecture"), str):
            return _from_timm(f"local-dir:{directory}")
        tensors: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= load_file(file)
        if "model_type" in config:
            processor = directory / "preprocessor_config.json"
            preprocessing = json.loads(processor.read_text()) if processor.is_file() else None
            return from_hugging_face(config, tensors, preprocessing)
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise UserError(f"{directory} is corrupt: {error}.") from None
    except KeyError as error:
        raise UserError(f"{directory}: {error.args[0]} is missing.") from None
    return _from_config_dict(directory, config, tensors)


def read_config_json(directory: str | Path) -> SourceWeights:
    """Reads the config.json of a model directory of vitmha, without tensors.

    Raises:
        UserError: It is missing or invalid.
    """
    file = Path(directory) / "config.json"
    try:
        return _from_config_dict(directory, json.loads(file.read_text()), {})
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a valid vitmha config: {error}") from None


def _from_config_dict(source: str | Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> SourceWeights:
    """A model of vitmha, with the dictionary of its config.json or checkpoint (`to_config_dict`)."""
    try:
        names, preprocessing = config["class_names"], config["preprocessing"]
        return SourceWeights(
            _tuples(config["architecture"]),
            {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
            names and tuple(names),
            preprocessing and Preprocessing(**_tuples(preprocessing)),
            config.get("decoder"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{source} has no valid vitmha config: {error}.") from None


def _from_file(path: Path, hints: Mapping[str, Any]) -> SourceWeights:
    content = _read(path)
    if "vitmha" in content:
        state = {key: t for key, t in content["state_dict"].items() if key.startswith(("model.", "_orig_mod."))}
        return _from_config_dict(path, content["vitmha"], strip_prefixes(state))
    try:
        return from_big_vision(content, hints) if path.suffix == ".npz" else from_tensors(_tensors_in(content), hints)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing.") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of another package's file, with its names but without the prefixes of wrappers.

    Raises:
        UserError: A corrupt file, or one that holds something other than tensors.
    """
    return strip_prefixes(_tensors_in(_read(path)))


def _tensors_in(content: dict[str, Any]) -> dict[str, Tensor]:
    entry = next((name for name in ENTRIES if isinstance(content.get(name), dict)), None)
    tensors = content[entry] if entry else content
    if not (tensors and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
        raise UserError("the file has no state dict.")
    return tensors


def _read(path: Path) -> dict[str, Any]:
    """Reads a file without running code.

    A corrupt file makes torch's unpickler raise almost any exception: IndexError, KeyError, struct.error.
    """
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments that DeiT and others save too
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{path}: {error.strerror}.") from None
        raise UserError(f"{path} is corrupt, or holds objects other than tensors, numbers and strings.") from None
    return content if isinstance(content, dict) else {}


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]


def _from_timm(name: str) -> SourceWeights:
    import timm  # imported here since it takes a second

    try:
        return from_timm(timm.create_model(name, pretrained=True))
    except RuntimeError as error:
        if name.startswith("local-dir:"):
            raise UserError(f"{name.partition(':')[2]}: {' '.join(str(error).split())[:400]}") from None
        known = timm.list_models(name.partition(".")[0] + "*", pretrained=True) or timm.list_models()
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        raise UserError(f"timm:{name}: {_first_line(error)} (did you mean {near}?)") from None
    except OSError as error:
        raise _download_failed(f"timm:{name}", error) from None


def _from_torchvision(name: str) -> SourceWeights:
    import torchvision

    try:
        enum = torchvision.models.get_model_weights(name)
        entry = next(iter(enum))
        module = torchvision.models.get_model(name, weights=entry)
    except ValueError:
        near = ", ".join(difflib.get_close_matches(name, torchvision.models.list_models(include="vit*"), cutoff=0))
        raise UserError(f"torchvision:{name}: unknown model (did you mean {near}?)") from None
    except OSError as error:
        raise _download_failed(f"torchvision:{name}", error) from None
    weights, transform = from_torchvision(module), entry.transforms()
    preprocessing = Preprocessing(
        image_size=(transform.crop_size[0], transform.crop_size[0]),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        interpolation=transform.interpolation.value,
        crop_pct=transform.crop_size[0] / transform.resize_size[0],
    )
    return SourceWeights(weights.fields, weights.tensors, tuple(entry.meta["categories"]), preprocessing)


def _from_hub(name: str) -> SourceWeights:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    try:
        directory = Path(snapshot_download(repo, revision=revision or None, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, HFValidationError) as error:
        raise _download_failed(f"hf:{name}", error) from None
    if not ((directory / "config.json").is_file() and any(directory.glob("*.safetensors"))):
        raise UserError(f"hf:{name} has no config.json or no safetensors file.")
    return _from_directory(directory)


HUBS = {"timm": _from_timm, "torchvision": _from_torchvision, "hf": _from_hub}


def _download_failed(source: str, error: Exception) -> UserError:
    return UserError(
        f"{source} could not be downloaded ({_first_line(error)}): check the name and the network, or give a local "
        "directory or file."
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, since JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
