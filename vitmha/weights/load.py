"""Loads a model from any source of weights."""

import copy
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
from vitmha.weights.resize import _resize
from vitmha.weights.sources import read_config_json, read_source

LOG = logging.getLogger(__name__)
# What weights can be fitted to, and what plays no part in them.
RESIZABLE = ("image_size", "patch_size", "in_channels", "num_classes")
FREE = ("attention_dropout", "drop_path", "patch_dropout", "backend")
# Of no use behind the pretraining: may be left over in any file.
LEFT_OVER = ("head.", "head_dist.", "pooler.dense.", "mask_token")


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights of a source; as text, one line."""

    source: str
    loaded: int
    """Tensors as they were."""
    resized: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    """Parameters of the model that the source has nothing for: those of a new head."""
    unexpected: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all was loaded as it was, and nothing else."""
        return not (self.resized or self.initialized or self.unexpected or self.assumed)

    def __str__(self) -> str:
        parts = {
            "resized": self.resized,
            "initialized": self.initialized,
            "left out": self.unexpected,
            "assumed": self.assumed,
        }
        hints = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        return "; ".join([f"{self.source}: {self.loaded} tensors loaded", *hints])


def load_model(source: str | Path | nn.Module, *, ignore_keys: tuple[str, ...] = (), **changes: Any) -> Model:
    """A model with trained weights.

    Args:
        source: A model folder; the name of a model that comes with the package (`vitmha.sources.list_models`); a checkpoint
            (.ckpt) of a training run; timm:NAME, torchvision:NAME or hf:REPO, which are downloaded; a folder as Hugging
            Face or timm write it; a .pt, .pth, .bin, .safetensors or .npz file of any of these; or a model object of
            timm, torchvision or transformers.
        ignore_keys: Beginnings of the names, as ours, of tensors that may be left over.
        changes: Fields of `ViTConfig`. Another image_size, patch_size or in_channels resizes the weights, another
            num_classes makes a new head; dropout rates and the kernel are free; all others say what a file does not
            tell, and must be the source's where it does.

    Returns:
        The model in eval mode, on the CPU, with its class names and preprocessing where the source tells them. What was
        resized, new or left out is logged.

    Raises:
        UserError: Nothing there, another kind of file, weights that do not fit the architecture, or an architecture
            that has no counterpart here.
    """
    weights = read_source(source, changes)
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    model = _build(name, weights, changes)
    is_same_head = model.config.num_classes == weights.fields.get("num_classes", model.config.num_classes)
    report = _load_state(model, weights, name, is_same_head, ignore_keys)
    model.class_names = weights.class_names if is_same_head else None
    model.preprocessing = _preprocessing(weights, model.config)
    LOG.log(logging.INFO if report.is_plain else logging.WARNING, "%s", report)
    return model.eval()


def build_empty_model(folder: str | Path) -> VisionTransformer:
    """The classifier that config.json in a folder describes, in eval mode; the values of its weights are undefined.

    Raises:
        UserError: No such description.
    """
    weights = read_config_json(folder)
    with torch.device("meta"):
        model = VisionTransformer(_config(str(folder), weights, {}))
    model.class_names, model.preprocessing = weights.class_names, weights.preprocessing
    return model.to_empty(device="cpu").eval()


def load_weights(model: nn.Module, source: str | Path | nn.Module, ignore_keys: tuple[str, ...] = ()) -> LoadReport:
    """Starts a model from earlier weights, for fine-tuning.

    Args:
        model: What to fill; of the source's architecture but for the size of pictures and patches, the channels, and
            the classes: where these differ in number or name, the head stays new.
        source: As `load_model` takes it.
        ignore_keys: As there.

    Returns:
        What was loaded, resized, new and left out.

    Raises:
        UserError: Another architecture, or a parameter other than the head's that is missing, left over or of another
            shape; the model stays as it was.
    """
    model = cast(Model, getattr(model, "_orig_mod", model))  # what torch.compile has wrapped
    weights = read_source(source, asdict(model.config))
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    _check_same_architecture(name, ViTConfig(**weights.fields), model.config)
    is_same_head = (
        weights.class_names == model.class_names and weights.fields.get("num_classes") == model.config.num_classes
    )
    report = _load_state(model, weights, name, is_same_head, ignore_keys)
    theirs, ours = weights.preprocessing, model.preprocessing
    if theirs is not None and ours is not None and (theirs.mean, theirs.std) != (ours.mean, ours.std):
        normal = f"pictures of mean {ours.mean} and std {ours.std}, where the source's were {theirs.mean}, {theirs.std}"
        report = replace(report, assumed=(*report.assumed, normal))
    return report


def config_from_pretrained(source: str | Path | nn.Module, wanted: ViTConfig) -> ViTConfig:
    """The architecture of a source for another task.

    Args:
        source: As `load_model` takes it.
        wanted: Its picture size, channels, classes and dropout rates are taken, and the size of its patches where that
            is not `ViTConfig`'s own; of a bare file also what it does not tell, such as the number of heads. The other
            fields must be `ViTConfig`'s own or the source's.

    Raises:
        UserError: Another field is neither.
    """
    own = {field.name: field.default for field in fields(ViTConfig)}
    task = ("image_size", "in_channels", "num_classes", *FREE)
    chosen = {name: value for name, value in asdict(wanted).items() if name in task or value != own[name]}
    weights, hints = read_source(source, asdict(wanted)), asdict(wanted)
    is_assumed = any(guess.startswith("num_heads") for guess in weights.assumed)
    if is_assumed and wanted.num_heads == own["num_heads"] and weights.fields["embed_dim"] != own["embed_dim"]:
        del hints["num_heads"]  # that of another width was not meant: now it is refused
        weights = read_source(source, hints)
    return _config(str(source), weights, chosen)


def _build(name: str, weights: SourceWeights, changes: dict[str, Any]) -> Model:
    config = _config(name, weights, changes)
    try:
        decoder = weights.decoder and DecoderConfig(**weights.decoder)
    except TypeError as error:
        raise UserError(f"{name} does not describe a model of vitmha: {error}.") from None
    return EncoderDecoder(config, decoder) if decoder else VisionTransformer(config)


def _config(name: str, weights: SourceWeights, changes: dict[str, Any]) -> ViTConfig:
    """The source's architecture with the changes that can be made."""
    try:
        given, wanted = ViTConfig(**weights.fields), ViTConfig(**{**weights.fields, **changes})
    except TypeError as error:
        raise UserError(f"{name} does not describe a model of vitmha: {error}.") from None
    _check_same_architecture(name, given, wanted)
    return wanted


def _check_same_architecture(name: str, given: ViTConfig, wanted: ViTConfig) -> None:
    """Names the fields by which two architectures differ that weights cannot be fitted to."""
    theirs, ours = _plain(given), _plain(wanted)
    faults = [f"{field} is {theirs[field]}, here {ours[field]}" for field in theirs if theirs[field] != ours[field]]
    if faults:
        raise UserError(f"{name} has another architecture: {'; '.join(faults)}.")


def _plain(config: ViTConfig) -> dict[str, Any]:
    """The fields that weights hang on, with what stands for their default written out."""
    described = {name: value for name, value in asdict(config).items() if name not in (*RESIZABLE, *FREE)}
    described["mlp_dim"] = config.mlp_dim or 4 * config.embed_dim
    described["num_kv_heads"] = config.num_kv_heads or config.num_heads
    described["head_dim"] = config.head_dim or config.embed_dim // config.num_heads
    described["layer_scale_init"] = config.layer_scale_init is not None
    return described


def _load_state(
    model: Model, weights: SourceWeights, name: str, is_same_head: bool, ignore_keys: tuple[str, ...]
) -> LoadReport:
    """Puts the weights into the model; nothing but the head may be missing or left over."""
    given = dict(weights.tensors)
    encoder = get_encoder(model)
    prefix = "encoder." if isinstance(model, EncoderDecoder) else ""
    resized = _resize(given, prefix, ViTConfig(**weights.fields), encoder.config)
    wanted = _pruned_alike(model, given).state_dict()
    heads = [each for each in wanted if each.startswith(("head.", "head_dist."))]
    initialized = heads if not is_same_head or not any(each in given for each in heads) else []
    useless = (*LEFT_OVER, *ignore_keys)
    dropped = [each for each in given if each in initialized or (each not in wanted and each.startswith(useless))]
    kept = {each: tensor for each, tensor in given.items() if each not in dropped}
    _check_fit(name, kept, {each: tensor for each, tensor in wanted.items() if each not in initialized})
    model.load_state_dict(kept, strict=False)  # removes heads likewise
    return LoadReport(
        source=name,
        loaded=len(kept) - len(resized),
        resized=tuple(resized),
        initialized=tuple(initialized),
        unexpected=tuple(each for each in dropped if each not in initialized),
        assumed=weights.assumed,
    )


def _preprocessing(weights: SourceWeights, config: ViTConfig) -> Preprocessing | None:
    """The source's, at the model's size; none where the channels are others."""
    preprocessing = weights.preprocessing
    if preprocessing is None or len(preprocessing.mean) != config.in_channels:
        return None
    return replace(preprocessing, image_size=config.layout.image_size)


def _pruned_alike(model: Model, weights: dict[str, Tensor]) -> Model:
    """A copy of the model without the heads that the model of the weights has lost; itself where it has them all."""
    if not any(name.endswith(".head_index") for name in weights):
        return model
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and f"{name}.head_index" in weights:
            module.keep_heads(weights[f"{name}.head_index"].tolist())
    return model


def _check_fit(source: str, given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    faults = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    faults += [f"{name} is left over" for name in given.keys() - wanted.keys()]
    faults += [
        f"{name} is {tuple(given[name].shape)}, the model's is {tuple(wanted[name].shape)}"
        for name in wanted.keys() & given.keys()
        if given[name].shape != wanted[name].shape
    ]
    if faults:
        raise UserError(f"The weights of {source} do not fit the model: {'; '.join(sorted(faults)[:5])}.")
