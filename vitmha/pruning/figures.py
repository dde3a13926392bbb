"""Figures of what `vitmha heads` measures and writes."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Rows = list[dict[str, Any]]
SEEDS = 3  # of the random orders
CRITERIA = ("importance_normalized", "importance", "loss_ablated")
# For each column: the label of its color bar, the color map, and the value of the first color if it is fixed.
HEAT_MAPS = {
    "importance": ("importance [nats]", "magma", 0),
    "importance_normalized": ("importance, normalized by layer", "magma", 0),
    "loss_ablated": ("loss with the head ablated [nats]", "magma", None),
    "accuracy_zero": ("accuracy with the head zero-ablated", "magma_r", None),
}


def draw_importance(rows: Rows, figure: Figure) -> None:
    """Heat maps of layers by heads: the importance, and the accuracy with each head ablated if it was measured."""
    names = [name for name in ("importance", "accuracy_zero") if name in rows[0]]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        label, colors, lowest = HEAT_MAPS[name]
        image = axes.imshow(_grid(rows, name), cmap=colors, vmin=lowest, interpolation="nearest")
        figure.colorbar(image, ax=axes, label=label, shrink=0.8)
        _label_heads(axes)


def draw_curve(rows: Rows, figure: Figure) -> None:
    """Accuracy against the fraction of heads removed; for random orders the range over seeds."""
    axes = figure.subplots()
    removed = [row["removed"] / row["total"] for row in rows]
    for replacement, shade in (("zero", "0.85"), ("mean", "0.65")):
        seeds = [[row[f"random_{seed}_{replacement}_accuracy"] for seed in range(SEEDS)] for row in rows]
        label = f"random order, {replacement}-ablated"
        axes.fill_between(removed, list(map(min, seeds)), list(map(max, seeds)), color=shade, alpha=0.7, label=label)
    lines = {
        "zero": ("--", "zero-ablated"),
        "mean": ("-", "mean-ablated"),
        "reconstructed": (":", "reconstructed"),
    }
    for order, color in (("importance", "C0"), ("ablation", "C1")):
        for replacement, (style, label) in lines.items():
            if f"{order}_{replacement}_accuracy" in rows[0]:
                accuracies = [row[f"{order}_{replacement}_accuracy"] for row in rows]
                axes.plot(removed, accuracies, style, marker="o", color=color, label=f"by {order}, {label}")
    axes.set(xlabel="fraction of heads removed", ylabel="accuracy", ylim=(0, 1))
    axes.legend()


def draw_layers(rows: Rows, figure: Figure) -> None:
    """Accuracy against the heads remaining in one layer, the other layers being complete; zero and mean ablation."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, replacement in zip(panels, ("zero", "mean"), strict=True):
        for layer in sorted({row["layer"] for row in rows}):
            curve = [row for row in rows if row["layer"] == layer]
            remaining = [row["heads_remaining"] for row in curve]
            accuracies = [row[f"importance_{replacement}_accuracy"] for row in curve]
            axes.plot(remaining, accuracies, marker="o", label=f"{layer}")
        axes.set(xlabel="heads remaining in the layer", xticks=sorted({row["heads_remaining"] for row in rows}))
        axes.set_title(f"others {replacement}-ablated", fontsize=10)
    panels[0].set_ylabel("accuracy")
    panels[1].legend(title="layer")


def draw_removed(rows: Rows, figure: Figure) -> None:
    """Heat map of layers by heads: the remaining heads, colored by the criterion if there is one."""
    axes = figure.subplots()
    name = next((name for name in CRITERIA if name in rows[0]), None)
    values = [row | {"value": math.nan if row["removed"] else row[name] if name else 0.5} for row in rows]
    label, colors, lowest = HEAT_MAPS[name] if name else ("", "magma", 0)
    highest = None if name else 1
    image = axes.imshow(_grid(values, "value"), cmap=colors, vmin=lowest, vmax=highest, interpolation="nearest")
    if name:
        figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    axes.set_title("remaining heads (white: removed)", fontsize=10)
    _label_heads(axes)


def draw_groups(rows: Rows, figure: Figure) -> None:
    """Heat map of layers by heads: the group of each head, by color and number."""
    heads = [{**row, "head": int(head)} for row in rows for head in row["heads"].split()]
    axes = figure.subplots()
    axes.imshow(_grid(heads, "group"), cmap="tab20", interpolation="nearest", vmin=0, vmax=19)
    for row in heads:
        axes.text(row["head"], row["layer"], str(row["group"]), ha="center", va="center", fontsize=8)
    axes.set_title("group of each query head", fontsize=10)
    _label_heads(axes)


def _grid(rows: Rows, name: str) -> list[list[float]]:
    """A column of the rows as a matrix of layers by heads; NaN where a layer has no such head."""
    layers, heads = (1 + max(row[key] for row in rows) for key in ("layer", "head"))
    values = [[math.nan] * heads for _ in range(layers)]
    for row in rows:
        values[row["layer"]][row["head"]] = float(row[name])
    return values


def _label_heads(axes: Axes) -> None:
    axes.set(xlabel="head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
