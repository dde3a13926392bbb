"""Where weights come from: model folders, checkpoints, files and hubs, each read as `SourceWeights` and never run as code."""

import argparse
import difflib
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.weights.convert import from_module, from_tensors
from vitmha.weights.convert.big_vision import from_big_vision
from vitmha.weights.convert.canonical import SourceWeights, strip_prefixes
from vitmha.weights.convert.hugging_face import from_hugging_face
from vitmha.weights.convert.timm import from_timm
from vitmha.weights.convert.torchvision import from_torchvision

# The reference models that come with the package, a folder each.
MODELS = Path(__file__).parent / "shipped"
FILES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".npz")
# The entries under which checkpoints of others keep their tensors, the averaged ones first.
ENTRIES = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model")


def read_source(source: str | Path | nn.Module, hints: Mapping[str, Any]) -> SourceWeights:
    """The weights of any source.

    Args:
        source: As `load_model` takes it.
        hints: Fields of `ViTConfig` that the user gives, for files that do not tell their architecture.

    Raises:
        UserError: Nothing there, damaged, another kind of file, or an architecture that ours cannot express.
    """
    if isinstance(source, nn.Module):
        return from_module(source)
    place, _, name = str(source).partition(":")
    if name and place in HUBS:
        return HUBS[place](name)
    path = Path(source)
    if str(source) in list_models() and not (path / "config.json").is_file():
        path = MODELS / path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    if path.is_file() and path.suffix in FILES:
        return _from_file(path, hints)
    if not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        raise UserError(
            f"{source} must be a folder with config.json and model.safetensors, a file ({', '.join(FILES)}), "
            f"timm:NAME, torchvision:NAME, hf:REPO or a model that comes with vitmha ({', '.join(list_models())})."
        )
    return _from_folder(path)


def list_models() -> list[str]:
    """The names of the reference models that come with the package; a model folder of that name here comes before."""
    return sorted(folder.parent.name for folder in MODELS.glob("*/config.json"))


def _from_folder(folder: Path) -> SourceWeights:
    """A model folder of ours, of Hugging Face's or of timm's: each has a config.json of its own kind."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if isinstance(config.get("architecture"), str):
            return _from_timm(f"local-dir:{folder}")
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        if "model_type" in config:
            processor = folder / "preprocessor_config.json"
            described = json.loads(processor.read_text()) if processor.is_file() else None
            return from_hugging_face(config, tensors, described)
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise UserError(f"{folder} is damaged: {error}.") from None
    except KeyError as error:
        raise UserError(f"{folder}: {error.args[0]} is missing.") from None
    return _from_config_dict(folder, config, tensors)


def read_config_json(folder: str | Path) -> SourceWeights:
    """What the config.json of ours in a folder tells, without tensors.

    Raises:
        UserError: It is missing, damaged, or describes no model of ours.
    """
    file = Path(folder) / "config.json"
    try:
        return _from_config_dict(folder, json.loads(file.read_text()), {})
    except (OSError, ValueError) as error:
        raise UserError(f"{file} does not describe a model of vitmha: {error}") from None


def _from_config_dict(source: str | Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> SourceWeights:
    """Ours, with the description that stands in config.json or in a checkpoint."""
    try:
        names, preprocessing = description["class_names"], description["preprocessing"]
        return SourceWeights(
            _tuples(description["architecture"]),
            {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
            names and tuple(names),
            preprocessing and Preprocessing(**_tuples(preprocessing)),
            description.get("decoder"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{source} does not describe a model of vitmha: {error}.") from None


def _from_file(path: Path, hints: Mapping[str, Any]) -> SourceWeights:
    content = _read(path)
    if "vitmha" in content:
        own = {name: each for name, each in content["state_dict"].items() if name.startswith(("model.", "_orig_mod."))}
        return _from_config_dict(path, content["vitmha"], strip_prefixes(own))
    try:
        return from_big_vision(content, hints) if path.suffix == ".npz" else from_tensors(_tensors_in(content), hints)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing.") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of another package's file, by its own names without wrappers.

    Raises:
        UserError: It is damaged, or holds other things than tensors.
    """
    return strip_prefixes(_tensors_in(_read(path)))


def _tensors_in(content: dict[str, Any]) -> dict[str, Tensor]:
    entry = next((name for name in ENTRIES if isinstance(content.get(name), dict)), None)
    tensors = content[entry] if entry else content
    if not (tensors and all(isinstance(each, Tensor) for each in tensors.values())):
        raise UserError("it holds no tensors by name.")
    return tensors


def _read(path: Path) -> dict[str, Any]:
    """The content of a file, which cannot run code."""
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments that DeiT and others save beside
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, ValueError, OSError, pickle.UnpicklingError, SafetensorError, BadZipFile):
        raise UserError(f"{path} is damaged, or holds other things than numbers and words.") from None
    return content if isinstance(content, dict) else {}


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]


def _from_timm(name: str) -> SourceWeights:
    import timm  # takes a second that most calls can do without

    try:
        return from_timm(timm.create_model(name, pretrained=True))
    except RuntimeError as error:
        if name.startswith("local-dir:"):
            raise UserError(f"{name.partition(':')[2]}: {' '.join(str(error).split())[:400]}") from None
        known = timm.list_models(name.partition(".")[0] + "*", pretrained=True) or timm.list_models()
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        raise UserError(f"timm:{name}: {_first(error)}; the nearest names are {near}.") from None
    except OSError as error:
        raise _not_fetched(f"timm:{name}", error) from None


def _from_torchvision(name: str) -> SourceWeights:
    import torchvision

    try:
        enum = torchvision.models.get_model_weights(name)
        chosen = next(iter(enum))
        module = torchvision.models.get_model(name, weights=chosen)
    except ValueError:
        near = ", ".join(difflib.get_close_matches(name, torchvision.models.list_models(include="vit*"), cutoff=0))
        raise UserError(f"torchvision:{name}: there is no such model; the nearest names are {near}.") from None
    except OSError as error:
        raise _not_fetched(f"torchvision:{name}", error) from None
    weights, transform = from_torchvision(module), chosen.transforms()
    preprocessing = Preprocessing(
        image_size=(transform.crop_size[0], transform.crop_size[0]),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        interpolation=transform.interpolation.value,
        crop_pct=transform.crop_size[0] / transform.resize_size[0],
    )
    return SourceWeights(weights.fields, weights.tensors, tuple(chosen.meta["categories"]), preprocessing)


def _from_hub(name: str) -> SourceWeights:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    try:
        folder = Path(snapshot_download(repo, revision=revision or None, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, HFValidationError) as error:
        raise _not_fetched(f"hf:{name}", error) from None
    if not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
        raise UserError(f"hf:{name} must hold config.json and safetensors: it has other files.")
    return _from_folder(folder)


HUBS = {"timm": _from_timm, "torchvision": _from_torchvision, "hf": _from_hub}


def _not_fetched(source: str, error: Exception) -> UserError:
    return UserError(
        f"{source} could not be fetched ({_first(error)}): check the name and the network, or give a folder or file "
        "that is already here."
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
