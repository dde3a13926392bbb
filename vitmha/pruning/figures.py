"""Pictures of what `vitmha heads` has measured or done."""

import math
from typing import Any

from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
SEEDS = 3  # of the random orders
CHOSEN_BY = ("within_layer", "importance", "loss_without")
PANELS = {
    "importance": "importance [nats]",
    "kept": "heads kept, by what they were chosen by",
    "accuracy_zero": "accuracy without the head",
}


def draw_importance(rows: Rows, figure: Figure) -> None:
    """Layers down, heads across: the importance, and the accuracy without each head where it was measured."""
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "head"))
    panels = [(name, label) for name, label in PANELS.items() if name in rows[0]]
    for axes, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        values = [[math.nan] * heads for _ in range(layers)]
        for row in rows:
            values[row["layer"]][row["head"]] = row[name]
        lowest, colors = (None, "magma_r") if name == "accuracy_zero" else (0, "magma")
        painted = axes.imshow(values, cmap=colors, vmin=lowest, interpolation="nearest")
        figure.colorbar(painted, ax=axes, label=label, shrink=0.8)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))


def draw_curve(rows: Rows, figure: Figure) -> None:
    """Accuracy against the share of heads removed; for random ones from the worst seed to the best."""
    axes = figure.subplots()
    shares = [row["removed"] / row["of"] for row in rows]
    for what, shade in (("zero", "0.85"), ("mean", "0.65")):
        seeds = [[row[f"random_{seed}_{what}_accuracy"] for seed in range(SEEDS)] for row in rows]
        label = f"at random, {what} in their place"
        axes.fill_between(shares, list(map(min, seeds)), list(map(max, seeds)), color=shade, alpha=0.7, label=label)
    lines = {
        "zero": ("--", "zero in their place"),
        "mean": ("-", "mean in their place"),
        "reconstruct": (":", "others refitted"),
    }
    for order, color in (("importance", "C0"), ("ablation", "C1")):
        for what, (style, label) in lines.items():
            if f"{order}_{what}_accuracy" in rows[0]:
                accuracies = [row[f"{order}_{what}_accuracy"] for row in rows]
                axes.plot(shares, accuracies, style, marker="o", color=color, label=f"by {order}, {label}")
    axes.set(xlabel="share of heads removed", ylabel="accuracy", ylim=(0, 1))
    axes.legend()


def draw_layers(rows: Rows, figure: Figure) -> None:
    """Accuracy against the heads that are left in one layer, the others having all of theirs: zeros, and means."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("zero", "mean"), strict=True):
        for layer in sorted({row["layer"] for row in rows}):
            these = [row for row in rows if row["layer"] == layer]
            left, accuracies = ([row[name] for row in these] for name in ("heads_left", f"importance_{what}_accuracy"))
            axes.plot(left, accuracies, marker="o", label=f"{layer}")
        axes.set(xlabel="heads left in the layer", xticks=sorted({row["heads_left"] for row in rows}))
        axes.set_title(f"{what} in place of the others", fontsize=10)
    panels[0].set_ylabel("accuracy")
    panels[1].legend(title="layer")


def draw_removed(rows: Rows, figure: Figure) -> None:
    """Layers down, heads across: what is left, by importance where it is known."""
    kept = [
        row | {"kept": math.nan if row["removed"] else next((row[name] for name in CHOSEN_BY if name in row), 1.0)}
        for row in rows
    ]
    draw_importance(kept, figure)


def draw_groups(rows: Rows, figure: Figure) -> None:
    """Layers down, heads across, one colour for each group."""
    groups = [(row["layer"], row["group"], int(head)) for row in rows for head in row["heads"].split()]
    layers, heads = 1 + max(layer for layer, *_ in groups), 1 + max(head for *_, head in groups)
    values = [[math.nan] * heads for _ in range(layers)]
    for layer, group, head in groups:
        values[layer][head] = group
    axes = figure.subplots()
    axes.imshow(values, cmap="tab20", interpolation="nearest", vmin=0, vmax=19)
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
