"""inspect: what every head of a model does, as one page, numbers and pictures."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitmha.cli.arguments import CommandParser, parse_device, writable_dir
from vitmha.errors import UserError
from vitmha.images import ImageReadError
from vitmha.images.find import ImageFinder, display_name, load_image, subsample
from vitmha.inspection import HeadComparison, HeadMetrics, head_divergence
from vitmha.inspection.compare import renormalized_for
from vitmha.inspection.epochs import check_animation, read_epochs, write_animation
from vitmha.inspection.figures import draw_divergence, write_maps
from vitmha.inspection.page.page import PageImage, check_page, write_page
from vitmha.models.encoder_decoder import get_preprocessing
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model

EXAMPLES = """
  vitmha inspect cat.jpg dog.jpg --model timm:vit_base_patch16_224 --output heads
  vitmha inspect FOLDER --model runs/x/version_0/model --against runs/x/version_1/model --output heads
  vitmha inspect runs/x/version_0 --output heads      the pictures of the run, with a slider over its epochs and a film
"""


def main(args: Sequence[str]) -> None:
    """Writes the page, the numbers and the pictures."""
    given = _arguments(args)
    device, run, film = parse_device(given.device), _run_of(given), given.film or "gif"
    if given.model is None and run is None:
        raise UserError("--model says which model: a model folder, a .ckpt, timm:NAME, hf:REPO, ...")
    if given.film and run is None:
        raise UserError("--film is made of the epochs of a run: give the folder of one, or leave it out.")
    check_animation(film)
    source = given.model if run is None else given.model or _model_of(run)
    model = _loaded("--model", source, device)
    if given.numbers_over or run is None:
        get_preprocessing(model)
    against = None if given.against is None else (given.against, _loaded("--against", given.against, device))
    if run is not None:
        images, epochs = read_epochs(run / "attention", model)
        shown, failed = [PageImage(name=f"picture {i}", image=image) for i, image in enumerate(images)], 0
    else:
        (shown, failed), epochs = _pictures(given.paths, model), []
    if not shown:
        raise UserError("There is no picture to look at: give files or folders of pictures, or the folder of a run.")
    room = check_page(model, len(shown), against)
    numbers, rows = HeadMetrics(model), []
    for picture in shown:
        numbers.update(picture.image[None].to(device))
        rows.append(numbers.readout_attention[0])
    if given.numbers_over:
        numbers, more = _numbers_over(given.numbers_over, model, device)
        failed += more
    if model.config.num_classes:
        per_picture = f"{_passes(numbers):.0f} passes for each of {len(shown)}"
        print(f"All heads switched off: as much as {per_picture}.", file=sys.stderr)
    fitting = subsample(epochs, room) if room else []
    if len(fitting) < len(epochs):
        print(f"The page has room for {len(fitting)} of the {len(epochs)} epochs; the film has all.", file=sys.stderr)
    folder = _emptied(given.output)
    page = folder / "page.html"
    found = write_page(page, model, shown, title=source, numbers=numbers, against=against, epochs=fitting)
    if found.faithfulness is not None:
        (folder / "faithfulness.json").write_text(json.dumps(found.faithfulness.record(), indent=1) + "\n")
    numbers.write(folder)
    divergence = head_divergence(model, torch.stack([picture.image for picture in shown]).to(device))
    np.savez_compressed(folder / "divergence.npz", divergence=divergence.cpu().numpy(), heads=numbers.heads)
    draw_divergence(divergence, numbers.heads).savefig(folder / "divergence.png", dpi=110)
    for place, (picture, each) in enumerate(zip(shown, rows, strict=True)):
        maps = {name.replace("-", "_"): values[0] for name, values in found.maps[place].items()}
        write_maps(folder / f"picture_{place}", model, picture.image, each, picture.name, further=maps)
    if against is not None and found.comparison is not None:
        _write_differences(folder, model, against, shown, rows, found.comparison)
    if epochs:
        write_animation(folder / f"training.{film}", model, shown[0].image, epochs)
    _tell(folder, numbers, len(shown))
    sys.exit(1 if failed else 0)


def _arguments(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="vitmha inspect",
        description="What every head of a model does: one page to explore, numbers, pictures.",
        epilog="examples:" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="pictures, folders of pictures, or one run's folder")
    parser.add_argument(
        "--model", metavar="M", help="a model folder, a .ckpt, timm:NAME, hf:REPO, ...; a run has its own"
    )
    parser.add_argument(
        "--output",
        type=writable_dir,
        required=True,
        metavar="DIR",
        help="page.html, numbers and pictures; in the place of what an earlier call has left there",
    )
    parser.add_argument("--against", metavar="B", help="a second model with the same tokens, to see what differs")
    over = "take the numbers over all pictures of FOLDER/CLASS/x.jpg, with the heads' selectivity for the classes"
    parser.add_argument("--numbers-over", metavar="FOLDER", help=over)
    parser.add_argument("--film", choices=("gif", "mp4"), help="of a run's epochs; default gif")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    return parser.parse_intermixed_args(args)


def _run_of(given: argparse.Namespace) -> Path | None:
    """The folder of a run, if that is what is given; beside --model only one that has logged attention is."""
    place, signs = Path(given.paths[0]), ["attention"] if given.model else ["attention", "checkpoints", "metrics.csv"]
    return place if len(given.paths) == 1 and any((place / sign).exists() for sign in signs) else None


def _model_of(run: Path) -> str:
    """The model folder of a run; of one that has not ended the checkpoint."""
    last = run / "checkpoints" / "last.ckpt"
    return str(last if last.exists() and not (run / "model").exists() else run / "model")


def _loaded(flag: str, source: str, device: torch.device) -> VisionTransformer:
    model = load_model(source)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{flag} {source} reads sequences: inspect takes a model of single pictures.")
    return model.to(device)


def _pictures(paths: list[str], model: VisionTransformer) -> tuple[list[PageImage], int]:
    """The pictures that can be read; the others are named on standard error, and counted."""
    shown, failed, prepare = [], 0, get_preprocessing(model)
    for item in ImageFinder(recursive=False).below(paths, ()):
        try:
            picture = prepare(load_image(item))
            shown.append(PageImage(name=Path(display_name(item)).name, image=picture))
        except ImageReadError as error:
            print(error, file=sys.stderr)
            failed += 1
    return shown, failed


def _numbers_over(folder: str, model: VisionTransformer, device: torch.device) -> tuple[HeadMetrics, int]:
    """Over all pictures of a folder, one in memory at a time; where they lie in folders, these are their classes.

    Those that cannot be read are named on standard error, and counted.
    """
    numbers, classes, failed, prepare = HeadMetrics(model), dict[str, int](), 0, get_preprocessing(model)
    for item in ImageFinder(recursive=True).below([folder], ()):
        place = str(Path(display_name(item)).parent)
        label = torch.tensor([classes.setdefault(place, len(classes))])
        try:
            numbers.update(prepare(load_image(item))[None].to(device), label)
        except ImageReadError as error:
            print(error, file=sys.stderr)
            failed += 1
    if not numbers.count:
        raise UserError(f"--numbers-over: there is no folder {folder} with pictures in it.")
    return numbers, failed


def _emptied(output: str) -> Path:
    """The folder, without what an earlier call has left that this one may not write again; all else stays."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "page.html").exists():
        names = ["faithfulness.json", "against.json", "training.gif", "training.mp4"]
        for file in folder.glob("picture_*.npz"):  # a picture without one is no drawing of ours
            if re.fullmatch(r"picture_\d+(_difference)?", file.stem):
                names += [f"{file.stem}{suffix}" for suffix in (".png", ".svg", ".npz")]
        for name in names:
            (folder / name).unlink(missing_ok=True)
    return folder


def _write_differences(
    folder: Path,
    model: VisionTransformer,
    against: tuple[str, VisionTransformer],
    shown: Sequence[PageImage],
    rows: Sequence[Tensor],
    found: HeadComparison,
) -> None:
    """What the heads of the second model do otherwise, each against the one of the first that it is paired with."""
    name, other = against
    facts = {"against": name, "heads": found.records(), "layer_cka": found.layer_cka}
    (folder / "against.json").write_text(json.dumps(facts, indent=2) + "\n")
    images = torch.stack([picture.image for picture in shown]).to(next(model.parameters()).device)
    numbers = HeadMetrics(other)
    numbers.update(renormalized_for(other, model, images))
    for place, (picture, first, second) in enumerate(zip(shown, rows, numbers.readout_attention, strict=True)):
        file, title = folder / f"picture_{place}_difference", f"{picture.name}: {name} minus this model"
        write_maps(file, model, picture.image, second[found.partner] - first, title, diverging=True)


def _passes(numbers: HeadMetrics) -> float:
    """Whole passes of one picture that all heads switched off, in two ways, come to."""
    depth = len(numbers.heads)
    return 2 * sum(count * (depth - layer) / depth for layer, count in enumerate(numbers.heads))


def _tell(folder: Path, numbers: HeadMetrics, pictures: int) -> None:
    """How many heads play which role, and where everything lies."""
    table = Table(title="What the heads do", box=box.SIMPLE_HEAD)
    table.add_column("role")
    table.add_column("heads", justify="right")
    table.add_column("for example")
    roles: dict[str, list[str]] = {}
    for record in numbers.records():
        roles.setdefault(record["role"], []).append(f"layer {record['layer']} head {record['head']} {record['words']}")
    for role, heads in sorted(roles.items(), key=lambda pair: -len(pair[1])):
        table.add_row(role, str(len(heads)), heads[0])
    Console().print(table)
    megabytes = (folder / "page.html").stat().st_size / 1e6
    print(f"{folder / 'page.html'} ({megabytes:.1f} MB, {pictures} pictures) opens in any browser; beside it lie")
    measured = "faithfulness.json, " if (folder / "faithfulness.json").exists() else ""
    print(f"heads.json, .csv and .png, {measured}divergence.npz and .png, and of each picture .png, .svg and .npz")
