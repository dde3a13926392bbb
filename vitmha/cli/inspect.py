"""inspect: writes an HTML page, metrics and figures of every attention head of a model."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitmha.atomic import atomic_files
from vitmha.cli.arguments import CommandParser, add_data, add_device, add_model, parse_device, writable_dir
from vitmha.data.class_dirs import find_splits
from vitmha.data.labeled import read_labeled
from vitmha.errors import UserError
from vitmha.images import ImageReadError
from vitmha.images.find import ImageFinder, display_name, load_image, subsample
from vitmha.inspection import HeadComparison, HeadMetrics
from vitmha.inspection.adapters import get_attention_spec
from vitmha.inspection.compare import renormalized_for
from vitmha.inspection.epochs import check_animation, read_epochs, write_animation
from vitmha.inspection.figures import draw_divergence, write_maps
from vitmha.inspection.page.page import PageImage, PageResult, check_page, write_page
from vitmha.models.encoder_decoder import get_preprocessing
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model

EXAMPLES = """
  vitmha inspect cat.jpg dog.jpg --model timm:vit_base_patch16_224 --output heads
  vitmha inspect DIR --model runs/x/version_0/model --compare-to runs/x/version_1/model --output heads
  vitmha inspect runs/x/version_0 --output heads      the images that the run logs, by epoch, and an animation
"""


def main(args: Sequence[str]) -> None:
    """Writes the page, the metrics and the figures."""
    options = _parse(args)
    device, run, animation = parse_device(options.device), _run_of(options), options.animation or "gif"
    if options.model is None and run is None:
        raise UserError("--model is required: a model directory, a .ckpt file, timm:NAME, hf:REPO or a bundled model.")
    if options.animation and run is None:
        raise UserError("--animation shows the epochs of a run: pass a run directory instead of images, or remove it.")
    check_animation(animation)
    source = options.model if run is None else options.model or _model_of(run)
    model = _load("--model", source, device)
    if options.data or run is None:
        get_preprocessing(model)
    other = None if options.compare_to is None else _load("--compare-to", options.compare_to, device)
    compare_to = None if other is None else (options.compare_to, other)
    if run is not None:
        logged, epochs = read_epochs(run / "attention", model)
        images, num_failed = [PageImage(name=f"image {i}", image=image) for i, image in enumerate(logged)], 0
    else:
        (images, num_failed), epochs = _read_images(options.paths, model), []
    if not images:
        raise UserError("No images found: pass image files, directories of images, or a run directory.")
    max_epochs = check_page(model, len(images), compare_to)
    metrics = None
    if options.data:
        metrics, more_failed = _metrics_over(_read_data(options.data, model, options.data_root), model, device)
        num_failed += more_failed
    if model.config.num_classes:
        passes = f"{_num_passes(model):.0f} forward passes for each of {len(images)} images"
        print(f"Ablating every head takes as much time as {passes}.", file=sys.stderr)
    page_epochs = subsample(epochs, max_epochs) if max_epochs else []
    if len(page_epochs) < len(epochs):
        fit = f"{len(page_epochs)} of the {len(epochs)} epochs fit on the page"
        print(f"{fit}; the animation has all of them.", file=sys.stderr)
    with atomic_files(options.output) as directory:
        page = directory / "page.html"
        result = write_page(
            page, model, images, title=source, metrics=metrics, compare_to=compare_to, epochs=page_epochs
        )
        _write_files(directory, model, images, result, compare_to)
        if epochs:
            write_animation(directory / f"epochs.{animation}", model, images[0].image, epochs)
        _remove_earlier_output(Path(options.output))
    _print_report(Path(options.output), result.metrics, len(images))
    sys.exit(1 if num_failed else 0)


def _write_files(
    directory: Path,
    model: VisionTransformer,
    images: Sequence[PageImage],
    result: PageResult,
    compare_to: tuple[str, VisionTransformer] | None,
) -> None:
    """Writes the metrics and the figures."""
    if result.faithfulness is not None:
        (directory / "faithfulness.json").write_text(json.dumps(result.faithfulness.to_record(), indent=1) + "\n")
    metrics, rows, divergence = result.metrics, result.rows, result.divergence
    metrics.write(directory)
    np.savez_compressed(directory / "divergence.npz", divergence=divergence.cpu().numpy(), heads=metrics.heads)
    draw_divergence(divergence, metrics.heads).savefig(directory / "divergence.png", dpi=110)
    for i, image in enumerate(images):
        maps = {name.replace("-", "_"): values[0] for name, values in result.maps[i].items()}
        write_maps(directory / f"image_{i}", model, image.image, rows[i], image.name, extra=maps)
    if compare_to is not None and result.comparison is not None:
        _write_differences(directory, model, compare_to, images, rows, result.comparison)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="vitmha inspect",
        description="Writes an HTML page, metrics and figures of every attention head of a model.",
        epilog="examples:" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="+", metavar="IMAGES", help="image files, directories of images, or one run directory"
    )
    add_model(parser, required=False, note="; default for a run: its own model")
    parser.add_argument(
        "--output", type=writable_dir, required=True, metavar="DIR", help="output directory; earlier output is replaced"
    )
    parser.add_argument("--compare-to", metavar="MODEL", help="a second model with the same tokens")
    add_data(parser, required=False, note="; computes the head metrics over these, with class selectivity")
    parser.add_argument("--animation", choices=("gif", "mp4"), help="format of a run's animation; default gif")
    add_device(parser)
    return parser.parse_intermixed_args(args)


def _run_of(options: argparse.Namespace) -> Path | None:
    """Returns the run directory if one was passed; with --model only one that has logged attention counts."""
    path, marks = Path(options.paths[0]), ["attention"]
    if not options.model:
        marks += ["checkpoints", "metrics.csv"]
    return path if len(options.paths) == 1 and any((path / mark).exists() for mark in marks) else None


def _model_of(run: Path) -> str:
    """Returns the model directory of a run, or its last checkpoint if it has not finished."""
    last = run / "checkpoints" / "last.ckpt"
    return str(last if last.exists() and not (run / "model").exists() else run / "model")


def _load(flag: str, source: str, device: torch.device) -> VisionTransformer:
    model = load_model(source)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{flag} {source} is an encoder-decoder: inspect needs an image classification model.")
    return model.to(device)


def _read_images(paths: list[str], model: VisionTransformer) -> tuple[list[PageImage], int]:
    """Reads the images; returns those that can be read and the number of failures, which are printed."""
    images, num_failed, preprocess = [], 0, get_preprocessing(model)
    for item in ImageFinder(recursive=False).below(paths, ()):
        try:
            images.append(PageImage(name=Path(display_name(item)).name, image=preprocess(load_image(item))))
        except ImageReadError as error:
            print(error, file=sys.stderr)
            num_failed += 1
    return images, num_failed


def _read_data(source: str, model: VisionTransformer, data_root: str) -> list[tuple[Any, int | None]]:
    """Returns all labeled images of a SOURCE; the classes of a directory need not be those of the model."""
    root, class_names = Path(source), model.class_names or ()
    if root.is_dir():  # class selectivity depends only on which images have the same class: any names will do
        class_dirs = [path for split in (*find_splits(root).values(), root) for path in split.glob("*/")]
        class_names = tuple(sorted({path.name for path in class_dirs}))
    labeled = read_labeled(source, class_names, data_root=data_root)
    return [*labeled.train, *labeled.val]


def _metrics_over(
    labeled: Sequence[tuple[Any, int | None]], model: VisionTransformer, device: torch.device
) -> tuple[HeadMetrics, int]:
    """Returns the metrics over all images, one in memory at a time, and the number of failures, which are printed."""
    metrics, num_failed, preprocess = HeadMetrics(model), 0, get_preprocessing(model)
    for item, label in labeled:
        try:
            metrics.update(preprocess(load_image(item))[None].to(device), torch.tensor([label]))
        except ImageReadError as error:
            print(error, file=sys.stderr)
            num_failed += 1
    if not metrics.count:
        raise UserError("--data: none of the images can be read.")
    return metrics, num_failed


def _remove_earlier_output(directory: Path) -> None:
    """Removes earlier output that this call might not overwrite, and nothing else."""
    if (directory / "page.html").exists():
        names = ["faithfulness.json", "comparison.json", "epochs.gif", "epochs.mp4"]
        for file in directory.glob("image_*.npz"):  # an image file without an .npz of its name is not our output
            if re.fullmatch(r"image_\d+(_difference)?", file.stem):
                names += [f"{file.stem}{suffix}" for suffix in (".png", ".svg", ".npz")]
        for name in names:
            (directory / name).unlink(missing_ok=True)


def _write_differences(
    directory: Path,
    model: VisionTransformer,
    compare_to: tuple[str, VisionTransformer],
    images: Sequence[PageImage],
    rows: Sequence[Tensor],
    comparison: HeadComparison,
) -> None:
    """Writes the attention of each head of the second model minus that of the head it is paired with."""
    name, other = compare_to
    record = {"compare_to": name, "heads": comparison.records(), "layer_cka": comparison.layer_cka}
    (directory / "comparison.json").write_text(json.dumps(record, indent=2) + "\n")
    batch = torch.stack([image.image for image in images]).to(next(model.parameters()).device)
    metrics = HeadMetrics(other)
    metrics.update(renormalized_for(other, model, batch))
    for i, (image, first, second) in enumerate(zip(images, rows, metrics.readout_attention, strict=True)):
        file, title = directory / f"image_{i}_difference", f"{image.name}: {name} minus this model"
        write_maps(file, model, image.image, second[comparison.partner] - first, title, diverging=True)


def _num_passes(model: VisionTransformer) -> float:
    """Returns how many forward passes of one image zero and mean ablation of all heads amount to."""
    counts = get_attention_spec(model).num_heads
    return 2 * sum(count * (len(counts) - layer) / len(counts) for layer, count in enumerate(counts))


def _print_report(directory: Path, metrics: HeadMetrics, num_images: int) -> None:
    """Prints how many heads have which role, and where the output is."""
    table = Table(title="Roles of the heads", box=box.SIMPLE_HEAD)
    table.add_column("role", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    table.add_column("example", overflow="fold")
    roles: dict[str, list[str]] = {}
    for record in metrics.records():
        head = f"layer {record['layer']} head {record['head']} {record['description']}"
        roles.setdefault(record["role"], []).append(head)
    for role, heads in sorted(roles.items(), key=lambda pair: -len(pair[1])):
        table.add_row(role, str(len(heads)), heads[0])
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
    megabytes = (directory / "page.html").stat().st_size / 1e6
    print(f"{directory / 'page.html'} ({megabytes:.1f} MB, {num_images} images): open it in a browser. Also written:")
    measured = "faithfulness.json, " if (directory / "faithfulness.json").exists() else ""
    print(f"heads.json, .csv and .png, {measured}divergence.npz and .png, and .png, .svg and .npz of each image.")
