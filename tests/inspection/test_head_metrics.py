"""Numbers of heads, against what was worked out by hand and against the whole maps."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.inspection import HeadMetrics, attention_distance, attention_entropy, head_divergence, record_attention
from vitmha.inspection.head_metrics import for_json, offset_in_words, role_of
from vitmha.inspection.maps import js_divergence
from vitmha.models.config import TokenLayout, ViTConfig
from vitmha.models.vit import VisionTransformer

exactly = partial(assert_close, rtol=0, atol=0)


def random_model(**fields: Any) -> VisionTransformer:
    """Two blocks of three heads over a grid of 4 x 6 patches of 3 x 5 pixels, with sharp attention, in eval mode."""
    defaults = {"num_classes": 5, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_dim": 17, "patch_size": (3, 5)}
    model = VisionTransformer(ViTConfig(image_size=(12, 30), **{**defaults, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def grid_layout(height: int, width: int, patch_size: tuple[int, int] = (1, 1), prefix: int = 0) -> TokenLayout:
    return TokenLayout(num_class_tokens=0, num_registers=prefix, grid_size=(height, width), patch_size=patch_size)


def test_uniform_attention_has_the_greatest_entropy() -> None:
    entropy = attention_entropy(torch.full((2, 3, 197), 1 / 197, dtype=torch.float64))
    assert_close(entropy, torch.full((2, 3), math.log(197), dtype=torch.float64))
    assert_close(entropy[0, 0].item(), 5.28320, rtol=0, atol=5e-6)


def test_entropy_of_equal_weights_in_nats_and_bits() -> None:
    for keys, nats, bits in ((196, 5.27811, 7.61471), (197, 5.28320, 7.62205)):
        entropy = attention_entropy(torch.full((keys,), 1 / keys, dtype=torch.float64)).item()
        assert_close((entropy, entropy / math.log(2)), (nats, bits), rtol=0, atol=5e-6)


def test_attention_to_one_key_has_no_entropy() -> None:
    exactly(attention_entropy(torch.eye(5)), torch.zeros(5))


def test_entropy_of_two_unequal_shares() -> None:
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


def test_a_patch_that_sees_itself_or_the_prefix_alone_looks_no_distance_away() -> None:
    layout = grid_layout(3, 5, (7, 11), prefix=2)
    exactly(attention_distance(torch.eye(17).expand(2, 17, 17), layout), torch.zeros(2))
    to_prefix = torch.zeros(2, 17, 17)
    to_prefix[..., 0] = 1
    exactly(attention_distance(to_prefix, layout), torch.zeros(2))


@pytest.mark.parametrize(("step", "expected"), [((0, 1), 11.0), ((1, 0), 7.0), ((1, 1), math.hypot(7, 11))])
def test_distance_to_a_neighbour_is_the_patch(step: tuple[int, int], expected: float) -> None:
    layout = grid_layout(3, 5, (7, 11), prefix=1)
    weights, with_neighbour = torch.eye(16), 0
    for row in range(3 - step[0]):
        for column in range(5 - step[1]):
            weights[layout.token_of(row, column)] = 0
            weights[layout.token_of(row, column), layout.token_of(row + step[0], column + step[1])] = 1
            with_neighbour += 1
    assert_close(attention_distance(weights, layout), torch.tensor(expected * with_neighbour / 15))


@pytest.mark.parametrize(("renormalize", "expected"), [(True, 3.609465), (False, 0.721893)])
def test_distance_with_mass_on_the_prefix(renormalize: bool, expected: float) -> None:
    weights = torch.full((3, 2, 50, 50), 0.2 / 49)
    weights[..., 0] = 0.8
    distance = attention_distance(weights, grid_layout(7, 7, prefix=1), renormalize=renormalize)
    assert_close(distance, torch.full((3, 2), expected), rtol=0, atol=1e-5)


def looking_at(model: VisionTransformer, maps: Tensor, monkeypatch: pytest.MonkeyPatch) -> HeadMetrics:
    """The numbers of a model whose three heads, in both layers, look as the maps (heads, tokens, tokens) say."""

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        first = weigh.seen % maps.shape[1]
        weigh.seen += q.shape[2]
        return maps[None, :, first : first + q.shape[2]].expand(len(q), -1, -1, -1)

    weigh.seen = 0
    monkeypatch.setattr("vitmha.inspection.head_metrics.attention_probabilities", weigh)
    numbers = HeadMetrics(model)
    numbers.update(torch.randn(2, 3, 12, 30))
    return numbers


def shifted(layout: TokenLayout, offset: tuple[int, int]) -> Tensor:
    """Every patch looks at the one at an offset, or at itself where there is none; prefix tokens at themselves."""
    weights = torch.eye(layout.num_tokens)
    height, width = layout.grid_size
    for row in range(height):
        for column in range(width):
            there = (row + offset[0], column + offset[1])
            if 0 <= there[0] < height and 0 <= there[1] < width:
                weights[layout.token_of(row, column)] = 0
                weights[layout.token_of(row, column), layout.token_of(*there)] = 1
    return weights


@pytest.mark.parametrize("rows", [64, 7])
@pytest.mark.parametrize("fields", [{}, {"num_registers": 3, "distillation_token": True}, {"pool": "mean"}])
def test_streamed_numbers_equal_those_of_whole_maps(
    fields: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitmha.inspection.head_metrics.ROWS", rows)
    model, images = random_model(**fields), torch.randn(5, 3, 12, 30)
    numbers, layout = HeadMetrics(model), model.layout
    logits = torch.cat([numbers.update(images[:2]), numbers.update(images[2:])])
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        exactly(logits[:2], model(images[:2]))
        model(images)
    values = numbers.values()
    maps = torch.stack(recorded.maps, 1)  # batch layers heads tokens tokens
    among = maps[..., layout.patches, layout.patches]
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
        "local_mass": ((among * near).sum(-1) / among.sum(-1)).mean((0, 3)),
    }
    for name, value in expected.items():
        assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    one = torch.stack([among[:, :, :, i, i + 1] for i in range(24) if i % 6 < 5]).mean((0, 1))
    assert (values["offset_mass"] >= one - 1e-6).all()


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        ((-1, 0), "one patch up"),
        ((1, 0), "one patch down"),
        ((0, -1), "one patch left"),
        ((0, 2), "2 patches right"),
        ((1, -2), "one patch down, 2 patches left"),
    ],
)
@pytest.mark.parametrize("registers", [0, 2])
def test_a_head_that_looks_at_a_fixed_offset_is_told_with_its_direction(
    offset: tuple[int, int], words: str, registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_registers=registers)
    maps = shifted(model.layout, offset).expand(3, -1, -1)
    numbers = looking_at(model, maps, monkeypatch)
    assert numbers.offsets == [[offset] * 3] * 2
    exactly(numbers.values()["offset_mass"], torch.ones(2, 3))
    assert offset_in_words(offset) == words
    if words.startswith("one patch") and "," not in words:
        record = numbers.records()[5]
        assert (record["role"], record["words"]) == ("positional", f"looks {words} (100%)")


def test_an_offset_that_few_patches_have_is_no_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    maps = torch.full((25, 25), 1 / 25)
    maps[1], maps[1, 24] = 0, 1  # the first patch looks at the last alone
    numbers = looking_at(model, maps.expand(3, -1, -1), monkeypatch)
    assert (3, 5) not in numbers.offsets[0]
    assert_close(numbers.values()["offset_mass"], torch.full((2, 3), 1 / 25), rtol=0.1, atol=0)


def test_roles_of_heads_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(num_registers=1)
    uniform, sink = torch.full((26, 26), 1 / 26), torch.zeros(26, 26)
    sink[:, 0] = 1
    numbers = looking_at(model, torch.stack([torch.eye(26), sink, uniform]), monkeypatch)
    assert [record["role"] for record in numbers.records()[:3]] == ["itself", "sink", "uniform"]
    assert numbers.records()[1]["words"] == "looks at the class token (100%)"
    values = numbers.values()
    assert_close(values["entropy"][0], torch.tensor([0, 0, math.log(26)]))
    assert_close(values["register_mass"][0], torch.tensor([1 / 26, 0, 1 / 26]))
    assert_close(values["sink_mass"][0], torch.tensor([1 / 26, 1, 1 / 26]))
    assert_close(values["relative_distance"][0, 2], torch.tensor(1.0))


def test_the_rules_of_the_roles_come_in_their_order() -> None:
    nothing = dict.fromkeys(
        ("self_mass", "offset_mass", "cls_mass", "dist_mass", "register_mass", "sink_mass", "normalized_entropy"), 0.0
    ) | {"local_mass": 0.0, "relative_distance": 0.0, "distance": 12.0}
    sinks = {
        "cls_mass": "looks at the class token (50%)",
        "dist_mass": "looks at the distillation token (50%)",
        "register_mass": "looks at the registers (50%)",
        "sink_mass": "looks at one token of the picture (50%)",
    }
    rules = [
        ("self_mass", 0.5, "itself"),
        ("offset_mass", 0.4, "positional"),
        ("sink_mass", 0.5, "sink"),
        ("normalized_entropy", 0.95, "uniform"),
        ("local_mass", 0.5, "local"),
        ("relative_distance", 0.9, "global"),
    ]
    assert role_of(nothing, (0, 1)).name == "mixed"
    for name, least, role in reversed(rules):
        if role == "sink":  # each alone, before what comes behind
            for place, words in sinks.items():
                assert role_of({**nothing, place: 0.5}, (0, 1)) == ("sink", words)
                assert role_of({**nothing, place: 0.49}, (0, 1)).name == "uniform"
        assert role_of({**nothing, name: least - 0.01}, (0, 1)).name != role
        nothing[name] = least
        assert role_of(nothing, (0, 1)).name == role


def test_selectivity_is_the_variance_between_classes() -> None:
    model, images = random_model(), torch.randn(12, 3, 12, 30)
    labels = torch.arange(12) % 3
    numbers = HeadMetrics(model)
    numbers.update(images[:7], labels[:7])
    numbers.update(images[7:], labels[7:])
    with torch.no_grad(), record_attention(model) as recorded:
        model(images)
    rows = torch.stack(recorded.maps)[:, :, :, 0].double()
    total = (rows - rows.mean(1, keepdim=True)).square().sum((1, 3)) / 11
    within = sum(
        (rows[:, labels == label] - rows[:, labels == label].mean(1, keepdim=True)).square().sum((1, 3))
        for label in range(3)
    )
    assert_close(numbers.values()["class_selectivity"], (1 - within / 9 / total).float(), rtol=1e-3, atol=1e-4)

    same = HeadMetrics(model)
    same.update(images[:3].repeat_interleave(4, 0), torch.arange(3).repeat_interleave(4))
    assert_close(same.values()["class_selectivity"], torch.ones(2, 3), rtol=0, atol=1e-6)


def test_selectivity_of_a_head_that_looks_at_one_place_in_every_picture_is_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = random_model()
    sink = torch.full((25, 25), 0.003)
    sink[:, 0] = 1 - 24 * 0.003
    numbers = looking_at(model, sink.expand(3, -1, -1), monkeypatch)
    for label in range(7):  # sums that are rounded in float32 differ by more than nothing
        numbers.update(torch.randn(13, 3, 12, 30), torch.full((13,), label))
    assert numbers.values()["class_selectivity"].isnan().all()
    numbers.write(tmp_path)
    facts = json.loads((tmp_path / "heads.json").read_text(), parse_constant=pytest.fail)
    assert {head["class_selectivity"] for head in facts["heads"]} == {None}
    assert for_json([{"a": math.inf, "b": -math.inf, "c": 2.5, "d": "x", "e": 3}]) == [
        {"a": None, "b": None, "c": 2.5, "d": "x", "e": 3}
    ]


def test_memory_does_not_grow_with_the_pictures() -> None:
    model = random_model()
    numbers = HeadMetrics(model)

    def held() -> int:
        kept = [*numbers.sums.values(), *numbers.rows.values(), *(rows for _, rows in numbers.by_class.values())]
        return sum(tensor.nbytes for tensor in kept)

    for _ in range(2):
        numbers.update(torch.randn(4, 3, 12, 30), torch.tensor([0, 1, 0, 1]))
    before = held()
    for _ in range(5):
        numbers.update(torch.randn(4, 3, 12, 30), torch.tensor([0, 1, 0, 1]))
    assert (numbers.count, held()) == (28, before)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_similarity_of_all_heads_is_the_mean_divergence_of_their_rows(rows: int) -> None:
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


def test_numbers_are_written_for_programs_and_for_people_pruned_heads_left_out(tmp_path: Path) -> None:
    model = random_model()
    model.blocks[1].attn.prune_heads([0, 2])
    numbers = HeadMetrics(model)
    numbers.update(torch.randn(2, 3, 12, 30))
    numbers.write(tmp_path)
    facts = json.loads((tmp_path / "heads.json").read_text(), parse_constant=pytest.fail)
    places = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [(head["layer"], head["head"]) for head in facts["heads"]] == places
    assert facts["pictures"] == 2
    assert facts["heads"][3]["class_selectivity"] is None
    with (tmp_path / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = numbers.values()
    assert values["entropy"].isnan().tolist() == [[False] * 3, [False, True, True]]
    for row, head, place in zip(rows, facts["heads"], places, strict=True):
        assert float(row["entropy"]) == head["entropy"] == float(values["entropy"][place])
        assert row["words"] == head["words"]
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_numbers_of_no_picture_are_an_error() -> None:
    with pytest.raises(ValueError, match="No picture was seen: call update first"):
        HeadMetrics(random_model()).values()
