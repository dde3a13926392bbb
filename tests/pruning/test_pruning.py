"""slimming.py: importance against finite differences, removal against masks, regrouping against equal heads."""

import csv
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import batches, images_of, small_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.cli import main
from vitmha.data import FashionMNISTMini
from vitmha.images import Preprocessing, read_image
from vitmha.inspection.ablation import mean_outputs
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.curves import layer_curves, reconstruction_curve, removal_curve
from vitmha.pruning.evaluation import evaluate
from vitmha.pruning.gqa import convert_to_gqa, head_groups, head_similarity
from vitmha.pruning.importance import (
    ablation_scores,
    accumulate_importance,
    head_importance,
    normalize_importance,
    random_order,
    rank_heads,
)
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import group_by_layer, mask_heads, prune
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model, load_weights
from vitmha.weights.save import save_model

exactly = partial(assert_close, rtol=0, atol=0)


def gated_loss(model: VisionTransformer, layer: int, gates: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of each picture with a factor on what each head of a layer gives."""
    attention = model.blocks[layer].attn
    factors = gates.repeat_interleave(attention.head_dim)
    hook = attention.out_proj.register_forward_pre_hook(lambda module, args: args[0] * factors)
    losses = F.cross_entropy(model(images), labels, reduction="none")
    hook.remove()
    return losses


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "pos_embed": "rope", "pool": "mean"}])
def test_importance_is_the_mean_absolute_gradient_of_a_gate(fields: dict[str, Any]) -> None:
    model, step = small_model(**fields).double(), 1e-5
    data = [(images.double(), labels) for images, labels in batches()]
    importance = head_importance(model, data)
    for layer in range(3):
        for head in range(6):
            gate = torch.zeros(6, dtype=torch.float64)
            gate[head] = step
            differences = [
                (gated_loss(model, layer, 1 + gate, *batch) - gated_loss(model, layer, 1 - gate, *batch)) / (2 * step)
                for batch in data
            ]
            expected = torch.cat(differences).abs().mean()
            assert_close(importance[layer][head], expected.detach(), rtol=1e-5, atol=1e-9)


def test_importance_is_the_same_for_every_batch_size_and_leaves_the_model_alone() -> None:
    model = small_model()
    expected = head_importance(model, batches(11))
    before = model(batches()[0][0])
    for size in (1, 3, 4):
        assert_close(head_importance(model, batches(size)), expected, rtol=1e-5, atol=1e-7)
    model.requires_grad_(False)
    assert_close(head_importance(model, batches()), expected, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())
    exactly(model(batches()[0][0]), before.detach())


def test_where_the_output_is_linear_in_a_head_its_importance_is_the_change_without_it() -> None:
    model = small_model(depth=1, pool="mean").double()
    model.norm = nn.Identity()
    nn.init.zeros_(model.blocks[0].mlp.fc2.weight)
    images = torch.randn(4, 3, 14, 33, dtype=torch.float64)
    with accumulate_importance(model) as sums:
        whole = model(images)[:, 2]
        whole.sum().backward()
    for head in range(6):
        with torch.no_grad(), mask_heads(model, {0: [head]}):
            assert_close(sums[0][head], (whole - model(images)[:, 2]).abs().sum().detach())


def test_a_head_without_influence_has_no_importance_and_goes_first() -> None:
    model = small_model()
    with torch.no_grad():
        model.blocks[1].attn.out_proj.weight[:, 8:12] = 0
    importance = head_importance(model, batches())
    assert importance[1][2] == 0
    assert min(each.min() for each in (importance[0], importance[1][[0, 1, 3, 4, 5]], importance[2])) > 0
    assert rank_heads(importance)[0] == (1, 2)
    assert_close(torch.stack(normalize_importance(importance)).norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_weakest_first_by_hand() -> None:
    values = [torch.tensor([0.3, 0.1]), torch.tensor([]), torch.tensor([0.2, 0.1, 0.4])]
    assert rank_heads(values) == [(0, 1), (2, 1), (2, 0), (0, 0), (2, 2)]
    assert group_by_layer([(0, 1), (2, 1), (2, 0)]) == {0: [1], 2: [1, 0]}
    assert normalized([torch.tensor([3.0, 4.0]), torch.zeros(2)])[0].tolist() == pytest.approx([0.6, 0.8])
    assert normalized([torch.zeros(2)])[0].tolist() == [0, 0]


def test_score_by_hand() -> None:
    model = small_model()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    images = torch.randn(3, 3, 14, 33)
    measured = evaluate(model, [(images[:2], torch.tensor([2, 0])), (images[2:], torch.tensor([2]))])
    assert measured.accuracy == pytest.approx(2 / 3)
    assert measured.loss == pytest.approx(math.log(math.e + 4) - 2 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "replaced"),
    [
        ({}, "zero"),
        ({"num_kv_heads": 2}, "mean"),
        ({"pool": "mean", "pos_embed": "rope", "qk_norm": True}, "mean"),
        ({"pool": "attention", "num_registers": 2, "qkv_bias": False}, "zero"),
        ({"pool": "cls_mean", "layer_scale_init": 0.5}, "mean"),
        ({"distillation_token": True}, "zero"),
    ],
    ids=str,
)
def test_removed_heads_are_as_masked_ones(fields: dict[str, Any], replaced: str, tmp_path: Path) -> None:
    model = small_model(**fields)
    means = mean_outputs(model, images_of(batches())) if replaced == "mean" else None
    heads = {0: [1, 3], 1: range(6), 2: {0, 1, 2, 3, 5}}
    images, whole = batches()[0][0], model(batches()[0][0])
    with mask_heads(model, heads, means):
        masked = model(images).detach()
    exactly(model(images), whole)
    assert (masked - whole).abs().max() > 0.01
    before = total_cost(layer_costs(model))
    prune(model, heads, means)
    assert_close(model(images), masked, rtol=0, atol=1e-5)
    assert [block.attn.num_heads for block in model.blocks] == [4, 0, 1]
    after = total_cost(layer_costs(model))
    assert after.parameters < before.parameters
    # q_proj and out_proj of 13 heads of 6 x 4 channels on 7 tokens, at least.
    assert before.macs - after.macs > 2 * 13 * 4 * 24 * 7
    save_model(model, tmp_path)
    exactly(load_model(tmp_path)(images), model(images))
    F.cross_entropy(model(images), batches()[0][1]).backward()
    for name, parameter in model.named_parameters():  # many processes wait for the gradient of each
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name
    assert len(head_importance(model, batches())[1]) == 0


def test_a_model_in_bfloat16_loses_heads_and_keeps_their_means() -> None:
    model, images = small_model(), batches()[0][0]
    means = mean_outputs(model, [images])
    with torch.no_grad(), mask_heads(model, {0: [1, 3]}, means):
        expected = model(images)
    half = small_model()
    half.load_state_dict(model.state_dict())
    prune(half.bfloat16(), {0: [1, 3]}, means)
    assert_close(half(images.bfloat16()).float(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_means_are_those_over_pictures_and_tokens() -> None:
    model = small_model()
    inputs = []
    hook = model.blocks[2].attn.out_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for images, _ in batches(11):
        model(images)
    hook.remove()
    expected = inputs[0].detach().mean((0, 1)).view(6, 4)
    for size in (1, 4):
        assert_close(mean_outputs(model, images_of(batches(size)))[2], expected)


def test_ablation_curve_and_single_heads_are_scores_of_pruned_models() -> None:
    def pruned_score(heads: dict[int, list[int]]) -> Any:
        pruned = small_model()
        pruned.load_state_dict(model.state_dict())
        prune(pruned, heads)
        return evaluate(pruned, batches())

    model = small_model()
    alone = ablation_scores(model, batches())
    assert [len(each) for each in alone] == [6, 6, 6]
    assert alone[1][4].loss == pytest.approx(pruned_score({1: [4]}).loss, rel=1e-5)
    order = random_order(model, seed=3)
    assert sorted(order) == [(layer, head) for layer in range(3) for head in range(6)]
    assert order == random_order(model, seed=3) != random_order(model, seed=4)
    curve = removal_curve(model, batches(), order, [0, 5, 18])
    assert curve[0] == evaluate(model, batches())
    assert curve[1].loss == pytest.approx(pruned_score(group_by_layer(order[:5])).loss, rel=1e-5)
    layers = layer_curves(model, batches(), [torch.arange(6.0), torch.tensor([]), torch.arange(6.0).flip(0)])
    assert [len(each) for each in layers] == [7, 1, 7]
    assert layers[1] == [evaluate(model, batches())]
    assert layers[0][5].loss == pytest.approx(pruned_score({0: [0, 1, 2, 3, 4]}).loss, rel=1e-5)
    assert layers[2][2].loss == pytest.approx(pruned_score({2: [5, 4]}).loss, rel=1e-5)
    means = mean_outputs(model, images_of(batches()))
    with_means = layer_curves(model, batches(), [torch.arange(6.0)] * 3, means)
    with mask_heads(model, {1: [0, 1]}, means):
        assert with_means[1][2] == evaluate(model, batches())


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_regrouping_equal_heads_changes_nothing(num_kv_heads: int) -> None:
    model = small_model(qk_norm=True, pos_embed="rope", num_registers=2)
    size = 6 // num_kv_heads
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.k_proj, block.attn.v_proj):
                for parameter in (layer.weight, layer.bias):
                    heads = parameter.view(6, 4, -1)
                    heads.copy_(heads[::size].repeat_interleave(size, 0))
    model.class_names = ("a", "b", "c", "d", "e")
    regrouped = convert_to_gqa(model, num_kv_heads)
    assert regrouped.config.num_kv_heads == num_kv_heads
    assert regrouped.blocks[0].attn.k_proj.weight.shape == (num_kv_heads * 4, 24)
    assert regrouped.class_names == model.class_names
    assert not regrouped.training
    assert_close(regrouped(batches()[0][0]), model(batches()[0][0]))


def test_regrouping_takes_the_mean_of_neighbours() -> None:
    model = small_model()
    attention, regrouped = model.blocks[1].attn, convert_to_gqa(model, 2).blocks[1].attn
    for name in ("k_proj", "v_proj"):
        old, new = getattr(attention, name), getattr(regrouped, name)
        assert_close(new.weight[5], (old.weight[13] + old.weight[17] + old.weight[21]) / 3)
        assert_close(new.bias[3], (old.bias[3] + old.bias[7] + old.bias[11]) / 3)
    exactly(regrouped.q_proj.weight, attention.q_proj.weight)
    # Groups of groups: 6 to 2 to 1 is 6 to 1.
    again = convert_to_gqa(convert_to_gqa(model, 2), 1)
    assert_close(again.blocks[1].attn.k_proj.weight, convert_to_gqa(model, 1).blocks[1].attn.k_proj.weight)


def test_heads_alike_are_grouped_and_the_model_stays_where_they_are_equal() -> None:
    model = small_model()
    twins = [0, 1, 2, 1, 0, 2]  # heads 0 and 4, 1 and 3, 2 and 5 are equal
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj):
                for parameter in (layer.weight, layer.bias):
                    heads = parameter.view(6, 4, -1)
                    heads.copy_(heads[twins])
    similarity = head_similarity(model, batches())
    for each in similarity:
        assert_close(each.diag(), torch.ones(6))
        assert_close(each[[0, 1, 2], [4, 3, 5]], torch.ones(3))
        assert each[0, 1] < 0.999
    images = batches()[0][0]
    assert_close(convert_to_gqa(model, 3, similarity)(images), model(images))
    assert (convert_to_gqa(model, 3)(images) - model(images)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({3: [0]}, "The model has layers 0 to 2; there is no layer 3."),
        ({0: [0], 1: [6, 2]}, "Layer 1 has 6 heads, counted from 0; there is no head 6."),
        ({layer: range(6) for layer in range(3)}, "All heads of all layers were to be removed: leave at least one."),
    ],
)
def test_heads_that_cannot_be_removed_are_refused_and_nothing_changes(heads: dict[int, Any], message: str) -> None:
    model = small_model()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        prune(model, heads)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_groups_that_cannot_be_made_are_refused() -> None:
    model = small_model()
    for count in (0, 4, 12):
        with pytest.raises(ValueError, match=f"must divide the 6 key/value heads that there are, got {count}"):
            convert_to_gqa(model, count)
    with pytest.raises(ValueError, match="The 6 heads share 2 key/value heads already: group them as they stand"):
        convert_to_gqa(small_model(num_kv_heads=2), 1, head_similarity(model, batches()))
    prune(model, {0: [1]})
    with pytest.raises(ValueError, match=r"Some heads are gone already.*regroup first, then prune"):
        convert_to_gqa(model, 2)


def test_no_picture_is_refused() -> None:
    for measure in (score, head_importance, ablation_scores, head_similarity, mean_outputs):
        with pytest.raises(ValueError, match="There is no picture"):
            measure(small_model(), [])


Batch = list[tuple[Tensor, Tensor]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, Batch]:
    """The working directory: a model, one without classes, one with a decoder, and labelled pictures.

    Those that are measured on, and those that are chosen on: each one batch.
    """
    monkeypatch.chdir(tmp_path)
    model, images, labels = small_model(), [], []
    save_model(model, "plain")
    model.class_names = ("ant", "bee", "cat", "dog", "elk")
    model.preprocessing = Preprocessing(image_size=(14, 33), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    save_model(model, "model")
    save_model(EncoderDecoder(model.config, DecoderConfig(max_length=2, num_heads=6)), "reader")
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (10, 14, 33, 3), dtype=np.uint8)):
        file = Path("pictures", model.class_names[1 + i // 4], f"{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        images.append(model.preprocessing(read_image(file)))
        labels.append(1 + i // 4)
    Path("empty").mkdir()
    Path("notes.txt").write_text("mine")
    Path("others/cow").mkdir(parents=True)
    return tuple([(torch.stack(images[first::2]), torch.tensor(labels[first::2]))] for first in (0, 1))


def heads(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `vitmha heads WORDS` answers."""
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    main(["heads", *words.split()])
    return capsys.readouterr().out


def test_heads_importance_gives_the_numbers_of_the_library(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "importance model --data pictures --batch-size 3 --ablate --output out"
    printed = heads(words, capsys, monkeypatch)
    model, (measured, chosen) = load_model("model"), here
    importance, whole = head_importance(model, measured), evaluate(model, measured)
    assert printed.startswith(f"All heads: accuracy {whole.accuracy:.2%}, loss {whole.loss:.4f}, of 5 pictures\n")
    facts = json.loads(Path("out/importance.json").read_text())
    rows = facts.pop("rows")
    assert facts == {"model": "model", "pictures": 5, "accuracy": whole.accuracy, "loss": pytest.approx(whole.loss)}
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(3) for j in range(6)]
    assert [row["importance"] for row in rows] == pytest.approx(torch.cat(importance).tolist(), rel=1e-5)
    assert [row["within_layer"] for row in rows] == pytest.approx(
        torch.cat(normalize_importance(importance)).tolist(), rel=1e-5
    )
    means = mean_outputs(model, images_of(chosen))
    losses = [each.loss for layer in ablation_scores(model, measured, means) for each in layer]
    assert [row["loss_mean"] for row in rows] == pytest.approx(losses, rel=1e-5)
    with Image.open("out/importance.png") as picture:
        assert picture.size == (1050, 600)
    with Path("out/importance.csv").open() as lines:
        assert [float(row["loss_mean"]) for row in csv.DictReader(lines)] == pytest.approx(losses, rel=1e-5)


def losses_without(model: VisionTransformer, batches: Batch, means: list[Tensor] | None) -> list[Tensor]:
    return [torch.tensor([each.loss for each in layer]) for layer in ablation_scores(model, batches, means)]


def test_heads_curve_starts_with_the_whole_model(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads("curve model --data pictures --refit --output out", capsys, monkeypatch)
    with Image.open("out/curve.png") as picture:
        assert picture.size == (1050, 600)
    rows, model = json.loads(Path("out/curve.json").read_text())["rows"], load_model("model")
    (measured, chosen), counts = here, [0, 2, 4, 5, 7, 9, 11, 13, 14, 16, 18]
    assert [row["removed"] for row in rows] == counts
    orders = {
        "importance": rank_heads(normalize_importance(head_importance(model, chosen))),
        **{f"random_{seed}": random_order(model, seed) for seed in range(3)},
    }
    for what, means in (("zero", None), ("mean", mean_outputs(model, images_of(chosen)))):
        orders["ablation"] = rank_heads(losses_without(model, chosen, means))
        for name, order in orders.items():
            expected = removal_curve(model, measured, order, counts, means)
            assert [row[f"{name}_{what}_loss"] for row in rows] == pytest.approx([each.loss for each in expected])
            assert [row[f"{name}_{what}_accuracy"] for row in rows] == [each.accuracy for each in expected]
    expected = reconstruction_curve(model, measured, orders["ablation"], counts[:-1], means, chosen)
    assert [row["ablation_refit_loss"] for row in rows[:-1]] == pytest.approx(
        [each.loss for each in expected], rel=1e-4
    )
    assert rows[-1]["ablation_refit_loss"] == rows[-1]["ablation_mean_loss"]


def test_heads_curve_of_each_layer_ends_with_one_head(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads("curve model --data pictures --per-layer --output out", capsys, monkeypatch)
    rows, model = json.loads(Path("out/layers.json").read_text())["rows"], load_model("model")
    assert [(row["layer"], row["heads_left"]) for row in rows] == [
        (i, n) for i in range(3) for n in (6, 5, 4, 3, 2, 1, 0)
    ]
    for what, means in (("zero", None), ("mean", mean_outputs(model, images_of(here[1])))):
        losses = losses_without(model, here[1], means)
        for name, values in (
            ("importance", normalize_importance(head_importance(model, here[1]))),
            ("ablation", losses),
        ):
            curves = layer_curves(model, here[0], values, means)
            expected = [each.loss for curve in curves for each in curve]
            assert [row[f"{name}_{what}_loss"] for row in rows] == pytest.approx(expected, rel=1e-5)
    assert Path("out/layers.png").is_file()


def test_heads_are_measured_on_the_test_set_of_a_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FashionMNISTMini()
    images, labels = data.read(train=False)
    model = small_model(image_size=28, patch_size=7, in_channels=1, num_classes=10)
    model.preprocessing, model.class_names = data.preprocessing, data.class_names
    save_model(model, tmp_path / "model")
    printed = heads(f"importance {tmp_path}/model --data FashionMNISTMini --num-images 100", capsys, monkeypatch)
    expected = evaluate(model, [(data.preprocessing.normalize(images[::20]), labels[::20])])
    assert printed.startswith(f"All heads: accuracy {expected.accuracy:.2%}, loss {expected.loss:.4f}, of 100 pictures")


def test_heads_prune_removes_the_heads_that_are_named(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = heads("prune model new --heads 0.1 2.5 0.3 --output out", capsys, monkeypatch)
    assert printed == "new: 15 of 18 heads, by layer 4 6 5\n"
    facts = json.loads(Path("out/prune.json").read_text())
    assert [(row["layer"], row["head"]) for row in facts["rows"] if row["removed"]] == [(0, 1), (0, 3), (2, 5)]
    assert Path("out/prune.png").is_file()
    model, pruned = load_model("model"), load_model("new")
    with mask_heads(model, {0: [1, 3], 2: [5]}):
        assert_close(pruned(here[0][0][0]), model(here[0][0][0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("means", ["", " --means"])
def test_heads_prune_writes_a_model_without_its_weakest_heads(
    means: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = heads(f"prune model new --data pictures --share 0.5{means}", capsys, monkeypatch)
    model, pruned, (measured, chosen) = load_model("model"), load_model("new"), here
    gone = rank_heads(normalize_importance(head_importance(model, chosen)))[:9]
    with mask_heads(model, group_by_layer(gone), mean_outputs(model, images_of(chosen)) if means else None):
        assert_close(pruned(measured[0][0]), model(measured[0][0]), rtol=0, atol=1e-5)
    assert sum(block.attn.num_heads for block in pruned.blocks) == 9
    assert printed.startswith("new: 9 of 18 heads, by layer ")
    before, after = evaluate(model, measured).accuracy, evaluate(pruned, measured).accuracy
    assert f"Accuracy {before:.2%} before, {after:.2%} without training, of 5 pictures." in printed
    assert pruned.class_names == model.class_names


def test_heads_are_chosen_across_the_layers_where_asked(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads("prune model new --data pictures --share 0.5 --across-layers --output out", capsys, monkeypatch)
    model = load_model("model")
    importance = head_importance(model, here[1])
    gone = rank_heads(importance)[:9]
    assert gone != rank_heads(normalize_importance(importance))[:9]
    rows = json.loads(Path("out/prune.json").read_text())["rows"]
    assert {(row["layer"], row["head"]) for row in rows if row["removed"]} == {*gone}


@pytest.mark.parametrize("means", ["", " --means"])
def test_heads_are_chosen_by_the_loss_without_them_where_asked(
    means: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads(f"prune model new --data pictures --share 0.5 --by ablation{means} --output out", capsys, monkeypatch)
    model, (measured, chosen) = load_model("model"), here
    gone = rank_heads(losses_without(model, chosen, mean_outputs(model, images_of(chosen)) if means else None))[:9]
    assert gone != rank_heads(normalize_importance(head_importance(model, chosen)))[:9]
    facts = json.loads(Path("out/prune.json").read_text())
    assert {(row["layer"], row["head"]) for row in facts.pop("rows") if row["removed"]} == {*gone}
    before, after = (vars(evaluate(each, measured)) for each in (model, load_model("new")))
    assert facts == {"model": "model", "dest": "new", "pictures": 5, "before": before, "after": pytest.approx(after)}
    assert Path("out/prune.png").is_file()


@pytest.mark.parametrize("words", ["prune model new --share 0.5", "regroup model new --num-kv-heads 2"])
def test_what_remains_is_refitted_where_asked(
    words: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads(f"{words} --data pictures --refit", capsys, monkeypatch)
    model, (measured, chosen) = load_model("model"), here
    if "prune" in words:
        expected = load_model("model")
        means = mean_outputs(model, images_of(chosen))
        prune(expected, group_by_layer(rank_heads(normalize_importance(head_importance(model, chosen)))[:9]), means)
    else:
        expected = convert_to_gqa(model, 2)
    reconstruct(expected, model, chosen)
    assert_close(load_model("new")(measured[0][0]), expected(measured[0][0]))


def test_a_pruned_model_is_trained_on(tmp_path: Path) -> None:
    model = small_model()
    model.class_names = tuple("abcde")
    prune(model, {0: [1, 3], 1: range(6)})
    save_model(model, tmp_path)
    module = LitViT(
        ViTConfig(image_size=(14, 33), patch_size=(7, 11), num_classes=5), pretrained=str(tmp_path), optimizer="adamw"
    )
    module.model.class_names = model.class_names
    load_weights(module.model, tmp_path)
    images, labels = batches()[0]
    assert [each.num_heads for each in module.model.attentions] == [4, 0, 6]
    assert_close(module.model.eval()(images), model(images))
    optimizer = torch.optim.SGD(module.model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = module.loss(module(images, labels), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    # What does not fit leaves the model as it was.
    save_file({**load_file(tmp_path / "model.safetensors"), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    whole = small_model()
    with pytest.raises(ValueError, match="more is left over"):
        load_weights(whole, tmp_path)
    assert [each.num_heads for each in whole.attentions] == [6, 6, 6]


@pytest.mark.parametrize("words", ["", " --data pictures --alike"])
def test_heads_regroup_writes_a_model_of_shared_keys(
    words: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = heads(f"regroup model new --num-kv-heads 2{words} --output out", capsys, monkeypatch)
    model, (measured, chosen) = load_model("model"), here
    similarity = head_similarity(model, chosen) if words else None
    expected = convert_to_gqa(model, 2, similarity)
    assert_close(load_model("new")(measured[0][0]), expected(measured[0][0]))
    rows = json.loads(Path("out/regroup.json").read_text())["rows"]
    groups = head_groups(model, 2, similarity)
    assert [row["heads"] for row in rows] == [" ".join(map(str, heads)) for layer in groups for heads in layer]
    assert sorted(groups[0][0] + groups[0][1]) == list(range(6))
    assert words or groups[0] == [[0, 1, 2], [3, 4, 5]]
    assert printed.startswith("new: 6 heads on 2 key/value heads\n")
    assert ("Accuracy" in printed) == bool(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: WORD"),
        ("prune model new --data pictures --share 1", "--share: expected a number between 0 and 1, got '1'"),
        ("prune model new --data pictures --share 0.01", "--share 0.01 of 18 heads is less than half a head"),
        (
            "prune model new --data pictures --share 0.99",
            "--share 0.99 of 18 heads is all of them: leave at least one.",
        ),
        (
            "prune model new --heads 0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1 2.2 2.3 2.4 2.5",
            "All heads of all layers were to be removed: leave at least one.",
        ),
        ("prune model empty --data pictures --share 0.5", "empty is there already: name a new folder."),
        (
            "prune model new --data empty --share 0.5",
            "--truth: empty has no pictures in folders, one for each class: give",
        ),
        ("curve model --data nowhere", "--truth: there is no folder nowhere."),
        ("curve model --data others", "The model has no class 'cow': its 5 classes are ant, bee, cat, dog, elk"),
        (
            "importance plain --data pictures",
            "The model does not say how pictures are prepared for it",
        ),
        ("importance reader --data pictures", "reader has a decoder: only the heads of classifiers are measured."),
        ("importance model", "Which pictures? Give --data FOLDER, or --data CIFAR10 or another data set."),
        ("curve model --data CIFAR10", "--data CIFAR10 has the classes airplane, automobile, bird, ..., the model has"),
        ("prune model new --data pictures --heads 1", "--heads: expected LAYER.HEAD such as 3.0, got '1'"),
        ("prune model new --data pictures --heads 1.6", "Layer 1 has 6 heads, counted from 0; there is no head 6."),
        ("prune model notes.txt/new --heads 0.1", "DEST: notes.txt/new cannot be made or written to, for"),
        ("curve model --data pictures --output notes.txt", "notes.txt: it is no folder"),
        ("prune model new --data pictures", "one of the arguments --share --heads is required"),
        ("importance model --data pictures --ablat", "there is no option 'ablat'; the nearest is 'ablate'."),
        ("regroup model new --num-kv-heads 4", "num_kv_heads must divide the 6 key/value heads that there are, got 4"),
        (
            "regroup model new --num-kv-heads 2 --alike",
            "Which pictures for --alike? Give --data FOLDER, or --data CIFAR10 or",
        ),
        (
            "prune model new --heads 0.1 --refit",
            "Which pictures for --refit? Give --data FOLDER, or --data CIFAR10 or another",
        ),
        (
            "prune model new --data pictures --share 0.5 --by ablation --across-layers",
            "--across-layers is for importance: --by ablation compares all layers anyway",
        ),
        (
            "curve model --data pictures --per-layer --refit",
            "--refit is for the curve over all layers: leave out --by-",
        ),
    ],
)
def test_a_wrong_call_gets_one_message_and_leaves_nothing(
    words: str,
    message: str,
    here: tuple[Batch, Batch],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        heads(words, capsys, monkeypatch)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(Path().rglob("*")) == before
