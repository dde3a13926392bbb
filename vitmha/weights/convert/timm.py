"""timm's plain Vision Transformers: ViT, AugReg, DeiT, DINO, CLIP, SigLIP, DINOv3."""

import math
import re
from typing import Any

import torch
from torch import nn

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import pair
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert.canonical import (
    SourceWeights,
    Table,
    Tensors,
    activation_of,
    check_representable,
    distinct,
    placed_positions,
    renamed,
    to_vitmha_names,
    unsupported_parts,
)

TIMM: Table = {
    r"^blocks\.\d+\.(\d+)\.": r"blocks.\1.",  # DINOv2 saves its blocks in chunks
    r"^(storage_tokens|register_tokens)$": "reg_token",
    r"^fc_norm\.": "norm.",
    r"\.gamma_([12])$": r".ls\1.gamma",
    r"\.attn\.proj\.": ".attn.out_proj.",
    r"\.attn\.([qv])_bias$": r".attn.\1_proj.bias",
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^attn_pool\.latent$": "attn_pool.probe",
    r"^attn_pool\.q\.": "attn_pool.attn.q_proj.",
    r"^attn_pool\.kv\.": "attn_pool.attn.kv.",
    r"^attn_pool\.proj\.": "attn_pool.attn.out_proj.",
}


def from_timm(module: Any) -> SourceWeights:
    """Reads a plain Vision Transformer of timm: ViT, AugReg, DeiT, DINO, CLIP, SigLIP or DINOv3."""
    kind, name = type(module).__name__, _describe(module)
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
        raise UserError(f"{name} is not supported: only plain Vision Transformers are.")
    block, stem = module.blocks[0], module.patch_embed
    if not isinstance(getattr(stem, "proj", None), nn.Conv2d) or hasattr(stem, "backbone"):
        raise UserError(f"{name} has a convolutional stem ({type(stem).__name__}), which is not supported.")
    proj = stem.proj
    is_dinov3 = kind == "Eva" and type(module.rope).__name__ == "RotaryEmbeddingDinoV3" and module.pos_embed is None
    _refuse_timm(module, block, name)
    pool = {"token": "cls", "avg": "mean", "map": "attention"}.get(module.global_pool, module.global_pool)
    has_class_token = module.cls_token is not None
    fields = {
        "image_size": tuple(module.patch_embed.img_size),
        "patch_size": tuple(proj.kernel_size),
        "in_channels": proj.in_channels,
        "num_classes": module.num_classes,
        "embed_dim": module.embed_dim,
        "depth": len(module.blocks),
        "num_heads": block.attn.num_heads,
        "mlp": activation_of(block.mlp),
        "norm_eps": block.norm1.eps,
        "pre_norm": not isinstance(module.norm_pre, nn.Identity),
        "pool": pool,
        "class_token": has_class_token and pool not in ("cls", "cls_mean"),
        "fc_norm": not isinstance(module.fc_norm, nn.Identity) and pool == "mean",
        "distillation_token": kind == "VisionTransformerDistilled",
        "num_registers": 0 if getattr(module, "reg_token", None) is None else module.reg_token.shape[1],
        "pos_embed": "rope_dinov3" if is_dinov3 else "learned",
    }
    tensors = to_vitmha_names(renamed(module.state_dict(), TIMM), fields)
    if is_dinov3:
        _interleave(tensors, fields["num_heads"])
    return SourceWeights(fields, tensors, timm_classes(module), timm_preprocessing(module))


def _describe(module: Any) -> str:
    """The model by the name that timm builds it by, if it has one, and its class."""
    architecture = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    kind = type(module).__name__
    return f"timm's {architecture} ({kind})" if architecture else f"timm's {kind}"


def _refuse_timm(module: Any, block: Any, name: str) -> None:
    """Raises for the parts of a timm model that `VisionTransformer` does not have."""

    def is_used(owner: Any, name: str) -> bool:
        return not isinstance(getattr(owner, name, None), nn.Identity | None)

    if type(block).__name__ not in ("Block", "EvaBlock"):
        raise UserError(f"{name} has blocks of type {type(block).__name__}, which are not supported.")
    attention, pool = block.attn, module.global_pool
    reads_prefix = bool(getattr(module, "pool_include_prefix", False))
    norms = [layer for layer in module.modules() if "norm" in type(layer).__name__.lower()]
    others = ", ".join(sorted({type(norm).__name__ for norm in norms if not isinstance(norm, nn.LayerNorm)}))
    is_eva, rope = type(module).__name__ == "Eva", getattr(module, "rope", None)
    parts = {
        f"pooling {pool!r}": pool not in ("token", "avg", "map"),
        "a model without a last norm": not (is_used(module, "norm") or is_used(module, "fc_norm")),
        "a norm after the pooling of a class token": is_used(module, "fc_norm") and pool == "token",
        "a norm inside attention or MLP": is_used(attention, "norm") or is_used(block.mlp, "norm"),
        "gated attention": is_used(attention, "gate"),
        "a mean over prefix tokens": reads_prefix and pool == "avg",
        "attention pooling without the prefix tokens": not reads_prefix
        and pool == "map"
        and module.num_prefix_tokens > 0,
        f"norms other than LayerNorm ({others})": others,
        "a norm after the patch embedding": is_used(module.patch_embed, "norm"),
        f"rotary position embeddings other than DINOv3's ({type(rope).__name__})": is_eva
        and rope is not None
        and type(rope).__name__ != "RotaryEmbeddingDinoV3",
        "learned next to rotary position embeddings": rope is not None and module.pos_embed is not None,
        "blocks of EVA without rotary position embeddings": is_eva and rope is None,
        "no position embeddings": rope is None and module.pos_embed is None,
        "a scale of the scores other than 1 / sqrt(head_dim)": not math.isclose(
            attention.scale, attention.head_dim**-0.5
        ),
        "attention pooling with position embeddings": is_used(getattr(module, "attn_pool", None), "pos_embed"),
        "qk_norm with another eps than 1e-6": is_used(attention, "q_norm") and attention.q_norm.eps != 1e-6,
    }
    found = [part for part, is_present in parts.items() if is_present]
    if found:
        raise UserError(f"{name} has {' and '.join(found)}, which is not supported.")


def timm_classes(module: Any) -> tuple[str, ...] | None:
    """The class names that timm has for a model; None if it has none."""
    from timm.data import ImageNetInfo, infer_imagenet_subset  # imported here since it takes a second

    config = getattr(module, "pretrained_cfg", None)
    if config is None:  # not built by timm's factory
        return None
    names = config.get("label_names")
    if names and len(names) == module.num_classes:
        descriptions = config.get("label_descriptions") or {}
        return distinct([descriptions.get(name, name) for name in names])
    subset = infer_imagenet_subset(module)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return distinct([info.index_to_description(i) for i in range(module.num_classes)])


def timm_preprocessing(module: Any) -> Preprocessing | None:
    """timm's evaluation transform; None for a model that was not built by timm's factory."""
    from timm.data import resolve_data_config

    if getattr(module, "pretrained_cfg", None) is None:
        return None
    config = resolve_data_config({}, model=module)
    if config["crop_mode"] not in ("center", "squash"):
        raise UserError(f"timm's crop_mode {config['crop_mode']!r} is not supported.")
    interpolation: Any = "bicubic" if config["interpolation"] == "random" else config["interpolation"]
    return Preprocessing(
        image_size=tuple(module.patch_embed.img_size),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=interpolation,
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )


def _interleave(tensors: Tensors, num_heads: int) -> None:
    """Permutes channels so that rotary embeddings, which pair a channel with the one half a head later, pair neighbors.

    Queries and keys are permuted in the same way within each head, which does not change the scores.
    """
    for name in [name for name in tensors if re.search(r"blocks\.\d+\.attn\.[qk]_proj\.", name)]:
        halves = tensors[name].unflatten(0, (num_heads, 2, -1))
        tensors[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()


def to_timm(model: VisionTransformer) -> tuple[dict[str, Any], Tensors]:
    """Converts a model to the format of timm: the content of config.json and the tensors of model.safetensors.

    `timm.create_model("local-dir:DIR", pretrained=True)` returns the same logits.

    Raises:
        UserError: A part that timm's Vision Transformer does not have.
    """
    return timm_config(model), _timm_tensors(model)


def timm_config(model: VisionTransformer) -> dict[str, Any]:
    """The first part of `to_timm`, which needs no tensors.

    Raises:
        UserError: See `to_timm`.
    """
    config = model.config
    is_gated, is_distilled = config.mlp == "swiglu", config.distillation_token
    pool = {"cls": "token", "mean": "avg", "attention": "map"}.get(config.pool)
    check_representable(
        "timm",
        {
            **unsupported_parts(model),
            f"pool {config.pool!r}": pool is None,
            f"norm_eps {config.norm_eps}": config.norm_eps not in (1e-6, 1e-5),
            f"mlp 'swiglu' with norm_eps {config.norm_eps}": is_gated and config.norm_eps != 1e-6,
            "mlp 'swiglu' with pool 'attention'": is_gated and config.pool == "attention",
            "qk_norm with norm_eps 1e-5": config.qk_norm and config.norm_eps != 1e-6,
            "a distillation token with parts that DeiT does not have": is_distilled
            and (is_gated or config.num_registers > 0 or config.pre_norm or config.norm_eps != 1e-6),
        },
    )
    # In timm only the named architecture determines the MLP and the norm; everything else is an argument.
    base = "vit_base_patch16_clip_224" if config.norm_eps == 1e-5 else "vit_base_patch16_224"
    base = "vit_giant_patch14_dinov2" if is_gated else "deit_base_distilled_patch16_224" if is_distilled else base
    arguments = {
        "img_size": list(pair(config.image_size)),
        "patch_size": list(pair(config.patch_size)),
        "in_chans": config.in_channels,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        # of the first layer, both halves if it is gated; timm truncates embed_dim * mlp_ratio
        "mlp_ratio": ((1 + is_gated) * (config.mlp_dim or 4 * config.embed_dim) + 0.5) / config.embed_dim,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale_init,
        "pre_norm": config.pre_norm,
        "global_pool": pool,
        "fc_norm": config.fc_norm,
    }
    if not is_distilled:
        arguments |= {"class_token": model.cls_token is not None, "reg_tokens": config.num_registers}
        arguments |= {"no_embed_class": False}
        arguments |= {"pool_include_prefix": config.pool == "attention" and model.layout.num_prefix_tokens > 0}
    if not is_gated:
        arguments["act_layer"] = config.mlp
    content = {
        "architecture": base,
        "num_classes": config.num_classes,
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(model),
    }
    if model.class_names is not None:
        content["label_names"] = list(model.class_names)
    return content


def _pretrained_cfg(model: VisionTransformer) -> dict[str, Any]:
    height, width = pair(model.config.image_size)
    content: dict[str, Any] = {
        "num_classes": model.config.num_classes,
        "input_size": [model.config.in_channels, height, width],
        "fixed_input_size": True,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if model.head_dist is not None else "head",
    }
    if model.preprocessing is not None:
        p = model.preprocessing
        content |= {
            "mean": list(p.mean),
            "std": list(p.std),
            "interpolation": p.interpolation,
            "crop_pct": p.crop_pct,
        }
        content["crop_mode"] = p.crop_mode
    return content


def _timm_tensors(model: VisionTransformer) -> Tensors:
    config, state = model.config, model.state_dict()
    state["pos_embed"] = placed_positions(model)
    if config.pre_norm:  # timm's patch embedding has no bias then: it is added to the position embeddings
        state["pos_embed"][:, model.layout.num_prefix_tokens :] += state.pop("patch_embed.proj.bias")
    tensors: Tensors = {}
    for name, tensor in state.items():
        head, part, kind = name.partition(".attn.q_proj.")
        if part:
            joined = "kv" if head == "attn_pool" else "qkv"
            tensors[f"{head}.attn.{joined}.{kind}"] = torch.cat([state[f"{head}.attn.{p}_proj.{kind}"] for p in joined])
            if head == "attn_pool":
                tensors[f"attn_pool.attn.q.{kind}"] = tensor
        elif not re.search(r"\.attn\.[kv]_proj\.", name):
            tensors[name.replace(".out_proj.", ".proj.")] = tensor
    tensors = {name.replace("attn_pool.attn.", "attn_pool."): tensor for name, tensor in tensors.items()}
    if config.pool == "attention":
        tensors["attn_pool.latent"] = tensors.pop("attn_pool.probe")
    if config.fc_norm:
        tensors |= {f"fc_norm.{part}": tensors.pop(f"norm.{part}") for part in ("weight", "bias")}
    return tensors
