"""Builds models of timm and torchvision with weights that `vitmha.weights.files` reads."""

import difflib
import inspect
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.weights.files import first_line, read_json, read_weights, shorten, weight_files

PLAIN = ("timm.models.vision_transformer", "timm.models.deit", "timm.models.eva")
IMAGES_AND_CLASSES = (
    *("input_size", "fixed_input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "global_pool"),
    *("num_classes", "label_names", "label_descriptions", "first_conv", "classifier", "tag"),
)


def build_timm(name: str) -> nn.Module:
    """Builds a pretrained model of timm by its name, such as vit_small_patch14_reg4_dinov2.lvd142m.

    timm adapts the weights of other sizes and names; it is given tensors and reads no file.

    Raises:
        UserError: An unknown name, a name without weights, or no network.
    """
    import timm  # imported here since it takes a second

    config = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not (config.hf_hub_id or config.url):
        known = timm.list_models(name.partition(".")[0] + "*", pretrained=True) or timm.list_models()
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        reason = "unknown model" if config is None else "no weights exist"
        raise UserError(f"timm:{name}: {reason} (did you mean {near}?)")
    try:
        tensors = (
            read_weights(download_hub(config.hf_hub_id, f"timm:{name}"))
            if config.hf_hub_id
            else torch.hub.load_state_dict_from_url(str(config.url), map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise _download_failed(f"timm:{name}", error) from None
    nowhere = dict.fromkeys(("hf_hub_id", "hf_hub_filename", "url", "file", "source"))
    overlay = {"state_dict": tensors, "custom_load": False, **nowhere}
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    except RuntimeError as error:
        raise UserError(f"timm:{name}: {' '.join(str(error).split())[:400]}") from None


def build_timm_directory(directory: Path, can_run: bool = True) -> nn.Module:
    """Builds the model of a directory that timm's `save_for_hf` or `push_to_hf_hub` wrote.

    Args:
        directory: With config.json and weights.
        can_run: If not, only the tensors of the file have values, which is faster.

    Raises:
        UserError: A config.json that is invalid or does not describe the tensors next to it.
    """
    from timm.models import create_model, is_model, model_entrypoint  # imported here since it takes a second

    config, tensors = read_json(directory / "config.json"), read_weights(directory)
    name, arguments = config.get("architecture"), config.get("model_args") or {}
    if not (isinstance(name, str) and is_model(name) and model_entrypoint(name).__module__ in PLAIN):
        raise UserError(f"{directory}: architecture {shorten(name)} is not a plain Vision Transformer of timm.")
    _check_model_args(directory, arguments, tensors)
    try:
        options = {"pretrained_cfg": _pretrained_cfg(config), **arguments}
        with torch.device("meta"):  # without memory, since a config.json can ask for any size
            module = create_model(name, **options)
        module.load_state_dict(tensors, assign=True)
        if can_run:
            module = create_model(name, **options)
            module.load_state_dict(tensors)
    except Exception as error:  # what timm raises depends on the argument
        raise UserError(f"{directory}: {' '.join(str(error).split())[:400]}") from None
    return module.eval()


def _pretrained_cfg(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about images and classes; files from before timm 0.9 say it at the top level."""
    task = dict(config.get("pretrained_cfg", config))
    if "labels" in task:
        task["label_names"] = task.pop("labels")
    top = {key: config[key] for key in ("num_classes", "label_names", "label_descriptions") if key in config}
    return {key: value for key, value in {**task, **top}.items() if key in IMAGES_AND_CLASSES}


def _check_model_args(directory: Path, arguments: Any, tensors: dict[str, Tensor]) -> None:
    """Raises for what is not an argument of timm's models, such as a file to read, and for a depth without tensors."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    known = {*inspect.signature(VisionTransformer).parameters, *inspect.signature(Eva).parameters} - {"device", "dtype"}
    if not isinstance(arguments, dict) or not known.issuperset(arguments):
        unexpected = ", ".join(arguments.keys() - known) if isinstance(arguments, dict) else arguments
        raise UserError(
            f"{directory}: model_args of config.json must be an object of arguments of timm's Vision Transformer, got "
            f"{shorten(unexpected)}."
        )
    depth = len({found[1] for key in tensors if (found := re.match(r"blocks\.(\d+)\.", key))})
    if arguments.get("depth", depth) != depth:
        wrong = shorten(arguments["depth"])
        raise UserError(f"{directory}: depth is {wrong} in config.json, but the weights have {depth} blocks.")


def build_torchvision(name: str) -> tuple[nn.Module, Any]:
    """Builds a pretrained Vision Transformer of torchvision, and returns its entry in torchvision's table of weights.

    Raises:
        UserError: An unknown name, or no network.
    """
    import torchvision

    known = torchvision.models.list_models(include="vit*")
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        raise UserError(f"torchvision:{name}: unknown model (did you mean {near}?)")
    entry = next(iter(torchvision.models.get_model_weights(name)))
    try:
        tensors = entry.get_state_dict(map_location="cpu", check_hash=True, weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise _download_failed(f"torchvision:{name}", error) from None
    module = torchvision.models.get_model(name, weights=None, image_size=entry.meta["min_size"][0])
    module.load_state_dict(tensors)
    return module.eval(), entry


def download_hub(name: str, source: str) -> Path:
    """Downloads the config and the weights of a repository of the Hugging Face hub; returns their directory.

    Args:
        name: OWNER/NAME, or OWNER/NAME@REVISION.
        source: What the user gave, for messages.

    Raises:
        UserError: No such repository, or one without a config.json or weights, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    for weights in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        try:
            found = snapshot_download(repo, revision=revision or None, allow_patterns=["*.json", weights, "README.md"])
        except (OSError, HFValidationError) as error:
            raise _download_failed(source, error) from None
        if weight_files(directory := Path(found)) and (directory / "config.json").is_file():
            return directory
    raise UserError(f"{source} has no config.json, or neither a safetensors file nor pytorch_model.bin.")


def _download_failed(source: str, error: Exception) -> UserError:
    if isinstance(error, UnpicklingError):
        return UserError(f"{source}: the downloaded file is corrupt, or contains objects that could run code.")
    return UserError(
        f"{source} could not be downloaded ({first_line(error)}): check the name and the network, or give a local "
        "directory or file."
    )
