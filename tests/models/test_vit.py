"""The Vision Transformer against timm's, and its pooling, tokens, patch dropout and initialization."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import timm.layers
import timm.models.deit
import timm.models.vision_transformer
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from vit_cases import SMALL, assert_equal, random_images, random_model

from vitmha.models.config import SIZES, ViTConfig
from vitmha.models.positions import build_rope2d, build_sincos2d
from vitmha.models.vit import AttentionPool, VisionTransformer


def timm_weights(model: VisionTransformer) -> dict[str, Tensor]:
    """The weights of a model under timm's names."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        if ".attn.q_proj." in name:
            tensor = torch.cat([model.state_dict()[name.replace("q_proj", f"{p}_proj")] for p in "qkv"])
        if not any(part in name for part in ("blocks", "attn_pool")) or not ("k_proj" in name or "v_proj" in name):
            renamed[name.replace("q_proj", "qkv").replace("out_proj", "proj")] = tensor
    return renamed


def timm_model(model: VisionTransformer, **arguments: Any) -> timm.models.VisionTransformer:
    reference = timm.models.VisionTransformer(
        img_size=(21, 55),
        patch_size=(7, 11),
        num_classes=13,
        embed_dim=24,
        depth=3,
        num_heads=3,
        fc_norm=False,
        **{"mlp_ratio": 31 / 24 + 1e-6, **arguments},
    )
    if arguments.get("pre_norm"):
        reference.patch_embed.proj.bias = nn.Parameter(torch.zeros(24))  # with pre_norm timm has no bias there
    reference.load_state_dict(timm_weights(model))
    return reference.eval()


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "huge"])
def test_parameter_count_equals_timm(size: str) -> None:
    name = f"vit_{size}_patch{14 if size == 'huge' else 16}_224"
    with torch.device("meta"):
        model = VisionTransformer(ViTConfig(num_classes=1000, **SIZES[f"vit_{size}"]))
        reference = getattr(timm.models.vision_transformer, name)(num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("fields", "timm_arguments"),
    [
        ({}, {}),
        ({"pool": "mean"}, {"global_pool": "avg", "class_token": False}),
        ({"qkv_bias": False}, {"qkv_bias": False}),
        ({"qk_norm": True}, {"qk_norm": True}),
        ({"layer_scale_init": 0.1}, {"init_values": 0.1}),
        ({"mlp": "swiglu"}, {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 62 / 24 + 1e-6}),
        ({"mlp": "gelu_tanh"}, {"act_layer": "gelu_tanh"}),
        ({"mlp": "quick_gelu"}, {"act_layer": "quick_gelu"}),
        ({"norm_eps": 0.1}, {"norm_layer": partial(nn.LayerNorm, eps=0.1)}),
        ({"pre_norm": True}, {"pre_norm": True}),
        ({"pool": "mean", "num_registers": 2}, {"global_pool": "avg", "class_token": False, "reg_tokens": 2}),
    ],
    ids=[
        *("cls", "mean", "no qkv bias", "qk norm", "layer scale", "swiglu", "gelu tanh", "quick gelu", "norm eps"),
        *("pre norm", "mean with registers"),
    ],
)
def test_logits_equal_timm(fields: dict[str, Any], timm_arguments: dict[str, Any]) -> None:
    model = random_model(**fields)
    if "reg_tokens" in timm_arguments:
        timm_arguments["no_embed_class"] = True
    images = random_images()
    assert_close(model(images), timm_model(model, **timm_arguments)(images), rtol=0, atol=1e-4)


def test_logits_with_a_class_token_and_registers_equal_timm() -> None:
    """timm gives registers a position embedding too: with zeros for them both models agree."""
    model = random_model(num_registers=2)
    reference = timm.models.VisionTransformer(
        img_size=(21, 55),
        patch_size=(7, 11),
        num_classes=13,
        embed_dim=24,
        depth=3,
        num_heads=3,
        mlp_ratio=31 / 24 + 1e-6,
        reg_tokens=2,
    ).eval()
    positions = torch.cat([model.pos_embed[:, :1], torch.zeros(1, 2, 24), model.pos_embed[:, 1:]], dim=1)
    reference.load_state_dict({**timm_weights(model), "pos_embed": positions})
    images = random_images()
    assert_close(model(images), reference(images), rtol=0, atol=1e-4)


def test_a_distilled_model_equals_timm() -> None:
    model = random_model(distillation_token=True)
    reference = timm.models.deit.VisionTransformerDistilled(
        img_size=(21, 55), patch_size=(7, 11), num_classes=13, embed_dim=24, depth=3, num_heads=3, mlp_ratio=31 / 24
    )
    reference.load_state_dict(timm_weights(model))
    images = random_images()
    assert_close(model(images), reference.eval()(images), rtol=0, atol=1e-4)
    assert_close(model.features(images), reference.forward_head(reference.forward_features(images), pre_logits=True))
    reference.train().set_distilled_training(True)
    assert_close(model(images, separate_heads=True), torch.stack(reference(images), 1), rtol=0, atol=1e-4)


def test_parameter_count_of_a_distilled_model_equals_timm() -> None:
    model = VisionTransformer(ViTConfig(distillation_token=True, **SIZES["vit_tiny"]))
    reference = timm.create_model("deit_tiny_distilled_patch16_224")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())


def test_attention_pool_equals_timm() -> None:
    pool = AttentionPool(ViTConfig(**SMALL))
    for parameter in pool.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference = timm.layers.AttentionPoolLatent(
        24, num_heads=3, mlp_ratio=31 / 24 + 1e-6, norm_layer=partial(nn.LayerNorm, eps=1e-6)
    )
    weights = pool.state_dict()
    renamed = {name.replace("attn.out_proj", "proj"): t for name, t in weights.items() if ".out_" in name}
    renamed |= {name: t for name, t in weights.items() if name.startswith(("norm", "mlp"))}
    renamed |= {f"q.{kind}": weights[f"attn.q_proj.{kind}"] for kind in ("weight", "bias")}
    renamed |= {
        f"kv.{kind}": torch.cat([weights[f"attn.{p}_proj.{kind}"] for p in "kv"]) for kind in ("weight", "bias")
    }
    reference.load_state_dict({**renamed, "latent": pool.probe.data})
    tokens = torch.randn(2, 17, 24)
    assert_close(pool(tokens), reference(tokens), rtol=0, atol=1e-4)


def test_the_head_classifies_the_attention_pool_of_the_normalized_tokens() -> None:
    model = random_model(pool="attention")
    normalized = []
    model.norm.register_forward_hook(lambda module, inputs, output: normalized.append(output))
    logits = model(random_images())
    assert_equal(logits, model.head(model.attn_pool(normalized[0])))


def test_every_layer_norm_has_an_epsilon_of_1e_6() -> None:
    model = VisionTransformer(ViTConfig(**SMALL, qk_norm=True, pool="attention"))
    norms = [module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms == [1e-6] * (4 * 3 + 1 + 1)


@pytest.mark.parametrize("num_registers", [0, 2])
def test_tokens_are_class_then_registers_then_patches_with_positions(num_registers: int) -> None:
    model = random_model(num_registers=num_registers)
    images = random_images()
    tokens, rope = model.embed(images)
    assert rope is None
    assert_equal(tokens[:, 0], (model.cls_token[0, 0] + model.pos_embed[0, 0]).expand(3, 24))
    if num_registers:
        assert_equal(tokens[:, 1:3], model.reg_token.expand(3, 2, 24))
    assert_equal(tokens[:, 1 + num_registers :], model.patch_embed(images) + model.pos_embed[:, 1:])


def test_sincos_is_added_to_patch_tokens_only() -> None:
    model = random_model(pos_embed="sincos2d", num_registers=2)
    assert model.pos_embed is None
    images = random_images()
    tokens, _ = model.embed(images)
    assert_equal(tokens[:, :3], torch.cat([model.cls_token, model.reg_token], 1).expand(3, 3, 24))
    assert_equal(tokens[:, 3:], model.patch_embed(images) + build_sincos2d(model.layout, 24))


def test_blocks_rotate_queries_and_keys() -> None:
    model = random_model(pos_embed="rope", num_registers=2)
    images = random_images()
    assert model.pos_embed is None
    tokens, rope = model.embed(images)
    assert_equal(tokens[:, 3:], model.patch_embed(images))
    assert_equal(rope, build_rope2d(model.layout, 8))
    block = model.blocks[0]
    y = tokens + block.attn(block.norm1(tokens), rope=rope)
    assert_equal(block(tokens, rope), y + block.mlp(block.norm2(y)))
    for block in model.blocks:
        tokens = block(tokens, rope)
    assert_close(model(images), model.head(model.norm(tokens)[:, 0]))


def test_mean_pooling_excludes_the_registers() -> None:
    model = random_model(pool="mean", num_registers=2)
    images = random_images()
    tokens, rope = model.embed(images)
    for block in model.blocks:
        tokens = block(tokens, rope)
    tokens = model.norm(tokens)
    assert_close(model.features(images), sum(tokens[:, token] for token in range(2, 17)) / 15)


def test_grouped_heads_and_head_dim_reach_the_blocks() -> None:
    model = random_model(num_heads=6, num_kv_heads=2, head_dim=5, backend="math", attention_dropout=0.3)
    for block in model.blocks:
        assert (block.attn.num_heads, block.attn.num_kv_heads, block.attn.head_dim) == (6, 2, 5)
        assert (block.attn.backend, block.attn.attention_dropout) == ("math", 0.3)
    images = random_images()
    twin = VisionTransformer(ViTConfig(**{**SMALL, "num_heads": 6, "head_dim": 5}))
    weights = {
        name: tensor.unflatten(0, (2, 5)).repeat_interleave(3, 0).flatten(0, 1)
        if ("k_proj" in name or "v_proj" in name)
        else tensor
        for name, tensor in model.state_dict().items()
    }
    twin.load_state_dict(weights)
    assert_close(model(images), twin(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos_embed", ["learned", "sincos2d", "rope"])
def test_patch_dropout_keeps_the_prefix_and_whole_tokens(pos_embed: str) -> None:
    model = random_model(patch_dropout=0.4, num_registers=2, pos_embed=pos_embed)
    images = random_images()
    full, rope = model.embed(images)
    assert full.shape[1] == 18
    kept, kept_rope = model.train().embed(images)
    assert kept.shape[1] == 3 + 9
    assert_equal(kept[:, :3], full[:, :3])
    origins = torch.cdist(kept, full, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
    assert_equal(kept, torch.stack([full[i, origins[i]] for i in range(3)]))
    assert all(len(set(row)) == 12 for row in origins.tolist())
    assert len({frozenset(row) for row in origins.tolist()}) == 3
    if pos_embed == "rope":
        assert_equal(kept_rope[:, :, 0], torch.stack([rope[:, origins[i]] for i in range(3)], 1))
    else:
        assert kept_rope is None


def test_patch_dropout_with_rope_equals_the_kept_tokens_alone() -> None:
    model = random_model(patch_dropout=0.6, pos_embed="rope")
    images = random_images(2)
    tokens, rope = model.train().embed(images)
    together = model.blocks[0](tokens, rope)
    for i in range(2):
        alone = model.blocks[0](tokens[i : i + 1], rope[:, i, 0])
        assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)


def test_patch_dropout_keeps_every_patch_equally_often() -> None:
    model = random_model(patch_dropout=0.8, pos_embed="rope")
    images = torch.arange(15.0).view(3, 5).repeat_interleave(7, 0).repeat_interleave(11, 1).expand(2000, 3, 21, 55)
    full = model.embed(images[:1])[0][0]
    kept = model.train().embed(images)[0]
    chosen = torch.cdist(kept, full.expand(2000, 16, 24)).argmin(-1)[:, 1:].flatten().bincount(minlength=16)
    assert_close(chosen[1:] / 2000, torch.full((15,), 3 / 15), rtol=0, atol=0.05)


def test_patch_dropout_keeps_at_least_one_patch() -> None:
    assert random_model(patch_dropout=0.99).train().embed(random_images())[0].shape[1] == 2


def test_a_new_model_gives_every_class_the_same_probability() -> None:
    torch.testing.assert_close(VisionTransformer(ViTConfig(**SMALL)).eval()(random_images()), torch.zeros(3, 13))


def test_gradients_reach_every_parameter() -> None:
    model = random_model(num_registers=2, qk_norm=True, layer_scale_init=0.5, mlp="swiglu").train()
    F.cross_entropy(model(random_images()), torch.tensor([0, 5, 12])).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("shape", [(2, 3, 55, 21), (2, 1, 21, 55), (2, 3, 21, 44)])
def test_images_of_another_size_are_rejected(shape: tuple[int, ...]) -> None:
    expected = rf"images must be \(batch, 3, 21, 55\), got \({', '.join(map(str, shape))}\)"
    with pytest.raises(ValueError, match=expected):
        VisionTransformer(ViTConfig(**SMALL))(torch.zeros(shape))


COMPILED = """
import torch
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer

torch.manual_seed(0)
model = VisionTransformer(ViTConfig(image_size=(21, 55), patch_size=(7, 11), embed_dim=24, depth=2,
                                    num_classes=13, num_registers=2, pos_embed="rope")).eval()
torch.nn.init.normal_(model.head.weight)
images = torch.randn(3, 3, 21, 55)
expected = model(images)
assert expected.std() > 0.1
torch.testing.assert_close(torch.compile(model, fullgraph=True)(images), expected, rtol=0, atol=1e-4)

# Stochastic depth and both heads, forward and backward, from the same random stream.
model = VisionTransformer(ViTConfig(image_size=(21, 55), patch_size=(7, 11), embed_dim=24, depth=2, num_classes=13,
                                    distillation_token=True, pos_embed="rope", drop_path=0.4))
torch.nn.init.normal_(model.head_dist.weight)
outcomes = []
for run in (model, torch.compile(model, fullgraph=True, dynamic=False)):
    torch.manual_seed(1)
    logits = run(torch.linspace(-1, 1, 7 * 3 * 21 * 55).view(7, 3, 21, 55), separate_heads=True)
    outcomes.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.blocks.parameters()))))
# A second step, whose kept images are others, compiles nothing.
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
run(torch.randn(7, 3, 21, 55), separate_heads=True).sum().backward()
assert graphs > 0
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
assert outcomes[0][1].abs().sum() > 0
torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_a_compiled_model_equals_the_eager_one() -> None:
    # In its own process: the run-time checks of shapes, on in tests only, cannot be compiled.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
