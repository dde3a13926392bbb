"""heads: which attention heads a model needs, and models without the others."""

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from vitmha.cli.parsing import WordParser, count, device_named, share
from vitmha.cli.records import Search, evenly, picture_of
from vitmha.evaluation import class_folders
from vitmha.inspection.ablation import mean_outputs
from vitmha.pretrained import load_model, save_model
from vitmha.slimming import (
    ablated,
    by_layer,
    head_importance,
    head_similarity,
    in_random_order,
    normalized,
    prune,
    regroup,
    removal_curve,
    score,
    weakest_first,
)
from vitmha.vit import Block, VisionTransformer

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
        pictures = Pictures(given, model, progress) if given.truth else None
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
        search, folders = Search(recursive=True), class_folders(given.truth, model.class_names)
        files = [
            (item, number) for name, number in folders.items() for item in search.below([f"{given.truth}/{name}"], ())
        ]
        if not files:
            raise ValueError(f"--truth: {given.truth} has no folders of pictures, one for each class, to measure with.")
        chosen = evenly(files, given.pictures)
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
    order, means = weakest_first(normalized(head_importance(model, pictures))), mean_outputs(model, pictures.images)
    counts = sorted({round(len(order) * step / STEPS) for step in range(STEPS)})
    curves = {
        "importance_zero": removal_curve(model, pictures, order, counts),
        "importance_mean": removal_curve(model, pictures, order, counts, means),
    }
    for seed in range(SEEDS):
        curves[f"random_{seed}"] = removal_curve(model, pictures, in_random_order(model, seed), counts)
    rows: Rows = [
        {"removed": number, "of": len(order), **{name: scores[i].accuracy for name, scores in curves.items()}}
        for i, number in enumerate(counts)
    ]
    _tell(rows, given.output, "curve", _draw_curve)


def _prune(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures) -> None:
    before = score(model, pictures)
    order = weakest_first(normalized(head_importance(model, pictures)))
    gone = order[: round(given.share * len(order))]
    prune(model, by_layer(gone), mean_outputs(model, pictures.images) if given.means else None)
    save_model(model, given.dest)
    after, left = score(model, pictures), [cast(Block, block).attn.num_heads for block in model.blocks]
    print(f"{given.dest}: {len(order) - len(gone)} of {len(order)} heads, by layer {' '.join(map(str, left))}")
    print(f"Accuracy {before.accuracy:.2%} before, {after.accuracy:.2%} without training.")


def _regroup(given: argparse.Namespace, model: VisionTransformer, pictures: Pictures | None) -> None:
    similarity = None
    if given.alike:
        if pictures is None:
            raise ValueError("--alike compares the maps of heads on pictures: give some by --truth.")
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


def _tell(rows: Rows, folder: str | None, name: str, draw: Callable[[Rows, Any], None]) -> None:
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
    figure = Figure(figsize=(6, 4), layout="constrained")
    draw(rows, figure.subplots())
    figure.savefig(Path(folder) / f"{name}.png", dpi=150)


def _draw_importance(rows: Rows, axes: Axes) -> None:
    """Layers down, heads across."""
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "head"))
    values = [[math.nan] * heads for _ in range(layers)]
    for row in rows:
        values[row["layer"]][row["head"]] = row["importance"]
    painted = axes.imshow(values, cmap="magma", vmin=0, interpolation="nearest", aspect="auto")
    axes.figure.colorbar(painted, ax=axes, label="importance [nats]")
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))


def _draw_curve(rows: Rows, axes: Axes) -> None:
    """Accuracy against the share of heads removed; for random ones from the worst seed to the best."""
    shares = [row["removed"] / row["of"] for row in rows]
    seeds = [[row[name] for name in row if name.startswith("random")] for row in rows]
    axes.fill_between(shares, list(map(min, seeds)), list(map(max, seeds)), alpha=0.3, color="gray", label="at random")
    for what in ("zero", "mean"):
        accuracies = [row[f"importance_{what}"] for row in rows]
        axes.plot(shares, accuracies, marker="o", label=f"least important first, {what} in their place")
    axes.set(xlabel="share of heads removed", ylabel="accuracy", ylim=(0, 1))
    axes.legend()


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
        each.add_argument("--truth", metavar="FOLDER", required=word != "regroup", help="pictures: FOLDER/CLASS/x.jpg")
        each.add_argument("--pictures", type=count, default=1000, metavar="N", help="most to take; default 1000")
        each.add_argument("--batch-size", type=count, default=32, metavar="N", help="pictures at a time; default 32")
        each.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda if there is one")
        if word in ("importance", "curve"):
            each.add_argument("--output", metavar="FOLDER", help=f"for {word}.csv, .json and .png")
    options: Mapping[str, argparse.ArgumentParser] = words.choices
    options["importance"].add_argument(
        "--ablate", action="store_true", help="also the scores without each head, slowly"
    )
    options["prune"].add_argument("--share", type=share, required=True, help="of the heads to remove, between 0 and 1")
    options["prune"].add_argument("--means", action="store_true", help="keep the means of what they gave, not zeros")
    options["regroup"].add_argument("--num-kv-heads", type=count, required=True, metavar="N", help="1 for one for all")
    options["regroup"].add_argument(
        "--alike", action="store_true", help="group heads with like maps, not as they stand"
    )
    return parser.parse_args(sys.argv[2:])
