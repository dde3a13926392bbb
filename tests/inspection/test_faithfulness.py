"""Deletion and insertion, against areas worked out by hand."""

import json
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.inspection import record_attention, relevance, rollout, value_weighted
from vitmha.inspection.faithfulness import (
    ORDERS,
    area,
    baseline_image,
    center_prior,
    faithfulness,
    patch_maps,
    perturbation_auc,
    perturbation_curves,
    pointing_game,
)
from vitmha.models.config import TokenLayout, ViTConfig
from vitmha.models.vit import VisionTransformer

module = import_module("vitmha.inspection.faithfulness")  # the package gives the function by this name
LAYOUT = TokenLayout(num_class_tokens=1, num_registers=2, grid_size=(4, 5), patch_size=(2, 3))


def random_model(**fields: Any) -> VisionTransformer:
    defaults = {"num_classes": 5, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_dim": 17, "patch_size": (2, 3)}
    model = VisionTransformer(ViTConfig(image_size=(8, 15), **{**defaults, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def test_areas_of_a_constant_and_of_a_line() -> None:
    assert_close(area(torch.full((3, 15), 0.37)), torch.full((3,), 0.37))
    assert_close(area(torch.linspace(1, 0, 11)), torch.tensor(0.5))
    assert_close(area(torch.tensor([1.0, 0, 0])), torch.tensor(0.25))


@pytest.mark.parametrize("accuracy", [0.0, 0.4, 1.0])
def test_a_constant_accuracy_gives_ninety_times_itself(accuracy: float) -> None:
    assert_close(perturbation_auc(torch.full((2, 10), accuracy)), torch.full((2,), 90 * accuracy))


@pytest.mark.parametrize(
    ("place", "tolerance", "is_hit"),
    [
        ((2, 3), 0.0, True),
        ((5, 6), 0.0, True),
        ((6, 3), 0.0, False),
        ((6, 3), 1.0, True),
        ((8, 8), 3.5, False),
        ((8, 8), 3.7, True),
    ],
)
def test_the_pointing_game(place: tuple[int, int], tolerance: float, is_hit: bool) -> None:
    map_ = torch.zeros(9, 12)
    map_[place] = 1
    assert pointing_game(map_, (2, 3, 6, 7), tolerance) is is_hit  # rows 2 to 5, columns 3 to 6


@pytest.mark.parametrize("relevant", [1, 4, 10])
def test_a_model_of_some_patches_gives_the_areas_worked_out_by_hand(relevant: int) -> None:
    chosen = torch.randperm(20)[:relevant]
    image, baseline_image = torch.ones(3, 8, 15), torch.zeros(3, 8, 15)

    def left(images: Tensor) -> Tensor:
        patches = images[:, 0, ::2, ::3].flatten(1)
        assert torch.equal(patches, images[:, 2, 1::2, 2::3].flatten(1))  # whole patches come and go
        return patches[:, chosen].mean(1)

    perfect = torch.zeros(20)
    perfect[chosen] = 1
    for ranks, share in ((perfect, relevant / 40), (-perfect, 1 - relevant / 40)):
        deletion, insertion = perturbation_curves(left, image, baseline_image, ranks, LAYOUT, steps=20)
        assert_close(area(deletion), torch.tensor(share))
        assert_close(area(insertion), torch.tensor(1 - share))
    deletion, insertion = perturbation_curves(left, image, baseline_image, perfect, LAYOUT, steps=5)
    assert (len(deletion), deletion[0], deletion[-1], insertion[0], insertion[-1]) == (6, 1, 0, 0, 1)
    # At random both ways alike.
    randomly = [
        [area(each) for each in perturbation_curves(left, image, baseline_image, torch.rand(20), LAYOUT, 20)]
        for _ in range(300)
    ]
    assert_close(torch.tensor(randomly).mean(0), torch.tensor([0.5, 0.5]), rtol=0, atol=0.04)


def test_a_constant_model_gives_its_constant_and_steps_are_no_more_than_the_patches() -> None:
    image, baseline_image = torch.ones(3, 8, 15), torch.zeros(3, 8, 15)
    curves = perturbation_curves(
        lambda x: torch.full((len(x),), 0.3), image, baseline_image, torch.rand(20), LAYOUT, 999
    )
    assert [len(curve) for curve in curves] == [21, 21]
    assert_close(area(torch.stack(curves)), torch.full((2,), 0.3))


@pytest.mark.parametrize("fields", [{"num_registers": 1}, {"pool": "mean"}, {"pool": "attention"}])
def test_all_methods_are_measured_beside_random_and_centre(fields: dict[str, Any]) -> None:
    model, images = random_model(**fields), torch.randn(2, 3, 8, 15)
    found = faithfulness(model, images, steps=4)
    names = ["attention", "value-weighted", "rollout", "relevance", "random", "centre"]
    assert list(found.deletion) == list(found.insertion) == names
    assert all(0 < value < 1 for value in (*found.deletion.values(), *found.insertion.values()))
    assert found.sentence.startswith("Attention is not by itself an explanation.")
    deleted, inserted = found.sentence.split("When they are put back")
    assert f"relevance {found.deletion['relevance']:.3f}" in deleted
    assert f"relevance {found.insertion['relevance']:.3f}" in inserted
    assert "replaced by the colour that the normalisation maps to 0)" in found.sentence
    for areas, curves in ((found.deletion, found.deletion_curves), (found.insertion, found.insertion_curves)):
        assert areas == pytest.approx({name: float(area(torch.tensor(curve))) for name, curve in curves.items()})
        assert {len(curve) for curve in curves.values()} == {5}
    written = json.loads(json.dumps(found.record()))
    assert written["insertion"] == {"areas": found.insertion, "curves": found.insertion_curves}
    assert written["deletion"]["curves"]["relevance"] == found.deletion_curves["relevance"]
    assert (written["baseline"], written["pictures"]) == ("colour that the normalisation maps to 0", 2)
    alone = [faithfulness(model, image[None], steps=4).deletion["rollout"] for image in images]
    assert found.deletion["rollout"] == pytest.approx(sum(alone) / 2)
    assert faithfulness(model, images, steps=4) == found
    blurred = faithfulness(model, images, baseline="blur", steps=4)
    assert blurred.deletion["rollout"] != found.deletion["rollout"]
    assert "blurred picture" in blurred.sentence
    assert (
        faithfulness(model, images, [0, 0], steps=4).deletion != faithfulness(model, images, [1, 1], steps=4).deletion
    )


def test_each_picture_is_deleted_in_random_orders_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, seen = random_model(), torch.randn(2, 3, 8, 15), []

    def spied(*arguments: Any) -> Any:
        seen.append(arguments[3])
        return perturbation_curves(*arguments)

    monkeypatch.setattr(module, "perturbation_curves", spied)
    found = faithfulness(model, images, [0, 1], steps=4)
    ranks = torch.stack(seen).unflatten(0, (2, -1))
    assert ranks.shape[1] == 4 + ORDERS + 1
    noise = ranks[:, 4:-1].flatten(0, 1)
    assert len({tuple(order) for order in noise.argsort(-1).tolist()}) == 2 * ORDERS > 2
    curves = []
    for image, label, orders in zip(images, (0, 1), ranks[:, 4:-1], strict=True):

        def score(batch: Tensor, label: int = label) -> Tensor:
            return model(batch).softmax(-1)[:, label]

        baseline_image = torch.zeros_like(image)
        curves += [perturbation_curves(score, image, baseline_image, order, model.layout, 4)[0] for order in orders]
    assert_close(torch.tensor(found.deletion_curves["random"]), torch.stack(curves).mean(0))


def test_maps_that_are_there_are_not_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 15)
    maps = [patch_maps(model, image[None], [1]) for image in images]
    found = faithfulness(model, images, [1, 1], steps=4)
    monkeypatch.setattr(module, "patch_maps", pytest.fail)
    assert faithfulness(model, images, [1, 1], steps=4, maps=maps) == found


def test_maps_of_attention_pooling_begin_with_what_the_pooling_attends_to() -> None:
    model, images = random_model(pool="attention", num_registers=1), torch.randn(2, 3, 8, 15)
    with torch.no_grad(), record_attention(model, queries="all", value_norms=True) as recorded:
        tokens = model.forward_features(images)
    pooling = model.attn_pool
    assert pooling is not None
    with torch.no_grad():
        row = pooling.attn.attention_weights(pooling.probe.expand(2, -1, -1), tokens).mean(1)
    assert row.std(-1).min() > 0.01  # not the same for all tokens, nor for both pictures
    assert (row[0] - row[1]).abs().max() > 0.01
    weighted = value_weighted(recorded.maps[-1], recorded.value_norms[-1])
    expected = {
        "attention": row @ recorded.maps[-1].mean(1),
        "value-weighted": row @ weighted.mean(1),
        "rollout": row @ rollout(recorded.maps),
    }
    found = patch_maps(model, images, [0, 1])
    for name, values in expected.items():
        assert_close(found[name], values[:, 0, 1:])


def test_without_a_head_relevance_is_that_for_the_length_of_the_features() -> None:
    model, images = random_model(num_classes=0), torch.randn(2, 3, 8, 15)
    found = patch_maps(model, images, [3, 1])["relevance"]
    assert_close(found, relevance(model, images, lambda features: features.square().sum(1).sqrt().sum())[:, 1:])
    assert found.max() > 0


def test_centre_ranks_by_the_distance_from_the_middle() -> None:
    centre = center_prior(LAYOUT).view(4, 5)
    assert centre.argmax() in (7, 12)
    assert_close(centre, centre.flip(0))
    assert_close(centre, centre.flip(1))
    assert centre.argmin() in (0, 4, 15, 19)


def test_blank_pictures() -> None:
    images = torch.randn(1, 3, 16, 24)
    assert baseline_image(images, "mean").abs().max() == 0
    blurred = baseline_image(images, "blur")
    assert blurred.std() < 0.5 * images.std()
    assert_close(baseline_image(torch.full_like(images, 0.7), "blur"), torch.full_like(images, 0.7))
