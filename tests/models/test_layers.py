"""Patch embedding, MLP and stochastic depth against their formulas."""

import pytest
import torch
from torch.testing import assert_close
from vit_cases import SMALL, assert_equal, random_images, random_model

from vitmha.models.config import ViTConfig
from vitmha.models.layers import DropPath, Mlp, PatchEmbed, UniqueIndexSelect
from vitmha.models.vit import VisionTransformer


def test_patches_are_projected_flattened_in_channel_row_column_order() -> None:
    embed = PatchEmbed(2, (3, 5), 7)
    images = torch.randn(2, 2, 6, 20)
    tokens = embed(images)
    for token, (row, column) in enumerate((row, column) for row in range(2) for column in range(4)):
        patch = images[:, :, 3 * row : 3 * row + 3, 5 * column : 5 * column + 5].reshape(2, 30)
        expected = patch @ embed.proj.weight.reshape(7, 30).T + embed.proj.bias
        assert_close(tokens[:, token], expected)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_equals_its_formula(activation: str) -> None:
    mlp = Mlp(5, 7, activation)
    x = torch.randn(2, 3, 5)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    if activation == "gelu":
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    else:
        hidden = hidden[..., :7] * torch.sigmoid(hidden[..., :7]) * hidden[..., 7:]
    assert_close(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)


@pytest.mark.parametrize(("batch", "kept"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 5), (40, 30)])
def test_drop_path_runs_the_branch_for_a_fixed_fraction_of_the_batch(batch: int, kept: int) -> None:
    model = random_model(depth=2, drop_path=0.25).train()
    block, batch_sizes = model.blocks[1], []
    for part in (block.attn, block.mlp):
        part.register_forward_pre_hook(lambda _, inputs: batch_sizes.append(len(inputs[0])))
    assert block(torch.randn(batch, 5, 24)).shape == (batch, 5, 24)
    assert batch_sizes == [kept, kept]


def test_drop_path_keeps_the_expectation() -> None:
    """Averaged over many draws, each image gets its branch once."""
    drop, x = DropPath(0.3).train(), torch.randn(7, 3, 5)
    kept = torch.zeros(7)
    for _ in range(2000):
        y = drop(x, lambda x, _: 2 * x)
        is_kept = (y != x).any(2).any(1)
        assert is_kept.sum() == 5
        assert_equal(y[~is_kept], x[~is_kept])
        assert_close(y[is_kept], x[is_kept] * (1 + 2 * 7 / 5))
        kept += is_kept
    assert_close(kept / 2000 * 7 / 5, torch.ones(7), rtol=0, atol=0.08)


def test_drop_path_does_nothing_in_eval() -> None:
    x = torch.randn(4, 3, 5)
    assert_equal(DropPath(0.9).eval()(x, lambda x, _: 2 * x), 3 * x)
    images = random_images(8)
    model = random_model(drop_path=0.9)
    plain = VisionTransformer(ViTConfig(**SMALL)).eval()
    plain.load_state_dict(model.state_dict())
    assert_equal(model(images), plain(images))


def test_unique_index_select_equals_indexing_and_its_gradient() -> None:
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 3])
    assert_equal(UniqueIndexSelect.apply(x, index), x[index])
    assert torch.autograd.gradcheck(lambda x: UniqueIndexSelect.apply(x, index).square(), x)


def test_drop_path_works_with_half_precision_branches() -> None:
    block = random_model(depth=2, drop_path=0.5).train().blocks[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert block(torch.randn(6, 5, 24)).dtype == torch.float32


def test_drop_path_rises_linearly_with_depth() -> None:
    blocks = VisionTransformer(ViTConfig(**{**SMALL, "depth": 5}, drop_path=0.2)).blocks
    assert [block.drop_path.rate for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_drop_path_skips_the_two_branches_of_an_image_independently() -> None:
    model = random_model(depth=2, drop_path=0.5, layer_scale_init=1.0)
    block, x = model.blocks[1].train(), torch.randn(1, 5, 24).expand(400, 5, 24)
    attended = block.ls1(block.attn(block.norm1(x[:1])))
    y = block(x)
    after_attention = [x[:1], x[:1] + 2 * attended]
    outcomes = [h + scale * block.ls2(block.mlp(block.norm2(h))) for h in after_attention for scale in (0, 2)]
    nearest = torch.stack([(y - outcome).abs().amax((1, 2)) for outcome in outcomes])
    assert nearest.min(0).values.max() < 1e-3
    fractions = nearest.argmin(0).bincount(minlength=4) / 400
    assert_close(fractions, torch.full((4,), 0.25), rtol=0, atol=0.1)
    assert_close(fractions[:2].sum(), torch.tensor(0.5))


def test_drop_path_and_patch_dropout_rotate_each_image_by_its_own_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(drop_path=0.5, patch_dropout=0.6, pos_embed="rope", depth=2).train()
    tokens, rope = model.embed(random_images(6))
    block = model.blocks[1]
    monkeypatch.setattr(torch, "randperm", lambda n, device: torch.tensor([4, 0, 3, 1, 2, 5]))
    together = block(tokens, rope)
    for i in range(6):
        alone = tokens[i : i + 1]
        if i in (4, 0, 3):
            alone = alone + 2 * block.attn(block.norm1(alone), rope=rope[:, i, 0])
            alone = alone + 2 * block.mlp(block.norm2(alone))
        assert_close(together[i : i + 1], alone, rtol=0, atol=1e-4)
