"""torchvision's `VisionTransformer`."""

from typing import Any

from torch import nn

from vitmha.errors import UserError
from vitmha.models.config import pair
from vitmha.weights.convert.canonical import SourceWeights, Table, activation_of, renamed, to_vitmha_names

TORCHVISION: Table = {
    r"^conv_proj\.": "patch_embed.proj.",
    r"^class_token$": "cls_token",
    r"^encoder\.pos_embedding$": "pos_embed",
    r"^encoder\.layers\.encoder_layer_": "blocks.",
    r"\.ln_([12])\.": r".norm\1.",
    r"\.self_attention\.in_proj_": ".attn.qkv.",
    r"\.self_attention\.out_proj\.": ".attn.out_proj.",
    r"\.mlp\.(0|linear_1)\.": ".mlp.fc1.",
    r"\.mlp\.(3|linear_2)\.": ".mlp.fc2.",
    r"^encoder\.ln\.": "norm.",
    r"^heads\.head\.": "head.",
}


def from_torchvision(module: Any) -> SourceWeights:
    """Reads torchvision's `VisionTransformer`."""
    kind = type(module).__name__
    if kind != "VisionTransformer":
        raise UserError(f"torchvision's {kind} is not supported: only VisionTransformer is.")
    layers = module.encoder.layers
    parts = {
        "a convolutional stem": not isinstance(module.conv_proj, nn.Conv2d),
        "a head of two layers": len(module.heads) != 1,
        "norms other than LayerNorm": not isinstance(layers[0].ln_1, nn.LayerNorm),
    }
    found = [part for part, is_present in parts.items() if is_present]
    if found:
        raise UserError(f"torchvision's VisionTransformer has {' and '.join(found)}, which is not supported.")
    fields = {
        "image_size": pair(module.image_size),
        "patch_size": pair(module.patch_size),
        "in_channels": module.conv_proj.in_channels,
        "num_classes": module.num_classes,
        "embed_dim": module.hidden_dim,
        "depth": len(layers),
        "num_heads": layers[0].num_heads,
        "mlp": activation_of(layers[0].mlp),
        "norm_eps": layers[0].ln_1.eps,
    }
    return SourceWeights(fields, to_vitmha_names(renamed(module.state_dict(), TORCHVISION), fields))
