"""profile: parameters, MACs, time and memory of a model."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from vitmha.cli.arguments import CommandParser, add_batch_size, add_device, add_model, add_size, parse_device

if TYPE_CHECKING:  # --help and a wrong call are answered without the seconds of importing torch
    from torch import Tensor

    from vitmha.attention import Backend
    from vitmha.models.encoder_decoder import Model
    from vitmha.models.profiling import LayerCost, Measurement

PIPE_WIDTH = 10_000  # columns of a table that is not printed to a terminal: no limit in practice


def main(args: Sequence[str]) -> None:
    """Counts and measures, and prints tables or JSON."""
    options = _parse(args)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise PyTorch's profiler writes to standard error

    import torch

    from vitmha.models.profiling import layer_costs, measure, total_cost

    device = parse_device(options.device)
    model = _load(options.model, options.image_size, options.patch_size).to(device).eval()
    costs, layout = layer_costs(model, options.batch_size), model.config.layout
    height, width = layout.image_size
    console = Console()
    console = console if console.is_terminal else Console(width=PIPE_WIDTH)
    if options.format == "table":
        size = f"{height} x {width} pixels, {layout.num_tokens} tokens, batch of {options.batch_size}"
        # Not as the table's title, which rich would wrap within a path and whose brackets it would read as markup.
        console.print(f"{options.model}: {size}", soft_wrap=True, markup=False, highlight=False)
        console.print(_cost_table(costs))
    images = torch.zeros(options.batch_size, model.config.in_channels, height, width, device=device)
    measured = [measure(model, images, backend) for backend in _backends(model, costs)]
    if options.format == "table":
        console.print(_time_table(images, measured))
        return
    facts = {"model": options.model, "image_size": [height, width], "num_tokens": layout.num_tokens}
    facts |= {"batch_size": options.batch_size, "device": device.type, "measured": [asdict(run) for run in measured]}
    facts |= {"layers": [_to_dict(cost) for cost in costs], "total": _to_dict(total_cost(costs))}
    print(json.dumps(facts, indent=2))


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="vitmha profile", description="Parameters, MACs, time and memory of a model.")
    add_model(parser, note=", or a size such as vit_small")
    add_size(parser, "--image-size", "image size in pixels; one number for a square")
    add_size(parser, "--patch-size", "patch size in pixels; only if the model is a size")
    add_batch_size(parser, 1)
    add_device(parser)
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="human- or machine-readable; default table"
    )
    return parser.parse_args(args)


def _load(source: str, image_size: tuple[int, int] | None, patch_size: tuple[int, int] | None) -> "Model":
    from vitmha.errors import UserError
    from vitmha.models.config import SIZES
    from vitmha.models.profiling import at_image_size
    from vitmha.models.vit import create_model
    from vitmha.weights.load import load_model

    if source in SIZES:
        sizes: dict[str, Any] = {"image_size": image_size, "patch_size": patch_size}
        return create_model(source, **{name: size for name, size in sizes.items() if size is not None})
    if patch_size is not None:
        raise UserError(f"patch_size needs a size as the model ({', '.join(SIZES)}); {source} has its own.")
    try:
        model = load_model(source)
    except UserError as error:
        raise UserError(f"{error} profile also takes a size: {', '.join(SIZES)}.") from None
    return model if image_size is None else at_image_size(model, image_size)


def _backends(model: "Model", costs: "Sequence[LayerCost]") -> "list[Backend]":
    """The model's own kernel and, unless a layer has more than 1 GiB of attention scores, the one that stores them."""
    fits = max(cost.score_bytes for cost in costs) <= 2**30
    return list(dict.fromkeys([model.config.backend, "explicit"] if fits else [model.config.backend]))


def _to_dict(cost: "LayerCost") -> dict[str, Any]:
    return {**asdict(cost), "macs": cost.macs}


def _cost_table(costs: "Sequence[LayerCost]") -> Table:
    from vitmha.models.profiling import total_cost

    caption = "Columns 3 to 7 count MACs. A fused kernel does not store scores."
    table = Table(caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("layer", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for column in ("q k v out", "scores", "MLP", "other", "all", "scores stored", "k/v cache"):
        table.add_column(column, justify="right")
    for cost in (*costs, total_cost(costs)):
        macs = (cost.projections, cost.scores, cost.mlp, cost.other, cost.macs)
        memory = (_short(cost.score_bytes, "B"), _short(cost.cache_bytes, "B"))
        table.add_row(cost.name, f"{cost.parameters:,}", *map(_short, macs), *memory)
    table.rows[-2].end_section = True
    return table


def _time_table(images: "Tensor", measured: "Sequence[Measurement]") -> Table:
    import torch

    is_cpu = images.device.type == "cpu"
    device = f"CPU, threads: {torch.get_num_threads()}" if is_cpu else torch.cuda.get_device_name(images.device)
    caption = "Median time; memory in addition to parameters and images."
    table = Table(title=f"A forward pass in float32 on {device}", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("attention kernel")
    for column in ("time", "images/s", "peak memory"):
        table.add_column(column, justify="right")
    for run in measured:
        speed = _short(len(images) / run.seconds)
        table.add_row(run.backend, f"{1000 * run.seconds:,.2f} ms", speed, _short(run.peak_bytes, "B"))
    return table


def _short(number: int | float, unit: str = "") -> str:
    """Three significant digits with a prefix: 22050664 is 22.1M."""
    prefix = ""
    for larger in "kMGT":
        if number < 999.5:
            break
        number, prefix = number / 1000, larger
    return f"{number:.3g}{prefix}{unit}"
