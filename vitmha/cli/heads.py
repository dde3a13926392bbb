"""heads: which attention heads a model needs, and models without the others."""

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from vitmha.cli.parsing import WordParser, count, device_named, share
from vitmha.cli.records import Search, evenly, picture_of
from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.evaluation import class_folders
from vitmha.inspection.ablation import mean_outputs
from vitmha.pretrained import load_model, save_model
from vitmha.slimming import (
    ablated,
    by_layer,
    head_importance,
    head_similarity,
    in_random_order,
    layer_curves,
    normalized,
    prune,
    regroup,
    removal_curve,
    score,
    weakest_first,
)
from vitmha.vit import Block, VisionTransformer

DATA_SETS: Mapping[str, Callable[[str], CIFAR10 | CIFAR100 | FashionMNIST | FashionMNISTMini]] = {
    "CIFAR10": CIFAR10,
    "CIFAR100": CIFAR100,
    "FashionMNIST": FashionMNIST,
    "FashionMNISTMini": lambda _: FashionMNISTMini(),  # comes with the package
}
STEPS, SEEDS = 10, 3
Rows = list[dict[str, Any]]


def main() -> None:
    """Measures heads, or writes a model with fewer of them."""
    given = _arguments()
    if getattr(given, "dest", None) and os.path.lexists(given.dest):
        raise ValueError(f"{given.dest} is there already: name a new folder.")
    model = load_model(given.model)
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{given.model} has a decoder: only the heads of classifiers are measured.")
    model = model.to(device_named(given.device))
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        pictures = Pictures(given, model, progress) if given.truth or given.data else None
        if pictures is None and given.word != "regroup":
            raise ValueError("Which pictures? Give --truth FOLDER, or --data CIFAR10 or another data set.")
        WORDS[given.word](given, model, pictures)


class Pictures:
    """Labelled pictures in batches, as often as they are asked for; how often is shown.

    Args:
        given: What the user gave: the folder, how many, how many at a time.
        model: Knows how pictures become its input, and the classes.
        progress: Where the passes are shown.
    """

    def __init__(self, given: argparse.Namespace, model: VisionTransformer, progress: Progress) -> None:
        if model.preprocessing is None or model.class_names is None:
            raise ValueError(f"{given.model} does not say how pictures become its input, or not its classes.")
        labelled = _test_set(given, model.class_names) if given.data else _files(given.truth, model.class_names)
        chosen = evenly(labelled, given.pictures)
        images = [model.preprocessing(picture_of(item)) for item, _ in progress.track(chosen, description="reading")]
        labels = torch.tensor([number for _, number in chosen])
        size = given.batch_size
        self.batches = list(zip(torch.stack(images).split(size), labels.split(size), strict=True))
        self.progress, self.passes = progress, progress.add_task("passes", total=None)

    @property
    def images(self) -> Iterator[Tensor]:
        """Without the labels."""
        return (images for images, _ in self)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.batches
        self.progress.advance(self.passes)


def _files(folder: str, class_names: Sequence[str]) -> list[tuple[Any, int]]:
    search = Search(recursive=True)
    numbers = class_folders(folder, class_names)
    files = [(item, number) for name, number in numbers.items() for item in search.below([f"{folder}/{name}"], ())]
    if not files:
        raise ValueError(f"--truth: {folder} has no folders of pictures, one for each class, to measure with.")
    return files


def _test_set(given: argparse.Namespace, class_names: Sequence[str]) -> list[tuple[Any, int]]:
    data = DATA_SETS[given.data](given.root)
    if tuple(class_names) != tuple(data.class_names):
        raise ValueError(
            f"--data {given.data} has the classes {', '.join(data.class_names[:3])}, ..., the model has "
            f"{', '.join(class_names[:3])}, ...: take the data that it was trained for."
        )
    data.prepare_data()
    images, labels = data.read(train=False)
    arrays = images.movedim(1, -1).squeeze(-1).numpy()
    return list(zip(arrays, labels.tolist(), strict=True))


def _importance(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures) -> None:
    importance, whole = head_importance(model, pictures), score(model, pictures)
    print(f"All heads: accuracy {whole.accuracy:.2%}, loss {whole.loss:.4f}")
    rows: Rows = [
        {"layer": layer, "head": head, "importance": value, "within_layer": relative}
        for layer, pair in enumerate(zip(importance, normalized(importance), strict=True))
        for head, (value, relative) in enumerate(zip(*(each.tolist() for each in pair), strict=True))
    ]
    if given.ablate:
        for name, means in (("zero", None), ("mean", mean_outputs(model, pictures.images))):
            scores = [each for layer in ablated(model, pictures, means) for each in layer]
            for row, without in zip(rows, scores, strict=True):
                row |= {f"accuracy_{name}": without.accuracy, f"loss_{name}": without.loss}
    _tell(rows, given.output, "importance", _draw_importance)


def _curve(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures) -> None:
    importance = normalized(head_importance(model, pictures))
    if given.by_layer:
        curves = layer_curves(model, pictures, importance)
        rows: Rows = [
            {"layer": layer, "heads_left": len(curve) - i, "accuracy": each.accuracy, "loss": each.loss}
            for layer, curve in enumerate(curves)
            for i, each in enumerate(curve)
        ]
        print(f"All heads: accuracy {score(model, pictures).accuracy:.2%}")
        return _tell(rows, given.output, "layers", _draw_layers)
    losses = [torch.tensor([each.loss for each in layer]) for layer in ablated(model, pictures)]
    orders = {"importance": weakest_first(importance), "ablation": weakest_first(losses)}
    means = mean_outputs(model, pictures.images)
    total = len(orders["importance"])
    counts = sorted({round(total * step / STEPS) for step in range(STEPS)})
    scores = {
        f"{name}_{what}": removal_curve(model, pictures, order, counts, instead)
        for name, order in orders.items()
        for what, instead in (("zero", None), ("mean", means))
    }
    for seed in range(SEEDS):
        scores[f"random_{seed}"] = removal_curve(model, pictures, in_random_order(model, seed), counts)
    rows = [
        {"removed": number, "of": total, **{name: each[i].accuracy for name, each in scores.items()}}
        for i, number in enumerate(counts)
    ]
    return _tell(rows, given.output, "curve", _draw_curve)


def _prune(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures) -> None:
    before, total = score(model, pictures), sum(cast(Block, block).attn.num_heads for block in model.blocks)
    gone = given.heads
    if gone is None:
        gone = weakest_first(normalized(head_importance(model, pictures)))[: round(given.share * total)]
    prune(model, by_layer(gone), mean_outputs(model, pictures.images) if given.means else None)
    save_model(model, given.dest)
    after, left = score(model, pictures), [cast(Block, block).attn.num_heads for block in model.blocks]
    print(f"{given.dest}: {sum(left)} of {total} heads, by layer {' '.join(map(str, left))}")
    print(f"Accuracy {before.accuracy:.2%} before, {after.accuracy:.2%} without training.")


def _regroup(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures | None) -> None:
    similarity = None
    if given.alike:
        if pictures is None:
            raise ValueError("--alike compares the maps of heads on pictures: give some by --truth or --data.")
        similarity = head_similarity(model, pictures)
    regrouped = regroup(model, given.num_kv_heads, similarity)
    save_model(regrouped, given.dest)
    print(f"{given.dest}: {model.config.num_heads} heads on {given.num_kv_heads} key/value heads")
    if pictures is not None:
        before, after = score(model, pictures), score(regrouped, pictures)
        print(f"Accuracy {before.accuracy:.2%} before, {after.accuracy:.2%} without training.")


WORDS: Mapping[str, Callable[..., None]] = {
    "importance": _importance,
    "curve": _curve,
    "prune": _prune,
    "regroup": _regroup,
}


def _tell(rows: Rows, folder: str | None, name: str, draw: Callable[[Rows, Figure], None]) -> None:
    """Prints a table, and writes and draws it where there is a folder."""
    text = [
        {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows
    ]
    widths = {key: max(len(key), *(len(row[key]) for row in text)) for key in rows[0]}
    for row in ({key: key for key in widths}, *text):
        print("  ".join(row[key].rjust(width) for key, width in widths.items()))
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
    with (Path(folder) / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(rows, figure)
    figure.savefig(Path(folder) / f"{name}.png", dpi=150)


def _draw_importance(rows: Rows, figure: Figure) -> None:
    """Layers down, heads across: the importance, and the accuracy without each head where it was measured."""
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "head"))
    panels = [("importance", "importance [nats]"), ("accuracy_zero", "accuracy without the head")]
    panels = [(name, label) for name, label in panels if name in rows[0]]
    for axes, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        values = [[math.nan] * heads for _ in range(layers)]
        for row in rows:
            values[row["layer"]][row["head"]] = row[name]
        lowest, colors = (0, "magma") if name == "importance" else (None, "magma_r")
        painted = axes.imshow(values, cmap=colors, vmin=lowest, interpolation="nearest")
        figure.colorbar(painted, ax=axes, label=label, shrink=0.8)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))


def _draw_curve(rows: Rows, figure: Figure) -> None:
    """Accuracy against the share of heads removed; for random ones from the worst seed to the best."""
    axes = figure.subplots()
    shares = [row["removed"] / row["of"] for row in rows]
    seeds = [[row[name] for name in row if name.startswith("random")] for row in rows]
    axes.fill_between(shares, list(map(min, seeds)), list(map(max, seeds)), alpha=0.3, color="gray", label="at random")
    for order, color in (("importance", "C0"), ("ablation", "C1")):
        for what, style in (("zero", "--"), ("mean", "-")):
            accuracies = [row[f"{order}_{what}"] for row in rows]
            axes.plot(shares, accuracies, style, marker="o", color=color, label=f"by {order}, {what} in their place")
    axes.set(xlabel="share of heads removed", ylabel="accuracy", ylim=(0, 1))
    axes.legend()


def _draw_layers(rows: Rows, figure: Figure) -> None:
    """Accuracy against the heads that are left in one layer, the others having all of theirs."""
    axes = figure.subplots()
    for layer in sorted({row["layer"] for row in rows}):
        these = [row for row in rows if row["layer"] == layer]
        axes.plot(*([row[name] for row in these] for name in ("heads_left", "accuracy")), marker="o", label=f"{layer}")
    axes.set(xlabel="heads left in the layer", ylabel="accuracy", xticks=sorted({row["heads_left"] for row in rows}))
    axes.legend(title="layer")


def _place(text: str) -> tuple[int, int]:
    """LAYER.HEAD as numbers."""
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected LAYER.HEAD such as 3.0, got {text!r}")
    return int(layer), int(head)


def _arguments() -> argparse.Namespace:
    parser = WordParser(
        prog="vitmha heads", description="Which attention heads a model needs, and models without others."
    )
    words = parser.add_subparsers(title="words", metavar="WORD", dest="word", required=True)
    purposes = {
        "importance": "how much the loss hangs on each head",
        "curve": "accuracy without the least important heads, and without random ones",
        "prune": "a model without its least important heads",
        "regroup": "a model whose heads share key/value heads",
    }
    for word, purpose in purposes.items():
        each = words.add_parser(word, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        each.add_argument("model", metavar="MODEL", help="a model folder, or what else --model.pretrained takes")
        if word in ("prune", "regroup"):
            each.add_argument("dest", metavar="DEST", help="the model folder to make")
        given = each.add_mutually_exclusive_group()
        given.add_argument("--truth", metavar="FOLDER", help="pictures to measure with: FOLDER/CLASS/x.jpg")
        given.add_argument("--data", choices=tuple(DATA_SETS), help="measure with the test set of this instead")
        each.add_argument("--root", default="data", metavar="FOLDER", help="where the data set lies; default data")
        each.add_argument("--pictures", type=count, default=1000, metavar="N", help="most to take; default 1000")
        each.add_argument("--batch-size", type=count, default=32, metavar="N", help="pictures at a time; default 32")
        each.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda if there is one")
        if word in ("importance", "curve"):
            each.add_argument("--output", metavar="FOLDER", help=f"for {word}.csv, .json and .png")
    options: Mapping[str, argparse.ArgumentParser] = words.choices
    options["importance"].add_argument(
        "--ablate", action="store_true", help="also the scores without each head, slowly"
    )
    options["curve"].add_argument("--by-layer", action="store_true", help="each layer alone, down to one head")
    which = options["prune"].add_mutually_exclusive_group(required=True)
    which.add_argument("--share", type=share, help="of the heads to remove, the least important, between 0 and 1")
    which.add_argument("--heads", type=_place, nargs="+", metavar="LAYER.HEAD", help="these, counted from 0")
    options["prune"].add_argument("--means", action="store_true", help="keep the means of what they gave, not zeros")
    options["regroup"].add_argument("--num-kv-heads", type=count, required=True, metavar="N", help="1 for one for all")
    options["regroup"].add_argument(
        "--alike", action="store_true", help="group heads with like maps, not as they stand"
    )
    return parser.parse_args(sys.argv[2:])
