"""Figures of what `vitmha heads` measures and writes."""

import math
from typing import Any

from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
SEEDS = 3  # of the random orders
CRITERIA = ("importance_normalized", "importance", "loss_ablated")
PANELS = {
    "importance": "importance [nats]",
    "remaining": "remaining heads, by criterion",
    "accuracy_zero": "accuracy with the head ablated",
}


def draw_importance(rows: Rows, figure: Figure) -> None:
    """Heat maps of layers by heads: the importance, and the accuracy with each head ablated if it was measured."""
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "head"))
    panels = [(name, label) for name, label in PANELS.items() if name in rows[0]]
    for axes, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        values = [[math.nan] * heads for _ in range(layers)]
        for row in rows:
            values[row["layer"]][row["head"]] = row[name]
        lowest, colors = (None, "magma_r") if name == "accuracy_zero" else (0, "magma")
        image = axes.imshow(values, cmap=colors, vmin=lowest, interpolation="nearest")
        figure.colorbar(image, ax=axes, label=label, shrink=0.8)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))


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
    """Heat map of layers by heads: the remaining heads, by the criterion if it is known."""
    remaining = [
        row | {"remaining": math.nan if row["removed"] else next((row[name] for name in CRITERIA if name in row), 1.0)}
        for row in rows
    ]
    draw_importance(remaining, figure)


def draw_groups(rows: Rows, figure: Figure) -> None:
    """Heat map of layers by heads, one color per group."""
    groups = [(row["layer"], row["group"], int(head)) for row in rows for head in row["heads"].split()]
    layers, heads = 1 + max(layer for layer, *_ in groups), 1 + max(head for *_, head in groups)
    values = [[math.nan] * heads for _ in range(layers)]
    for layer, group, head in groups:
        values[layer][head] = group
    axes = figure.subplots()
    axes.imshow(values, cmap="tab20", interpolation="nearest", vmin=0, vmax=19)
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
