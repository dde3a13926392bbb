"""profile: what a model costs."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitmha.attention import Backend
from vitmha.cli.arguments import CommandParser, parse_device, positive_int
from vitmha.errors import UserError
from vitmha.models.config import SIZES
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.models.profiling import LayerCost, Measurement, at_image_size, layer_costs, measure, total_cost
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.load import load_model


def main(args: Sequence[str]) -> None:
    """Counts and measures, as tables or as JSON."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler would write notes of its own to stderr
    given = _profile_arguments(args)
    device = parse_device(given.device)
    model = _profiled(given.model, _size(given, "image_size"), _size(given, "patch_size")).to(device).eval()
    costs, layout = layer_costs(model, given.batch_size), model.config.layout
    height, width = layout.image_size
    if given.format == "table":
        size = f"{height} x {width} pixels, {layout.num_tokens} tokens, batch of {given.batch_size}"
        Console().print(_cost_table(f"{given.model}: {size}", costs))
    images = torch.zeros(given.batch_size, model.config.in_channels, height, width, device=device)
    measured = [measure(model, images, backend) for backend in _compared(model, costs)]
    if given.format == "table":
        Console().print(_time_table(images, measured))
        return
    facts = {"model": given.model, "image_size": [height, width], "num_tokens": layout.num_tokens}
    facts |= {"batch_size": given.batch_size, "device": device.type, "measured": [asdict(run) for run in measured]}
    facts |= {"layers": [_numbers(cost) for cost in costs], "total": _numbers(total_cost(costs))}
    print(json.dumps(facts, indent=2))


def _profile_arguments(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="vitmha profile", description="What a model costs, layer by layer and in a forward pass."
    )
    parser.add_argument("model", metavar="MODEL", help=f"a model folder, a .ckpt, or a size: {', '.join(SIZES)}")
    pixels: dict[str, Any] = {"type": count, "nargs": "+", "metavar": ("HEIGHT", "WIDTH")}
    parser.add_argument("--image-size", **pixels, help="pixels of a picture; one number for a square")
    parser.add_argument("--patch-size", **pixels, help="pixels of a patch; only with the name of a size")
    parser.add_argument(
        "--batch-size", type=positive_int, default=1, metavar="N", help="pictures in the batch; default 1"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="for people or for programs")
    return parser.parse_args(args)


def _size(given: argparse.Namespace, name: str) -> tuple[int, int] | None:
    """(height, width), where given."""
    pixels = getattr(given, name)
    if pixels is not None and len(pixels) > 2:
        raise UserError(f"--{name.replace('_', '-')} takes height and width, or one number for both; got {pixels}.")
    return pixels and (pixels[0], pixels[-1])


def _profiled(
    source: str, image_size: tuple[int, int] | None, patch_size: tuple[int, int] | None
) -> VisionTransformer | EncoderDecoder:
    if source in SIZES:
        sizes: dict[str, Any] = {"image_size": image_size, "patch_size": patch_size}
        return create_model(source, **{name: size for name, size in sizes.items() if size is not None})
    if patch_size is not None:
        raise UserError(f"--patch-size goes with the name of a size ({', '.join(SIZES)}); {source} has its own.")
    try:
        model = load_model(source)
    except ValueError as error:
        raise UserError(f"{error} The sizes that need no weights are {', '.join(SIZES)}.") from None
    return model if image_size is None else at_image_size(model, image_size)


def _compared(model: VisionTransformer | EncoderDecoder, costs: Sequence[LayerCost]) -> list[Backend]:
    """The model's own kernel, and the one that stores the scores, unless a layer has more than 1 GiB of them."""
    has_room = max(cost.score_bytes for cost in costs) <= 2**30
    return list(dict.fromkeys([model.config.backend, "explicit"] if has_room else [model.config.backend]))


def _numbers(cost: LayerCost) -> dict[str, Any]:
    return {**asdict(cost), "macs": cost.macs}


def _cost_table(title: str, costs: Sequence[LayerCost]) -> Table:
    caption = "Columns 3 to 7 count multiply-adds. A fused kernel stores no scores."
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("layer", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for column in ("q k v out", "scores", "MLP", "other", "all", "scores stored", "k/v cache"):
        table.add_column(column, justify="right")
    for cost in (*costs, total_cost(costs)):
        arithmetic = (cost.projections, cost.scores, cost.mlp, cost.other, cost.macs)
        memory = (_short(cost.score_bytes, "B"), _short(cost.cache_bytes, "B"))
        table.add_row(cost.name, f"{cost.parameters:,}", *map(_short, arithmetic), *memory)
    table.rows[-2].end_section = True
    return table


def _time_table(images: Tensor, measured: Sequence[Measurement]) -> Table:
    on_cpu = images.device.type == "cpu"
    device = f"CPU, threads: {torch.get_num_threads()}" if on_cpu else torch.cuda.get_device_name(images.device)
    caption = "Median time; memory beside parameters and pictures."
    table = Table(title=f"A forward pass in float32 on {device}", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("attention kernel")
    for column in ("time", "pictures/s", "peak memory"):
        table.add_column(column, justify="right")
    for run in measured:
        pace = _short(len(images) / run.seconds)
        table.add_row(run.backend, f"{1000 * run.seconds:,.2f} ms", pace, _short(run.peak_bytes, "B"))
    return table


def _short(number: int | float, unit: str = "") -> str:
    """Three digits: 22050664 is 22.1M."""
    prefix = ""
    for larger in "kMGT":
        if number < 999.5:
            break
        number, prefix = number / 1000, larger
    return f"{number:.3g}{prefix}{unit}"
