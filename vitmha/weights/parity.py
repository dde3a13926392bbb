"""A converted model beside the one that its own package builds of the same weights."""

import json
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
from vitmha.weights.save import save_model
from vitmha.weights.sources import FILES, read_state_dict

LIMIT = 1e-4


@torch.no_grad()
def compare(ours: Model, source: str) -> None:
    """Prints the largest differences on random pictures between our model and its original.

    Raises:
        UserError: There is no original, or a difference passes the limit.
    """
    if isinstance(ours, EncoderDecoder):
        raise UserError("--check compares with models of other packages; none of them reads sequences.")
    theirs, size = original(source, ours), (ours.config.in_channels, *ours.layout.image_size)
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    logits, maps = _seen(ours, images)
    expected, expected_maps = _seen(theirs, images)
    if logits.shape != expected.shape:
        raise UserError(f"{source} gives {tuple(expected.shape[1:])} outputs, the converted model {logits.shape[1:]}.")
    differences = {
        "logits": (logits - expected).abs().max().item(),
        "attention maps": max((a - b).abs().max().item() for a, b in zip(maps, expected_maps, strict=True)),
    }
    hints = ", ".join(f"{what} by {difference:.1e}" for what, difference in differences.items())
    print(f"{source}: on 2 random pictures its own package and the converted model differ in {hints} at most")
    if not all(difference <= LIMIT for difference in differences.values()):  # NaN is no agreement
        raise UserError(f"{source}: the difference passes {LIMIT}; what was converted is not the same.")


def _seen(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    with record_attention(model, queries="all") as recorded:
        output = model(images)
    if hasattr(output, "last_hidden_state"):  # of transformers' models without a head
        return output.last_hidden_state[:, 0], recorded.maps
    return getattr(output, "logits", output), recorded.maps


def original(source: str, ours: VisionTransformer) -> nn.Module:
    """A model as its own package builds it.

    Args:
        source: As `load_model` takes it.
        ours: What it was read as.

    Raises:
        UserError: The source is no model of another package, or its package is not installed.
    """
    path = folder_of(source)
    source = str(path) if path.exists() else source
    place, _, name = source.partition(":")
    config = path / "config.json"
    described = json.loads(config.read_text()) if config.is_file() else {}
    if path.is_file() and path.suffix in FILES and path.suffix != ".ckpt":
        return _around_file(path, ours)
    if place == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights="DEFAULT").eval()
    if place == "timm" or isinstance(described.get("architecture"), str):
        import timm

        return timm.create_model(name if place == "timm" else f"local-dir:{source}", pretrained=True).eval()
    if place == "hf" or "model_type" in described:
        try:
            from transformers import AutoModel, AutoModelForImageClassification
        except ImportError:
            raise UserError("--check builds the model with transformers, which is not installed.") from None
        repo, _, revision = name.partition("@")
        where = (repo, revision or "main") if place == "hf" else (source, "main")
        # Without a head of its own, transformers would add a random one.
        kind = AutoModelForImageClassification if ours.config.num_classes else AutoModel
        return kind.from_pretrained(where[0], revision=where[1]).eval()
    raise UserError(f"--check: {source} is no model of another package that could be built and compared.")


def _around_file(path: Path, ours: VisionTransformer) -> nn.Module:
    """Its package's model around the tensors of a bare file; of the architecture that was told, right or wrong.

    Of the names that packages have had in time, those of today: timm's, torchvision's and Hugging Face's.
    """
    tensors = {} if path.suffix == ".npz" else read_state_dict(path)
    package = package_of(tensors) if tensors else "timm"
    if package == "torchvision":
        module = _torchvision_like(ours)
    else:
        with TemporaryDirectory() as folder:
            save_model(ours, folder, "timm" if package == "timm" else "hugging_face")
            module = original(folder, ours)
    if path.suffix == ".npz":
        cast(Any, module).load_pretrained(str(path))  # timm's own reader of Google's files
        return module
    try:
        missing = module.load_state_dict(tensors, strict=False).missing_keys
    except RuntimeError as error:  # other shapes
        raise UserError(f"--check: {' '.join(str(error).split())[:400]}") from None
    if missing:
        raise UserError(f"--check: {path} lacks {', '.join(missing[:4])} of {package}'s {type(module).__name__}.")
    return module


def _torchvision_like(ours: VisionTransformer) -> nn.Module:
    from torchvision.models import VisionTransformer as Theirs

    config = ours.config
    return Theirs(
        image_size=ours.layout.image_size[0],
        patch_size=ours.layout.patch_size[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
        norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
    ).eval()


def folder_of(source: str) -> Path:
    """The folder that a model.safetensors beside its config.json stands for, or the path itself."""
    path = Path(source)
    is_whole = path.name == "model.safetensors" and (path.parent / "config.json").is_file()
    return path.parent if is_whole else path
