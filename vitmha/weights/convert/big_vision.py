"""Google's .npz files: those of vision_transformer (AugReg) and of big_vision."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitmha.errors import UserError
from vitmha.weights.convert.canonical import (
    SourceWeights,
    Table,
    infer_image_size,
    new_names,
    read_shapes,
    to_vitmha_names,
)

BIG_VISION: Table = {
    r"^embedding/": "patch_embed.proj.",
    r"^cls$": "cls_token",
    r"^(Transformer/posembed_input/)?pos_embedding$": "pos_embed",
    r"^Transformer/encoderblock_(\d+)/": r"blocks.\1.",
    r"LayerNorm_0/": "norm1.",
    r"LayerNorm_[12]/": "norm2.",
    r"MultiHeadDotProductAttention_[01]/(query|key|value)/": lambda found: f"attn.{found[1][0]}_proj.",
    r"MultiHeadDotProductAttention_[01]/out/": "attn.out_proj.",
    r"MlpBlock_[03]/Dense_0/": "mlp.fc1.",
    r"MlpBlock_[03]/Dense_1/": "mlp.fc2.",
    r"^Transformer/encoder_norm/": "norm.",
    r"^MAPHead_0/probe$": "attn_pool.probe",
    r"^MAPHead_0/norm1\.": "attn_pool.norm.",
    r"^MAPHead_0/": "attn_pool.",
    r"^head/": "head.",
    r"[./](kernel|scale)$": ".weight",
    r"/bias$": ".bias",
}


def from_big_vision(arrays: Mapping[str, np.ndarray], hints: Mapping[str, Any]) -> SourceWeights:
    """Reads the arrays of an .npz file of Google's vision_transformer (AugReg) or big_vision.

    Both use Flax, whose LayerNorm has an eps of 1e-6 and whose GELU is the tanh approximation. Of the user's hints only
    image_size is used, if the patch grid is not square.
    """
    towers = ("params/img/", "img/", "params/", "opt/target/")
    tower = next((tower for tower in towers if any(name.startswith(tower) for name in arrays)), "")
    flat = _unstacked({name.removeprefix(tower): array for name, array in arrays.items() if name.startswith(tower)})
    if "embedding/kernel" not in flat:
        raise UserError(
            f"The array names are not those of a known Vision Transformer: {', '.join(list(arrays)[:4])}, ..."
        )
    tensors = {name: _from_flax(old, torch.from_numpy(flat[old])) for old, name in new_names(flat, BIG_VISION).items()}
    fields = {"pool": "cls", **read_shapes(tensors), "mlp": "gelu_tanh", "norm_eps": 1e-6}
    fields["num_heads"] = next(array.shape[1] for old, array in flat.items() if old.endswith("/query/kernel"))
    fields["image_size"], assumed = infer_image_size(tensors, fields, hints)
    return SourceWeights(fields, to_vitmha_names(tensors, fields), assumed=tuple(assumed))


def _unstacked(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits the arrays of newer big_vision files, which hold a parameter of all blocks."""
    flat: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if "/encoderblock/" not in name:
            flat[name] = array
            continue
        for i, part in enumerate(array):
            flat[name.replace("/encoderblock/", f"/encoderblock_{i}/")] = part
    return flat


def _from_flax(old: str, tensor: Tensor) -> Tensor:
    """Permutes Flax's axes to PyTorch's: kernels are (height, width, in, out), projections (in, heads, head_dim)."""
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1)
    is_kernel = old.endswith("/kernel")
    if "/out/" in old and is_kernel:
        return tensor.flatten(0, 1).T
    if any(part in old for part in ("/query/", "/key/", "/value/")):
        return tensor.flatten(1).T if is_kernel else tensor.flatten()
    return tensor.T if is_kernel else tensor
