"""The Vision Transformer against timm's, big_vision's formulas and numbers worked out by hand."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jaxtyping
import pytest
import timm.layers
import timm.models.deit
import timm.models.vision_transformer
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import apply_rope
from vitmha.models.config import SIZES, TokenLayout, ViTConfig
from vitmha.models.layers import DropPath, Mlp, PatchEmbed, pick
from vitmha.models.positions import build_rope2d, build_sincos2d
from vitmha.models.vit import AttentionPool, VisionTransformer

exactly = partial(assert_close, rtol=0, atol=0)
SMALL = {
    "image_size": (21, 55),
    "patch_size": (7, 11),
    "num_classes": 13,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "mlp_dim": 31,
}


def random_model(**fields: Any) -> VisionTransformer:
    """A small model no weight of which is at its start value, in eval mode."""
    model = VisionTransformer(ViTConfig(**{**SMALL, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def pictures(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 21, 55)


def timm_weights(model: VisionTransformer) -> dict[str, Tensor]:
    """Our weights under timm's names."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        if ".attn.q_proj." in name:
            tensor = torch.cat([model.state_dict()[name.replace("q_proj", f"{p}_proj")] for p in "qkv"])
        if not any(part in name for part in ("blocks", "attn_pool")) or not ("k_proj" in name or "v_proj" in name):
            renamed[name.replace("q_proj", "qkv").replace("out_proj", "proj")] = tensor
    return renamed


def timm_model(model: VisionTransformer, **arguments: Any) -> timm.models.VisionTransformer:
    theirs = timm.models.VisionTransformer(
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
        theirs.patch_embed.proj.bias = nn.Parameter(torch.zeros(24))  # timm leaves it out there
    theirs.load_state_dict(timm_weights(model))
    return theirs.eval()


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "huge"])
def test_parameter_count_equals_timm(size: str) -> None:
    name = f"vit_{size}_patch{14 if size == 'huge' else 16}_224"
    with torch.device("meta"):
        ours = VisionTransformer(ViTConfig(num_classes=1000, **SIZES[f"vit_{size}"]))
        theirs = getattr(timm.models.vision_transformer, name)(num_classes=1000)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("ours", "theirs"),
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
def test_logits_equal_timm(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    model = random_model(**ours)
    if "reg_tokens" in theirs:
        theirs["no_embed_class"] = True
    images = pictures()
    assert_close(model(images), timm_model(model, **theirs)(images), rtol=0, atol=1e-4)


def test_logits_with_a_class_token_and_registers_equal_timm() -> None:
    """timm gives registers a position or takes the class token's away: with a zero for each register both agree."""
    model = random_model(num_registers=2)
    theirs = timm.models.VisionTransformer(
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
    theirs.load_state_dict({**timm_weights(model), "pos_embed": positions})
    images = pictures()
    assert_close(model(images), theirs(images), rtol=0, atol=1e-4)


def test_a_distilled_model_equals_timm() -> None:
    model = random_model(distillation_token=True)
    theirs = timm.models.deit.VisionTransformerDistilled(
        img_size=(21, 55), patch_size=(7, 11), num_classes=13, embed_dim=24, depth=3, num_heads=3, mlp_ratio=31 / 24
    )
    theirs.load_state_dict(timm_weights(model))
    images = pictures()
    assert_close(model(images), theirs.eval()(images), rtol=0, atol=1e-4)
    assert_close(model.features(images), theirs.forward_head(theirs.forward_features(images), pre_logits=True))
    theirs.train().set_distilled_training(True)
    assert_close(model(images, separate_heads=True), torch.stack(theirs(images), 1), rtol=0, atol=1e-4)


def test_the_distilled_tiny_model_has_as_many_parameters_as_timm_s() -> None:
    ours = VisionTransformer(ViTConfig(distillation_token=True, **SIZES["vit_tiny"]))
    theirs = timm.create_model("deit_tiny_distilled_patch16_224")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_attention_pool_equals_timm() -> None:
    pool = AttentionPool(ViTConfig(**SMALL))
    for parameter in pool.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = timm.layers.AttentionPoolLatent(
        24, num_heads=3, mlp_ratio=31 / 24 + 1e-6, norm_layer=partial(nn.LayerNorm, eps=1e-6)
    )
    weights = pool.state_dict()
    renamed = {name.replace("attn.out_proj", "proj"): t for name, t in weights.items() if ".out_" in name}
    renamed |= {name: t for name, t in weights.items() if name.startswith(("norm", "mlp"))}
    renamed |= {f"q.{kind}": weights[f"attn.q_proj.{kind}"] for kind in ("weight", "bias")}
    renamed |= {
        f"kv.{kind}": torch.cat([weights[f"attn.{p}_proj.{kind}"] for p in "kv"]) for kind in ("weight", "bias")
    }
    theirs.load_state_dict({**renamed, "latent": pool.probe.data})
    tokens = torch.randn(2, 17, 24)
    assert_close(pool(tokens), theirs(tokens), rtol=0, atol=1e-4)


def test_the_head_reads_the_attention_pool_of_the_normalised_tokens() -> None:
    model = random_model(pool="attention")
    read = []
    model.norm.register_forward_hook(lambda module, inputs, output: read.append(output))
    logits = model(pictures())
    exactly(logits, model.head(model.attn_pool(read[0])))


def test_every_layer_norm_adds_a_millionth() -> None:
    model = VisionTransformer(ViTConfig(**SMALL, qk_norm=True, pool="attention"))
    norms = [module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms == [1e-6] * (4 * 3 + 1 + 1)


def test_patches_are_mapped_flattened_in_channel_row_column_order() -> None:
    embed = PatchEmbed(2, (3, 5), 7)
    images = torch.randn(2, 2, 6, 20)
    tokens = embed(images)
    for token, (row, column) in enumerate((row, column) for row in range(2) for column in range(4)):
        patch = images[:, :, 3 * row : 3 * row + 3, 5 * column : 5 * column + 5].reshape(2, 30)
        expected = patch @ embed.proj.weight.reshape(7, 30).T + embed.proj.bias
        assert_close(tokens[:, token], expected)


@pytest.mark.parametrize("num_registers", [0, 2])
def test_tokens_are_class_then_registers_then_placed_patches(num_registers: int) -> None:
    model = random_model(num_registers=num_registers)
    images = pictures()
    tokens, rope = model.embed(images)
    assert rope is None
    exactly(tokens[:, 0], (model.cls_token[0, 0] + model.pos_embed[0, 0]).expand(3, 24))
    if num_registers:
        exactly(tokens[:, 1:3], model.reg_token.expand(3, 2, 24))
    exactly(tokens[:, 1 + num_registers :], model.patch_embed(images) + model.pos_embed[:, 1:])


def test_sincos_tokens_carry_their_position_and_the_prefix_none() -> None:
    model = random_model(pos_embed="sincos2d", num_registers=2)
    assert model.pos_embed is None
    images = pictures()
    tokens, _ = model.embed(images)
    exactly(tokens[:, :3], torch.cat([model.cls_token, model.reg_token], 1).expand(3, 3, 24))
    exactly(tokens[:, 3:], model.patch_embed(images) + build_sincos2d(model.layout, 24))


def test_sincos_equals_the_formula_of_big_vision() -> None:
    positions = build_sincos2d(ViTConfig(**SMALL).layout, 12)
    row, column = 2, 4
    omega = torch.tensor([1.0, 1 / 100, 1 / 10_000])
    expected = torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    assert_close(positions[0, 5 * row + column], expected)


def test_sincos_tells_rows_from_columns() -> None:
    grid = build_sincos2d(ViTConfig(**SMALL).layout, 12)[0].unflatten(0, (3, 5))
    exactly(grid[..., :6], grid[:1, :, :6].expand(3, 5, 6))
    exactly(grid[..., 6:], grid[:, :1, 6:].expand(3, 5, 6))
    assert grid[0, :, 0].unique().numel() == 5
    assert grid[:, 0, 6].unique().numel() == 3


@pytest.mark.parametrize("num_prefix_tokens", [0, 3])
def test_rotary_positions_equal_timm(num_prefix_tokens: int) -> None:
    layout = TokenLayout(num_class_tokens=0, num_registers=num_prefix_tokens, grid_size=(3, 5), patch_size=(7, 11))
    cosine, sine = build_rope2d(layout, 8)
    rope = timm.layers.RotaryEmbeddingCat(8, in_pixels=False, feat_shape=(3, 5)).get_embed()
    assert_close(torch.cat([sine, cosine], -1)[num_prefix_tokens:], rope)
    exactly(cosine[:num_prefix_tokens], torch.ones(num_prefix_tokens, 8))
    exactly(sine[:num_prefix_tokens], torch.zeros(num_prefix_tokens, 8))


def test_rotary_scores_depend_on_the_displacement_alone() -> None:
    layout = TokenLayout(num_class_tokens=1, num_registers=0, grid_size=(3, 5), patch_size=(7, 11))
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rope = build_rope2d(layout, 8).double()
    turned_q, turned_k = (apply_rope(vector.expand(1, 1, 16, 8), rope)[0, 0] for vector in (q, k))
    scores = turned_q @ turned_k.T
    by_displacement: dict[tuple[int, int], list[Tensor]] = {}
    for a in range(15):
        for b in range(15):
            displacement = (b // 5 - a // 5, b % 5 - a % 5)
            by_displacement.setdefault(displacement, []).append(scores[1 + a, 1 + b])
    for same in by_displacement.values():
        assert_close(torch.stack(same), same[0].expand(len(same)), rtol=0, atol=1e-6)
    means = torch.stack([same[0] for same in by_displacement.values()])
    assert torch.pdist(means[:, None]).min() > 1e-6
    assert_close(scores[0, 0], q @ k)


def test_rotary_blocks_turn_queries_and_keys() -> None:
    model = random_model(pos_embed="rope", num_registers=2)
    images = pictures()
    assert model.pos_embed is None
    tokens, rope = model.embed(images)
    exactly(tokens[:, 3:], model.patch_embed(images))
    exactly(rope, build_rope2d(model.layout, 8))
    block = model.blocks[0]
    y = tokens + block.attn(block.norm1(tokens), rope=rope)
    exactly(block(tokens, rope), y + block.mlp(block.norm2(y)))
    for each in model.blocks:
        tokens = each(tokens, rope)
    assert_close(model(images), model.head(model.norm(tokens)[:, 0]))


def test_a_model_that_pools_the_mean_reads_no_register() -> None:
    model = random_model(pool="mean", num_registers=2)
    images = pictures()
    tokens, rope = model.embed(images)
    for block in model.blocks:
        tokens = block(tokens, rope)
    tokens = model.norm(tokens)
    assert_close(model.features(images), sum(tokens[:, token] for token in range(2, 17)) / 15)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_is_its_formula(activation: str) -> None:
    mlp = Mlp(5, 7, activation)
    x = torch.randn(2, 3, 5)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    if activation == "gelu":
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    else:
        hidden = hidden[..., :7] * torch.sigmoid(hidden[..., :7]) * hidden[..., 7:]
    assert_close(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)


def test_grouped_heads_and_a_free_head_width_reach_the_blocks() -> None:
    model = random_model(num_heads=6, num_kv_heads=2, head_dim=5, backend="math", attention_dropout=0.3)
    for block in model.blocks:
        assert (block.attn.num_heads, block.attn.num_kv_heads, block.attn.head_dim) == (6, 2, 5)
        assert (block.attn.backend, block.attn.attention_dropout) == ("math", 0.3)
    images = pictures()
    twin = VisionTransformer(ViTConfig(**{**SMALL, "num_heads": 6, "head_dim": 5}))
    weights = {
        name: tensor.unflatten(0, (2, 5)).repeat_interleave(3, 0).flatten(0, 1)
        if ("k_proj" in name or "v_proj" in name)
        else tensor
        for name, tensor in model.state_dict().items()
    }
    twin.load_state_dict(weights)
    assert_close(model(images), twin(images), rtol=0, atol=1e-4)


def test_layout_of_a_wide_picture() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, pool="mean").layout
    assert layout.grid_size == (4, 8)
    assert layout.token_of(1, 6) == 14
    assert (layout.num_patches, layout.num_tokens) == (32, 32)


def test_layout_puts_the_class_token_first_then_registers() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4).layout
    assert (layout.num_class_tokens, layout.num_prefix_tokens, layout.num_tokens) == (1, 5, 37)
    assert layout.registers == slice(1, 5)
    assert layout.patches == slice(5, 37)
    assert layout.token_of(1, 6) == 19


def test_layout_puts_the_distillation_token_between_the_class_token_and_the_registers() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4, distillation_token=True).layout
    assert (layout.distillation, layout.registers, layout.patches) == (slice(1, 2), slice(2, 6), slice(6, 38))
    assert layout.token_of(1, 6) == 20
    assert ViTConfig(num_registers=4).layout.distillation == slice(1, 1)


def test_a_marked_patch_of_the_picture_is_found_on_the_grid() -> None:
    model = random_model(num_registers=2)
    for row in range(3):
        for column in range(5):
            images = torch.zeros(1, 3, 21, 55)
            images[..., 7 * row + 3, 11 * column + 8] = 1
            changed = (model.embed(images)[0] - model.embed(torch.zeros_like(images))[0]).abs().sum(-1)
            assert changed.argmax() == model.layout.token_of(row, column)
            grid = model.layout.to_grid(changed)
            assert grid.shape == (1, 3, 5)
            assert grid[0].nonzero().tolist() == [[row, column]]


def test_coordinates_are_the_row_and_the_column_of_each_patch() -> None:
    rows, columns = ViTConfig(**SMALL).layout.coordinates()
    assert rows.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert columns.tolist() == [0, 1, 2, 3, 4] * 3


@pytest.mark.parametrize("place", [(3, 0), (0, 5), (-1, 0), (0, -1)])
def test_a_place_outside_the_grid_is_refused(place: tuple[int, int]) -> None:
    layout = ViTConfig(**SMALL).layout
    with pytest.raises(ValueError, match=rf"3 x 5 patches; there is none at row {place[0]}, column {place[1]}"):
        layout.token_of(*place)


def test_values_of_another_number_of_tokens_have_no_grid() -> None:
    with pytest.raises(ValueError, match="The layout has 16 tokens, the values 15"):
        ViTConfig(**SMALL).layout.to_grid(torch.zeros(2, 15))


@pytest.mark.parametrize(("batch", "kept"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 5), (40, 30)])
def test_drop_path_runs_a_branch_for_a_fixed_share_of_the_batch(batch: int, kept: int) -> None:
    model = random_model(depth=2, drop_path=0.25).train()
    block, seen = model.blocks[1], []
    for part in (block.attn, block.mlp):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert block(torch.randn(batch, 5, 24)).shape == (batch, 5, 24)
    assert seen == [kept, kept]


def test_drop_path_keeps_the_expectation() -> None:
    """For each picture the mean over many draws is that of masking with chance `rate`: the whole branch, once."""
    drop, x = DropPath(0.3).train(), torch.randn(7, 3, 5)
    kept = torch.zeros(7)
    for _ in range(2000):
        chosen = drop.choose(x)
        y = drop.add(x, 2 * pick(x, chosen), chosen)
        is_kept = torch.zeros(7, dtype=torch.bool).index_fill(0, chosen, True)
        exactly(y[~is_kept], x[~is_kept])
        assert_close(y[is_kept], x[is_kept] * (1 + 2 * 7 / 5))
        kept += is_kept
    assert_close(kept / 2000 * 7 / 5, torch.ones(7), rtol=0, atol=0.08)


def test_drop_path_does_nothing_in_eval() -> None:
    x = torch.randn(4, 3, 5)
    assert DropPath(0.9).eval().choose(x) is None
    images = pictures(8)
    model = random_model(drop_path=0.9)
    plain = VisionTransformer(ViTConfig(**SMALL)).eval()
    plain.load_state_dict(model.state_dict())
    exactly(model(images), plain(images))


def test_picked_pictures_give_their_gradient_back() -> None:
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([4, 0, 3])
    exactly(pick(x, chosen), x[chosen])
    assert torch.autograd.gradcheck(lambda x: pick(x, chosen).square(), x)


def test_drop_path_works_with_half_precision_branches() -> None:
    block = random_model(depth=2, drop_path=0.5).train().blocks[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert block(torch.randn(6, 5, 24)).dtype == torch.float32


def test_drop_path_rises_linearly_with_depth() -> None:
    blocks = VisionTransformer(ViTConfig(**{**SMALL, "depth": 5}, drop_path=0.2)).blocks
    assert [block.drop_path.rate for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_drop_path_leaves_out_both_branches_of_a_picture_apart() -> None:
    model = random_model(depth=2, drop_path=0.5, layer_scale_init=1.0)
    block, x = model.blocks[1].train(), torch.randn(1, 5, 24).expand(400, 5, 24)
    attended = block.ls1(block.attn(block.norm1(x[:1])))
    y = block(x)
    after_attention = [x[:1], x[:1] + 2 * attended]
    outcomes = [h + scale * block.ls2(block.mlp(block.norm2(h))) for h in after_attention for scale in (0, 2)]
    nearest = torch.stack([(y - outcome).abs().amax((1, 2)) for outcome in outcomes])
    assert nearest.min(0).values.max() < 1e-3
    shares = nearest.argmin(0).bincount(minlength=4) / 400
    assert_close(shares, torch.full((4,), 0.25), rtol=0, atol=0.1)
    assert_close(shares[:2].sum(), torch.tensor(0.5))


def test_drop_path_and_patch_dropout_turn_each_picture_by_its_own_patches() -> None:
    model = random_model(drop_path=0.5, patch_dropout=0.6, pos_embed="rope", depth=2).train()
    tokens, rope = model.embed(pictures(6))
    block = model.blocks[1]
    chosen = torch.tensor([4, 0, 3])
    block.drop_path.choose = lambda x: chosen
    together = block(tokens, rope)
    block.drop_path.choose = lambda x: None
    for i in range(6):
        alone, turns = tokens[i : i + 1], rope[:, i, 0]
        if i in chosen:
            alone = alone + 2 * block.attn(block.norm1(alone), rope=turns)
            alone = alone + 2 * block.mlp(block.norm2(alone))
        assert_close(together[i : i + 1], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos_embed", ["learned", "sincos2d", "rope"])
def test_patch_dropout_keeps_prefix_and_pairs(pos_embed: str) -> None:
    model = random_model(patch_dropout=0.4, num_registers=2, pos_embed=pos_embed)
    images = pictures()
    every, turns = model.embed(images)
    assert every.shape[1] == 18
    kept, kept_turns = model.train().embed(images)
    assert kept.shape[1] == 3 + 9
    exactly(kept[:, :3], every[:, :3])
    origins = torch.cdist(kept, every, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
    exactly(kept, torch.stack([every[i, origins[i]] for i in range(3)]))
    assert all(len(set(row)) == 12 for row in origins.tolist())
    assert len({frozenset(row) for row in origins.tolist()}) == 3
    if pos_embed == "rope":
        exactly(kept_turns[:, :, 0], torch.stack([turns[:, origins[i]] for i in range(3)], 1))
    else:
        assert kept_turns is None


def test_patch_dropout_with_rotary_attends_as_the_kept_tokens_alone() -> None:
    model = random_model(patch_dropout=0.6, pos_embed="rope")
    images = pictures(2)
    tokens, rope = model.train().embed(images)
    together = model.blocks[0](tokens, rope)
    for i in range(2):
        alone = model.blocks[0](tokens[i : i + 1], rope[:, i, 0])
        assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)


def test_patch_dropout_takes_every_patch_as_often() -> None:
    model = random_model(patch_dropout=0.8, pos_embed="rope")
    images = torch.arange(15.0).view(3, 5).repeat_interleave(7, 0).repeat_interleave(11, 1).expand(2000, 3, 21, 55)
    every = model.embed(images[:1])[0][0]
    kept = model.train().embed(images)[0]
    chosen = torch.cdist(kept, every.expand(2000, 16, 24)).argmin(-1)[:, 1:].flatten().bincount(minlength=16)
    assert_close(chosen[1:] / 2000, torch.full((15,), 3 / 15), rtol=0, atol=0.05)


def test_patch_dropout_keeps_at_least_one_patch() -> None:
    assert random_model(patch_dropout=0.99).train().embed(pictures())[0].shape[1] == 2


def test_a_new_model_gives_every_class_the_same_chance() -> None:
    torch.testing.assert_close(VisionTransformer(ViTConfig(**SMALL)).eval()(pictures()), torch.zeros(3, 13))


def test_gradients_reach_every_parameter() -> None:
    model = random_model(num_registers=2, qk_norm=True, layer_scale_init=0.5, mlp="swiglu").train()
    F.cross_entropy(model(pictures()), torch.tensor([0, 5, 12])).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_channels": 0}, "in_channels must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must not be negative, got -1"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"fc_norm": True}, "fc_norm is for pool 'mean', got 'cls'"),
        ({"embed_dim": 0}, "embed_dim must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"mlp_dim": 0}, "mlp_dim must be at least 1, got 0"),
        ({"distillation_token": True, "pool": "mean"}, "distillation_token .* needs pool 'cls', got 'mean'"),
        ({"num_registers": -1}, "num_registers must not be negative, got -1"),
        ({"attention_dropout": 1.0}, r"attention_dropout must lie in \[0, 1\), got 1.0"),
        ({"drop_path": -0.1}, r"drop_path must lie in \[0, 1\), got -0.1"),
        ({"patch_dropout": 1.0}, r"patch_dropout must lie in \[0, 1\), got 1.0"),
        ({"image_size": 30, "patch_size": 8}, "image_size 30 x 30 is not divisible by patch_size 8 x 8"),
        ({"image_size": (32, 30), "patch_size": 8}, "image_size 32 x 30 is not divisible by patch_size 8 x 8"),
        ({"image_size": 30, "patch_size": (5, 7)}, "image_size 30 x 30 is not divisible by patch_size 5 x 7"),
        ({"patch_size": 0}, "not divisible by patch_size 0 x 0"),
        ({"embed_dim": 24, "num_heads": 5}, "embed_dim 24 is not divisible by num_heads 5"),
        ({"embed_dim": 24, "num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not divisible by num_kv_heads 2"),
        ({"pos_embed": "rope", "embed_dim": 30, "num_heads": 3}, "'rope' needs a head_dim divisible by 4.*got 10"),
        ({"pos_embed": "rope", "head_dim": 6}, "'rope' needs a head_dim divisible by 4.*got 6"),
        (
            {"pos_embed": "sincos2d", "embed_dim": 30, "num_heads": 3},
            "'sincos2d' needs an embed_dim divisible by 4, got 30",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("mlp", "gelu, gelu_tanh, quick_gelu, swiglu"),
        ("pool", "cls, mean, cls_mean, attention"),
        ("pos_embed", "learned, sincos2d, rope, rope_dinov3"),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(
    field: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run-time checks of types, on in tests only, would refuse before the code does.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"{field} must be one of {words}; got 'other'"):
        ViTConfig(**{field: "other"})


@pytest.mark.parametrize("shape", [(2, 3, 55, 21), (2, 1, 21, 55), (2, 3, 21, 44)])
def test_pictures_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
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

# Stochastic depth and both heads, forwards and backwards, from the same random stream.
model = VisionTransformer(ViTConfig(image_size=(21, 55), patch_size=(7, 11), embed_dim=24, depth=2, num_classes=13,
                                    distillation_token=True, pos_embed="rope", drop_path=0.4))
torch.nn.init.normal_(model.head_dist.weight)
outcomes = []
for run in (model, torch.compile(model, fullgraph=True, dynamic=False)):
    torch.manual_seed(1)
    logits = run(torch.linspace(-1, 1, 7 * 3 * 21 * 55).view(7, 3, 21, 55), separate_heads=True)
    outcomes.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.blocks.parameters()))))
assert outcomes[0][1].abs().sum() > 0
torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_a_compiled_model_equals_the_eager_one() -> None:
    # In a process of its own: the run-time checks of shapes, on in tests only, cannot be compiled.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
