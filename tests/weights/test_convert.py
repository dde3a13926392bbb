"""Each family of Vision Transformers against its own package, in logits and in the attention maps of every head.

`pytest tests/weights/test_convert.py -s` prints the table of families.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig

from vitmha.attention import MultiHeadAttention
from vitmha.cli import main
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

transformers = pytest.importorskip("transformers")

LIMIT = 1e-4
TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": (32, 48), "patch_size": 8, "num_classes": 5}
SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "num_labels": 5}


def randomized(model: nn.Module) -> Any:
    """Random weights whose attention is far from uniform."""
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("weight") and parameter.ndim == 1), std=0.2)
    return model.eval()


def timm_maps(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    maps: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, inputs, __: maps.append(inputs[0]))
    return model(images), maps


def hugging_face_maps(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.set_attn_implementation("eager")
    output = model(images, output_attentions=True)
    return output.logits, list(output.attentions)


def torchvision_maps(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    maps: list[Tensor] = []
    for layer in model.encoder.layers:
        attention = layer.self_attention
        attention.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "need_weights": True, "average_attn_weights": False}),
            with_kwargs=True,
        )
        attention.register_forward_hook(lambda _, __, output: maps.append(output[1]))
    return model(images), maps


def vitmha_maps(model: VisionTransformer, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    maps: list[Tensor] = []
    for module in model.blocks.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(
                lambda module, args, kwargs: maps.append(module.attention_weights(*args, **kwargs)), with_kwargs=True
            )
    return model(images), maps


def timm_vit(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, **{**TINY, **changes})


def hugging_face_vit(kind: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    sizes = {**SMALL, "image_size": (32, 48), "patch_size": 8, **changes}
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=77, num_classes=5
    )


@dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    maps: Callable[[nn.Module, Tensor], tuple[Tensor, list[Tensor]]] = timm_maps
    out: str | None = "timm"
    """The format that it is saved in again."""


DINO_TINY = {"rope_rotate_half": True, "num_classes": 0}
FAMILIES = {
    "timm ViT, AugReg": Family(timm_vit("vit_tiny_patch16_224", num_heads=4)),
    "timm ViT, qk norm": Family(timm_vit("vit_tiny_patch16_224", qk_norm=True, qkv_bias=False)),
    "timm ViT, registers with positions": Family(timm_vit("vit_tiny_patch16_224", reg_tokens=3)),
    "timm ViT, mean and class token": Family(timm_vit("vit_tiny_patch16_224", global_pool="avg")),
    "timm ViT, mean, no class token": Family(timm_vit("vit_medium_patch16_gap_256")),
    "timm DeiT, distilled": Family(timm_vit("deit_tiny_distilled_patch16_224")),
    "timm DeiT III": Family(timm_vit("deit3_small_patch16_224")),
    "timm DINO, no head": Family(timm_vit("vit_small_patch16_224", num_classes=0)),
    "timm DINOv2": Family(timm_vit("vit_small_patch14_dinov2", num_classes=0)),
    "timm DINOv2, registers": Family(timm_vit("vit_small_patch14_reg4_dinov2")),
    "timm DINOv2, SwiGLU": Family(timm_vit("vit_giant_patch14_dinov2", mlp_ratio=2.5)),
    "timm DINOv3": Family(timm_vit("vit_small_patch16_dinov3", **DINO_TINY), out=None),
    "timm DINOv3, SwiGLU, class token": Family(
        timm_vit("vit_small_plus_patch16_dinov3", global_pool="token", **DINO_TINY), out=None
    ),
    "timm DINOv3, biases": Family(timm_vit("vit_small_patch16_dinov3_qkvb", **DINO_TINY), out=None),
    "timm CLIP": Family(timm_vit("vit_base_patch16_clip_224")),
    "timm CLIP, quick GELU": Family(timm_vit("vit_base_patch16_clip_quickgelu_224")),
    "timm SigLIP, map pooling": Family(timm_vit("vit_base_patch16_siglip_224", act_layer="gelu_tanh")),
    "timm map pooling, registers": Family(
        timm_vit("vit_base_patch16_siglip_224", act_layer="gelu_tanh", reg_tokens=2, pool_include_prefix=True)
    ),
    "timm SigLIP, mean": Family(timm_vit("vit_base_patch16_siglip_gap_224")),
    "Hugging Face ViT": Family(
        hugging_face_vit("ViTForImageClassification", "ViTConfig", intermediate_size=77, hidden_act="gelu_new"),
        hugging_face_maps,
        "hf",
    ),
    "Hugging Face DeiT": Family(
        hugging_face_vit("DeiTForImageClassification", "DeiTConfig", intermediate_size=77), hugging_face_maps, None
    ),
    "Hugging Face DeiT, distilled": Family(
        hugging_face_vit("DeiTForImageClassificationWithTeacher", "DeiTConfig", intermediate_size=77),
        hugging_face_maps,
        "hf",
    ),
    "Hugging Face DINOv2": Family(
        hugging_face_vit("Dinov2ForImageClassification", "Dinov2Config", image_size=32),
        hugging_face_maps,
        "hf",
    ),
    "Hugging Face DINOv2, registers": Family(
        hugging_face_vit("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", image_size=32),
        hugging_face_maps,
        "hf",
    ),
    "Hugging Face DINOv2, SwiGLU": Family(
        hugging_face_vit(
            "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", image_size=32, use_swiglu_ffn=True
        ),
        hugging_face_maps,
        None,
    ),
    "torchvision ViT": Family(torchvision_vit, torchvision_maps),
}


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, tuple[str, ...]]]:
    """Prints the differences with `pytest -s`."""
    rows: dict[str, tuple[str, ...]] = {}
    yield rows
    for name, (logits, maps, format_, back) in {"family": ("logits", "maps", "back in", "logits"), **rows}.items():
        print(f"\n{name:36}{logits:>10}{maps:>10}  {format_:14}{back:>10}", end="")  # noqa: T201


def random_images(model: VisionTransformer) -> Tensor:
    (height, width), (rows, columns) = model.layout.grid_size, model.layout.patch_size
    return torch.randn(2, model.config.in_channels, height * rows, width * columns)


def worst(model: Tensor, reference: Tensor) -> float:
    assert model.shape == reference.shape
    return (model - reference).abs().max().item()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_and_maps_equal_those_of_the_package(
    name: str, tmp_path: Path, table: dict[str, tuple[str, ...]]
) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    reference = randomized(family.build())
    model = load_model(reference)
    images = random_images(model)
    expected, expected_maps = family.maps(reference, images)
    logits, maps = vitmha_maps(model, images)
    assert len(maps) == len(expected_maps) == 2
    assert expected.std() > 0.3
    assert max(each.max().item() for each in expected_maps) > 0.2  # far from uniform
    differences = worst(logits, expected), max(map(worst, maps, expected_maps))
    back = "-"
    if family.out:
        save_model(model, tmp_path / "out", family.out)
        back = f"{worst(read_by(family.out, tmp_path / 'out', images), logits):.0e}"
        assert worst(load_model(tmp_path / "out")(images), logits) <= LIMIT
        assert float(back) <= LIMIT
    table[name] = (*(f"{each:.0e}" for each in differences), family.out or "-", back)
    assert max(differences) <= LIMIT


def read_by(package: str, directory: Path, images: Tensor) -> Tensor:
    """The logits of the package, from the directory that vitmha wrote."""
    if package == "timm":
        return timm.create_model(f"local-dir:{directory}", pretrained=True).eval()(images)
    return transformers.AutoModelForImageClassification.from_pretrained(directory).eval()(images).logits


@torch.no_grad()
def test_augreg_arrays_equal_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The names and axes are those that timm reads; its exact GELU is set to the one of Flax."""
    source = randomized(timm.create_model("vit_tiny_patch16_224", **{**TINY, "img_size": 32}))
    np.savez(tmp_path / "x.npz", **flax_arrays(source))
    reference = timm.create_model("vit_tiny_patch16_224", **{**TINY, "img_size": 32}, act_layer="gelu_tanh").eval()
    reference.load_pretrained(tmp_path / "x.npz")
    model = load_model(tmp_path / "x.npz")
    images = torch.randn(2, 3, 32, 32)
    assert (model.config.num_heads, model.config.norm_eps, model.config.mlp) == (3, 1e-6, "gelu_tanh")
    torch.testing.assert_close(model(images), reference(images), rtol=0, atol=1e-5)
    main(["convert", "--model", str(tmp_path / "x.npz"), "--output", str(tmp_path / "out"), "--verify"])
    assert "the converted model differs from its own package by at most" in capsys.readouterr().out


@pytest.mark.parametrize("stacked", [False, True])
@torch.no_grad()
def test_big_vision_arrays_equal_timm(tmp_path: Path, stacked: bool) -> None:
    arguments = {**TINY, "img_size": 32, "num_classes": 0}
    source = randomized(timm.create_model("vit_base_patch16_siglip_224", **arguments))
    arrays = flax_arrays(source, "params/img/")
    if not stacked:  # timm reads blocks one by one
        np.savez(tmp_path / "x.npz", **arrays)
        reference = timm.create_model("vit_base_patch16_siglip_224", **arguments, act_layer="gelu_tanh").eval()
        reference.load_pretrained(tmp_path / "x.npz")
        expected = reference
    else:
        separate = {name: array for name, array in arrays.items() if "encoderblock_" in name}
        for name in {name.replace("_0/", "/", 1) for name in separate if "encoderblock_0/" in name}:
            blocks = [arrays[name.replace("encoderblock/", f"encoderblock_{i}/")] for i in range(2)]
            arrays[name] = np.stack(blocks)
        np.savez(tmp_path / "y.npz", **arrays)
        expected = load_model(tmp_path / "y.npz")
        arrays = {name: array for name, array in arrays.items() if name not in separate} | {"params/txt/x": np.zeros(2)}
        np.savez(tmp_path / "x.npz", **arrays)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(load_model(tmp_path / "x.npz")(images), expected(images), rtol=0, atol=1e-5)


def flax_arrays(model: nn.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """A model of timm under the names and axes of vision_transformer, or with a prefix of big_vision."""
    heads, dim = model.blocks[0].attn.num_heads, model.embed_dim
    is_big = bool(prefix)
    attention, second, mlp = ("0", "1", "0") if is_big else ("1", "2", "3")
    arrays: dict[str, Tensor] = {
        "embedding/kernel": model.patch_embed.proj.weight.permute(2, 3, 1, 0),
        "embedding/bias": model.patch_embed.proj.bias,
        ("" if is_big else "Transformer/posembed_input/") + "pos_embedding": model.pos_embed,
    }

    def norm(name: str, module: nn.Module) -> None:
        arrays[f"{name}/scale"], arrays[f"{name}/bias"] = module.weight, module.bias

    def dense(name: str, module: nn.Module) -> None:
        arrays[f"{name}/kernel"], arrays[f"{name}/bias"] = module.weight.T, module.bias

    def projections(name: str, weights: dict[str, tuple[Tensor, Tensor]], out: nn.Module) -> None:
        for part, (weight, bias) in weights.items():
            arrays[f"{name}/{part}/kernel"] = weight.T.reshape(dim, heads, -1)
            arrays[f"{name}/{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{name}/out/kernel"] = out.weight.T.reshape(heads, -1, dim)
        arrays[f"{name}/out/bias"] = out.bias

    for i, block in enumerate(model.blocks):
        name = f"Transformer/encoderblock_{i}"
        parts = zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True)
        weights = dict(zip(("query", "key", "value"), parts, strict=True))
        projections(f"{name}/MultiHeadDotProductAttention_{attention}", weights, block.attn.proj)
        norm(f"{name}/LayerNorm_0", block.norm1)
        norm(f"{name}/LayerNorm_{second}", block.norm2)
        dense(f"{name}/MlpBlock_{mlp}/Dense_0", block.mlp.fc1)
        dense(f"{name}/MlpBlock_{mlp}/Dense_1", block.mlp.fc2)
    norm("Transformer/encoder_norm", model.norm)
    if model.cls_token is not None:
        arrays["cls"] = model.cls_token
    if model.attn_pool is not None:
        pool, name = model.attn_pool, "MAPHead_0"
        keys, values = zip(pool.kv.weight.chunk(2), pool.kv.bias.chunk(2), strict=True)
        weights = {"query": (pool.q.weight, pool.q.bias), "key": keys, "value": values}
        projections(f"{name}/MultiHeadDotProductAttention_0", weights, pool.proj)
        arrays[f"{name}/probe"] = pool.latent
        norm(f"{name}/LayerNorm_0", pool.norm)
        dense(f"{name}/MlpBlock_0/Dense_0", pool.mlp.fc1)
        dense(f"{name}/MlpBlock_0/Dense_1", pool.mlp.fc2)
    if isinstance(model.head, nn.Linear):
        dense("head", model.head)
    return {prefix + name: each.detach().numpy() for name, each in arrays.items()}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("beit_base_patch16_224", {"depth": 1}, r"timm's beit_base_patch16_224 \(Beit\) is not supported"),
        (
            "vit_relpos_small_patch16_224",
            {"depth": 1},
            r"vit_relpos_small_patch16_224 \(VisionTransformerRelPos\) is not supported",
        ),
        (
            "eva02_tiny_patch14_224",
            {"depth": 1},
            r"timm's eva02_tiny_patch14_224 \(Eva\) has rotary position embeddings other than DINOv3's "
            r"\(RotaryEmbeddingCat\) and learned next to rotary position embeddings",
        ),
        ("eva_giant_patch14_224", {"depth": 1, "embed_dim": 64}, "blocks of EVA without rotary position embeddings"),
        (
            "vit_tiny_r_s16_p8_224",
            {"depth": 1},
            r"timm's vit_tiny_r_s16_p8_224 \(VisionTransformer\) has a convolutional stem \(HybridEmbed\)",
        ),
        ("vit_base_patch16_rope_224", {"depth": 1}, "rotary position embeddings other than DINOv3's"),
        (
            "vit_tiny_patch16_224",
            {"global_pool": "max"},
            r"timm's vit_tiny_patch16_224 \(VisionTransformer\) has pooling 'max'",
        ),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}, "has no position embeddings"),
        ("vit_tiny_patch16_224", {"final_norm": False}, "a model without a last norm"),
        ("vit_tiny_patch16_224", {"fc_norm": True}, "a norm after the pooling of a class token"),
        ("vit_tiny_patch16_224", {"pool_include_prefix": True, "global_pool": "avg"}, "a mean over prefix tokens"),
        ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm"}, r"norms other than LayerNorm \(RmsNorm\)"),
        ("vit_base_patch16_siglip_224", {"reg_tokens": 2}, "attention pooling without the prefix tokens"),
        ("vit_tiny_patch16_224", {"scale_attn_norm": True}, "a norm inside attention or MLP"),
        ("vit_tiny_patch16_224", {"act_layer": "relu"}, "The activation ReLU.* of the MLP is not supported"),
        (
            "vit_tiny_patch16_224",
            {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
            "blocks of type ParallelScalingBlock",
        ),
    ],
)
def test_an_unsupported_part_of_timm_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(timm.create_model(name, **changes))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: torchvision.models.VisionTransformer(
                32, 16, 1, 3, 48, 96, conv_stem_configs=[ConvStemConfig(8, 3, 2)] * 4
            ),
            "torchvision's VisionTransformer has a convolutional stem, which",
        ),
        (lambda: torchvision.models.VisionTransformer(32, 16, 1, 3, 48, 96, representation_size=4), "a head of two"),
        (
            lambda: torchvision.models.VisionTransformer(32, 16, 1, 3, 48, 96, norm_layer=nn.Identity),
            "norms other than LayerNorm",
        ),
        (torchvision.models.resnet18, "torchvision's ResNet is not supported: only VisionTransformer is"),
    ],
)
def test_an_unsupported_part_of_torchvision_is_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(build())


def test_another_scale_is_refused() -> None:
    model = timm_vit("vit_tiny_patch16_224")()
    model.blocks[0].attn.scale = 0.2
    with pytest.raises(ValueError, match=r"a scale of the scores other than 1 / sqrt\(head_dim\)"):
        load_model(model)


def test_an_unknown_activation_or_kind_of_model_is_refused() -> None:
    config = transformers.ViTConfig(**SMALL, intermediate_size=77, hidden_act="relu")
    with pytest.raises(ValueError, match="hidden_act 'relu' is not supported"):
        load_model(transformers.ViTForImageClassification(config))
    with pytest.raises(ValueError, match="model_type 'beit' is not supported"):
        load_model(transformers.BeitForImageClassification(transformers.BeitConfig(**SMALL)))
    with pytest.raises(ValueError, match="Expected a model of timm, torchvision or transformers, got Linear"):
        load_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("format_", "fields", "message"),
    [
        ("timm", {"pos_embed": "rope"}, "timm cannot represent pos_embed 'rope'"),
        ("timm", {"pool": "cls_mean"}, "timm cannot represent pool 'cls_mean'"),
        ("timm", {"norm_eps": 1e-12}, "timm cannot represent norm_eps 1e-12"),
        ("timm", {"num_kv_heads": 1}, "grouped key/value heads"),
        ("timm", {"head_dim": 20}, "a head_dim other than embed_dim / num_heads"),
        ("timm", {"mlp": "swiglu", "pool": "attention"}, "mlp 'swiglu' with pool 'attention'"),
        (
            "timm",
            {"distillation_token": True, "num_registers": 1},
            "a distillation token with parts that DeiT does not have",
        ),
        ("hf", {"qk_norm": True}, "Hugging Face cannot represent qk_norm"),
        ("hf", {"pool": "mean"}, "pool 'mean'"),
        ("hf", {"num_registers": 2}, "registers without pool 'cls_mean'"),
        ("hf", {"layer_scale_init": 0.1}, "layer_scale without pool 'cls_mean'"),
        ("hf", {"pre_norm": True, "num_classes": 0}, "a model without a head and a norm before the blocks"),
        ("hf", {"pool": "cls_mean", "layer_scale_init": 0.1}, "non-square images"),
    ],
)
def test_what_a_format_cannot_represent_is_named_and_nothing_is_written(
    format_: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"image_size": (32, 48), "patch_size": 8, "embed_dim": 48, "depth": 1, "num_classes": 5}
    with pytest.raises(ValueError, match=message):
        save_model(VisionTransformer(ViTConfig(**{**sizes, **fields})), tmp_path / "out", format_)
    assert not (tmp_path / "out").exists()


def test_timm_cannot_represent_pruned_heads(tmp_path: Path) -> None:
    model = VisionTransformer(ViTConfig(image_size=32, embed_dim=48, depth=1, num_classes=5))
    model.blocks[0].attn.prune_heads({1})
    with pytest.raises(ValueError, match="timm cannot represent pruned heads"):
        save_model(model, tmp_path / "out", "timm")


@pytest.mark.parametrize("format_", ["timm", "hf"])
@pytest.mark.parametrize("crop_mode", ["squash", "center"])
@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_class_names_and_preprocessing_are_loaded_again(
    format_: str, crop_mode: Any, crop: float, tmp_path: Path
) -> None:
    model = VisionTransformer(ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=1, num_classes=3))
    model.class_names = ("cat", "dog", "owl")
    model.preprocessing = Preprocessing(
        image_size=(32, 32),
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        interpolation="bilinear",
        crop_mode=crop_mode,
        crop_pct=crop,
    )
    save_model(model, tmp_path / "out", format_)
    back = load_model(tmp_path / "out")
    assert back.class_names == model.class_names
    assert back.preprocessing == model.preprocessing


def test_the_crop_of_squashed_non_square_images_is_loaded_again(tmp_path: Path) -> None:
    model = VisionTransformer(ViTConfig(image_size=(32, 24), patch_size=8, embed_dim=48, depth=1, num_classes=3))
    model.preprocessing = Preprocessing(
        image_size=(32, 24), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.8, crop_mode="squash"
    )
    save_model(model, tmp_path / "out", "hf")
    assert load_model(tmp_path / "out").preprocessing == model.preprocessing


def test_the_transform_and_class_names_of_timm_are_kept() -> None:
    model = load_model(timm.create_model("vit_tiny_patch16_224", depth=1))
    assert model.preprocessing == Preprocessing(
        image_size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=0.9
    )
    assert model.class_names is not None
    assert (len(model.class_names), model.class_names[207]) == (1000, "golden retriever")


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (
            {"size": {"height": 32, "width": 48}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0},
        ),
        (
            {"size": {"shortest_edge": 37}, "do_center_crop": True, "crop_size": {"height": 32, "width": 48}}
            | {"resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            {"interpolation": "bicubic", "crop_mode": "center", "crop_pct": 32 / 37},
        ),
        (  # as DINOv2 has it: trained on larger images than its processor returns
            {"size": {"shortest_edge": 28}, "do_center_crop": True, "crop_size": {"height": 21, "width": 21}}
            | {"resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            {"interpolation": "bicubic", "crop_mode": "center", "crop_pct": 21 / 28},
        ),
    ],
)
def test_the_image_processor_of_hugging_face_is_converted(
    processor: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    hugging_face_vit("ViTForImageClassification", "ViTConfig", intermediate_size=77)().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = load_model(tmp_path).preprocessing
    assert found == Preprocessing(image_size=(32, 48), mean=(0.5,) * 3, std=(0.5,) * 3, **expected)
