"""Vision Transformers of other packages, read as ours and written as theirs: one module for each package.

What another package does differently and means the same is folded into the tensors: joined projections are taken apart,
a position of a register is added to the register, a bias that is not there is zero. What has no counterpart is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitmha.weights.convert.canonical import (
    TOLD,
    Table,
    Weights,
    canonical,
    guess_grid,
    read_shapes,
    renamed,
    without_wrappers,
)
from vitmha.weights.convert.hugging_face import HUGGING_FACE, from_hugging_face
from vitmha.weights.convert.timm import TIMM, from_timm
from vitmha.weights.convert.torchvision import TORCHVISION, from_torchvision

TABLES: Mapping[str, Table] = {"timm": TIMM, "torchvision": TORCHVISION, "transformers": HUGGING_FACE}
# A name by which the tensors of a package are known.
SIGNS = {
    "timm": r"^blocks\.(0\.)?0\.attn\.qkv\.weight$",
    "torchvision": r"^conv_proj\.weight$",
    "transformers": r"embeddings\.patch_embeddings\.projection\.weight$",
}


def from_module(module: nn.Module) -> Weights:
    """A model object of timm, torchvision or Hugging Face.

    Raises:
        ValueError: Another kind of object, or a part that has no counterpart here.
    """
    package = type(module).__module__.split(".")[0]
    if package == "timm":
        return from_timm(module)
    if package == "torchvision":
        return from_torchvision(module)
    if package == "transformers":
        return from_hugging_face(module.config.to_dict(), module.state_dict())  # type: ignore[union-attr, operator]
    raise ValueError(f"Expected a model of timm, torchvision or transformers, got {type(module).__name__}.")


def package_of(tensors: Mapping[str, Tensor]) -> str:
    """By whose names the tensors go, without wrappers: those of "timm" (which DeiT and DINO share), "torchvision" or
    "transformers".

    Raises:
        ValueError: Nobody's.
    """
    if "blocks.0.attn.q_proj.weight" in tensors:
        raise ValueError("These are vitmha's own, without the config.json that describes them: give the whole folder.")
    for package, sign in SIGNS.items():
        if any(re.search(sign, name) for name in tensors):
            return package
    raise ValueError(f"The names are of no known Vision Transformer: {', '.join(list(tensors)[:4])}, ...")


def from_tensors(tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> Weights:
    """The tensors of a bare file of timm, DeiT, DINO, torchvision or Hugging Face.

    Args:
        tensors: By the file's names.
        told: Fields of `ViTConfig` that the user gives; shapes do not tell the number of heads, LayerNorm's eps, the
            kind of GELU and what the head reads.

    Raises:
        ValueError: Unknown names, or something that must be told.
    """
    tensors = without_wrappers(tensors)
    ours = renamed(tensors, TABLES[package_of(tensors)])
    fields = read_shapes(ours)
    missing = {name: f"{name}={value}" for name, value in TOLD.items() if name not in fields and name not in told}
    if missing:
        raise ValueError(
            "Tensors alone do not tell all of an architecture: say "
            + ", ".join(missing.values())
            + (f" ({fields['embed_dim'] // 64} heads would be 64 wide)" if "num_heads" in missing else "")
            + " or whatever else it was trained with; `vitmha convert FILE FOLDER --set num_heads=... --set mean=...` "
            "makes a folder that tells it to all commands."
        )
    said = {name: told[name] for name in TOLD if name in told and name not in fields}
    fields |= {name: told[name] for name in TOLD if name in told}
    fields["image_size"], guesses = guess_grid(ours, fields, told)
    guesses += [f"{name} {value}" for name, value in said.items()]
    if fields["pool"] == "mean":
        fields |= {"class_token": "cls_token" in ours, "norm_pooled": any(n.startswith("fc_norm.") for n in tensors)}
    return Weights(fields, canonical(ours, fields), guesses=tuple(guesses))
