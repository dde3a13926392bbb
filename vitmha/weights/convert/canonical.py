"""The common form of all conversions: fields of `ViTConfig`, and tensors with the names of `VisionTransformer`."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import pair
from vitmha.models.layers import ACTIVATIONS
from vitmha.models.vit import VisionTransformer

Tensors = dict[str, Tensor]
Fields = dict[str, Any]
# From another package's names to vitmha's; the patterns are replaced anywhere in a name, in this order.
Table = Mapping[str, str | Callable[[re.Match[str]], str]]

# Fields that cannot be inferred from shapes, with a common value of each.
NOT_IN_SHAPES = {"num_heads": "...", "norm_eps": "1e-6", "mlp": "gelu", "pool": "cls"}


@dataclass(frozen=True)
class SourceWeights:
    """A model as read from any source."""

    fields: Fields
    """The fields of `ViTConfig` that the source contains."""
    tensors: Tensors
    """With the names of `VisionTransformer`."""
    class_names: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    decoder: Fields | None = None
    """The fields of `DecoderConfig`, for an encoder-decoder."""
    assumed: tuple[str, ...] = ()
    """What the source does not contain and was assumed, for messages."""


def to_vitmha_names(tensors: Tensors, fields: Fields) -> Tensors:
    """Brings tensors into the form of `VisionTransformer`, and adds the fields that can be inferred from them.

    Args:
        tensors: With vitmha's names, but with joined projections and position embeddings as the package has them.
        fields: Of `ViTConfig`, with sizes as pairs; mlp_dim, qkv_bias, qk_norm and layer_scale_init are added.

    Returns:
        The tensors as `VisionTransformer` names and shapes them.
    """
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    _split(tensors, ".attn.qkv.", "qkv")
    _split(tensors, ".attn.kv.", "kv")
    for name in [name for name in tensors if name.endswith((".fc1_g.weight", ".gate_proj.weight"))]:
        _join_gate(tensors, *name.rsplit(".", 2)[:2])
    biased = {_kind(name) for name in tensors if name.endswith(".bias")}
    for name in [name for name in tensors if name.endswith(".weight")]:
        is_without = (
            _kind(name) not in biased
        )  # none of its kind has one; a single missing bias is an error of the load
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            block = name.rsplit(".", 2)[0]  # some packages have biases of queries and values only
            is_without = is_without and any(f"{block}.{part}_proj.bias" in tensors for part in "qkv")
        elif name == "patch_embed.proj.weight":
            is_without = is_without and "norm_pre.weight" in tensors  # whose bias replaces that of the patches
        if is_without and not name.startswith("head"):
            tensors[name.removesuffix("weight") + "bias"] = tensors[name].new_zeros(len(tensors[name]))
    fc2 = tensors["blocks.0.mlp.fc2.weight"]
    fields["mlp_dim"] = fc2.shape[1]
    fields["qkv_bias"] = "blocks.0.attn.q_proj.bias" in tensors
    fields["qk_norm"] = "blocks.0.attn.q_norm.weight" in tensors
    fields["layer_scale_init"] = 1e-5 if "blocks.0.ls1.gamma" in tensors else None
    if "attn_pool.probe" in tensors:
        tensors["attn_pool.probe"] = tensors["attn_pool.probe"].reshape(1, 1, -1)
    _place_prefix(tensors, fields)
    return tensors


def _kind(name: str) -> str:
    """The name of a layer without its block index; all norms of the full width count as one kind."""
    module = re.sub(r"^blocks\.\d+\.", "", name.rsplit(".", 1)[0])
    return "norm" if module in ("norm", "norm1", "norm2", "norm_pre") else module


def _split(tensors: Tensors, joined: str, parts: str) -> None:
    """Splits qkv into q_proj, k_proj and v_proj."""
    for name in [name for name in tensors if joined in name]:
        for part, tensor in zip(parts, tensors.pop(name).chunk(len(parts)), strict=True):
            tensors[name.replace(joined, f".attn.{part}_proj.")] = tensor.clone()


def _join_gate(tensors: Tensors, mlp: str, gate: str) -> None:
    up = {"fc1_g": "fc1_x", "gate_proj": "up_proj"}[gate]
    for part in ("weight", "bias"):
        if f"{mlp}.{gate}.{part}" in tensors:
            halves = [tensors.pop(f"{mlp}.{half}.{part}") for half in (gate, up)]
            tensors[f"{mlp}.fc1.{part}"] = torch.cat(halves)


def _place_prefix(tensors: Tensors, fields: Fields) -> None:
    """Keeps the positions of class token, distillation token and patches; adds those of registers to the registers."""
    positions = tensors.get("pos_embed")
    if positions is None:
        return
    positions = positions.reshape(1, -1, positions.shape[-1])
    placed = sum(name in tensors for name in ("cls_token", "dist_token"))
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    (height, width), (rows, columns) = fields["image_size"], fields["patch_size"]
    prefix = positions.shape[1] - (height // rows) * (width // columns)
    if prefix == placed + registers and registers:
        tensors["reg_token"] = tensors["reg_token"] + positions[:, placed:prefix]
        positions = torch.cat([positions[:, :placed], positions[:, prefix:]], dim=1)
    elif prefix == 0 and placed:
        positions = torch.cat([positions.new_zeros(1, placed, positions.shape[-1]), positions], dim=1)
    tensors["pos_embed"] = positions


def read_shapes(tensors: Mapping[str, Tensor]) -> Fields:
    """Infers fields from the shapes of tensors with vitmha's names, whose q, k and v may still be joined."""
    patch, mlp = tensors["patch_embed.proj.weight"], "blocks.0.mlp"
    blocks = {int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))}
    fields: Fields = {
        "patch_size": tuple(patch.shape[2:]),
        "in_channels": patch.shape[1],
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "embed_dim": len(patch),
        "depth": max(blocks) + 1,
        "distillation_token": "dist_token" in tensors,
        "num_registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "pre_norm": "norm_pre.weight" in tensors,
    }
    if (
        f"{mlp}.fc1_g.weight" in tensors
        or len(tensors[f"{mlp}.fc1.weight"]) == 2 * tensors[f"{mlp}.fc2.weight"].shape[1]
    ):
        fields["mlp"] = "swiglu"
    if "attn_pool.probe" in tensors:
        fields["pool"] = "attention"
    elif "cls_token" not in tensors:
        fields["pool"] = "mean"
    elif "head.weight" in tensors and tensors["head.weight"].shape[1] == 2 * len(patch):
        fields["pool"] = "cls_mean"
    return fields


def infer_image_size(tensors: Tensors, fields: Fields, hints: Mapping[str, Any]) -> tuple[tuple[int, int], list[str]]:
    """Infers the image size of a bare file: a square grid if the number of positions is a square, else the user's.

    There are positions for class token, distillation token and patches; in DeiT III's files only for the patches.

    Raises:
        UserError: Not a square grid, and no image_size that matches.
    """
    prefix = sum(tensors[name].shape[1] for name in ("cls_token", "dist_token") if name in tensors)
    count = tensors["pos_embed"].shape[1]
    (height, width), image_size = fields["patch_size"], hints.get("image_size")
    side = math.isqrt(count - prefix)
    if side**2 == count - prefix:
        return (side * height, side * width), [f"a square grid of {side} x {side} patches"]
    if image_size is not None:
        rows, columns = (side // patch for side, patch in zip(pair(image_size), (height, width), strict=True))
        if rows * columns in (count, count - prefix):
            return pair(image_size), [f"a grid of {rows} x {columns} patches"]
    side = math.isqrt(count)
    if side**2 == count and "blocks.0.ls1.gamma" in tensors:  # DeiT III has layer scale
        return (side * height, side * width), [
            f"a square grid of {side} x {side} patches, which have the only positions"
        ]
    raise UserError(f"{count} positions are not a square grid: give the image_size that the model was trained with.")


def activation_of(mlp: Any) -> str:
    """The activation of an MLP of timm or torchvision, identified by its values."""
    activation = getattr(mlp, "act", None) or mlp[1]
    probe = torch.linspace(-4, 4, 97)
    with torch.no_grad():
        values = activation(probe)
    is_gated = type(mlp).__name__ in ("GluMlp", "SwiGLU")
    if is_gated and getattr(mlp, "gate_last", False):
        raise UserError("An MLP whose second half is the gate is not supported.")
    for name, known in ACTIVATIONS.items():
        if (name == "swiglu") == is_gated and torch.allclose(values, known(probe), rtol=0, atol=1e-6):
            return name
    raise UserError(f"The activation {activation} of the MLP is not supported.")


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names with the class index added to those that occur more than once, such as ImageNet's two cranes."""
    counts = Counter(names)
    return tuple(f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names))


def strip_prefixes(tensors: Mapping[str, Tensor]) -> Tensors:
    """Removes the prefixes that torch.compile and wrappers add to names, however they are nested.

    `module.` and `_orig_mod.` are removed anywhere, `backbone.` at the start, `model.` if all names start with it.
    """
    plain = {re.sub(r"(^|(?<=\.))(module|_orig_mod)\.", "", name): tensor for name, tensor in tensors.items()}
    while plain and all(name.startswith("model.") for name in plain):
        plain = {name.removeprefix("model."): tensor for name, tensor in plain.items()}
    return {name.removeprefix("backbone."): tensor for name, tensor in plain.items()}


def new_names(names: Sequence[str] | Mapping[str, Any], table: Table) -> dict[str, str]:
    """Maps old names to new ones."""
    renamed = {}
    for old in names:
        new = old
        for pattern, replacement in table.items():
            new = re.sub(pattern, replacement, new)
        renamed[old] = new
    return renamed


def renamed(tensors: Mapping[str, Tensor], table: Table) -> Tensors:
    return {new: tensors[old] for old, new in new_names(tensors, table).items()}


def placed_positions(model: VisionTransformer) -> Tensor:
    """Position embeddings as other packages store them, (1, tokens, embed_dim); zeros for prefix tokens without one."""
    prefix, dim = model.layout.num_prefix_tokens, model.config.embed_dim
    positions = torch.zeros(1, model.layout.num_tokens, dim)
    if model.pos_embed is not None:
        placed = model.layout.distillation.stop
        positions[:, :placed] = model.pos_embed[:, :placed]
        positions[:, prefix:] = model.pos_embed[:, placed:]
    if model.sincos2d is not None:
        positions[:, prefix:] = model.sincos2d
    return positions.detach()


def check_representable(package: str, parts: Mapping[str, bool]) -> None:
    """Raises a `UserError` that names the parts of an architecture that another package cannot represent."""
    found = [part for part, is_present in parts.items() if is_present]
    if found:
        raise UserError(f"{package} cannot represent {' and '.join(found)}.")


def unsupported_parts(model: VisionTransformer) -> dict[str, bool]:
    """The parts of a model that neither timm's nor Hugging Face's plain Vision Transformers have."""
    config = model.config
    return {
        f"pos_embed {config.pos_embed!r}": config.pos_embed.startswith("rope"),
        "grouped key/value heads": config.num_kv_heads not in (None, config.num_heads),
        "a head_dim other than embed_dim / num_heads": (config.head_dim or 0) * config.num_heads
        not in (0, config.embed_dim),
        "pruned heads": any(name.endswith("head_index") for name in model.state_dict()),
    }
