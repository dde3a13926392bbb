"""Head metrics, compared with hand-made values and with full maps."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from vitmha.inspection import HeadMetrics, attention_distance, attention_entropy, head_divergence, record_attention
from vitmha.inspection.head_metrics import describe_offset, for_json, role_of
from vitmha.inspection.maps import js_divergence
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

# A grid of 4 x 6 patches of 3 x 5 pixels.
random_model = partial(builders.random_vit, image_size=(12, 30), patch_size=(3, 5), depth=2)
exactly = partial(assert_close, rtol=0, atol=0)


def grid_layout(height: int, width: int, patch_size: tuple[int, int] = (1, 1), prefix: int = 0) -> TokenLayout:
    return TokenLayout(num_class_tokens=0, num_registers=prefix, grid_size=(height, width), patch_size=patch_size)


def test_uniform_attention_has_the_maximum_entropy() -> None:
    entropy = attention_entropy(torch.full((2, 3, 197), 1 / 197, dtype=torch.float64))
    assert_close(entropy, torch.full((2, 3), math.log(197), dtype=torch.float64))
    assert_close(entropy[0, 0].item(), 5.28320, rtol=0, atol=5e-6)


def test_entropy_of_equal_weights_in_nats_and_bits() -> None:
    for keys, nats, bits in ((196, 5.27811, 7.61471), (197, 5.28320, 7.62205)):
        entropy = attention_entropy(torch.full((keys,), 1 / keys, dtype=torch.float64)).item()
        assert_close((entropy, entropy / math.log(2)), (nats, bits), rtol=0, atol=5e-6)


def test_attention_to_one_key_has_zero_entropy() -> None:
    exactly(attention_entropy(torch.eye(5)), torch.zeros(5))


def test_entropy_of_two_unequal_weights() -> None:
    expected = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert_close(attention_entropy(torch.tensor([0.25, 0, 0.75])), torch.tensor(expected))


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (2, 2, 0.853553),
        (3, 3, 1.453311),
        (7, 7, 3.609465),
        (14, 14, 7.280764),
        (24, 24, 12.502999),
        (14, 28, 11.254044),
    ],
)
@pytest.mark.parametrize("patch", [1, 16])
def test_distance_of_uniform_attention(height: int, width: int, expected: float, patch: int) -> None:
    count = height * width
    weights = torch.full((2, count, count), 1 / count, dtype=torch.float64)
    distance = attention_distance(weights, grid_layout(height, width, (patch, patch)))
    assert_close(distance, torch.full((2,), patch * expected, dtype=torch.float64), rtol=0, atol=patch * 1e-6)


def test_distance_is_zero_for_attention_to_itself_or_to_prefix_tokens() -> None:
    layout = grid_layout(3, 5, (7, 11), prefix=2)
    exactly(attention_distance(torch.eye(17).expand(2, 17, 17), layout), torch.zeros(2))
    to_prefix = torch.zeros(2, 17, 17)
    to_prefix[..., 0] = 1
    exactly(attention_distance(to_prefix, layout), torch.zeros(2))


@pytest.mark.parametrize(("step", "expected"), [((0, 1), 11.0), ((1, 0), 7.0), ((1, 1), math.hypot(7, 11))])
def test_distance_to_a_neighbor_is_the_patch_size(step: tuple[int, int], expected: float) -> None:
    layout = grid_layout(3, 5, (7, 11), prefix=1)
    weights, with_neighbor = torch.eye(16), 0
    for row in range(3 - step[0]):
        for column in range(5 - step[1]):
            weights[layout.token_of(row, column)] = 0
            weights[layout.token_of(row, column), layout.token_of(row + step[0], column + step[1])] = 1
            with_neighbor += 1
    assert_close(attention_distance(weights, layout), torch.tensor(expected * with_neighbor / 15))


@pytest.mark.parametrize(("renormalize", "expected"), [(True, 3.609465), (False, 0.721893)])
def test_distance_with_mass_on_the_prefix(renormalize: bool, expected: float) -> None:
    weights = torch.full((3, 2, 50, 50), 0.2 / 49)
    weights[..., 0] = 0.8
    distance = attention_distance(weights, grid_layout(7, 7, prefix=1), renormalize=renormalize)
    assert_close(distance, torch.full((3, 2), expected), rtol=0, atol=1e-5)


def metrics_of_maps(model: VisionTransformer, maps: Tensor, monkeypatch: pytest.MonkeyPatch) -> HeadMetrics:
    """The metrics of a model whose three heads, in both layers, have the maps (heads, tokens, tokens)."""

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        first = weigh.num_rows % maps.shape[1]
        weigh.num_rows += q.shape[2]
        return maps[None, :, first : first + q.shape[2]].expand(len(q), -1, -1, -1)

    weigh.num_rows = 0
    monkeypatch.setattr("vitmha.inspection.head_metrics.attention_probabilities", weigh)
    metrics = HeadMetrics(model)
    metrics.update(torch.randn(2, 3, 12, 30))
    return metrics


def shifted(layout: TokenLayout, offset: tuple[int, int]) -> Tensor:
    """Maps in which a patch attends to the patch at an offset, else to itself, and prefix tokens to themselves."""
    weights = torch.eye(layout.num_tokens)
    height, width = layout.grid_size
    for row in range(height):
        for column in range(width):
            target = (row + offset[0], column + offset[1])
            if 0 <= target[0] < height and 0 <= target[1] < width:
                weights[layout.token_of(row, column)] = 0
                weights[layout.token_of(row, column), layout.token_of(*target)] = 1
    return weights


@pytest.mark.parametrize("rows", [64, 7])
@pytest.mark.parametrize("fields", [{}, {"num_registers": 3, "distillation_token": True}, {"pool": "mean"}])
def test_streamed_metrics_equal_those_of_full_maps(
    fields: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitmha.inspection.head_metrics.ROWS", rows)
    model, images = random_model(**fields), torch.randn(5, 3, 12, 30)
    metrics, layout = HeadMetrics(model), model.layout
    logits = torch.cat([metrics.update(images[:2]), metrics.update(images[2:])])
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        exactly(logits[:2], model(images[:2]))
        model(images)
    values = metrics.values()
    maps = torch.stack(recorded.maps, 1)  # batch layers heads tokens tokens
    on_patches = maps[..., layout.patches, layout.patches]
    rows_of, columns_of = torch.arange(24) // 6, torch.arange(24) % 6
    near = ((rows_of[:, None] - rows_of).abs() <= 1) & ((columns_of[:, None] - columns_of).abs() <= 1)
    expected = {
        "entropy": attention_entropy(maps).mean((0, 3)),
        "normalized_entropy": attention_entropy(maps).mean((0, 3)) / math.log(layout.num_tokens),
        "distance": attention_distance(maps, layout).mean(0),
        "distance_with_prefix": attention_distance(maps, layout, renormalize=False).mean(0),
        "cls_mass": maps[..., : layout.num_class_tokens].sum(-1).mean((0, 3)),
        "dist_mass": maps[..., layout.distillation].sum(-1).mean((0, 3)),
        "register_mass": maps[..., layout.registers].sum(-1).mean((0, 3)),
        "self_mass": maps.diagonal(dim1=-2, dim2=-1).mean((0, 3)),
        "sink_mass": maps.mean(3).amax(-1).mean(0),
        "local_mass": ((on_patches * near).sum(-1) / on_patches.sum(-1)).mean((0, 3)),
    }
    for name, value in expected.items():
        assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    one = torch.stack([on_patches[:, :, :, i, i + 1] for i in range(24) if i % 6 < 5]).mean((0, 1))
    assert (values["offset_mass"] >= one - 1e-6).all()


@pytest.mark.parametrize(
    ("offset", "description"),
    [
        ((-1, 0), "one patch up"),
        ((1, 0), "one patch down"),
        ((0, -1), "one patch left"),
        ((0, 2), "2 patches right"),
        ((1, -2), "one patch down, 2 patches left"),
    ],
)
@pytest.mark.parametrize("registers", [0, 2])
def test_a_head_that_attends_at_a_fixed_offset_is_positional(
    offset: tuple[int, int], description: str, registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_registers=registers)
    maps = shifted(model.layout, offset).expand(3, -1, -1)
    metrics = metrics_of_maps(model, maps, monkeypatch)
    assert metrics.offsets == [[offset] * 3] * 2
    exactly(metrics.values()["offset_mass"], torch.ones(2, 3))
    assert describe_offset(offset) == description
    if description.startswith("one patch") and "," not in description:
        record = metrics.records()[5]
        assert (record["role"], record["description"]) == ("positional", f"attends {description} (100%)")


def test_an_offset_inside_the_image_for_few_patches_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    maps = torch.full((25, 25), 1 / 25)
    maps[1], maps[1, 24] = 0, 1  # the first patch attends only to the last
    metrics = metrics_of_maps(model, maps.expand(3, -1, -1), monkeypatch)
    assert (3, 5) not in metrics.offsets[0]
    assert_close(metrics.values()["offset_mass"], torch.full((2, 3), 1 / 25), rtol=0.1, atol=0)


def test_roles_of_heads_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(num_registers=1)
    uniform, sink = torch.full((26, 26), 1 / 26), torch.zeros(26, 26)
    sink[:, 0] = 1
    metrics = metrics_of_maps(model, torch.stack([torch.eye(26), sink, uniform]), monkeypatch)
    assert [record["role"] for record in metrics.records()[:3]] == ["self", "sink", "uniform"]
    assert metrics.records()[1]["description"] == "attends to the class token (100%)"
    values = metrics.values()
    assert_close(values["entropy"][0], torch.tensor([0, 0, math.log(26)]))
    assert_close(values["register_mass"][0], torch.tensor([1 / 26, 0, 1 / 26]))
    assert_close(values["sink_mass"][0], torch.tensor([1 / 26, 1, 1 / 26]))
    assert_close(values["relative_distance"][0, 2], torch.tensor(1.0))


def test_the_rules_of_the_roles_apply_in_order() -> None:
    nothing = dict.fromkeys(
        ("self_mass", "offset_mass", "cls_mass", "dist_mass", "register_mass", "sink_mass", "normalized_entropy"), 0.0
    ) | {"local_mass": 0.0, "relative_distance": 0.0, "distance": 12.0}
    sinks = {
        "cls_mass": "attends to the class token (50%)",
        "dist_mass": "attends to the distillation token (50%)",
        "register_mass": "attends to the registers (50%)",
        "sink_mass": "attends to one token of the image (50%)",
    }
    rules = [
        ("self_mass", 0.5, "self"),
        ("offset_mass", 0.4, "positional"),
        ("sink_mass", 0.5, "sink"),
        ("normalized_entropy", 0.95, "uniform"),
        ("local_mass", 0.5, "local"),
        ("relative_distance", 0.9, "global"),
    ]
    assert role_of(nothing, (0, 1)).name == "mixed"
    for name, threshold, role in reversed(rules):
        if role == "sink":  # each on its own, before the later rules
            for metric, description in sinks.items():
                assert role_of({**nothing, metric: 0.5}, (0, 1)) == ("sink", description)
                assert role_of({**nothing, metric: 0.49}, (0, 1)).name == "uniform"
        assert role_of({**nothing, name: threshold - 0.01}, (0, 1)).name != role
        nothing[name] = threshold
        assert role_of(nothing, (0, 1)).name == role


def test_class_selectivity_is_the_variance_between_classes() -> None:
    model, images = random_model(), torch.randn(12, 3, 12, 30)
    labels = torch.arange(12) % 3
    metrics = HeadMetrics(model)
    metrics.update(images[:7], labels[:7])
    metrics.update(images[7:], labels[7:])
    with torch.no_grad(), record_attention(model) as recorded:
        model(images)
    rows = torch.stack(recorded.maps)[:, :, :, 0].double()
    total = (rows - rows.mean(1, keepdim=True)).square().sum((1, 3)) / 11
    within = sum(
        (rows[:, labels == label] - rows[:, labels == label].mean(1, keepdim=True)).square().sum((1, 3))
        for label in range(3)
    )
    assert_close(metrics.values()["class_selectivity"], (1 - within / 9 / total).float(), rtol=1e-3, atol=1e-4)

    same = HeadMetrics(model)
    same.update(images[:3].repeat_interleave(4, 0), torch.arange(3).repeat_interleave(4))
    assert_close(same.values()["class_selectivity"], torch.ones(2, 3), rtol=0, atol=1e-6)


def test_class_selectivity_is_nan_for_a_head_with_the_same_row_in_every_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = random_model()
    sink = torch.full((25, 25), 0.003)
    sink[:, 0] = 1 - 24 * 0.003
    metrics = metrics_of_maps(model, sink.expand(3, -1, -1), monkeypatch)
    for label in range(7):  # sums rounded in float32 are not exactly equal
        metrics.update(torch.randn(13, 3, 12, 30), torch.full((13,), label))
    assert metrics.values()["class_selectivity"].isnan().all()
    metrics.write(tmp_path)
    facts = json.loads((tmp_path / "heads.json").read_text(), parse_constant=pytest.fail)
    assert {head["class_selectivity"] for head in facts["heads"]} == {None}
    assert for_json([{"a": math.inf, "b": -math.inf, "c": 2.5, "d": "x", "e": 3}]) == [
        {"a": None, "b": None, "c": 2.5, "d": "x", "e": 3}
    ]


def test_memory_does_not_grow_with_the_number_of_images() -> None:
    model = random_model()
    metrics = HeadMetrics(model)

    def num_bytes() -> int:
        tensors = [*metrics.sums.values(), *metrics.rows.values(), *(rows for _, rows in metrics.by_class.values())]
        return sum(tensor.nbytes for tensor in tensors)

    for _ in range(2):
        metrics.update(torch.randn(4, 3, 12, 30), torch.tensor([0, 1, 0, 1]))
    before = num_bytes()
    for _ in range(5):
        metrics.update(torch.randn(4, 3, 12, 30), torch.tensor([0, 1, 0, 1]))
    assert (metrics.count, num_bytes()) == (28, before)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_head_divergence_is_the_mean_divergence_of_the_rows(rows: int) -> None:
    model, images = random_model(), torch.randn(2, 3, 12, 30)
    found = head_divergence(model, images, rows)
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        model(images)
    chosen = {1: [0], 5: [0, 6, 12, 18, 24], 100: list(range(25))}[rows]
    maps = torch.cat(recorded.maps, 1)[:, :, chosen]
    assert found.shape == (6, 6)
    for i in range(6):
        for j in range(6):
            assert_close(found[i, j], js_divergence(maps[:, i], maps[:, j]).mean(), rtol=1e-4, atol=1e-6)


def test_metrics_are_written_without_pruned_heads(tmp_path: Path) -> None:
    model = random_model()
    model.blocks[1].attn.prune_heads([0, 2])
    metrics = HeadMetrics(model)
    metrics.update(torch.randn(2, 3, 12, 30))
    metrics.write(tmp_path)
    facts = json.loads((tmp_path / "heads.json").read_text(), parse_constant=pytest.fail)
    heads = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [(head["layer"], head["head"]) for head in facts["heads"]] == heads
    assert facts["num_images"] == 2
    assert facts["heads"][3]["class_selectivity"] is None
    with (tmp_path / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = metrics.values()
    assert values["entropy"].isnan().tolist() == [[False] * 3, [False, True, True]]
    for row, head, index in zip(rows, facts["heads"], heads, strict=True):
        assert float(row["entropy"]) == head["entropy"] == float(values["entropy"][index])
        assert row["description"] == head["description"]
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_metrics_without_images_are_an_error() -> None:
    with pytest.raises(ValueError, match="HeadMetrics has no images yet: call update first"):
        HeadMetrics(random_model()).values()
