"""Vision Transformers of other packages, read as ours and written as theirs: one module for each package.

What another package does differently and means the same is folded into the tensors: joined projections are taken apart,
a position of a register is added to the register, a bias that is not there is zero. What has no counterpart is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.weights.convert.canonical import (
    NOT_IN_SHAPES,
    SourceWeights,
    Table,
    infer_image_size,
    read_shapes,
    renamed,
    strip_prefixes,
    to_vitmha_names,
)
from vitmha.weights.convert.hugging_face import HUGGING_FACE, from_hugging_face
from vitmha.weights.convert.timm import TIMM, from_timm
from vitmha.weights.convert.torchvision import TORCHVISION, from_torchvision

TABLES: Mapping[str, Table] = {"timm": TIMM, "torchvision": TORCHVISION, "transformers": HUGGING_FACE}
# A name by which the tensors of a package are known.
KEY_PATTERNS = {
    "timm": r"^blocks\.(0\.)?0\.attn\.qkv\.weight$",
    "torchvision": r"^conv_proj\.weight$",
    "transformers": r"embeddings\.patch_embeddings\.projection\.weight$",
}


def from_module(module: nn.Module) -> SourceWeights:
    """A model object of timm, torchvision or Hugging Face.

    Raises:
        UserError: Another kind of object, or a part that has no counterpart here.
    """
    package = type(module).__module__.split(".")[0]
    if package == "timm":
        return from_timm(module)
    if package == "torchvision":
        return from_torchvision(module)
    if package == "transformers":
        return from_hugging_face(module.config.to_dict(), module.state_dict())  # type: ignore[union-attr, operator]
    raise UserError(f"Expected a model of timm, torchvision or transformers, got {type(module).__name__}.")


def package_of(tensors: Mapping[str, Tensor]) -> str:
    """By whose names the tensors go, without wrappers: those of "timm" (which DeiT and DINO share), "torchvision" or
    "transformers".

    Raises:
        UserError: Nobody's.
    """
    if "blocks.0.attn.q_proj.weight" in tensors:
        raise UserError("These are vitmha's own, without the config.json that describes them: give the whole folder.")
    for package, sign in KEY_PATTERNS.items():
        if any(re.search(sign, name) for name in tensors):
            return package
    raise UserError(f"The names are of no known Vision Transformer: {', '.join(list(tensors)[:4])}, ...")


def from_tensors(tensors: Mapping[str, Tensor], hints: Mapping[str, Any]) -> SourceWeights:
    """The tensors of a bare file of timm, DeiT, DINO, torchvision or Hugging Face.

    Args:
        tensors: By the file's names.
        hints: Fields of `ViTConfig` that the user gives; shapes do not tell the number of heads, LayerNorm's eps, the
            kind of GELU and what the head reads.

    Raises:
        UserError: Unknown names, or something that must be told.
    """
    tensors = strip_prefixes(tensors)
    ours = renamed(tensors, TABLES[package_of(tensors)])
    fields = read_shapes(ours)
    missing = {
        name: f"{name}={value}" for name, value in NOT_IN_SHAPES.items() if name not in fields and name not in hints
    }
    if missing:
        raise UserError(
            "Tensors alone do not tell all of an architecture: say "
            + ", ".join(missing.values())
            + (f" ({fields['embed_dim'] // 64} heads would be 64 wide)" if "num_heads" in missing else "")
            + " or whatever else it was trained with; `vitmha convert FILE FOLDER --set num_heads=... --set mean=...` "
            "makes a folder that tells it to all commands."
        )
    said = {name: hints[name] for name in NOT_IN_SHAPES if name in hints and name not in fields}
    fields |= {name: hints[name] for name in NOT_IN_SHAPES if name in hints}
    fields["image_size"], assumed = infer_image_size(ours, fields, hints)
    assumed += [f"{name} {value}" for name, value in said.items()]
    if fields["pool"] == "mean":
        fields |= {"class_token": "cls_token" in ours, "fc_norm": any(n.startswith("fc_norm.") for n in tensors)}
    return SourceWeights(fields, to_vitmha_names(ours, fields), assumed=tuple(assumed))
