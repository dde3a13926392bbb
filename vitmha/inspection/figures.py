"""Pictures of heads: the maps of all layers and heads beside the picture they look at, and tables of numbers."""

import json
import math
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

if TYPE_CHECKING:  # matplotlib takes half a second to import: only those who draw wait for it
    from matplotlib.figure import Figure

CELL = 0.72  # inches of one map in the composite


def draw_maps(
    image: Float[Tensor, "channels height width"],
    maps: Float[Tensor, "layers heads grid_height grid_width"],
    title: str,
    highest: float | None = None,
    diverging: bool = False,
) -> "Figure":
    """One composite picture: rows are layers, columns heads, the input beside them, on one colour scale.

    Args:
        image: The picture looked at, values in [0, 1], one channel or three.
        maps: Attention on the patch grid of every layer and head.
        title: Stands above.
        highest: Where the scale ends; by default the 99.5th percentile of all values, so that one strong patch does not
            darken the rest.
        diverging: Whether the maps are differences, to be drawn from blue (less) over white to red.

    Returns:
        A figure, not yet saved.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layers, heads = maps.shape[:2]
    figure = Figure(figsize=(2.6 + CELL * heads + 1.1, 0.9 + max(CELL * layers, 2.2)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2.2, CELL * heads + 0.6])
    colours = None if len(image) > 1 else "gray"
    shown = image.cpu().clamp(0, 1).numpy()
    left.imshow(shown.transpose(1, 2, 0) if len(image) > 1 else shown[0], cmap=colours, vmin=0, vmax=1)
    left.set_title("input", fontsize=9)
    left.set_axis_off()

    top = highest or percentile(maps.abs())
    painted = right.imshow(
        _tiled(maps.cpu()).numpy(),
        cmap=mpl.colormaps["RdBu_r" if diverging else "magma"].with_extremes(bad="0.8" if diverging else "white"),
        vmin=-top if diverging else 0,
        vmax=top,
        interpolation="nearest",
    )
    _label_layers_and_heads(right, layers, heads, maps.shape[2], maps.shape[3], _gap(maps))
    extend, label = ("both", "difference of attention") if diverging else ("max", "attention per patch")
    figure.colorbar(painted, ax=right, extend=extend, label=label, fraction=0.05, pad=0.02)
    figure.suptitle(title, fontsize=10, parse_math=False)  # a file's name may hold "$"
    return figure


def to_layer_head_grid(
    rows: Float[Tensor, "all_heads tokens"], model: VisionTransformer
) -> Float[Tensor, "layers heads grid_height grid_width"]:
    """Rows of all heads, layer by layer, on the patch grid; NaN where pruning has left a layer fewer heads."""
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
    further: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes where the heads look in one picture, as a drawing and as numbers for other programs.

    Args:
        file: Without its suffix: .png, .svg and .npz are written. The .npz holds `rows`, one for each head, with
            `layers` and `heads`, their numbers, and, as JSON, `layout` and `render`, all that the drawing hangs on.
        model: Says which head is in which layer and how the picture is to be shown.
        image: Normalised.
        rows: Attention rows of all heads, layer by layer, such as `HeadMetrics.readout_attention`.
        title: Stands above.
        diverging: Whether the rows are differences.
        further: More maps to go into the .npz, by name.
    """
    grids, shown = to_layer_head_grid(rows, model), denormalized(model.preprocessing, image)
    figure = draw_maps(shown, grids, title, diverging=diverging)
    for suffix in (".png", ".svg"):
        figure.savefig(f"{file}{suffix}", dpi=110)
    places = [(layer, head) for layer, count in enumerate(get_attention_spec(model).num_heads) for head in range(count)]
    layers, heads = np.array(places).T
    top = percentile(grids.abs())
    render = {"colours": "RdBu_r", "lowest": -top} if diverging else {"colours": "magma", "lowest": 0}
    render |= {"highest": top, "title": title}
    arrays: dict[str, Any] = {name: values.cpu().numpy() for name, values in (further or {}).items()}
    arrays |= {"rows": rows.numpy(), "layers": layers, "heads": heads}
    np.savez_compressed(f"{file}.npz", **arrays, layout=json.dumps(asdict(model.layout)), render=json.dumps(render))


def denormalized(
    preprocessing: Preprocessing | None, image: Float[Tensor, "channels height width"]
) -> Float[Tensor, "channels height width"]:
    """The picture as it was before it was normalised, values in [0, 1]."""
    return image.clamp(0, 1) if preprocessing is None else preprocessing.denormalize(image[None])[0]


def percentile(maps: Tensor) -> float:
    """Where the colours end: the 99.5th percentile of all values."""
    return float(np.quantile(maps[~maps.isnan()].double().numpy(), 0.995))  # torch's takes no more than 2^24 values


def draw_head_numbers(numbers: Mapping[str, Float[Tensor, "layers heads"]], title: str) -> "Figure":
    """One heat map, layers by heads, for each kind of number, each value written into its cell, four in a row.

    Args:
        numbers: The values by the name that stands above their heat map; NaN where there is no such head.
        title: Stands above all.

    Returns:
        A figure, not yet saved.
    """
    from matplotlib.figure import Figure

    layers, heads = next(iter(numbers.values())).shape
    columns = min(len(numbers), 4)
    rows = -(-len(numbers) // columns)
    # All in inches, so that nothing has to be measured, which would take longer than drawing it.
    wide, high, beside, above, edge = max(0.62 * heads, 1.8), 0.42 * layers, 0.75, 0.65, 0.15
    width, height = columns * (wide + beside) + edge, rows * (high + above) + 0.35 + edge
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=beside / width,
        right=1 - edge / width,
        bottom=edge / height,
        top=1 - (above + 0.35) / height,
        wspace=beside / wide,
        hspace=above / high,
    )
    for axes in (places := list(figure.subplots(rows, columns, squeeze=False).flat))[len(numbers) :]:
        axes.remove()
    for axes, (name, values) in zip(places, numbers.items(), strict=False):
        axes.imshow(values.cpu().numpy(), cmap="cividis", aspect="auto")
        middle = float(values.nan_to_num(torch.inf).min() + values.nan_to_num(-torch.inf).max()) / 2
        for layer, row in enumerate(values.tolist()):
            for head, value in enumerate(row):
                if value != value:  # pruned
                    continue
                colour = "white" if value <= middle else "black"
                axes.text(head, layer, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)
        _label_layers_and_heads(axes, layers, heads, 1, 1, 0)
        axes.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=10, y=1 - 0.1 / height, va="top")
    return figure


def draw_divergence(divergence: Float[Tensor, "all_heads all_heads"], heads: Sequence[int]) -> "Figure":
    """How unlike the maps of all heads are, layer by layer: dark where two heads look alike.

    Args:
        divergence: As `head_divergence` gives it.
        heads: How many each layer has.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    painted = axes.imshow(divergence.cpu().numpy(), cmap="magma", vmin=0, vmax=math.log(2), interpolation="nearest")
    ends = list(accumulate(heads))
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="white", linewidth=0.5)
        axes.axvline(end - 0.5, color="white", linewidth=0.5)
    middles = [end - (count + 1) / 2 for end, count in zip(ends, heads, strict=True)]
    names = [f"layer {layer}" if count else "" for layer, count in enumerate(heads)]
    axes.set_xticks(middles, names, rotation=90, fontsize=8)
    axes.set_yticks(middles, names, fontsize=8)
    axes.set_title("how unlike the heads' maps are", fontsize=10)
    figure.colorbar(painted, ax=axes, label="Jensen-Shannon divergence [nats]")
    return figure


def _gap(maps: Tensor) -> int:
    """Blank rows and columns between maps, in patches."""
    return max(1, round(maps.shape[-1] / 12))


def _tiled(maps: Float[Tensor, "layers heads grid_height grid_width"]) -> Float[Tensor, "height width"]:
    """All maps in one, NaN between them."""
    gap = _gap(maps)
    padded = torch.nn.functional.pad(maps, (0, gap, 0, gap), value=torch.nan)
    return padded.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)[:-gap, :-gap]


def _label_layers_and_heads(axes: Any, layers: int, heads: int, height: int, width: int, gap: int) -> None:
    """Ticks at the middle of each map of the given size."""
    rows = [(height - 1) / 2 + (height + gap) * i for i in range(layers)]
    columns = [(width - 1) / 2 + (width + gap) * i for i in range(heads)]
    axes.set_yticks(rows, [f"layer {i}" for i in range(layers)])
    axes.set_xticks(columns, [f"head {i}" for i in range(heads)])
    axes.tick_params(length=0, labelsize=8, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
