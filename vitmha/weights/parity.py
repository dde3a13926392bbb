"""Parity of a model with the one that its own package builds from the same weights."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.inspection import record_attention
from vitmha.models.encoder_decoder import EncoderDecoder, Model
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert import package_of
from vitmha.weights.convert.canonical import strip_prefixes
from vitmha.weights.files import FILE_SUFFIXES, first_line, read_file, read_json, tensors_in
from vitmha.weights.packages import build_timm, build_timm_directory, build_torchvision
from vitmha.weights.save import save_model
from vitmha.weights.sources import model_directory

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Largest absolute differences between a model and its reference on random images."""

    logits: float
    attention_maps: float
    """Over all rows of all heads of all layers."""


@torch.no_grad()
def check_parity(model: Model, source: str) -> Parity:
    """Compares a model with the one that its own package builds from the same weights, on two random images.

    Args:
        model: As `load_model` loaded it from `source`.
        source: See `load_model`.

    Raises:
        UserError: No other package can build the model, or a difference exceeds `TOLERANCE`.

    Example:
        >>> check_parity(load_model("timm:vit_tiny_patch16_224"), "timm:vit_tiny_patch16_224")  # doctest: +SKIP
    """
    if isinstance(model, EncoderDecoder):
        raise UserError("verify compares with models of other packages, none of which is an encoder-decoder.")
    reference, shape = build_reference(source, model), (model.config.in_channels, *model.layout.image_size)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    logits, maps = _outputs(model, images)
    expected, expected_maps = _outputs(reference, images)
    if logits.shape != expected.shape:
        raise UserError(f"{source} has {tuple(expected.shape[1:])} outputs, the converted model {logits.shape[1:]}.")
    parity = Parity(
        logits=(logits - expected).abs().max().item(),
        attention_maps=max((a - b).abs().max().item() for a, b in zip(maps, expected_maps, strict=True)),
    )
    if not (parity.logits <= TOLERANCE and parity.attention_maps <= TOLERANCE):  # NaN is not equal
        raise UserError(
            f"{source}: the converted model differs from the reference by {parity.logits:.1e} in logits and "
            f"{parity.attention_maps:.1e} in attention maps, more than {TOLERANCE}."
        )
    return parity


def _outputs(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    with record_attention(model, queries="all") as recorded:
        output = model(images)
    if hasattr(output, "last_hidden_state"):  # transformers' models without a head
        return output.last_hidden_state[:, 0], recorded.maps
    return getattr(output, "logits", output), recorded.maps


def build_reference(source: str, model: VisionTransformer) -> nn.Module:
    """Builds a model with its own package.

    Args:
        source: See `load_model`.
        model: As vitmha loaded it.

    Raises:
        UserError: The source is not of another package, or that package is not installed.
    """
    path = model_directory(source)
    hub, _, name = source.partition(":")
    if path.is_file() and path.suffix in FILE_SUFFIXES and path.suffix != ".ckpt":
        return _build_from_file(path, model)
    if hub == "torchvision":
        return build_torchvision(name)[0]
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if isinstance(config.get("architecture"), str):
        return build_timm_directory(path)
    if "model_type" in config:
        return _build_hugging_face(path, model)
    if hub == "timm":
        return build_timm(name)
    raise UserError(f"verify: {source} is not a model of another package that could be built for comparison.")


def _build_hugging_face(directory: Path, model: VisionTransformer) -> nn.Module:
    try:
        from transformers import AutoModel, AutoModelForImageClassification
    except ImportError:
        raise UserError("verify needs transformers to build the reference: pip install transformers.") from None
    # For a model without a head, transformers would add a random one.
    auto = AutoModelForImageClassification if model.config.num_classes else AutoModel
    try:  # no version of transformers reads a pickle then, or runs the code of a repository
        return auto.from_pretrained(directory, use_safetensors=True, trust_remote_code=False).eval()
    except OSError as error:
        raise UserError(f"verify: {directory}: {first_line(error)}") from None


def _build_from_file(path: Path, model: VisionTransformer) -> nn.Module:
    """The model of its own package with the tensors of a bare file, of the architecture that the user gave.

    Of the names that packages have used over time, today's are supported: those of timm, torchvision and Hugging Face.
    """
    tensors = {} if path.suffix == ".npz" else strip_prefixes(tensors_in(read_file(path), path))
    package = package_of(tensors) if tensors else "timm"
    if package == "torchvision":
        reference = _build_torchvision(model)
    else:
        with TemporaryDirectory() as directory:
            save_model(model, directory, "timm" if package == "timm" else "hf")
            reference = build_reference(directory, model)
    if path.suffix == ".npz":
        cast(Any, reference).load_pretrained(str(path))  # timm's own reader of Google's files
        return reference
    try:
        missing = reference.load_state_dict(tensors, strict=False).missing_keys
    except RuntimeError as error:  # other shapes
        raise UserError(f"verify: {' '.join(str(error).split())[:400]}") from None
    if missing:
        raise UserError(f"verify: {path} lacks {', '.join(missing[:4])} of {package}'s {type(reference).__name__}.")
    return reference


def _build_torchvision(model: VisionTransformer) -> nn.Module:
    from torchvision.models import VisionTransformer as TorchvisionTransformer

    config = model.config
    return TorchvisionTransformer(
        image_size=model.layout.image_size[0],
        patch_size=model.layout.patch_size[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
        norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
    ).eval()
