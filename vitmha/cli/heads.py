"""heads: measure, prune or group the attention heads of a model."""

import argparse
import copy
import csv
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vitmha.atomic import atomic_files
from vitmha.cli.arguments import (
    CommandParser,
    add_batch_size,
    add_data,
    add_device,
    add_model,
    fraction,
    parse_device,
    positive_int,
    writable_dir,
)
from vitmha.data.labeled import DATASETS, SelectionSplit, read_labeled, selection_split
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
from vitmha.weights.training_summary import EvaluationSummary, read_summary

STEPS = 10  # points of a removal curve, without the first
PURPOSES = {
    "importance": "measure the sensitivity of the loss to each head",
    "curve": "measure the accuracy with more and more heads removed",
    "prune": "remove heads and write the pruned model",
    "group": "convert to grouped-query attention and write the model",
}


def main(args: Sequence[str]) -> None:
    """Measures heads, or writes a model with fewer heads or key/value heads."""
    options = _parse(args)
    options.call = shlex.join(["vitmha", "heads", *args])
    if options.command in ("prune", "group") and os.path.lexists(options.output):
        raise UserError(f"--output {options.output} already exists; choose another directory.")
    model = load_model(options.model)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"--model {options.model} is an encoder-decoder: heads takes a classifier.")
    model = model.to(parse_device(options.device))
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        split = _read_data(options, model, progress) if options.data else None
        RUN[options.command](options, model, split)


def _read_data(options: argparse.Namespace, model: VisionTransformer, progress: Progress) -> SelectionSplit:
    preprocessing = get_preprocessing(model)
    if model.class_names is None:
        raise UserError(
            f"--model {options.model} has no class names: add them with `vitmha convert --override class_names=[...]`."
        )
    images = read_labeled(options.data, model.class_names, data_root=options.data_root)
    return selection_split(images, options.num_images, preprocessing, options.batch_size, progress)


def _importance(options: argparse.Namespace, model: VisionTransformer, split: SelectionSplit) -> None:
    """Measures the importance of each head, and the accuracy without it, on the images to evaluate on."""
    images = split.eval
    importance, baseline = head_importance(model, images), evaluate(model, images)
    print(f"All heads: accuracy {baseline.accuracy:.2%}, loss {baseline.loss:.4f} on {len(images)} images")
    rows: Rows = [
        {"layer": layer, "head": head, "importance": value, "importance_normalized": relative}
        for layer, pair in enumerate(zip(importance, normalize_importance(importance), strict=True))
        for head, (value, relative) in enumerate(zip(*(values.tolist() for values in pair), strict=True))
    ]
    if options.ablation:
        for name, means in (("zero", None), ("mean", mean_outputs(model, split.select.images))):
            results = [result for layer in ablation_scores(model, images, means) for result in layer]
            for row, result in zip(rows, results, strict=True):
                row |= {f"accuracy_{name}": result.accuracy, f"loss_{name}": result.loss}
    _report(options, rows, baseline, len(images), draw_importance)


def _ranking_importance(
    options: argparse.Namespace, model: VisionTransformer, split: SelectionSplit
) -> list[torch.Tensor]:
    """The importance that heads are ranked by: the criterion `importance`."""
    importance = head_importance(model, split.select)
    return importance if options.is_global else normalize_importance(importance)


def _ablation_losses(
    model: VisionTransformer, split: SelectionSplit, means: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """The loss with each head ablated: the criterion `ablation`."""
    return [torch.tensor([result.loss for result in layer]) for layer in ablation_scores(model, split.select, means)]


def _curve(options: argparse.Namespace, model: VisionTransformer, split: SelectionSplit) -> None:
    """Ranks the heads on one half of the images, and measures the accuracy with more and more removed on the other."""
    importance = _ranking_importance(options, model, split)
    means = mean_outputs(model, split.select.images)
    replacements = {"zero": None, "mean": means}
    losses = {name: _ablation_losses(model, split, values) for name, values in replacements.items()}
    if options.per_layer:
        _layer_curves(options, model, split, importance, replacements, losses)
        return
    orders = {"importance": rank_heads(importance)}
    orders |= {f"random_{seed}": random_order(model, seed) for seed in range(SEEDS)}
    total = len(orders["importance"])
    counts = sorted({round(total * step / STEPS) for step in range(STEPS + 1)})
    curves = {}
    for replacement, values in replacements.items():
        orders["ablation"] = rank_heads(losses[replacement])
        for name, order in orders.items():
            curves[f"{name}_{replacement}"] = removal_curve(model, split.eval, order, counts, values)
    for name in ("importance", "ablation") if options.reconstruct else ():
        curve = reconstruction_curve(model, split.eval, orders[name], counts[:-1], means, split.select)
        # Without any head only the means remain, so there is nothing to reconstruct.
        curves[f"{name}_reconstructed"] = [*curve, curves[f"{name}_mean"][-1]]
    rows: Rows = [
        {
            **{"removed": count, "total": total},
            **{f"{name}_accuracy": curve[i].accuracy for name, curve in curves.items()},
            **{f"{name}_loss": curve[i].loss for name, curve in curves.items()},
        }
        for i, count in enumerate(counts)
    ]
    _report(options, rows, curves["importance_zero"][0], len(split.eval), draw_curve)


def _layer_curves(
    options: argparse.Namespace,
    model: VisionTransformer,
    split: SelectionSplit,
    importance: Sequence[torch.Tensor],
    replacements: Mapping[str, Sequence[torch.Tensor] | None],
    losses: Mapping[str, Sequence[torch.Tensor]],
) -> None:
    """The curve of each layer separately; `losses` are those with each head ablated, for each replacement."""
    curves = {
        f"{name}_{replacement}": layer_curves(model, split.eval, ranking, values)
        for replacement, values in replacements.items()
        for name, ranking in (("importance", importance), ("ablation", losses[replacement]))
    }
    rows: Rows = [
        {
            **{"layer": layer, "heads_remaining": attention.num_heads - i},
            **{f"{name}_accuracy": curve[layer][i].accuracy for name, curve in curves.items()},
            **{f"{name}_loss": curve[layer][i].loss for name, curve in curves.items()},
        }
        for layer, attention in enumerate(model.attentions)
        for i in range(attention.num_heads + 1)
    ]
    _report(options, rows, curves["importance_zero"][0][0], len(split.eval), draw_layers)


def _prune(options: argparse.Namespace, model: VisionTransformer, split: SelectionSplit | None) -> None:
    before = evaluate(model, split.eval) if split else None
    total, removed = sum(attention.num_heads for attention in model.attentions), options.heads
    count = round((options.amount or 0) * total)
    if options.amount and count in (0, total):
        problem = "removes no head" if count == 0 else "removes all heads: at least one must remain"
        raise UserError(f"--amount {options.amount} of {total} heads {problem}.")
    rows: Rows = [
        {"layer": layer, "head": head}
        for layer, attention in enumerate(model.attentions)
        for head in range(attention.num_heads)
    ]
    means = mean_outputs(model, split.select.images) if split and (options.fold_mean or options.reconstruct) else None
    if split:
        is_ablation = options.criterion == "ablation"
        values = _ablation_losses(model, split, means) if is_ablation else _ranking_importance(options, model, split)
        removed = removed or rank_heads(values)[:count]
        importance = "importance" if options.is_global else "importance_normalized"
        name = "loss_ablated" if is_ablation else importance
        rows = [row | {name: values[row["layer"]][row["head"]].item()} for row in rows]
    rows = [row | {"removed": int((row["layer"], row["head"]) in removed)} for row in rows]
    pruned = copy.deepcopy(model)
    prune(pruned, group_by_layer(removed), means)
    if split and options.reconstruct:
        reconstruct(pruned, model, split.select)
    remaining = [attention.num_heads for attention in pruned.attentions]
    what = f"{sum(remaining)} of {total} heads, by layer {' '.join(map(str, remaining))}"
    _save(options, pruned, what, before, split, rows, draw_removed)


def _group(options: argparse.Namespace, model: VisionTransformer, split: SelectionSplit | None) -> None:
    similarity = head_similarity(model, split.select) if split and options.cluster_heads else None
    before = evaluate(model, split.eval) if split else None
    grouped = convert_to_gqa(model, options.num_kv_heads, similarity)
    if split and options.reconstruct:
        reconstruct(grouped, model, split.select)
    rows: Rows = [
        {"layer": layer, "group": index, "heads": " ".join(map(str, heads))}
        for layer, groups in enumerate(head_groups(model, options.num_kv_heads, similarity))
        for index, heads in enumerate(groups)
    ]
    what = f"{model.config.num_heads} heads with {options.num_kv_heads} key/value heads"
    _save(options, grouped, what, before, split, rows, draw_groups)


RUN: Mapping[str, Callable[..., None]] = {
    "importance": _importance,
    "curve": _curve,
    "prune": _prune,
    "group": _group,
}


def _save(
    options: argparse.Namespace,
    model: VisionTransformer,
    what: str,
    before: EvalResult | None,
    split: SelectionSplit | None,
    rows: Rows,
    draw: Callable[[Rows, Figure], None],
) -> None:
    """Saves the model with what was done to it, and prints the accuracy before and after if there are images."""
    facts: dict[str, Any] = {}
    done, result = f"`{options.call}`: {what}.", None
    if before and split:
        after, count = evaluate(model, split.eval), len(split.eval)
        compared = (
            f"Accuracy {before.accuracy:.2%} before, {after.accuracy:.2%} after, on {count} images, without training."
        )
        done = f"{done} {compared}"
        result = EvaluationSummary(
            accuracy=after.accuracy,
            num_images=count,
            split="test" if options.data in DATASETS else "evaluation",
            dataset=Path(options.data).absolute().name,
        )
        facts = {"num_images": count, "before": vars(before), "after": vars(after)}
    save_model(model, options.output, summary=read_summary(options.model).changed(done, result=result))
    print(f"{options.output}: {what}")
    if facts:
        print(compared)
    _write(options, rows, facts, draw)


def _report(
    options: argparse.Namespace,
    rows: Rows,
    baseline: EvalResult,
    count: int,
    draw: Callable[[Rows, Figure], None],
) -> None:
    """Prints the rows as a table, and writes them if there is an output directory."""
    cells = [
        {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows
    ]
    columns = [key for key in rows[0] if not (options.command == "curve" and key.endswith("_loss"))]
    widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in columns}
    for row in ({key: key for key in widths}, *cells):
        print("  ".join(row[key].rjust(width) for key, width in widths.items()))
    _write(options, rows, {"num_images": count, **vars(baseline)}, draw)


def _write(
    options: argparse.Namespace, rows: Rows, facts: dict[str, Any], draw: Callable[[Rows, Figure], None]
) -> None:
    """Writes the rows as CSV, JSON and a figure into the output directory."""
    if options.output is None:
        return
    name = "layers" if getattr(options, "per_layer", False) else options.command
    text = json.dumps({"model": options.model, **facts, "rows": rows}, indent=2)
    figure = Figure(figsize=(7, 4), layout="compressed")  # close to the color bar, also where the heat map is narrow
    draw(rows, figure)
    with atomic_files(options.output) as directory:
        (directory / f"{name}.json").write_text(text + "\n")
        with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        figure.savefig(directory / f"{name}.png", dpi=150)


def _head_index(text: str) -> tuple[int, int]:
    """LAYER.HEAD as two integers."""
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected LAYER.HEAD such as 3.0, got {text!r}")
    return int(layer), int(head)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="vitmha heads", description="Measure, prune or group the attention heads of a model.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command, purpose in PURPOSES.items():
        _add_options(commands.add_parser(command, help=purpose, description=f"{purpose.capitalize()}."), command)
    options = parser.parse_args(args)
    refuse = commands.choices[options.command].error
    for name in ("amount", "fold_mean", "reconstruct", "cluster_heads"):
        if getattr(options, name, None) and options.data is None:
            flag = f"--{name.replace('_', '-')}"
            refuse(f"{flag} needs --data: a directory of class directories (CLASS/x.jpg), or a dataset such as CIFAR10")
    if getattr(options, "is_global", False) and getattr(options, "criterion", None) == "ablation":
        refuse("--global cannot be combined with --criterion ablation, which always compares all layers")
    if getattr(options, "per_layer", False) and options.reconstruct:
        refuse("--reconstruct cannot be combined with --per-layer")
    return options


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    measures = command in ("importance", "curve")
    add_model(parser)
    note = (
        "; heads are selected on its training split, or on every second image, and the result is evaluated on the rest"
    )
    add_data(parser, required=measures, note=note)
    parser.add_argument(
        "--num-images",
        type=positive_int,
        default=1000,
        metavar="N",
        help="largest number of images to select on, and to evaluate on; default 1000",
    )
    add_batch_size(parser)
    add_device(parser)
    output = f"write {command}.csv, .json and .png here" if measures else "the model directory to create"
    parser.add_argument("--output", type=writable_dir, required=not measures, metavar="DIR", help=output)
    if command == "importance":
        parser.add_argument(
            "--ablation", action="store_true", help="also measure the accuracy with each head ablated (slow)"
        )
    if command == "curve":
        parser.add_argument("--per-layer", action="store_true", help="each layer separately, down to no head")
    if command in ("curve", "prune"):
        global_ = "rank heads of all layers by their raw importance, not by importance normalized within the layer"
        parser.add_argument("--global", dest="is_global", action="store_true", help=global_)
    if command == "prune":
        parser.add_argument(
            "--criterion",
            choices=("importance", "ablation"),
            default="importance",
            help="rank heads by importance, or by the loss with each head ablated (slow, more accurate); default "
            "importance",
        )
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument(
            "--amount", type=fraction, metavar="F", help="fraction of the heads to remove, the least important first"
        )
        which.add_argument(
            "--heads", type=_head_index, nargs="+", metavar="LAYER.HEAD", help="the heads to remove, counted from 0"
        )
        fold_mean = "fold the mean outputs of the removed heads into the bias (mean ablation instead of zero ablation)"
        parser.add_argument("--fold-mean", action="store_true", help=fold_mean)
    if command == "group":
        parser.add_argument(
            "--num-kv-heads", type=positive_int, required=True, metavar="N", help="key/value heads; 1 for multi-query"
        )
        parser.add_argument(
            "--cluster-heads", action="store_true", help="group heads with similar attention maps, not neighbors"
        )
    if command != "importance":
        reconstruct_ = "fit the remaining weights to the outputs of the original model by least squares"
        reconstruct_ += "; measured in addition (slow)" if measures else ", without training"
        parser.add_argument("--reconstruct", action="store_true", help=reconstruct_)
