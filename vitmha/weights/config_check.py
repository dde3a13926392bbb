"""Checks of what a source says about its model, before anything is built: types, class names and sizes."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

from vitmha.errors import UserError
from vitmha.models.config import ViTConfig, pair
from vitmha.models.encoder_decoder import DecoderConfig
from vitmha.weights.convert.canonical import SourceWeights
from vitmha.weights.files import shorten

# Of position embeddings that are computed, so that no tensor of the file limits them.
MAX_PATCHES = 2**20
FC2 = "blocks.0.mlp.fc2.weight"
TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}


def check_source(weights: SourceWeights) -> None:
    """Checks the architecture, the class names and the preprocessing of a source, and compares them with its tensors.

    Raises:
        UserError: A value of another type or out of its range, or one that the tensors contradict.
    """
    check_types(weights.fields, ViTConfig)
    config = ViTConfig(**weights.fields)
    check_class_names(weights.class_names, config.num_classes)
    if weights.preprocessing is not None:
        check_types(vars(weights.preprocessing), type(weights.preprocessing))
    decoder = None
    if weights.decoder is not None:
        decoder = DecoderConfig(**weights.decoder)
    if config.pos_embed != "learned" and config.layout.num_patches > MAX_PATCHES:
        raise UserError(f"image_size {config.image_size} is too large: it has {config.layout.num_patches} patches.")
    if weights.tensors:
        _check_sizes(config, decoder, weights.tensors)


def check_types(values: Any, kind: type) -> None:
    """Checks that a mapping holds fields of a dataclass, each of the annotated type; lists must be tuples already.

    Raises:
        UserError: An unknown field, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"expected an object with the fields of {kind.__name__}, got {shorten(values)}.")
    annotations = {field.name: field.type for field in fields(kind)}
    for name, value in values.items():
        if name not in annotations:
            raise UserError(f"unknown field {name!r}.")
        if not _is_of_type(value, annotations[name]):
            raise UserError(f"{name} must be {_describe(annotations[name])}, got {_as_json(value)}.")


def check_class_names(names: Any, num_classes: int) -> None:
    """Checks that the class names are None, or distinct strings, one for each class.

    Raises:
        UserError: They are something else.
    """
    if names is None:
        return
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"class_names must be a list of strings or null, got {_as_json(names)}.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"class_names must differ from each other, but {shorten(repeated[0])} is repeated.")
    if len(names) != num_classes:
        raise UserError(f"class_names has {len(names)} names, but num_classes is {num_classes}.")


def _check_sizes(config: ViTConfig, decoder: DecoderConfig | None, tensors: Mapping[str, Tensor]) -> None:
    """Compares sizes with those of the tensors; whether each tensor fits is left to the load."""
    encoder = tensors
    if decoder is not None:
        encoder = {name.removeprefix("encoder."): each for name, each in tensors.items() if name.startswith("encoder.")}
        _compare(
            {
                "depth of the decoder": (decoder.depth, _count_blocks(tensors)),
                "max_length of the decoder": (decoder.max_length, _shape(tensors, "pos_embed", 3)[1]),
                "mlp_dim of the decoder": (decoder.mlp_dim or 4 * config.embed_dim, _shape(tensors, FC2, 2)[1]),
                "num_classes": (config.num_classes, _shape(tensors, "head.weight", 2)[0] - 1),  # and the end token
            }
        )
    elif config.num_classes or "head.weight" in tensors:
        _compare({"num_classes": (config.num_classes, _shape(tensors, "head.weight", 2)[0])})
    patch, registers = _shape(encoder, "patch_embed.proj.weight", 4), encoder.get("reg_token")
    _compare(
        {
            "depth": (config.depth, _count_blocks(encoder)),
            "embed_dim": (config.embed_dim, patch[0]),
            "in_channels": (config.in_channels, patch[1]),
            "patch_size": (pair(config.patch_size), patch[2:]),
            "mlp_dim": (config.mlp_dim or 4 * config.embed_dim, _shape(encoder, FC2, 2)[1]),
            "num_registers": (config.num_registers, 0 if registers is None else registers.numel() // patch[0]),
        }
    )
    head_dim = config.head_dim or config.embed_dim // config.num_heads
    for i in range(config.depth):
        kept = encoder.get(f"blocks.{i}.attn.head_index")  # of pruned attention
        heads = config.num_heads if kept is None else len(kept)
        rows = _shape(encoder, f"blocks.{i}.attn.q_proj.weight", 2)[0]
        _compare({"num_heads * head_dim": (heads * head_dim, rows)})
    if config.pos_embed == "learned":
        prefix, count = config.layout.distillation.stop, _shape(encoder, "pos_embed", 3)[1]
        _compare({"the number of patches of image_size": (config.layout.num_patches, count - prefix)})


def _compare(sizes: Mapping[str, tuple[object, object]]) -> None:
    differences = [f"{name} is {shorten(a)}, that of the tensors {b}" for name, (a, b) in sizes.items() if a != b]
    if differences:
        raise UserError(f"{'; '.join(differences)}.")


def _shape(tensors: Mapping[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    if name not in tensors:
        raise UserError(f"{name} is missing.")
    if tensors[name].ndim != ndim:
        raise UserError(f"{name} has {tensors[name].ndim} axes, expected {ndim}.")
    return tuple(tensors[name].shape)


def _count_blocks(tensors: Mapping[str, Tensor]) -> int:
    return len({found[1] for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))})


def _is_of_type(value: Any, annotation: Any) -> bool:
    kinds = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return any(_is_of_type(value, kind) for kind in kinds)
    if get_origin(annotation) is Literal:
        return isinstance(value, str) and value in kinds
    if get_origin(annotation) is tuple:
        kinds = kinds[:1] * len(value) if isinstance(value, tuple) and kinds[-1] is Ellipsis else kinds
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is_of_type, value, kinds))
    if get_origin(annotation) is dict:
        return isinstance(value, dict)
    if annotation is float:
        return type(value) in (int, float) and -1e300 < value < 1e300  # neither NaN nor infinite
    return type(value) is annotation  # a bool is not an integer


def _describe(annotation: Any) -> str:
    kinds = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_describe, kinds))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(kinds)}"
    if get_origin(annotation) is tuple:
        count = "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
        return f"a list of {count}{TYPES[kinds[0]].split()[-1]}s"
    return TYPES.get(annotation, "an object")


def _as_json(value: Any) -> str:
    return shorten(list(value) if isinstance(value, tuple) else value)
