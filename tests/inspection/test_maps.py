"""Derived maps, compared with hand-made values, explicit products and maps that are in the graph."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import random_vit
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.inspection import record_attention
from vitmha.inspection.maps import (
    head_divergences,
    js_divergence,
    mass_mask,
    readout_weights,
    relevance,
    rollout,
    value_weighted,
)
from vitmha.models.vit import VisionTransformer


def random_maps(layers: int = 3, heads: int = 4, tokens: int = 7, batch: int = 2) -> list[Tensor]:
    return [(3 * torch.randn(batch, heads, tokens, tokens, dtype=torch.float64)).softmax(-1) for _ in range(layers)]


def uniform(layers: int, tokens: int) -> list[Tensor]:
    return [torch.full((1, 2, tokens, tokens), 1 / tokens, dtype=torch.float64)] * layers


def test_rollout_of_uniform_attention_equals_hand_made_values() -> None:
    rows = rollout(uniform(12, 197))[0]
    off = rows[~torch.eye(197, dtype=torch.bool)]
    assert_close(rows.diagonal(), torch.full((197,), 0.00531904, dtype=torch.float64), rtol=0, atol=5e-9)
    assert_close(off, torch.full_like(off, 0.00507490), rtol=0, atol=5e-9)


def test_rollout_of_a_sink_and_of_the_identity() -> None:
    sink = torch.zeros(1, 2, 5, 5)
    sink[..., 3] = 1
    expected = torch.eye(5) * 2**-4
    expected[:, 3] += 1 - 2**-4
    assert_close(rollout([sink] * 4)[0], expected)
    assert_close(rollout([torch.eye(5).expand(1, 2, 5, 5)] * 4)[0], torch.eye(5))


def test_rollout_is_the_product_of_the_layers_in_their_order() -> None:
    maps, eye = random_maps(), torch.eye(7, dtype=torch.float64)
    product = eye.expand(2, 7, 7)
    for weights in maps:
        product = (weights.mean(1) + eye) / 2 @ product
    assert_close(rollout(maps), product)
    assert_close(rollout(maps, [0, 5]), product[:, [0, 5]])
    assert not torch.allclose(rollout(maps[::-1]), product, atol=1e-2)
    assert_close(rollout(maps, start_layer=2), (maps[2].mean(1) + eye) / 2)
    assert_close(rollout([weights[1:] for weights in maps]), product[1:])


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard_ratio", [0.0, 0.3, 0.9])
def test_rows_of_the_rollout_sum_to_one(fusion: Any, discard_ratio: float) -> None:
    rows = rollout(random_maps(), fusion=fusion, discard_ratio=discard_ratio)
    assert rows.min() >= 0
    assert_close(rows.sum(-1), torch.ones(2, 7, dtype=torch.float64))


def test_rollout_discards_the_least_attended_keys_of_each_row_and_keeps_the_identity() -> None:
    weights = torch.tensor([[[[0.05, 0.15, 0.8], [0.6, 0.1, 0.3], [0.2, 0.5, 0.3]]]])
    expected = torch.tensor([[[0, 0, 1], [1, 0, 0], [0, 1.0, 0]]])
    assert_close(rollout([weights], discard_ratio=0.67), (torch.eye(3) + expected) / 2)
    for fusion, kept in (("max", [0.5, 0.5, 0.25]), ("min", [0.25, 0.0, 0.0])):
        two = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])[None, :, None].expand(1, 2, 3, 3).clone()
        two[0, :, 0] = torch.tensor([[0.5, 0.5, 0], [0.25, 0, 0.25]])
        row = torch.tensor(kept)
        assert_close(rollout([two], [0], fusion=fusion)[0, 0], (torch.eye(3)[0] + row / row.sum()) / 2)


def test_invalid_rollout_arguments_are_refused() -> None:
    disjoint_heads = torch.eye(4).view(1, 1, 4, 4).repeat(1, 2, 1, 1)
    disjoint_heads[:, 1] = disjoint_heads[:, 1].roll(1, -1)
    with pytest.raises(ValueError, match=r"'min' leaves no weight in some rows of layer 0.*use 'mean' or 'max'"):
        rollout([disjoint_heads], fusion="min")
    with pytest.raises(ValueError, match=r"discard_ratio must be in \[0, 1\), got 1.0"):
        rollout([disjoint_heads], discard_ratio=1.0)
    with pytest.raises(ValueError, match=r"start_layer must be in \[0, 1\), got 1"):
        rollout([disjoint_heads], start_layer=1)


def test_value_weighting_keeps_rows_with_equal_norms_and_removes_keys_with_zero_values() -> None:
    (weights,) = random_maps(1)
    norms = torch.full((2, 4, 7), 3.0, dtype=torch.float64)
    assert_close(value_weighted(weights, norms) / 3, weights)
    norms[:, 1, 2] = 0
    weighted = value_weighted(weights, norms)
    assert weighted[:, 1, :, 2].abs().max() == 0
    assert_close(weighted[:, 1, :, 3], 3 * weights[:, 1, :, 3])


def chefer(model: VisionTransformer, images: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
    """All of R by the published rule, from recorded maps and gradients."""
    with record_attention(model, queries="all", gradients=True) as recorded:
        scalar = target(model(images))
    relevant = torch.eye(model.layout.num_tokens).expand(len(images), -1, -1)
    for weights, gradient in zip(recorded.maps, recorded.gradients(scalar), strict=True):
        relevant = relevant + (weights * gradient).clamp_min(0).mean(1) @ relevant
    return relevant


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_registers": 2, "num_kv_heads": 1},
        {"distillation_token": True},
        {"pool": "mean"},
        {"pool": "cls_mean"},
    ],
    ids=["class token", "registers", "distilled", "mean", "class and mean"],
)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_relevance_equals_the_rule_written_out(fields: dict[str, Any], is_frozen: bool) -> None:
    model, images = random_vit(**fields).requires_grad_(not is_frozen), torch.randn(3, 3, 8, 12)

    def target(logits: Tensor) -> Tensor:
        return logits[:, 2].sum() - 0.5 * logits[:, 4].square().sum()

    found, full = relevance(model, images, target), chefer(model, images, target)
    patches = full[:, model.layout.patches].mean(1)
    readout = {"mean": patches, "cls_mean": (full[:, 0] + patches) / 2}
    expected = readout.get(model.config.pool, full[:, : 1 + model.config.distillation_token].mean(1))
    assert_close(found, expected - readout_weights(model, images), rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert found.min() >= -1e-6
    assert found.max() > 0
    alone = torch.cat([relevance(model, image[None], target) for image in images])
    assert_close(found, alone, rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert_close(relevance(model, images, target), found)


def test_relevance_of_attention_pooling_starts_from_the_map_of_the_pooling() -> None:
    model, images = random_vit(pool="attention"), torch.randn(2, 3, 8, 12)

    def target(logits: Tensor) -> Tensor:
        return logits[:, 1].sum()

    found = relevance(model, images, target)
    assert model.attn_pool is not None
    pooling, observed = model.attn_pool.attn, []
    pooling.attention_hook = lambda *arguments: observed.extend(arguments[:4])
    logits = model(images)
    pooling.attention_hook = None
    q, k, v, y = observed
    [dy] = torch.autograd.grad(target(logits), y)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    row = (weights * (dy @ v.mT)).clamp_min(0).mean(1)  # of the pooling; the layers follow as for any other model
    maps = chefer(model, images, target)
    assert_close(found, (row @ maps)[:, 0], rtol=1e-4, atol=1e-6)


def test_start_layer_counts_layers_without_heads() -> None:
    model, images = random_vit(), torch.randn(2, 3, 8, 12)
    model.blocks[0].attn.prune_heads(range(3))
    found = [relevance(model, images, lambda logits: logits[:, 1].sum(), start_layer=layer) for layer in (0, 1, 2)]
    assert_close(found[0], found[1])
    assert (found[2] - found[1]).abs().max() > 1e-3


def test_relevance_in_bfloat16_is_close_to_float32() -> None:
    model, images = random_vit(), torch.randn(2, 3, 8, 12)
    expected = relevance(model.float(), images, lambda logits: logits[:, 1].sum())
    found = relevance(model.bfloat16(), images.bfloat16(), lambda logits: logits[:, 1].sum())
    assert_close(found, expected, rtol=0, atol=0.2 * float(expected.max()))


def test_relevance_is_zero_if_the_target_does_not_depend_on_the_attention() -> None:
    model, images = random_vit().double(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    nn.init.zeros_(model.head.weight)
    assert relevance(model, images, lambda logits: logits[:, 1].sum()).abs().max() == 0


def test_a_relevance_target_that_does_not_depend_on_the_logits_is_refused() -> None:
    model, images = random_vit().double(), torch.randn(1, 3, 8, 12, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="The target has no gradient: compute it from the logits"):
        relevance(model, images, lambda logits: logits.detach().sum())
    with pytest.raises(RuntimeError, match="does not depend on the model's attention"):
        relevance(model, images, lambda logits: torch.ones((), requires_grad=True) * 2)
    with pytest.raises(ValueError, match=r"start_layer must be in \[0, 3\), got 3"):
        relevance(model, images, lambda logits: logits.sum(), start_layer=3)


def test_methods_differ_from_each_other() -> None:
    model, images = random_vit(), torch.randn(1, 3, 8, 12)
    with record_attention(model, queries="all", value_norms=True) as recorded:
        model(images)
    rows = [
        recorded.maps[-1][0, :, 0].mean(0),
        value_weighted(recorded.maps[-1], recorded.value_norms[-1])[0, :, 0].mean(0),
        rollout(recorded.maps, [0])[0, 0],
        relevance(model, images, lambda logits: logits[:, 0].sum())[0],
    ]
    normalized = [row[1:].double() / row[1:].sum() for row in rows]
    for i, first in enumerate(normalized):
        for second in normalized[i + 1 :]:
            assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize(("fraction", "count"), [(0.6, 118), (0.5, 98), (1.0, 196), (0.001, 1)])
def test_mass_mask_of_uniform_attention_keeps_the_fraction_of_the_keys(fraction: float, count: int) -> None:
    assert mass_mask(torch.full((2, 196), 1 / 196, dtype=torch.float64), fraction).sum(-1).tolist() == [count] * 2


def test_mass_mask_keeps_the_strongest_keys() -> None:
    assert mass_mask(torch.tensor([[0.1, 0.45, 0.25, 0.2], [4.0, 1.0, 3.0, 2.0]])).tolist() == [
        [False, True, True, False],
        [True, False, True, False],
    ]
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        mass_mask(torch.ones(3), 0.0)


def test_js_divergence_of_equal_and_disjoint_rows() -> None:
    rows = torch.eye(4, dtype=torch.float64)
    assert_close(js_divergence(rows, rows), torch.zeros(4, dtype=torch.float64))
    disjoint = torch.full((4,), math.log(2), dtype=torch.float64)
    assert_close(js_divergence(rows, rows.roll(1, 0)), disjoint)
    assert_close(disjoint[0].item(), 0.693147, rtol=0, atol=5e-7)


def test_head_divergences_of_all_pairs_of_heads() -> None:
    (first,), (second,) = random_maps(1, heads=2), random_maps(1, heads=3)
    found = head_divergences(first, second)
    for i in range(2):
        for j in range(3):
            middle = (first[:, i] + second[:, j]) / 2
            kl = [(p * (p / middle).log()).sum(-1) for p in (first[:, i], second[:, j])]
            assert_close(found[i, j], sum(kl).mean() / 2)
