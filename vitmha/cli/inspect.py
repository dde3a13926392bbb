"""inspect: what every head of a model does, as one page, numbers and pictures."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitmha.cli.parsing import WordParser, device_named, folder_to_write
from vitmha.cli.search import Search, item_name, picture_of
from vitmha.images import ImageReadError
from vitmha.inspection import HeadNumbers, head_divergence
from vitmha.inspection.comparison import as_seen_by, compare_heads
from vitmha.inspection.epochs import read_epochs, write_film
from vitmha.inspection.faithfulness import patch_maps
from vitmha.inspection.page import Shown, check_page, write_page
from vitmha.inspection.pictures import draw_divergence, write_maps
from vitmha.pretrained import load_model, preprocessing_of
from vitmha.vit import VisionTransformer

EXAMPLES = """
  vitmha inspect cat.jpg dog.jpg --model timm:vit_base_patch16_224 --output heads
  vitmha inspect FOLDER --model runs/x/version_0/model --against runs/x/version_1/model --output heads
  vitmha inspect runs/x/version_0 --output heads      the pictures of the run, with a slider over its epochs and a film
"""


def main() -> None:
    """Writes the page, the numbers and the pictures."""
    given = _arguments()
    device, run = device_named(given.device), Path(given.paths[0])
    is_run = len(given.paths) == 1 and (run / "attention").is_dir()
    if given.model is None and not is_run:
        raise ValueError("--model says which model: a model folder, a .ckpt, timm:NAME, hf:REPO, ...")
    source = given.model or str(run / "model")
    model = _loaded("--model", source, device)
    if given.numbers_over or not is_run:
        preprocessing_of(model)
    against = None if given.against is None else (given.against, _loaded("--against", given.against, device))
    if is_run:
        images, epochs = read_epochs(run / "attention", model)
        shown, failed = [Shown(name=f"picture {i}", image=image) for i, image in enumerate(images)], 0
    else:
        (shown, failed), epochs = _pictures(given.paths, model), []
    if not shown:
        raise ValueError("There is no picture to look at: give files or folders of pictures, or the folder of a run.")
    check_page(model, len(shown), against)
    folder, numbers = Path(given.output), HeadNumbers(model)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for picture in shown:
        numbers.update(picture.image[None].to(device))
        rows.append(numbers.reader_rows[0])
    if given.numbers_over:
        numbers, more = _numbers_over(given.numbers_over, model, device)
        failed += more
    per_picture = _passes(numbers)
    print(f"All heads switched off: as much as {per_picture:.0f} passes for each of {len(shown)}.", file=sys.stderr)
    write_page(folder / "page.html", model, shown, title=source, numbers=numbers, against=against, epochs=epochs)
    numbers.write(folder)
    divergence = head_divergence(model, torch.stack([picture.image for picture in shown]).to(device))
    np.savez_compressed(folder / "divergence.npz", divergence=divergence.cpu().numpy(), heads=numbers.heads)
    draw_divergence(divergence, numbers.heads).savefig(folder / "divergence.png", dpi=110)
    for place, (picture, each) in enumerate(zip(shown, rows, strict=True)):
        file, maps = folder / f"picture_{place}", _maps_through(model, picture.image[None].to(device))
        write_maps(file, model, picture.image, each, picture.name, further=maps)
    if against is not None:
        _write_differences(folder, model, against, shown, rows)
    if epochs:
        write_film(folder / f"training.{given.film}", model, shown[0].image, epochs)
    _tell(folder, numbers, len(shown))
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = WordParser(
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
        type=folder_to_write,
        required=True,
        metavar="DIR",
        help="page.html, heads.json, heads.csv and pictures",
    )
    parser.add_argument("--against", metavar="B", help="a second model with the same tokens, to see what differs")
    over = "take the numbers over all pictures of FOLDER/CLASS/x.jpg, with the heads' selectivity for the classes"
    parser.add_argument("--numbers-over", metavar="FOLDER", help=over)
    parser.add_argument("--film", choices=("gif", "mp4"), default="gif", help="of a run's epochs; default gif")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    return parser.parse_intermixed_args(sys.argv[2:])


def _loaded(flag: str, source: str, device: torch.device) -> VisionTransformer:
    model = load_model(source)
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{flag} {source} reads sequences: inspect takes a model of single pictures.")
    return model.to(device)


def _pictures(paths: list[str], model: VisionTransformer) -> tuple[list[Shown], int]:
    """The pictures that can be read; the others are named on standard error, and counted."""
    shown, failed, prepare = [], 0, preprocessing_of(model)
    for item in Search(recursive=False).below(paths, ()):
        try:
            picture = prepare(picture_of(item))
            shown.append(Shown(name=Path(item_name(item)).name, image=picture))
        except ImageReadError as error:
            print(error, file=sys.stderr)
            failed += 1
    return shown, failed


def _numbers_over(folder: str, model: VisionTransformer, device: torch.device) -> tuple[HeadNumbers, int]:
    """Over all pictures of a folder, one in memory at a time; where they lie in folders, these are their classes.

    Those that cannot be read are named on standard error, and counted.
    """
    numbers, classes, failed, prepare = HeadNumbers(model), dict[str, int](), 0, preprocessing_of(model)
    for item in Search(recursive=True).below([folder], ()):
        place = str(Path(item_name(item)).parent)
        label = torch.tensor([classes.setdefault(place, len(classes))])
        try:
            numbers.update(prepare(picture_of(item))[None].to(device), label)
        except ImageReadError as error:
            print(error, file=sys.stderr)
            failed += 1
    if not numbers.count:
        raise ValueError(f"--numbers-over: there is no folder {folder} with pictures in it.")
    return numbers, failed


def _maps_through(model: VisionTransformer, image: Tensor) -> dict[str, Tensor]:
    """One number for each patch, by every method: of the last layer's heads together, and of all layers."""
    with torch.no_grad():
        label = int(model.forward(image)[0].argmax())
    maps = patch_maps(model, image, [label])
    return {name.replace("-", "_"): maps[name][0] for name in ("attention", "value-weighted", "rollout", "relevance")}


def _write_differences(
    folder: Path,
    model: VisionTransformer,
    against: tuple[str, VisionTransformer],
    shown: Sequence[Shown],
    rows: Sequence[Tensor],
) -> None:
    """What the heads of the second model do otherwise, each against the one of the first that it is most like."""
    name, other = against
    images = torch.stack([picture.image for picture in shown]).to(next(model.parameters()).device)
    found, seen = compare_heads(model, other, images), as_seen_by(other, model, images)
    (folder / "against.json").write_text(json.dumps({"against": name, "heads": found.records()}, indent=2) + "\n")
    for place, (picture, first, image) in enumerate(zip(shown, rows, seen, strict=True)):
        numbers = HeadNumbers(other)
        numbers.update(image[None])
        difference = numbers.reader_rows[0][found.partner] - first
        title = f"{picture.name}: {name} minus this model"
        write_maps(folder / f"picture_{place}_difference", model, picture.image, difference, title, is_signed=True)


def _passes(numbers: HeadNumbers) -> float:
    """Whole passes of one picture that all heads switched off, in two ways, come to."""
    depth = len(numbers.heads)
    return 2 * sum(count * (depth - layer) / depth for layer, count in enumerate(numbers.heads))


def _tell(folder: Path, numbers: HeadNumbers, pictures: int) -> None:
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
    print("heads.json, heads.csv and heads.png, divergence.npz and .png, and of each picture .png, .svg and .npz")
