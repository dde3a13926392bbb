"""Hugging Face's ViT, DeiT and DINOv2, with registers or without."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import pair
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert.canonical import (
    SourceWeights,
    Table,
    Tensors,
    check_representable,
    distinct,
    placed_positions,
    renamed,
    to_vitmha_names,
    unsupported_parts,
)

# Pillow's resampling filters.
RESAMPLE: Mapping[int, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
HUGGING_FACE: Table = {
    r"^(vit|deit|dinov2|dinov2_with_registers)\.": "",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"^embeddings\.cls_token$": "cls_token",
    r"^embeddings\.distillation_token$": "dist_token",
    r"^embeddings\.register_tokens$": "reg_token",
    r"^embeddings\.mask_token$": "mask_token",
    r"^embeddings\.position_embeddings$": "pos_embed",
    r"^(encoder\.)?layers?\.": "blocks.",
    r"\.attention\.attention\.(query|key|value)\.": lambda found: f".attn.{found[1][0]}_proj.",
    r"\.attention\.output\.dense\.": ".attn.out_proj.",
    r"\.attention\.o_proj\.": ".attn.out_proj.",
    r"\.attention\.([qkv]_proj)\.": r".attn.\1.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.layer_scale([12])\.lambda1$": r".ls\1.gamma",
    r"\.(intermediate\.dense|mlp\.weights_in)\.": ".mlp.fc1.",
    r"\.(mlp\.weights_out|mlp\.down_proj)\.": ".mlp.fc2.",
    r"(blocks\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    r"^layernorm\.": "norm.",
    r"^(cls_)?classifier\.": "head.",
    r"^distillation_classifier\.": "head_dist.",
}


def from_hugging_face(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], processor: Mapping[str, Any] | None = None
) -> SourceWeights:
    """Reads ViT, DeiT and DINOv2, with registers or without, of Hugging Face's transformers.

    Args:
        config: The content of config.json.
        tensors: With the names of the file or of the module.
        processor: The content of preprocessor_config.json.
    """
    kind = config.get("model_type")
    if kind not in ("vit", "deit", "dinov2", "dinov2_with_registers"):
        raise UserError(f"Hugging Face's model_type {kind!r} is not supported.")
    is_dino = kind.startswith("dinov2")
    activations = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
    }
    is_gated = is_dino and config.get("use_swiglu_ffn", False)
    if not is_gated and config["hidden_act"] not in activations:
        raise UserError(f"Hugging Face's hidden_act {config['hidden_act']!r} is not supported.")
    converted = renamed(tensors, HUGGING_FACE)
    width, has_head = converted["cls_token"].shape[-1], "head.weight" in converted
    fields = {
        "image_size": pair(config["image_size"]),
        "patch_size": pair(config["patch_size"]),
        "in_channels": config["num_channels"],
        "num_classes": len(converted["head.weight"]) if has_head else 0,
        "embed_dim": width,
        "depth": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp": "swiglu" if is_gated else activations[config["hidden_act"]],
        "norm_eps": float(config["layer_norm_eps"]),
        "pool": "cls_mean" if has_head and converted["head.weight"].shape[1] == 2 * width else "cls",
        "distillation_token": "head_dist.weight" in converted,
        "num_registers": config.get("num_register_tokens", 0),
    }
    if kind == "deit" and not fields["distillation_token"]:  # the head does not use the token, so it is a register
        fields["num_registers"] = 1
        converted["reg_token"] = converted.pop("dist_token")
    names = config.get("id2label") or {}
    ordered = tuple(names[key] for key in sorted(names, key=int))
    is_named = len(ordered) == fields["num_classes"] and not all(re.fullmatch(r"LABEL_\d+", name) for name in ordered)
    return SourceWeights(
        fields,
        to_vitmha_names(converted, fields),
        distinct(ordered) if is_named else None,
        None if processor is None else read_processor(processor, fields["image_size"]),
    )


def read_processor(processor: Mapping[str, Any], image_size: tuple[int, int]) -> Preprocessing:
    """Reads Hugging Face's image processor: resized to the size itself, or by the shortest edge and then cropped."""
    if not math.isclose(processor.get("rescale_factor", 1 / 255), 1 / 255):
        raise UserError(f"rescale_factor must be 1/255, got {processor['rescale_factor']}.")
    resample = processor.get("resample", 2)
    if resample not in RESAMPLE:
        raise UserError(f"resample must be one of Pillow's filters 0 to 3, got {resample}.")
    size, crops = processor.get("size", {}), processor.get("do_center_crop", False)
    edge = size if isinstance(size, int) else size.get("shortest_edge")
    crop_pct, is_squashed = 1.0, not crops
    if crops:
        cut = processor.get("crop_size") or min(image_size)
        crop_pct = (cut if isinstance(cut, int) else cut["height"] if edge is None else min(cut.values())) / (
            edge or size["height"]
        )
        is_squashed = edge is None
    normal = processor.get("do_normalize", True)
    return Preprocessing(
        image_size=image_size,
        mean=tuple(processor["image_mean"]) if normal else (0.0,) * 3,
        std=tuple(processor["image_std"]) if normal else (1.0,) * 3,
        interpolation=RESAMPLE[resample],
        crop_pct=crop_pct,
        crop_mode="squash" if is_squashed else "center",
    )


def to_hugging_face(model: VisionTransformer) -> tuple[dict[str, Any], Tensors, dict[str, Any] | None]:
    """Converts a model to the format of Hugging Face, for `AutoModelForImageClassification.from_pretrained`.

    Returns:
        The content of config.json, the tensors of model.safetensors, and the content of preprocessor_config.json, or
        None if the model has no preprocessing.

    Raises:
        UserError: A part that Hugging Face's ViT, DeiT and DINOv2 do not have.
    """
    config, processor = hugging_face_config(model)
    return config, _hugging_face_tensors(model, config["model_type"]), processor


def hugging_face_config(model: VisionTransformer) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The parts of `to_hugging_face` that need no tensors: config.json and preprocessor_config.json.

    Raises:
        UserError: See `to_hugging_face`.
    """
    config, is_dino = model.config, model.config.pool == "cls_mean"
    hidden, size = config.mlp_dim or 4 * config.embed_dim, pair(config.image_size)
    patch = pair(config.patch_size)
    check_representable(
        "Hugging Face",
        {
            **unsupported_parts(model),
            f"pool {config.pool!r}": config.pool not in ("cls", "cls_mean"),
            "a model without a head": config.num_classes == 0,
            "a norm before the blocks": config.pre_norm,
            "qk_norm": config.qk_norm,
            "mlp 'swiglu'": config.mlp == "swiglu",
            "registers without pool 'cls_mean'": config.num_registers > 0 and not is_dino,
            "layer_scale without pool 'cls_mean'": config.layer_scale_init is not None and not is_dino,
            "pool 'cls_mean' without layer_scale": config.layer_scale_init is None and is_dino,
            "pool 'cls_mean' with non-square images": is_dino and size[0] != size[1],
            "pool 'cls_mean' with an mlp_dim that is not a multiple of embed_dim": is_dino
            and hidden % config.embed_dim > 0,
        },
    )
    kind = "deit" if config.distillation_token else "vit"
    kind = ("dinov2_with_registers" if config.num_registers else "dinov2") if is_dino else kind
    names = model.class_names or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    hf_config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "image_size": size[0] if size[0] == size[1] else list(size),
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "num_channels": config.in_channels,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.mlp, config.mlp),
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    if is_dino:
        hf_config |= {"mlp_ratio": hidden // config.embed_dim, "use_swiglu_ffn": False, "layerscale_value": 1.0}
        hf_config |= {"num_register_tokens": config.num_registers} if config.num_registers else {}
    else:
        hf_config["intermediate_size"] = hidden
    return hf_config, _write_processor(model)


ARCHITECTURES = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassificationWithTeacher",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
}
# From vitmha's names to those in Hugging Face's files.
OUTWARD = {
    r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.",
    r"^(cls|mask)_token$": r"embeddings.\1_token",
    r"^dist_token$": "embeddings.distillation_token",
    r"^reg_token$": "embeddings.register_tokens",
    r"^pos_embed$": "embeddings.position_embeddings",
    r"^blocks\.": "encoder.layer.",
    r"\.attn\.q_proj\.": ".attention.attention.query.",
    r"\.attn\.k_proj\.": ".attention.attention.key.",
    r"\.attn\.v_proj\.": ".attention.attention.value.",
    r"\.attn\.out_proj\.": ".attention.output.dense.",
    r"\.ls([12])\.gamma$": r".layer_scale\1.lambda1",
    r"^norm\.": "layernorm.",
}
OUTWARD_VIT = {
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
}


def _hugging_face_tensors(model: VisionTransformer, kind: str) -> Tensors:
    is_dino = kind.startswith("dinov2")
    converted = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head")}
    converted["pos_embed"] = placed_positions(model)
    if is_dino:
        converted["mask_token"] = torch.zeros(1, model.config.embed_dim)
        if model.config.num_registers:  # theirs have no position embedding
            prefix = model.layout.num_prefix_tokens
            converted["pos_embed"] = torch.cat(
                [converted["pos_embed"][:, :1], converted["pos_embed"][:, prefix:]], dim=1
            )
    table = OUTWARD if is_dino else {**OUTWARD, **OUTWARD_VIT}
    tensors = {f"{kind}.{name}": tensor for name, tensor in renamed(converted, table).items()}
    heads = {"head": "cls_classifier" if kind == "deit" else "classifier", "head_dist": "distillation_classifier"}
    for name, tensor in model.state_dict().items():
        head, _, part = name.partition(".")
        if head in heads:
            tensors[f"{heads[head]}.{part}"] = tensor
    return tensors


def _write_processor(model: VisionTransformer) -> dict[str, Any] | None:
    preprocessing = model.preprocessing
    if preprocessing is None:
        return None
    height, width = preprocessing.image_size
    cuts = preprocessing.crop_mode == "center"
    check_representable("Hugging Face", {"a crop of non-square images": cuts and height != width})
    rows, columns = (math.floor(side / preprocessing.crop_pct) for side in (height, width))
    is_cut = cuts or (rows, columns) != (height, width)
    return {
        "image_processor_type": "BitImageProcessor" if is_cut else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": rows} if cuts else {"height": rows, "width": columns},
        **({"do_center_crop": True, "crop_size": {"height": height, "width": width}} if is_cut else {}),
        "resample": {name: number for number, name in RESAMPLE.items()}[preprocessing.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
