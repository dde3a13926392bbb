"""Loads a model from any source of weights."""

import copy
import difflib
import logging
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitmha.attention import MultiHeadAttention
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder, Model, get_encoder
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert.canonical import SourceWeights
from vitmha.weights.resize import resize_weights
from vitmha.weights.sources import read_config_json, read_source

LOG = logging.getLogger(__name__)
# Fields that weights can be resized to, and fields that do not affect them.
RESIZABLE = ("image_size", "patch_size", "in_channels", "num_classes")
FREE = ("attention_dropout", "drop_path", "patch_dropout", "backend")
# Used in pretraining only, so they are ignored in any file.
IGNORED = ("head.", "head_dist.", "pooler.dense.", "mask_token")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from a source; `str` gives it in one line."""

    source: str
    loaded: int
    """Number of tensors loaded unchanged."""
    resized: tuple[str, ...] = ()
    """Tensors that were resized, from what to what."""
    initialized: tuple[str, ...] = ()
    """Parameters that are not in the source and stay randomly initialized: those of a new head."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the source that were ignored."""
    assumed: tuple[str, ...] = ()
    """What the source does not say and was assumed."""

    @property
    def is_plain(self) -> bool:
        """Whether everything was loaded unchanged and nothing was assumed."""
        return not (self.resized or self.initialized or self.unexpected or self.assumed)

    def __str__(self) -> str:
        parts = {
            "resized": self.resized,
            "initialized": self.initialized,
            "unexpected": self.unexpected,
            "assumed": self.assumed,
        }
        details = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        return "; ".join([f"{self.source}: {self.loaded} tensors loaded", *details])


def load_model(source: str | Path | nn.Module, *, ignore_keys: tuple[str, ...] = (), **changes: Any) -> Model:
    """Loads a model with trained weights.

    Args:
        source: A model directory; the name of a bundled model (`list_models`); a checkpoint (.ckpt) of a training run;
            timm:NAME, torchvision:NAME or hf:REPO, which are downloaded; a directory saved by Hugging Face or timm; a
            .pt, .pth, .bin, .safetensors or .npz file of any of these; or a model object of timm, torchvision or
            transformers.
        ignore_keys: Prefixes of tensor names, as vitmha has them, that may be unexpected.
        changes: Fields of `ViTConfig`. Another image_size, patch_size or in_channels resizes the weights, and another
            num_classes initializes a new head. Dropout rates and the backend may be chosen freely. All other fields say
            what a bare file does not, and must otherwise equal the source's.

    Returns:
        The model in eval mode on the CPU, with class names and preprocessing if the source has them. What was resized,
        initialized, unexpected or assumed is logged.

    Raises:
        UserError: A source that does not exist or is corrupt, weights that do not fit the architecture, or an
            architecture that `VisionTransformer` cannot represent.

    Example:
        >>> model = load_model("cifar10")
        >>> model.class_names[:2]
        ('airplane', 'automobile')
    """
    names = [field.name for field in fields(ViTConfig)]
    for unknown in (change for change in changes if change not in names):
        near = difflib.get_close_matches(unknown, names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else f"; its fields are {', '.join(names)}"
        raise UserError(f"the architecture has no field '{unknown}'{hint}.")
    weights = read_source(source, changes)
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    model = _build(name, weights, changes)
    is_same_head = model.config.num_classes == weights.fields.get("num_classes", model.config.num_classes)
    report = _load_state(model, weights, name, is_same_head, ignore_keys)
    model.class_names = weights.class_names if is_same_head else None
    model.preprocessing = _preprocessing(weights, model.config)
    LOG.log(logging.INFO if report.is_plain else logging.WARNING, "%s", report)
    return model.eval()


def build_empty_model(directory: str | Path) -> VisionTransformer:
    """Builds the classifier of a directory's config.json, in eval mode; the values of its weights are undefined.

    Raises:
        UserError: A config.json that is missing or invalid.
    """
    weights = read_config_json(directory)
    with torch.device("meta"):
        model = VisionTransformer(_config(str(directory), weights, {}))
    model.class_names, model.preprocessing = weights.class_names, weights.preprocessing
    return model.to_empty(device="cpu").eval()


def load_weights(model: nn.Module, source: str | Path | nn.Module, ignore_keys: tuple[str, ...] = ()) -> LoadReport:
    """Loads weights into a model for fine-tuning.

    Args:
        model: Has the source's architecture, except for image size, patch size, channels and classes. If the classes
            differ in number or name, the head is not loaded; the same names in another order are matched by name.
        source: See `load_model`.
        ignore_keys: See `load_model`.

    Returns:
        What was loaded, resized, initialized and unexpected.

    Raises:
        UserError: Another architecture, or a parameter outside the head that is missing, unexpected or of another
            shape. The model is then unchanged.
    """
    model = cast(Model, getattr(model, "_orig_mod", model))  # the module inside a compiled one
    weights = read_source(source, asdict(model.config))
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    _check_same_architecture(name, ViTConfig(**weights.fields), model.config)
    weights = _in_class_order(weights, model.class_names)
    is_same_head = (
        weights.class_names == model.class_names and weights.fields.get("num_classes") == model.config.num_classes
    )
    report = _load_state(model, weights, name, is_same_head, ignore_keys)
    old, new = weights.preprocessing, model.preprocessing
    if old is not None and new is not None and (old.mean, old.std) != (new.mean, new.std):
        change = f"images normalized by mean {new.mean} and std {new.std}; the source has {old.mean} and {old.std}"
        report = replace(report, assumed=(*report.assumed, change))
    return report


def _in_class_order(weights: SourceWeights, class_names: tuple[str, ...] | None) -> SourceWeights:
    """The source with its head in the order of these class names, if they are the source's in another order."""
    if (
        weights.decoder is not None
        or not weights.class_names
        or sorted(weights.class_names) != sorted(class_names or ())
    ):
        return weights
    rows_by_name = {name: row for row, name in enumerate(weights.class_names)}
    rows = [rows_by_name[name] for name in class_names or ()]
    tensors = {
        name: tensor[rows] if name.startswith(("head.", "head_dist.")) else tensor
        for name, tensor in weights.tensors.items()
    }
    return replace(weights, class_names=class_names, tensors=tensors)


def config_from_pretrained(source: str | Path | nn.Module, requested: ViTConfig) -> ViTConfig:
    """The architecture of a source, adapted to another task.

    Args:
        source: See `load_model`.
        requested: Its image size, channels, classes and dropout rates are used, and its patch size unless that is
            `ViTConfig`'s default; for a bare file also what the file does not say, such as the number of heads. All
            other fields must be `ViTConfig`'s default or equal the source's.

    Raises:
        UserError: A field that is neither.
    """
    defaults = {field.name: field.default for field in fields(ViTConfig)}
    task = ("image_size", "in_channels", "num_classes", *FREE)
    changes = {name: value for name, value in asdict(requested).items() if name in task or value != defaults[name]}
    hints = asdict(requested)
    weights = read_source(source, hints)
    is_assumed = any(field.startswith("num_heads") for field in weights.assumed)
    is_default = requested.num_heads == defaults["num_heads"]
    if is_assumed and is_default and weights.fields["embed_dim"] != defaults["embed_dim"]:
        del hints["num_heads"]  # the default belongs to another width: without it the source is refused
        weights = read_source(source, hints)
    return _config(str(source), weights, changes)


def _build(name: str, weights: SourceWeights, changes: dict[str, Any]) -> Model:
    config = _config(name, weights, changes)
    try:
        decoder = weights.decoder and DecoderConfig(**weights.decoder)
    except TypeError as error:
        raise UserError(f"{name} has no valid vitmha config: {error}.") from None
    return EncoderDecoder(config, decoder) if decoder else VisionTransformer(config)


def _config(name: str, weights: SourceWeights, changes: dict[str, Any]) -> ViTConfig:
    """The source's architecture with the changes applied."""
    try:
        old, new = ViTConfig(**weights.fields), ViTConfig(**{**weights.fields, **changes})
    except TypeError as error:
        raise UserError(f"{name} has no valid vitmha config: {error}.") from None
    _check_same_architecture(name, old, new)
    return new


def _check_same_architecture(name: str, old: ViTConfig, new: ViTConfig) -> None:
    """Raises for the fields by which two architectures differ and that weights cannot be resized to."""
    source, requested = _normalized_fields(old), _normalized_fields(new)
    differences = [
        f"{key} is {source[key]}, requested {requested[key]}" for key in source if source[key] != requested[key]
    ]
    if differences:
        raise UserError(f"{name} has another architecture: {'; '.join(differences)}.")


def _normalized_fields(config: ViTConfig) -> dict[str, Any]:
    """The fields that determine the weights, with defaults such as mlp_dim written out."""
    values = {name: value for name, value in asdict(config).items() if name not in (*RESIZABLE, *FREE)}
    values["mlp_dim"] = config.mlp_dim or 4 * config.embed_dim
    values["num_kv_heads"] = config.num_kv_heads or config.num_heads
    values["head_dim"] = config.head_dim or config.embed_dim // config.num_heads
    values["layer_scale_init"] = config.layer_scale_init is not None
    return values


def _load_state(
    model: Model, weights: SourceWeights, name: str, is_same_head: bool, ignore_keys: tuple[str, ...]
) -> LoadReport:
    """Loads the weights; only the head may be missing or unexpected."""
    tensors = dict(weights.tensors)
    encoder = get_encoder(model)
    prefix = "encoder." if isinstance(model, EncoderDecoder) else ""
    resized = resize_weights(tensors, prefix, ViTConfig(**weights.fields), encoder.config)
    expected = _prune_as(model, tensors).state_dict()
    head = [key for key in expected if key.startswith(("head.", "head_dist."))]
    initialized = head if not is_same_head or not any(key in tensors for key in head) else []
    ignored = (*IGNORED, *ignore_keys)
    dropped = [key for key in tensors if key in initialized or (key not in expected and key.startswith(ignored))]
    kept = {key: tensor for key, tensor in tensors.items() if key not in dropped}
    _check_fit(name, kept, {key: tensor for key, tensor in expected.items() if key not in initialized})
    model.load_state_dict(kept, strict=False)  # also prunes the heads that the weights do not have
    return LoadReport(
        source=name,
        loaded=len(kept) - len(resized),
        resized=tuple(resized),
        initialized=tuple(initialized),
        unexpected=tuple(key for key in dropped if key not in initialized),
        assumed=weights.assumed,
    )


def _preprocessing(weights: SourceWeights, config: ViTConfig) -> Preprocessing | None:
    """The source's preprocessing at the model's image size; None if the number of channels differs."""
    preprocessing = weights.preprocessing
    if preprocessing is None or len(preprocessing.mean) != config.in_channels:
        return None
    return replace(preprocessing, image_size=config.layout.image_size)


def _prune_as(model: Model, weights: dict[str, Tensor]) -> Model:
    """A copy of the model without the heads that were pruned in the weights; the model itself if none were."""
    if not any(name.endswith(".head_index") for name in weights):
        return model
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and f"{name}.head_index" in weights:
            module.keep_heads(weights[f"{name}.head_index"].tolist())
    return model


def _check_fit(source: str, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    problems += [f"{name} is unexpected" for name in tensors.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, the model's is {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if tensors[name].shape != expected[name].shape
    ]
    if problems:
        raise UserError(f"The weights of {source} do not fit the model: {'; '.join(sorted(problems)[:5])}.")
