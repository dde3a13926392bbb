"""export: a model for another engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.cli.arguments import CommandParser, writable_dir
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.images.find import ImageFinder, load_image, subsample
from vitmha.inference.export import FileFormat, export_model
from vitmha.models.encoder_decoder import get_preprocessing
from vitmha.weights.load import load_model

MOST_PICTURES = 300


def main(args: Sequence[str]) -> None:
    """Exports a model and says how the file compares with it."""
    parser = CommandParser(
        prog="vitmha export", description="Write a model for another engine, run and compared there."
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, a .ckpt, or what else --model.pretrained takes")
    parser.add_argument("dest", type=writable_dir, metavar="DEST", help="the folder to make")
    formats = get_args(FileFormat)
    parser.add_argument("--format", choices=formats, default="onnx", help=f"{', '.join(formats)}; default onnx")
    purpose = "to compare on, and for openvino-int8 every other one to calibrate on"
    help_ = f"a folder of pictures {purpose}: up to {MOST_PICTURES} of them, evenly taken"
    parser.add_argument("--pictures", metavar="FOLDER", help=help_)
    given = parser.parse_args(args)
    model, pictures = load_model(given.model), None
    if given.pictures is not None:
        pictures = _read(Path(given.pictures), get_preprocessing(model))
    report = export_model(model, given.dest, given.format, pictures)
    print(f"{given.dest}: {', '.join(report.files)}, {report.nbytes / 1e6:.1f} MB")
    agreeing, kind = round(report.agreement * report.num_images), "random " if pictures is None else ""
    print(
        f"Compared on {report.num_images} {kind}pictures: outputs differ by at most {report.largest_difference:.1e}, "
        f"where the largest is {report.largest_output:.3g}; the same class comes first on {agreeing} of them."
    )


def _read(folder: Path, preprocessing: Preprocessing) -> Float[Tensor, "pictures channels height width"]:
    items = list(ImageFinder(recursive=True).below([str(folder)], ())) if folder.is_dir() else []
    if not items:
        raise UserError(f"--pictures: there is no folder {folder} with pictures in it.")
    return torch.stack([preprocessing(load_image(item)) for item in subsample(items, MOST_PICTURES)])
