"""Conversion of Vision Transformers from and to other packages, one module per package.

Equivalent differences are resolved in the tensors: joined projections are split, the position embedding of a register
is added to the register, a missing bias becomes zero. What cannot be represented is refused by name.
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
# A name that only the tensors of this package have.
KEY_PATTERNS = {
    "timm": r"^blocks\.(0\.)?0\.attn\.qkv\.weight$",
    "torchvision": r"^conv_proj\.weight$",
    "transformers": r"embeddings\.patch_embeddings\.projection\.weight$",
}


def from_module(module: nn.Module) -> SourceWeights:
    """Reads a model object of timm, torchvision or Hugging Face.

    Raises:
        UserError: Another kind of object, or a part that `VisionTransformer` cannot represent.
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
    """The package whose names the tensors have: "timm" (also DeiT and DINO), "torchvision" or "transformers".

    Raises:
        UserError: Unknown names.
    """
    if "blocks.0.attn.q_proj.weight" in tensors:
        raise UserError("These are tensors of vitmha without their config.json: give the model directory.")
    for package, sign in KEY_PATTERNS.items():
        if any(re.search(sign, name) for name in tensors):
            return package
    raise UserError(
        f"The tensor names are not those of a known Vision Transformer: {', '.join(list(tensors)[:4])}, ..."
    )


def from_tensors(tensors: Mapping[str, Tensor], hints: Mapping[str, Any]) -> SourceWeights:
    """Reads the tensors of a bare file of timm, DeiT, DINO, torchvision or Hugging Face.

    Args:
        tensors: With the names of the file.
        hints: Fields of `ViTConfig` given by the user. The number of heads, LayerNorm's eps, the variant of GELU and
            the pooling cannot be inferred from shapes.

    Raises:
        UserError: Unknown names, or a field that must be given.
    """
    tensors = strip_prefixes(tensors)
    converted = renamed(tensors, TABLES[package_of(tensors)])
    fields = read_shapes(converted)
    missing = {
        name: f"{name}={value}" for name, value in NOT_IN_SHAPES.items() if name not in fields and name not in hints
    }
    if missing:
        raise UserError(
            "A bare file does not contain the whole architecture: give "
            + ", ".join(missing.values())
            + (f" ({fields['embed_dim'] // 64} heads of width 64)" if "num_heads" in missing else "")
            + " or the values that it was trained with. `vitmha convert --model FILE --output DIR --override "
            "num_heads=... --override mean=...` stores them for all commands."
        )
    given = {name: hints[name] for name in NOT_IN_SHAPES if name in hints and name not in fields}
    fields |= {name: hints[name] for name in NOT_IN_SHAPES if name in hints}
    fields["image_size"], assumed = infer_image_size(converted, fields, hints)
    assumed += [f"{name} {value}" for name, value in given.items()]
    if fields["pool"] == "mean":
        fields |= {"class_token": "cls_token" in converted, "fc_norm": any(n.startswith("fc_norm.") for n in tensors)}
    return SourceWeights(fields, to_vitmha_names(converted, fields), assumed=tuple(assumed))
