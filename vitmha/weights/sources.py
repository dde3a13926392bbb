"""Reads weights from directories, checkpoints, files and hubs as `SourceWeights`; no file can run code."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import SIZES, ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig
from vitmha.weights.config_check import check_class_names, check_source, check_types
from vitmha.weights.convert import from_module, from_tensors
from vitmha.weights.convert.big_vision import from_big_vision
from vitmha.weights.convert.canonical import SourceWeights, strip_prefixes
from vitmha.weights.convert.hugging_face import from_hugging_face
from vitmha.weights.convert.timm import from_timm
from vitmha.weights.convert.torchvision import from_torchvision
from vitmha.weights.files import FILE_SUFFIXES, first_line, read_file, read_json, read_weights, tensors_in, weight_files
from vitmha.weights.packages import build_timm, build_timm_directory, build_torchvision, download_hub
from vitmha.weights.shipped import SHIPPED, list_models


def read_source(source: str | Path | nn.Module, hints: Mapping[str, Any]) -> SourceWeights:
    """Reads the weights of any source.

    Args:
        source: See `load_model`.
        hints: Fields of `ViTConfig` given by the user, for files that do not contain their architecture.

    Raises:
        UserError: A source that does not exist, is corrupt or of another kind, or an architecture that
            `VisionTransformer` cannot represent.
    """
    weights = _read(source, hints)
    try:
        check_source(weights)
    except UserError as error:
        name = type(source).__name__ if isinstance(source, nn.Module) else source
        raise UserError(f"{name}: {error}") from None
    return weights


def _read(source: str | Path | nn.Module, hints: Mapping[str, Any]) -> SourceWeights:
    if isinstance(source, nn.Module):
        return from_module(source)
    hub, _, name = str(source).partition(":")
    if name and hub in HUBS:
        return HUBS[hub](name)
    path = _bundled_or_path(str(source))
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    if path.is_file() and path.suffix in FILE_SUFFIXES:
        return _from_file(path, hints)
    if not ((path / "config.json").is_file() and weight_files(path)):
        raise UserError(_not_a_source(str(source), path))
    return _from_directory(path)


def model_directory(source: str) -> Path:
    """The directory of a model that is one, also of a repository of the hub, which is downloaded; else the path."""
    hub, _, name = source.removeprefix("timm:").partition(":")
    if name and hub in ("hf", "hf-hub", "hf_hub"):
        return download_hub(name, source)
    path = _bundled_or_path(name if hub == "local-dir" else source)
    is_in_directory = path.name == "model.safetensors" and (path.parent / "config.json").is_file()
    return path.parent if is_in_directory else path


def _bundled_or_path(source: str) -> Path:
    """The directory of a bundled model, unless a model directory has that name; else the path."""
    path = Path(source)
    is_bundled = source in list_models() and not (path / "config.json").is_file()
    return SHIPPED / path if is_bundled else path


def _not_a_source(source: str, path: Path) -> str:
    bundled = f"a bundled model ({', '.join(list_models())})"
    if source in SIZES:
        return (
            f"{source} is a model size without trained weights: expected {bundled}, a model directory, timm:NAME or "
            "hf:REPO. `vitmha fit --model.name` and `vitmha profile` take a size."
        )
    problem = "no such file or directory" if not path.exists() else "not a model"
    return (
        f"{source}: {problem} (expected a directory with config.json and model.safetensors or pytorch_model.bin, a "
        f"{', '.join(FILE_SUFFIXES)} file, timm:NAME, torchvision:NAME, hf:REPO, or {bundled})."
    )


def _from_directory(directory: Path) -> SourceWeights:
    """Reads a model directory of vitmha, Hugging Face or timm; each has its own kind of config.json."""
    config = read_json(directory / "config.json")
    if "model_type" in config:
        file = directory / "preprocessor_config.json"
        preprocessing = read_json(file) if file.is_file() else None
        return _converted(directory, from_hugging_face, config, read_weights(directory), preprocessing)
    if isinstance(config.get("architecture"), dict) or "preprocessing" in config:
        return _from_config_dict(directory, config, read_weights(directory))
    return _converted(directory, from_timm, build_timm_directory(directory, can_run=False))


def _converted(source: object, convert: Callable[..., SourceWeights], *args: Any) -> SourceWeights:
    """Calls a conversion; a config.json with values of any kind makes it raise any of these exceptions."""
    try:
        return convert(*args)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except KeyError as error:
        raise UserError(f"{source}: {error.args[0]} is missing.") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError, RuntimeError) as error:
        raise UserError(f"{source} has no valid config: {first_line(error)}.") from None


def read_config_json(directory: str | Path) -> SourceWeights:
    """Reads the config.json of a model directory of vitmha, without tensors.

    Raises:
        UserError: It is missing or invalid.
    """
    file = Path(directory) / "config.json"
    try:
        weights = _from_config_dict(directory, read_json(file), {})
        check_source(weights)
    except UserError as error:
        raise UserError(f"{file} is not a valid vitmha config: {error}") from None
    return weights


def _from_config_dict(source: str | Path, config: Any, tensors: dict[str, Tensor]) -> SourceWeights:
    """A model of vitmha, with the dictionary of its config.json or checkpoint (`to_config_dict`)."""
    try:
        fields, names, preprocessing = (config[key] for key in ("architecture", "class_names", "preprocessing"))
        fields, preprocessing = _tuples(fields), _tuples(preprocessing)
        check_types(fields, ViTConfig)
        check_class_names(names, ViTConfig(**fields).num_classes)
        if preprocessing is not None:
            check_types(preprocessing, Preprocessing)
            preprocessing = Preprocessing(**preprocessing)
        if (decoder := config.get("decoder")) is not None:
            check_types(decoder, DecoderConfig)
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        return SourceWeights(fields, tensors, names and tuple(names), preprocessing, decoder)
    except KeyError as error:
        raise UserError(f"{source} has no valid vitmha config: {error} is missing.") from None
    except (TypeError, UserError) as error:
        raise UserError(f"{source} has no valid vitmha config: {error}") from None


def _from_file(path: Path, hints: Mapping[str, Any]) -> SourceWeights:
    content = read_file(path)
    if "vitmha" in content:
        state = {key: t for key, t in content["state_dict"].items() if key.startswith(("model.", "_orig_mod."))}
        return _from_config_dict(path, content["vitmha"], strip_prefixes(state))
    if path.suffix == ".npz":
        return _converted(path, from_big_vision, content, hints)
    return _converted(path, from_tensors, tensors_in(content, path), hints)


def _from_timm(name: str) -> SourceWeights:
    source, _, rest = name.partition(":")
    if source in ("local-dir", "hf-hub", "hf_hub") and rest:
        return HUBS[source](rest)
    return _converted(f"timm:{name}", from_timm, build_timm(name))


def _from_torchvision(name: str) -> SourceWeights:
    module, entry = build_torchvision(name)
    weights, transform = from_torchvision(module), entry.transforms()
    preprocessing = Preprocessing(
        image_size=(transform.crop_size[0], transform.crop_size[0]),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        interpolation=transform.interpolation.value,
        crop_pct=transform.crop_size[0] / transform.resize_size[0],
    )
    return SourceWeights(weights.fields, weights.tensors, tuple(entry.meta["categories"]), preprocessing)


def _from_local_dir(name: str) -> SourceWeights:
    path = Path(name)
    if not ((path / "config.json").is_file() and weight_files(path)):
        raise UserError(_not_a_source(f"local-dir:{name}", path))
    return _from_directory(path)


def _from_hub(name: str) -> SourceWeights:
    return _from_directory(download_hub(name, f"hf:{name}"))


HUBS = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "hf": _from_hub,
    "local-dir": _from_local_dir,  # this and the next two as timm writes them
    "hf-hub": _from_hub,
    "hf_hub": _from_hub,
}


def _tuples(fields: Any) -> Any:
    """Lists of a dictionary as tuples, since JSON has no tuples."""
    if not isinstance(fields, dict):
        return fields
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
