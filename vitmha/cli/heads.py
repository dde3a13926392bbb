"""heads: which attention heads a model needs, and models without the others."""

import argparse
import copy
import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vitmha.cli.arguments import (
    CommandParser,
    add_batch_size,
    add_data,
    add_device,
    fraction,
    parse_device,
    positive_int,
    writable_dir,
)
from vitmha.data.labeled import SelectionSplit, read_labeled, selection_split
from vitmha.errors import UserError
from vitmha.inspection.ablation import mean_outputs
from vitmha.models.encoder_decoder import get_preprocessing
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.curves import layer_curves, reconstruction_curve, removal_curve
from vitmha.pruning.evaluation import EvalResult, evaluate
from vitmha.pruning.figures import SEEDS, Rows, draw_curve, draw_groups, draw_importance, draw_layers, draw_removed
from vitmha.pruning.gqa import convert_to_gqa, head_groups, head_similarity
from vitmha.pruning.importance import ablation_scores, head_importance, normalize_importance, random_order, rank_heads
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import group_by_layer, prune
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

STEPS = 10


def main(args: Sequence[str]) -> None:
    """Measures heads, or writes a model with fewer of them."""
    given = _arguments(args)
    if getattr(given, "dest", None) and os.path.lexists(given.dest):
        raise UserError(f"{given.dest} is there already: name a new folder.")
    model = load_model(given.model)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{given.model} has a decoder: only the heads of classifiers are measured.")
    model = model.to(parse_device(given.device))
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        pictures = _labelled(given, model, progress) if given.data else None
        needs_none = given.word == "group" or (given.word == "prune" and given.heads)
        wanting = [name for name in ("means", "reconstruct", "alike") if getattr(given, name, False)]
        if pictures is None and (wanting or not needs_none):
            what = f"Which pictures for --{wanting[0]}?" if wanting else "Which pictures?"
            raise UserError(
                f"{what} Give --data SOURCE: a directory of class directories, or CIFAR10 or another dataset."
            )
        WORDS[given.word](given, model, pictures)


def _labelled(given: argparse.Namespace, model: VisionTransformer, progress: Progress) -> SelectionSplit:
    preprocessing = get_preprocessing(model)
    if model.class_names is None:
        raise UserError(f"{given.model} has no class names: add them with `vitmha convert --set class_names=[...]`.")
    images = read_labeled(given.data, model.class_names, data_root=given.data_root)
    return selection_split(images, given.num_images, preprocessing, given.batch_size, progress)


def _importance(given: argparse.Namespace, model: VisionTransformer, sets: SelectionSplit) -> None:
    pictures = sets.eval
    importance, whole = head_importance(model, pictures), evaluate(model, pictures)
    print(f"All heads: accuracy {whole.accuracy:.2%}, loss {whole.loss:.4f}, of {len(pictures)} pictures")
    rows: Rows = [
        {"layer": layer, "head": head, "importance": value, "within_layer": relative}
        for layer, pair in enumerate(zip(importance, normalize_importance(importance), strict=True))
        for head, (value, relative) in enumerate(zip(*(each.tolist() for each in pair), strict=True))
    ]
    if given.ablate:
        for name, means in (("zero", None), ("mean", mean_outputs(model, sets.select.images))):
            scores = [each for layer in ablation_scores(model, pictures, means) for each in layer]
            for row, without in zip(rows, scores, strict=True):
                row |= {f"accuracy_{name}": without.accuracy, f"loss_{name}": without.loss}
    _tell(given, rows, whole, len(pictures), draw_importance)


def _importance_of(given: argparse.Namespace, model: VisionTransformer, sets: SelectionSplit) -> list[torch.Tensor]:
    """What heads are chosen by."""
    importance = head_importance(model, sets.select)
    return importance if given.across_layers else normalize_importance(importance)


def _losses_without(
    model: VisionTransformer, sets: SelectionSplit, means: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """What heads are chosen by that are switched off one by one."""
    return [torch.tensor([each.loss for each in layer]) for layer in ablation_scores(model, sets.select, means)]


def _curve(given: argparse.Namespace, model: VisionTransformer, sets: SelectionSplit) -> None:
    importance, pictures = _importance_of(given, model, sets), sets.eval
    means = mean_outputs(model, sets.select.images)
    replacements = {"zero": None, "mean": means}
    losses = {what: _losses_without(model, sets, instead) for what, instead in replacements.items()}
    if given.per_layer:
        curves = {
            f"{name}_{what}": layer_curves(model, pictures, values, instead)
            for what, instead in replacements.items()
            for name, values in (("importance", importance), ("ablation", losses[what]))
        }
        rows: Rows = [
            {
                **{"layer": layer, "heads_left": attention.num_heads - i},
                **{f"{name}_accuracy": each[layer][i].accuracy for name, each in curves.items()},
                **{f"{name}_loss": each[layer][i].loss for name, each in curves.items()},
            }
            for layer, attention in enumerate(model.attentions)
            for i in range(attention.num_heads + 1)
        ]
        return _tell(given, rows, curves["importance_zero"][0][0], len(pictures), draw_layers)
    orders = {"importance": rank_heads(importance)}
    orders |= {f"random_{seed}": random_order(model, seed) for seed in range(SEEDS)}
    total = len(orders["importance"])
    counts = sorted({round(total * step / STEPS) for step in range(STEPS + 1)})
    scores = {}
    for what, instead in replacements.items():
        orders["ablation"] = rank_heads(losses[what])
        for name, order in orders.items():
            scores[f"{name}_{what}"] = removal_curve(model, pictures, order, counts, instead)
    for name in ("importance", "ablation") if given.reconstruct else ():
        fitted = reconstruction_curve(model, pictures, orders[name], counts[:-1], means, sets.select)
        scores[f"{name}_refit"] = [*fitted, scores[f"{name}_mean"][-1]]  # without any head the means are left
    rows = [
        {
            **{"removed": number, "of": total},
            **{f"{name}_accuracy": each[i].accuracy for name, each in scores.items()},
            **{f"{name}_loss": each[i].loss for name, each in scores.items()},
        }
        for i, number in enumerate(counts)
    ]
    return _tell(given, rows, scores["importance_zero"][0], len(pictures), draw_curve)


def _prune(given: argparse.Namespace, model: VisionTransformer, sets: SelectionSplit | None) -> None:
    before = evaluate(model, sets.eval) if sets else None
    total, gone = sum(attention.num_heads for attention in model.attentions), given.heads
    number = round((given.share or 0) * total)
    if given.share and number in (0, total):
        what = "less than half a head: nothing to remove" if number == 0 else "all of them: leave at least one"
        raise UserError(f"--share {given.share} of {total} heads is {what}.")
    rows: Rows = [{"layer": i, "head": j} for i, each in enumerate(model.attentions) for j in range(each.num_heads)]
    means = mean_outputs(model, sets.select.images) if sets and (given.means or given.reconstruct) else None
    if sets:
        is_ablated = given.by == "ablation"
        values = _losses_without(model, sets, means) if is_ablated else _importance_of(given, model, sets)
        gone = gone or rank_heads(values)[:number]
        name = "loss_without" if is_ablated else "importance" if given.across_layers else "within_layer"
        rows = [row | {name: values[row["layer"]][row["head"]].item()} for row in rows]
    rows = [row | {"removed": int((row["layer"], row["head"]) in gone)} for row in rows]
    pruned = copy.deepcopy(model)
    prune(pruned, group_by_layer(gone), means)
    if sets and given.reconstruct:
        reconstruct(pruned, model, sets.select)
    save_model(pruned, given.dest)
    left = [attention.num_heads for attention in pruned.attentions]
    print(f"{given.dest}: {sum(left)} of {total} heads, by layer {' '.join(map(str, left))}")
    _compare(given, pruned, before, sets, rows, draw_removed)


def _regroup(given: argparse.Namespace, model: VisionTransformer, sets: SelectionSplit | None) -> None:
    similarity = head_similarity(model, sets.select) if sets and given.alike else None
    before = evaluate(model, sets.eval) if sets else None
    regrouped = convert_to_gqa(model, given.num_kv_heads, similarity)
    if sets and given.reconstruct:
        reconstruct(regrouped, model, sets.select)
    rows: Rows = [
        {"layer": layer, "group": number, "heads": " ".join(map(str, heads))}
        for layer, groups in enumerate(head_groups(model, given.num_kv_heads, similarity))
        for number, heads in enumerate(groups)
    ]
    save_model(regrouped, given.dest)
    print(f"{given.dest}: {model.config.num_heads} heads on {given.num_kv_heads} key/value heads")
    _compare(given, regrouped, before, sets, rows, draw_groups)


WORDS: Mapping[str, Callable[..., None]] = {
    "importance": _importance,
    "curve": _curve,
    "prune": _prune,
    "group": _regroup,
}


def _compare(
    given: argparse.Namespace,
    model: VisionTransformer,
    before: EvalResult | None,
    sets: SelectionSplit | None,
    rows: Rows,
    draw: Callable[[Rows, Figure], None],
) -> None:
    """Says how right the new model is, where there are pictures, and writes what was done."""
    facts: dict[str, Any] = {"dest": given.dest}
    if before and sets:
        after, number = evaluate(model, sets.eval), len(sets.eval)
        print(f"Accuracy {before.accuracy:.2%} before, {after.accuracy:.2%} without training, of {number} pictures.")
        facts |= {"pictures": number, "before": vars(before), "after": vars(after)}
    _write(given, rows, facts, draw)


def _tell(
    given: argparse.Namespace, rows: Rows, whole: EvalResult, count: int, draw: Callable[[Rows, Figure], None]
) -> None:
    """Prints a table, and writes and draws it where there is a folder."""
    text = [
        {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows
    ]
    shown = [key for key in rows[0] if not (given.word == "curve" and key.endswith("_loss"))]
    widths = {key: max(len(key), *(len(row[key]) for row in text)) for key in shown}
    for row in ({key: key for key in widths}, *text):
        print("  ".join(row[key].rjust(width) for key, width in widths.items()))
    _write(given, rows, {"pictures": count, **vars(whole)}, draw)


def _write(given: argparse.Namespace, rows: Rows, facts: dict[str, Any], draw: Callable[[Rows, Figure], None]) -> None:
    """The rows as CSV, as JSON with what they are of, and as a picture, where --output names a folder."""
    if given.output is None:
        return
    name, folder = "layers" if getattr(given, "per_layer", False) else given.word, Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": given.model, **facts, "rows": rows}, indent=2)
    (folder / f"{name}.json").write_text(text + "\n")
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(rows, figure)
    figure.savefig(folder / f"{name}.png", dpi=150)


def _place(text: str) -> tuple[int, int]:
    """LAYER.HEAD as numbers."""
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected LAYER.HEAD such as 3.0, got {text!r}")
    return int(layer), int(head)


def _arguments(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="vitmha heads", description="Which attention heads a model needs, and models without others."
    )
    words = parser.add_subparsers(title="words", metavar="WORD", dest="word", required=True)
    purposes = {
        "importance": "how much the loss hangs on each head",
        "curve": "accuracy without the least important heads, and without random ones",
        "prune": "a model without its least important heads",
        "group": "a model whose heads share key/value heads",
    }
    for word, purpose in purposes.items():
        each = words.add_parser(word, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        each.add_argument("model", metavar="MODEL", help="a model folder, or what else --model.pretrained takes")
        if word in ("prune", "group"):
            each.add_argument("dest", type=writable_dir, metavar="DEST", help="the model folder to make")
        add_data(each, required=False)
        each.add_argument(
            "--num-images", type=positive_int, default=1000, metavar="N", help="images to select and to evaluate; 1000"
        )
        add_batch_size(each)
        add_device(each)
        each.add_argument("--output", type=writable_dir, metavar="FOLDER", help=f"for {word}.csv, .json and .png")
    options: Mapping[str, argparse.ArgumentParser] = words.choices
    options["importance"].add_argument(
        "--ablate", action="store_true", help="also the scores without each head, slowly"
    )
    options["curve"].add_argument("--per-layer", action="store_true", help="each layer alone, down to one head")
    across = "choose by the importance as it is, and not relative to the layer's"
    for word in ("curve", "prune"):
        options[word].add_argument("--across-layers", action="store_true", help=across)
    by = "choose by importance, or slowly by the loss without each head, which keeps more; default importance"
    options["prune"].add_argument("--by", choices=("importance", "ablation"), default="importance", help=by)
    which = options["prune"].add_mutually_exclusive_group(required=True)
    which.add_argument("--share", type=fraction, help="of the heads to remove, the least important, between 0 and 1")
    which.add_argument("--heads", type=_place, nargs="+", metavar="LAYER.HEAD", help="these, counted from 0")
    options["prune"].add_argument("--means", action="store_true", help="keep the means of what they gave, not zeros")
    fitted = "fit what remains to what the model gave, by least squares on the pictures: no training, and far closer"
    options["prune"].add_argument("--refit", action="store_true", help=fitted)
    options["group"].add_argument("--refit", action="store_true", help=fitted)
    options["curve"].add_argument("--refit", action="store_true", help="also with the others fitted to it, slowly")
    options["group"].add_argument(
        "--num-kv-heads", type=positive_int, required=True, metavar="N", help="1 for one for all"
    )
    options["group"].add_argument("--alike", action="store_true", help="group heads with like maps, not as they stand")
    parsed = parser.parse_args(args)
    if getattr(parsed, "across_layers", False) and getattr(parsed, "by", None) == "ablation":
        options["prune"].error("--across-layers is for importance: --by ablation compares all layers anyway")
    if getattr(parsed, "per_layer", False) and parsed.reconstruct:
        options["curve"].error("--refit is for the curve over all layers: leave out --per-layer")
    return parsed
