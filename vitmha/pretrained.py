"""Models in and out: by the name of a size, and as a model folder, `config.json` beside `model.safetensors`."""

import json
import os
import pickle
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitmha.attention import MultiHeadAttention
from vitmha.decoder import DecoderConfig, EncoderDecoder
from vitmha.images import Preprocessing
from vitmha.vit import SIZES, VisionTransformer, ViTConfig


def create_model(name: str, *, num_classes: int = 1000, **fields: Any) -> VisionTransformer:
    """A new model of a named size.

    Args:
        name: A name in `SIZES`: vit_mini, vit_tiny, vit_small, vit_base, vit_large or vit_huge.
        num_classes: Outputs of the head.
        fields: Any field of `ViTConfig`; goes before the size's own.

    Returns:
        The model with random weights.

    Raises:
        ValueError: An unknown size, or fields that do not fit together.
    """
    if name not in SIZES:
        raise ValueError(f"There is no size {name!r}; choose from {', '.join(SIZES)}.")
    return VisionTransformer(ViTConfig(**{**SIZES[name], "num_classes": num_classes, **fields}))


def save_model(model: VisionTransformer | EncoderDecoder, folder: str | Path) -> None:
    """Writes a model folder: all that classifying and inspecting need.

    `config.json` holds the architecture, the class names and the preprocessing; `model.safetensors` the weights. Each
    file is written whole or not at all.

    Args:
        model: The model, with its `class_names` and `preprocessing` set where they are known.
        folder: Where to; made where it is not there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        config, weights = Path(unfinished, "config.json"), Path(unfinished, "model.safetensors")
        config.write_text(json.dumps(describe(model), indent=2) + "\n")
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights)
        for file in (weights, config):
            os.replace(file, folder / file.name)


def load_model(source: str | Path) -> VisionTransformer | EncoderDecoder:
    """A model as it was saved.

    Args:
        source: A model folder, or a checkpoint (.ckpt) of a training run.

    Returns:
        The model in eval mode, on the CPU, with its class names and preprocessing.

    Raises:
        ValueError: Nothing there, another kind of file, or weights that do not fit the architecture beside them.
    """
    source = Path(source)
    if source.suffix == ".ckpt" and source.is_file():
        try:
            checkpoint = torch.load(source, map_location="cpu", weights_only=True)
        except (EOFError, RuntimeError, pickle.UnpicklingError):
            raise ValueError(f"{source} is damaged, or holds other things than numbers and words.") from None
        if "vitmha" not in checkpoint:
            raise ValueError(f"{source} is not a checkpoint of vitmha.")
        weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items() if k.startswith("model.")}
        return _restore(source, checkpoint["vitmha"], weights)
    config, tensors = source / "config.json", source / "model.safetensors"
    if not (config.is_file() and tensors.is_file()):
        raise ValueError(f"{source} must be a folder with config.json and model.safetensors, or a .ckpt of a run.")
    try:
        description, weights = json.loads(config.read_text()), load_file(tensors)
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{source} is damaged: {error}.") from None
    return _restore(source, description, weights)


def load_weights(model: VisionTransformer | EncoderDecoder, source: str | Path) -> list[str]:
    """Starts a model from earlier weights, for fine-tuning.

    Args:
        model: What to fill; of the same architecture but for the number of classes.
        source: As `load_model` takes it.

    Returns:
        The names of the parameters that stay new: those of the head, where the classes differ in number or name.

    Raises:
        ValueError: A parameter other than the head's is missing, left over or of another shape.
    """
    earlier = load_model(source)
    given = earlier.state_dict()
    _prune_alike(model, given)
    wanted = model.state_dict()
    if earlier.class_names != model.class_names or given["head.weight"].shape != wanted["head.weight"].shape:
        new = [name for name in wanted if name.startswith(("head.", "head_dist."))]
    else:
        new = []
    given = {name: tensor for name, tensor in given.items() if name not in new}
    _check_fit(source, given, {name: tensor for name, tensor in wanted.items() if name not in new})
    model.load_state_dict(given, strict=False)
    return new


def describe(model: VisionTransformer | EncoderDecoder) -> dict[str, Any]:
    """What stands in `config.json`: plain dictionaries, lists, strings and numbers."""
    decoder = {"decoder": asdict(model.decoder)} if isinstance(model, EncoderDecoder) else {}
    return {
        "architecture": asdict(model.config),
        **decoder,
        "class_names": model.class_names and list(model.class_names),
        "preprocessing": model.preprocessing and asdict(model.preprocessing),
    }


def _restore(
    source: Path, description: dict[str, Any], weights: dict[str, Tensor]
) -> VisionTransformer | EncoderDecoder:
    try:
        config, decoder = ViTConfig(**_tuples(description["architecture"])), description.get("decoder")
        model = EncoderDecoder(config, DecoderConfig(**decoder)) if decoder else VisionTransformer(config)
        model.class_names = description["class_names"] and tuple(description["class_names"])
        model.preprocessing = description["preprocessing"] and Preprocessing(**_tuples(description["preprocessing"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} does not describe a model of vitmha: {error}.") from None
    _prune_alike(model, weights)
    _check_fit(source, weights, model.state_dict())
    model.load_state_dict(weights)
    return model.eval()


def _prune_alike(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Removes the heads that the model of the weights has lost."""
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and f"{name}.kept_heads" in weights:
            module.keep_heads(weights[f"{name}.kept_heads"].tolist())


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _check_fit(source: str | Path, given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    faults = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    faults += [f"{name} is left over" for name in given.keys() - wanted.keys()]
    faults += [
        f"{name} is {tuple(given[name].shape)}, the model's is {tuple(wanted[name].shape)}"
        for name in wanted.keys() & given.keys()
        if given[name].shape != wanted[name].shape
    ]
    if faults:
        raise ValueError(f"The weights of {source} do not fit the model: {'; '.join(sorted(faults)[:5])}.")
