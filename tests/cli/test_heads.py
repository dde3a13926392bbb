"""`vitmha heads`: its files against the results of the library, and wrong calls."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import full_disk, images_of, small_model
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from vitmha.cli import main
from vitmha.data import FashionMNISTMini
from vitmha.images import Preprocessing, read_image
from vitmha.inspection.ablation import mean_outputs
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.curves import layer_curves, reconstruction_curve, removal_curve
from vitmha.pruning.evaluation import evaluate
from vitmha.pruning.gqa import convert_to_gqa, head_groups, head_similarity
from vitmha.pruning.importance import ablation_scores, head_importance, normalize_importance, random_order, rank_heads
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import group_by_layer, mask_heads, prune
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.training_summary import read_summary

Batch = list[tuple[Tensor, Tensor]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, Batch]:
    """A working directory with models and labeled images; the images to evaluate and to select on, a batch each."""
    monkeypatch.chdir(tmp_path)
    model, images, labels = small_model(), [], []
    save_model(model, "plain")
    model.class_names = ("ant", "bee", "cat", "dog", "elk")
    model.preprocessing = Preprocessing(image_size=(14, 33), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    save_model(model, "model")
    save_model(EncoderDecoder(model.config, DecoderConfig(max_length=2, num_heads=6)), "sequences")
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (10, 14, 33, 3), dtype=np.uint8)):
        file = Path("images", model.class_names[1 + i // 4], f"{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        images.append(model.preprocessing(read_image(file)))
        labels.append(1 + i // 4)
    Path("empty").mkdir()
    Path("notes.txt").write_text("mine")
    Path("others/cow").mkdir(parents=True)
    return tuple([(torch.stack(images[first::2]), torch.tensor(labels[first::2]))] for first in (0, 1))


def heads(args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The standard output of `vitmha heads ARGS`."""
    main(["heads", *args.split()])
    return capsys.readouterr().out


def test_importance_writes_the_results_of_the_library(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    args = "importance --model model --data images --batch-size 3 --ablation --output out"
    printed = heads(args, capsys)
    model, (evaluation, selection) = load_model("model"), here
    importance, baseline = head_importance(model, evaluation), evaluate(model, evaluation)
    assert printed.startswith(f"All heads: accuracy {baseline.accuracy:.2%}, loss {baseline.loss:.4f} on 5 images\n")
    facts = json.loads(Path("out/importance.json").read_text())
    rows = facts.pop("rows")
    expected = {"accuracy": baseline.accuracy, "loss": pytest.approx(baseline.loss)}
    assert facts == {"model": "model", "num_images": 5, **expected}
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(3) for j in range(6)]
    assert [row["importance"] for row in rows] == pytest.approx(torch.cat(importance).tolist(), rel=1e-5)
    assert [row["importance_normalized"] for row in rows] == pytest.approx(
        torch.cat(normalize_importance(importance)).tolist(), rel=1e-5
    )
    means = mean_outputs(model, images_of(selection))
    losses = [result.loss for layer in ablation_scores(model, evaluation, means) for result in layer]
    assert [row["loss_mean"] for row in rows] == pytest.approx(losses, rel=1e-5)
    with Image.open("out/importance.png") as image:
        assert image.size == (1050, 600)
    with Path("out/importance.csv").open() as lines:
        assert [float(row["loss_mean"]) for row in csv.DictReader(lines)] == pytest.approx(losses, rel=1e-5)


@pytest.mark.usefixtures("here")
def test_a_full_disk_is_one_line_and_leaves_the_earlier_files_whole(capsys: pytest.CaptureFixture[str]) -> None:
    args = "importance --model model --data images --batch-size 3 --output out"
    heads(args, capsys)
    before = {file.name: file.read_bytes() for file in Path("out").iterdir()}
    with pytest.raises(SystemExit) as exit_, full_disk():
        heads(args, capsys)
    assert (exit_.value.code, capsys.readouterr().err.splitlines()[-1]) == (2, "error: out: File too large")
    assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == before


def ablation_losses(model: VisionTransformer, batches: Batch, means: list[Tensor] | None) -> list[Tensor]:
    return [torch.tensor([result.loss for result in layer]) for layer in ablation_scores(model, batches, means)]


def test_curve_writes_the_results_of_the_library(here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]) -> None:
    heads("curve --model model --data images --reconstruct --output out", capsys)
    with Image.open("out/curve.png") as image:
        assert image.size == (1050, 600)
    rows, model = json.loads(Path("out/curve.json").read_text())["rows"], load_model("model")
    (evaluation, selection), counts = here, [0, 2, 4, 5, 7, 9, 11, 13, 14, 16, 18]
    assert [row["removed"] for row in rows] == counts
    orders = {
        "importance": rank_heads(normalize_importance(head_importance(model, selection))),
        **{f"random_{seed}": random_order(model, seed) for seed in range(3)},
    }
    for replacement, means in (("zero", None), ("mean", mean_outputs(model, images_of(selection)))):
        orders["ablation"] = rank_heads(ablation_losses(model, selection, means))
        for name, order in orders.items():
            expected = removal_curve(model, evaluation, order, counts, means)
            assert [row[f"{name}_{replacement}_loss"] for row in rows] == pytest.approx(
                [result.loss for result in expected]
            )
            assert [row[f"{name}_{replacement}_accuracy"] for row in rows] == [result.accuracy for result in expected]
    expected = reconstruction_curve(model, evaluation, orders["ablation"], counts[:-1], means, selection)
    assert [row["ablation_reconstructed_loss"] for row in rows[:-1]] == pytest.approx(
        [result.loss for result in expected], rel=1e-4
    )
    assert rows[-1]["ablation_reconstructed_loss"] == rows[-1]["ablation_mean_loss"]


def test_curve_per_layer_ends_without_heads(here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]) -> None:
    heads("curve --model model --data images --per-layer --output out", capsys)
    rows, model = json.loads(Path("out/layers.json").read_text())["rows"], load_model("model")
    assert [(row["layer"], row["heads_remaining"]) for row in rows] == [
        (i, n) for i in range(3) for n in (6, 5, 4, 3, 2, 1, 0)
    ]
    for replacement, means in (("zero", None), ("mean", mean_outputs(model, images_of(here[1])))):
        losses = ablation_losses(model, here[1], means)
        for name, values in (
            ("importance", normalize_importance(head_importance(model, here[1]))),
            ("ablation", losses),
        ):
            curves = layer_curves(model, here[0], values, means)
            expected = [result.loss for curve in curves for result in curve]
            assert [row[f"{name}_{replacement}_loss"] for row in rows] == pytest.approx(expected, rel=1e-5)
    assert Path("out/layers.png").is_file()


def test_a_built_in_dataset_is_evaluated_on_its_test_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = FashionMNISTMini()
    images, labels = data.read(train=False)
    model = small_model(image_size=28, patch_size=7, in_channels=1, num_classes=10)
    model.preprocessing, model.class_names = data.preprocessing, data.class_names
    save_model(model, "model")
    printed = heads("importance --model model --data FashionMNISTMini --num-images 100", capsys)
    expected = evaluate(model, [(data.preprocessing.normalize(images[::20]), labels[::20])])
    assert printed.startswith(f"All heads: accuracy {expected.accuracy:.2%}, loss {expected.loss:.4f} on 100 images")


def test_prune_removes_the_listed_heads(here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]) -> None:
    printed = heads("prune --model model --output new --heads 0.1 2.5 0.3", capsys)
    assert printed == "new: 15 of 18 heads, by layer 4 6 5\n"
    facts = json.loads(Path("new/prune.json").read_text())
    assert [(row["layer"], row["head"]) for row in facts["rows"] if row["removed"]] == [(0, 1), (0, 3), (2, 5)]
    assert Path("new/prune.png").is_file()
    assert "| attention heads after pruning, by block | 4 6 5 |" in Path("new/README.md").read_text()
    model, pruned = load_model("model"), load_model("new")
    with mask_heads(model, {0: [1, 3], 2: [5]}):
        assert_close(pruned(here[0][0][0]), model(here[0][0][0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("means", ["", " --fold-mean"])
def test_prune_removes_the_least_important_heads(
    means: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = heads(f"prune --model model --output new --data images --amount 0.5{means}", capsys)
    model, pruned, (evaluation, selection) = load_model("model"), load_model("new"), here
    removed = rank_heads(normalize_importance(head_importance(model, selection)))[:9]
    with mask_heads(model, group_by_layer(removed), mean_outputs(model, images_of(selection)) if means else None):
        assert_close(pruned(evaluation[0][0]), model(evaluation[0][0]), rtol=0, atol=1e-5)
    assert sum(block.attn.num_heads for block in pruned.blocks) == 9
    assert printed.startswith("new: 9 of 18 heads, by layer ")
    before, after = evaluate(model, evaluation).accuracy, evaluate(pruned, evaluation).accuracy
    compared = f"Accuracy {before:.2%} before, {after:.2%} after, on 5 images, without training."
    assert compared in printed
    call = f"vitmha heads prune --model model --output new --data images --amount 0.5{means}"
    summary, remaining = read_summary("new"), " ".join(str(attention.num_heads) for attention in pruned.attentions)
    assert summary.changes == (f"`{call}`: 9 of 18 heads, by layer {remaining}. {compared}",)
    assert str(summary.result) == f"{100 * after:.2f} % top-1 accuracy on 5 evaluation images of images"
    assert pruned.class_names == model.class_names


def test_prune_global_ranks_heads_by_raw_importance(
    here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    heads("prune --model model --output new --data images --amount 0.5 --global", capsys)
    model = load_model("model")
    importance = head_importance(model, here[1])
    removed = rank_heads(importance)[:9]
    assert removed != rank_heads(normalize_importance(importance))[:9]
    rows = json.loads(Path("new/prune.json").read_text())["rows"]
    assert {(row["layer"], row["head"]) for row in rows if row["removed"]} == {*removed}


@pytest.mark.parametrize("means", ["", " --fold-mean"])
def test_prune_by_ablation_ranks_heads_by_the_loss_with_each_ablated(
    means: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    heads(f"prune --model model --output new --data images --amount 0.5 --criterion ablation{means}", capsys)
    model, (evaluation, selection) = load_model("model"), here
    removed = rank_heads(
        ablation_losses(model, selection, mean_outputs(model, images_of(selection)) if means else None)
    )[:9]
    assert removed != rank_heads(normalize_importance(head_importance(model, selection)))[:9]
    facts = json.loads(Path("new/prune.json").read_text())
    assert {(row["layer"], row["head"]) for row in facts.pop("rows") if row["removed"]} == {*removed}
    before, after = (vars(evaluate(candidate, evaluation)) for candidate in (model, load_model("new")))
    assert facts == {"model": "model", "num_images": 5, "before": before, "after": pytest.approx(after)}
    assert Path("new/prune.png").is_file()


@pytest.mark.parametrize(
    "args", ["prune --model model --output new --amount 0.5", "group --model model --output new --num-kv-heads 2"]
)
def test_reconstruct_fits_the_remaining_weights(
    args: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    heads(f"{args} --data images --reconstruct", capsys)
    model, (evaluation, selection) = load_model("model"), here
    if "prune" in args:
        expected = load_model("model")
        means = mean_outputs(model, images_of(selection))
        prune(expected, group_by_layer(rank_heads(normalize_importance(head_importance(model, selection)))[:9]), means)
    else:
        expected = convert_to_gqa(model, 2)
    reconstruct(expected, model, selection)
    assert_close(load_model("new")(evaluation[0][0]), expected(evaluation[0][0]))


@pytest.mark.parametrize("args", ["", " --data images --cluster-heads"])
def test_group_writes_a_model_with_fewer_key_value_heads(
    args: str, here: tuple[Batch, Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = heads(f"group --model model --output new --num-kv-heads 2{args}", capsys)
    model, (evaluation, selection) = load_model("model"), here
    similarity = head_similarity(model, selection) if args else None
    expected = convert_to_gqa(model, 2, similarity)
    assert_close(load_model("new")(evaluation[0][0]), expected(evaluation[0][0]))
    rows = json.loads(Path("new/group.json").read_text())["rows"]
    groups = head_groups(model, 2, similarity)
    assert [row["heads"] for row in rows] == [" ".join(map(str, heads)) for layer in groups for heads in layer]
    assert sorted(groups[0][0] + groups[0][1]) == list(range(6))
    assert args or groups[0] == [[0, 1, 2], [3, 4, 5]]
    assert printed.startswith("new: 6 heads with 2 key/value heads\n")
    assert ("Accuracy" in printed) == bool(args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        (
            "prune --model model --output new --data images --amount 1",
            "--amount: expected a number between 0 and 1, got '1'",
        ),
        ("prune --model model --output new --data images --amount 0.01", "--amount 0.01 of 18 heads removes no head"),
        (
            "prune --model model --output new --data images --amount 0.99",
            "--amount 0.99 of 18 heads removes all heads: at least one must remain.",
        ),
        (
            "prune --model model --output new --heads " + " ".join(f"{i}.{j}" for i in range(3) for j in range(6)),
            "--heads includes every head of every layer: at least one must remain.",
        ),
        (
            "prune --model model --output empty --data images --amount 0.5",
            "--output empty already exists; choose another directory.",
        ),
        ("prune --model model --output new --data empty --amount 0.5", "--data empty: no image files found"),
        (
            "curve --model model --data nowhere",
            "--data nowhere is not a directory of class directories, nor a built-in dataset (CIFAR10,",
        ),
        (
            "curve --model model --data others",
            "The model has no class 'cow': its 5 classes are ant, bee, cat, dog, elk",
        ),
        ("importance --model plain --data images", "preprocessing"),
        (
            "importance --model sequences --data images",
            "--model sequences is an encoder-decoder: heads takes a classifier.",
        ),
        ("importance --model model", "the following arguments are required: --data"),
        (
            "curve --model model --data CIFAR10",
            "--data CIFAR10 has the classes airplane, automobile, bird, ..., the model has",
        ),
        (
            "prune --model model --output new --data images --heads 1",
            "--heads: expected LAYER.HEAD such as 3.0, got '1'",
        ),
        (
            "prune --model model --output new --data images --heads 1.6",
            "head 6 of layer 1 does not exist: the layer has heads 0 to 5.",
        ),
        (
            "prune --model model --output notes.txt/new --heads 0.1",
            "--output: notes.txt/new cannot be created or written to",
        ),
        ("curve --model model --data images --output notes.txt", "notes.txt is not a directory"),
        ("prune --model model --output new --data images", "one of the arguments --amount --heads is required"),
        ("importance --model model --data images --ablat", "unknown option --ablat (did you mean --ablation?)"),
        (
            "group --model model --output new --num-kv-heads 4",
            "--num-kv-heads must divide the 6 key/value heads of the model, got 4.",
        ),
        (
            "group --model model --output new --num-kv-heads 2 --cluster-heads",
            "--cluster-heads needs --data: a directory of class directories (CLASS/x.jpg), or a dataset",
        ),
        ("prune --model model --output new --amount 0.5", "--amount needs --data: a directory of class directories"),
        (
            "prune --model model --output new --heads 0.1 --reconstruct",
            "--reconstruct needs --data: a directory of class directories",
        ),
        (
            "prune --model model --output new --data images --amount 0.5 --criterion ablation --global",
            "--global cannot be combined with --criterion ablation",
        ),
        (
            "curve --model model --data images --per-layer --reconstruct",
            "--reconstruct cannot be combined with --per-layer",
        ),
    ],
)
def test_a_wrong_call_gets_one_message_and_writes_nothing(
    args: str,
    message: str,
    here: tuple[Batch, Batch],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        heads(args, capsys)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(Path().rglob("*")) == before
