"""Figures of heads: the maps of all layers and heads next to the image, and heat maps of metrics."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.images import Preprocessing
from vitmha.inspection.adapters import get_attention_spec
from vitmha.models.vit import VisionTransformer
from vitmha.text import printable

if TYPE_CHECKING:  # importing matplotlib takes half a second: only functions that draw import it
    from matplotlib.figure import Figure

CELL = 0.72  # inches per map


def draw_maps(
    image: Float[Tensor, "channels height width"],
    maps: Float[Tensor, "layers heads grid_height grid_width"],
    title: str,
    highest: float | None = None,
    diverging: bool = False,
) -> "Figure":
    """Draws all maps, one row per layer and one column per head, next to the image, on one color scale.

    Args:
        image: Values in [0, 1], one channel or three.
        maps: Attention on the patch grid of every layer and head.
        title: Title of the figure.
        highest: Upper end of the color scale; default: the 99.5th percentile of all values, so that one strong patch
            does not darken the rest.
        diverging: Whether the maps are differences, drawn from blue (negative) to red (positive).

    Returns:
        The figure, not saved.

    Example:
        >>> figure = draw_maps(torch.rand(3, 32, 48), torch.rand(2, 3, 4, 6), "attention of the class token")
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layers, heads = maps.shape[:2]
    figure = Figure(figsize=(2.6 + CELL * heads + 1.1, 0.9 + max(CELL * layers, 2.2)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2.2, CELL * heads + 0.6])
    cmap = None if len(image) > 1 else "gray"
    pixels = image.cpu().clamp(0, 1).numpy()
    left.imshow(pixels.transpose(1, 2, 0) if len(image) > 1 else pixels[0], cmap=cmap, vmin=0, vmax=1)
    left.set_title("input", fontsize=9)
    left.set_axis_off()

    largest = float(maps.nan_to_num().abs().max())
    top = highest or percentile(maps.abs()) or largest or 1.0
    drawn = right.imshow(
        _tiled(maps.cpu()).numpy(),
        cmap=mpl.colormaps["RdBu_r" if diverging else "magma"].with_extremes(bad="0.8" if diverging else "white"),
        vmin=-top if diverging else 0,
        vmax=top,
        interpolation="nearest",
    )
    _label_layers_and_heads(right, layers, heads, maps.shape[2], maps.shape[3], _gap(maps))
    extend, label = ("both", "difference of attention") if diverging else ("max", "attention per patch")
    label += "" if largest else " (zero everywhere)"
    figure.colorbar(drawn, ax=right, extend=extend, label=label, fraction=0.05, pad=0.02)
    figure.suptitle(printable(title), fontsize=10, parse_math=False)  # a file name may contain "$"
    return figure


def to_layer_head_grid(
    rows: Float[Tensor, "all_heads tokens"], model: VisionTransformer
) -> Float[Tensor, "layers heads grid_height grid_width"]:
    """Arranges the rows of all heads as (layers, heads) maps on the patch grid.

    The maps are NaN where pruning has left a layer fewer heads.
    """
    counts = get_attention_spec(model).num_heads
    grids = torch.full((len(counts), max(counts), *model.layout.grid_size), torch.nan)
    for layer, part in enumerate(rows.split(list(counts))):
        grids[layer, : len(part)] = model.layout.to_grid(part)
    return grids


def write_maps(
    file: str | Path,
    model: VisionTransformer,
    image: Float[Tensor, "channels height width"],
    rows: Float[Tensor, "all_heads tokens"],
    title: str,
    *,
    diverging: bool = False,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the attention of all heads to one image, as figures and as arrays.

    Args:
        file: Path without suffix: .png, .svg and .npz are written. The .npz holds `rows`, one per head, their
            `layers` and `heads`, and, as JSON, `layout` and `render`, which are all that the figure depends on.
        model: The model that has these heads, with its preprocessing.
        image: Normalized.
        rows: Attention rows of all heads, layer by layer, such as `HeadMetrics.readout_attention`.
        title: Title of the figure.
        diverging: Whether the rows are differences.
        extra: More maps to store in the .npz, by name.
    """
    grids = to_layer_head_grid(rows, model)
    figure = draw_maps(denormalized(model.preprocessing, image), grids, title, diverging=diverging)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a title in a script that the font lacks
        for suffix in (".png", ".svg"):
            figure.savefig(f"{file}{suffix}", dpi=110)
    counts = get_attention_spec(model).num_heads
    layers, heads = np.array([(layer, head) for layer, count in enumerate(counts) for head in range(count)]).T
    top = percentile(grids.abs())
    render = {"cmap": "RdBu_r", "lowest": -top} if diverging else {"cmap": "magma", "lowest": 0}
    render |= {"highest": top, "title": title}
    arrays: dict[str, Any] = {name: values.cpu().numpy() for name, values in (extra or {}).items()}
    arrays |= {"rows": rows.numpy(), "layers": layers, "heads": heads}
    np.savez_compressed(f"{file}.npz", **arrays, layout=json.dumps(asdict(model.layout)), render=json.dumps(render))


def denormalized(
    preprocessing: Preprocessing | None, image: Float[Tensor, "channels height width"]
) -> Float[Tensor, "channels height width"]:
    """Undoes the normalization of an image; returns values in [0, 1]."""
    return image.clamp(0, 1) if preprocessing is None else preprocessing.denormalize(image[None])[0]


def percentile(maps: Tensor) -> float:
    """Returns the 99.5th percentile of all values, the upper end of the color scale."""
    return float(np.quantile(maps[~maps.isnan()].double().numpy(), 0.995))  # torch.quantile takes at most 2^24 values


def draw_head_metrics(metrics: Mapping[str, Float[Tensor, "layers heads"]], title: str) -> "Figure":
    """Draws one heat map (layers by heads) per metric, two per row, with each value written into its cell.

    Args:
        metrics: Values by name, such as `HeadMetrics.for_plot`; NaN where there is no such head.
        title: Title of the figure.

    Returns:
        The figure, not saved.

    Example:
        >>> figure = draw_head_metrics({"entropy [nats]": torch.rand(12, 3)}, "all heads")
    """
    from matplotlib.figure import Figure

    layers, heads = next(iter(metrics.values())).shape
    columns = min(len(metrics), 2)  # more would be too small to read on a page
    rows = -(-len(metrics) // columns)
    # All in inches, so that nothing needs to be measured, which would take longer than drawing it.
    panel_width, panel_height, left, top, edge = max(0.62 * heads, 1.8), 0.42 * layers, 0.75, 0.65, 0.15
    width, height = columns * (panel_width + left) + edge, rows * (panel_height + top) + 0.35 + edge
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=left / width,
        right=1 - edge / width,
        bottom=edge / height,
        top=1 - (top + 0.35) / height,
        wspace=left / panel_width,
        hspace=top / panel_height,
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(metrics) :]:
        axes.remove()
    for axes, (name, values) in zip(panels, metrics.items(), strict=False):
        axes.imshow(values.cpu().numpy(), cmap="cividis", aspect="auto")
        middle = float(values.nan_to_num(torch.inf).min() + values.nan_to_num(-torch.inf).max()) / 2
        for layer, row in enumerate(values.tolist()):
            for head, value in enumerate(row):
                if value != value:  # pruned
                    continue
                color = "white" if value <= middle else "black"
                axes.text(head, layer, f"{value:.3g}", ha="center", va="center", fontsize=7, color=color)
        _label_layers_and_heads(axes, layers, heads, 1, 1, 0)
        axes.set_title(name, fontsize=9)
    figure.suptitle(printable(title), fontsize=10, y=1 - 0.1 / height, va="top", parse_math=False)
    return figure


def draw_divergence(divergence: Float[Tensor, "all_heads all_heads"], heads: Sequence[int]) -> "Figure":
    """Draws the divergence of all pairs of heads, layer by layer: dark where two heads have similar maps.

    Args:
        divergence: As `head_divergence` returns it.
        heads: Number of heads of each layer.

    Returns:
        The figure, not saved.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(divergence.cpu().numpy(), cmap="magma", vmin=0, vmax=math.log(2), interpolation="nearest")
    ends = list(accumulate(heads))
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="white", linewidth=0.5)
        axes.axvline(end - 0.5, color="white", linewidth=0.5)
    middles = [end - (count + 1) / 2 for end, count in zip(ends, heads, strict=True)]
    labels = [f"layer {layer}" if count else "" for layer, count in enumerate(heads)]
    axes.set_xticks(middles, labels, rotation=90, fontsize=8)
    axes.set_yticks(middles, labels, fontsize=8)
    axes.set_title("divergence of the heads' maps", fontsize=10)
    figure.colorbar(drawn, ax=axes, label="Jensen-Shannon divergence [nats]")
    return figure


def _gap(maps: Tensor) -> int:
    """Returns the width of the gap between maps, in patches."""
    return max(1, round(maps.shape[-1] / 12))


def _tiled(maps: Float[Tensor, "layers heads grid_height grid_width"]) -> Float[Tensor, "height width"]:
    """Joins all maps into one array, with NaN between them."""
    gap = _gap(maps)
    padded = torch.nn.functional.pad(maps, (0, gap, 0, gap), value=torch.nan)
    return padded.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)[:-gap, :-gap]


def _label_layers_and_heads(axes: Any, layers: int, heads: int, height: int, width: int, gap: int) -> None:
    """Puts the ticks at the middle of each map of height x width patches."""
    rows = [(height - 1) / 2 + (height + gap) * i for i in range(layers)]
    columns = [(width - 1) / 2 + (width + gap) * i for i in range(heads)]
    axes.set_yticks(rows, [f"layer {i}" for i in range(layers)])
    axes.set_xticks(columns, [f"head {i}" for i in range(heads)])
    axes.tick_params(length=0, labelsize=8, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
