"""Deletion and insertion curves, compared with areas computed by hand."""

import json
from functools import partial
from importlib import import_module
from typing import Any

import builders
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from vitmha.inspection import record_attention, relevance, rollout, value_weighted
from vitmha.inspection.faithfulness import (
    ORDERS,
    Faithfulness,
    auc,
    baseline_image,
    center_prior,
    faithfulness,
    patch_maps,
    perturbation_auc,
    perturbation_curves,
    pointing_game,
)
from vitmha.models.config import TokenLayout

random_model = partial(builders.random_vit, image_size=(8, 15), patch_size=(2, 3), depth=2)

module = import_module("vitmha.inspection.faithfulness")  # the package exports the function under this name
LAYOUT = TokenLayout(num_class_tokens=1, num_registers=2, grid_size=(4, 5), patch_size=(2, 3))


def test_auc_of_a_constant_and_of_a_line() -> None:
    assert_close(auc(torch.full((3, 15), 0.37)), torch.full((3,), 0.37))
    assert_close(auc(torch.linspace(1, 0, 11)), torch.tensor(0.5))
    assert_close(auc(torch.tensor([1.0, 0, 0])), torch.tensor(0.25))


@pytest.mark.parametrize("accuracy", [0.0, 0.4, 1.0])
def test_perturbation_auc_of_a_constant_accuracy_is_ninety_times_it(accuracy: float) -> None:
    assert_close(perturbation_auc(torch.full((2, 10), accuracy)), torch.full((2,), 90 * accuracy))


@pytest.mark.parametrize(
    ("peak", "tolerance", "is_hit"),
    [
        ((2, 3), 0.0, True),
        ((5, 6), 0.0, True),
        ((6, 3), 0.0, False),
        ((6, 3), 1.0, True),
        ((8, 8), 3.5, False),
        ((8, 8), 3.7, True),
    ],
)
def test_the_pointing_game(peak: tuple[int, int], tolerance: float, is_hit: bool) -> None:
    map_ = torch.zeros(9, 12)
    map_[peak] = 1
    assert pointing_game(map_, (2, 3, 6, 7), tolerance) is is_hit  # rows 2 to 5, columns 3 to 6


@pytest.mark.parametrize("relevant", [1, 4, 10])
def test_a_model_that_reads_some_patches_has_the_areas_computed_by_hand(relevant: int) -> None:
    chosen = torch.randperm(20)[:relevant]
    image, baseline = torch.ones(3, 8, 15), torch.zeros(3, 8, 15)

    def mean_of_relevant(images: Tensor) -> Tensor:
        patches = images[:, 0, ::2, ::3].flatten(1)
        assert torch.equal(patches, images[:, 2, 1::2, 2::3].flatten(1))  # patches change as a whole
        return patches[:, chosen].mean(1)

    perfect = torch.zeros(20)
    perfect[chosen] = 1
    for ranks, area in ((perfect, relevant / 40), (-perfect, 1 - relevant / 40)):
        deletion, insertion = perturbation_curves(mean_of_relevant, image, baseline, ranks, LAYOUT, steps=20)
        assert_close(auc(deletion), torch.tensor(area))
        assert_close(auc(insertion), torch.tensor(1 - area))
    deletion, insertion = perturbation_curves(mean_of_relevant, image, baseline, perfect, LAYOUT, steps=5)
    assert (len(deletion), deletion[0], deletion[-1], insertion[0], insertion[-1]) == (6, 1, 0, 0, 1)
    # In random order both areas are 1/2.
    randomly = [
        [auc(curve) for curve in perturbation_curves(mean_of_relevant, image, baseline, torch.rand(20), LAYOUT, 20)]
        for _ in range(300)
    ]
    assert_close(torch.tensor(randomly).mean(0), torch.tensor([0.5, 0.5]), rtol=0, atol=0.04)


def test_a_constant_model_has_constant_curves_with_at_most_one_step_per_patch() -> None:
    image, baseline = torch.ones(3, 8, 15), torch.zeros(3, 8, 15)
    curves = perturbation_curves(lambda x: torch.full((len(x),), 0.3), image, baseline, torch.rand(20), LAYOUT, 999)
    assert [len(curve) for curve in curves] == [21, 21]
    assert_close(auc(torch.stack(curves)), torch.full((2,), 0.3))


@pytest.mark.parametrize("fields", [{"num_registers": 1}, {"pool": "mean"}, {"pool": "attention"}])
def test_all_methods_are_measured_next_to_random_and_center(fields: dict[str, Any]) -> None:
    model, images = random_model(**fields), torch.randn(2, 3, 8, 15)
    found = faithfulness(model, images, steps=4)
    names = ["attention", "value-weighted", "rollout", "relevance", "random", "center"]
    assert list(found.deletion) == list(found.insertion) == names
    assert all(0 < value < 1 for value in (*found.deletion.values(), *found.insertion.values()))
    assert found.summary.startswith("Attention is not by itself an explanation.")
    deleted, inserted = found.summary.split("Insertion test")
    assert f"relevance {found.deletion['relevance']:.3f}" in deleted
    assert f"relevance {found.insertion['relevance']:.3f}" in inserted
    assert "replaced by the mean color (0 after normalization)" in found.summary
    for aucs, curves in ((found.deletion, found.deletion_curves), (found.insertion, found.insertion_curves)):
        assert aucs == pytest.approx({name: float(auc(torch.tensor(curve))) for name, curve in curves.items()})
        assert {len(curve) for curve in curves.values()} == {5}
    written = json.loads(json.dumps(found.to_record()))
    assert written["insertion"] == {"auc": found.insertion, "curves": found.insertion_curves}
    assert written["deletion"]["curves"]["relevance"] == found.deletion_curves["relevance"]
    assert (written["baseline"], written["num_images"]) == ("mean color (0 after normalization)", 2)
    alone = [faithfulness(model, image[None], steps=4).deletion["rollout"] for image in images]
    assert found.deletion["rollout"] == pytest.approx(sum(alone) / 2)
    assert faithfulness(model, images, steps=4) == found
    blurred = faithfulness(model, images, baseline="blur", steps=4)
    assert blurred.deletion["rollout"] != found.deletion["rollout"]
    assert "blurred image" in blurred.summary
    assert (
        faithfulness(model, images, [0, 0], steps=4).deletion != faithfulness(model, images, [1, 1], steps=4).deletion
    )


def test_each_image_has_its_own_random_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, ranks_used = random_model(), torch.randn(2, 3, 8, 15), []

    def spied(*arguments: Any) -> Any:
        ranks_used.append(arguments[3])
        return perturbation_curves(*arguments)

    monkeypatch.setattr(module, "perturbation_curves", spied)
    found = faithfulness(model, images, [0, 1], steps=4)
    ranks = torch.stack(ranks_used).unflatten(0, (2, -1))
    assert ranks.shape[1] == 4 + ORDERS + 1
    noise = ranks[:, 4:-1].flatten(0, 1)
    assert len({tuple(order) for order in noise.argsort(-1).tolist()}) == 2 * ORDERS > 2
    curves = []
    for image, label, orders in zip(images, (0, 1), ranks[:, 4:-1], strict=True):

        def score(batch: Tensor, label: int = label) -> Tensor:
            return model(batch).softmax(-1)[:, label]

        baseline = torch.zeros_like(image)
        curves += [perturbation_curves(score, image, baseline, order, model.layout, 4)[0] for order in orders]
    assert_close(torch.tensor(found.deletion_curves["random"]), torch.stack(curves).mean(0))


def test_precomputed_maps_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 15)
    maps = [patch_maps(model, image[None], [1]) for image in images]
    found = faithfulness(model, images, [1, 1], steps=4)
    monkeypatch.setattr(module, "patch_maps", pytest.fail)
    assert faithfulness(model, images, [1, 1], steps=4, maps=maps) == found


def test_maps_of_attention_pooling_start_from_the_weights_of_the_pooling() -> None:
    model, images = random_model(std=1.0, pool="attention", num_registers=1), torch.randn(2, 3, 8, 15)
    with torch.no_grad(), record_attention(model, queries="all", value_norms=True) as recorded:
        tokens = model.forward_features(images)
    pooling = model.attn_pool
    assert pooling is not None
    with torch.no_grad():
        row = pooling.attn.attention_weights(pooling.probe.expand(2, -1, -1), tokens).mean(1)
    assert row.std(-1).min() > 0.01  # differs between tokens and between the images
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


def test_without_a_classification_head_the_target_is_the_norm_of_the_features() -> None:
    model, images = random_model(num_classes=0), torch.randn(2, 3, 8, 15)
    found = patch_maps(model, images, [3, 1])["relevance"]
    assert_close(found, relevance(model, images, lambda features: features.square().sum(1).sqrt().sum())[:, 1:])
    assert found.max() > 0


def test_center_prior_ranks_by_the_distance_to_the_center() -> None:
    center = center_prior(LAYOUT).view(4, 5)
    assert center.argmax() in (7, 12)
    assert_close(center, center.flip(0))
    assert_close(center, center.flip(1))
    assert center.argmin() in (0, 4, 15, 19)


def test_baseline_images() -> None:
    images = torch.randn(1, 3, 16, 24)
    assert baseline_image(images, "mean").abs().max() == 0
    blurred = baseline_image(images, "blur")
    assert blurred.std() < 0.5 * images.std()
    assert_close(baseline_image(torch.full_like(images, 0.7), "blur"), torch.full_like(images, 0.7))


def test_no_map_is_called_best_where_all_areas_are_equal() -> None:
    areas = {name: [0.1, 0.1, 0.1] for name in ("attention", "relevance", "random", "center")}
    found = Faithfulness(baseline="mean", num_images=1, deletion_curves=areas, insertion_curves=areas)
    assert "The areas are equal: no map is best." in found.summary
    assert "The best map" not in found.summary
