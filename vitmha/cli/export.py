"""export: a model for another engine."""

import sys
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.cli.arguments import WordParser, folder_to_write
from vitmha.images import Preprocessing
from vitmha.images.find import Search, evenly, picture_of
from vitmha.inference.export import FileFormat, export_model
from vitmha.models.encoder_decoder import preprocessing_of
from vitmha.weights.load import load_model

MOST_PICTURES = 300


def main() -> None:
    """Exports a model and says how the file compares with it."""
    parser = WordParser(prog="vitmha export", description="Write a model for another engine, run and compared there.")
    parser.add_argument("model", metavar="MODEL", help="a model folder, a .ckpt, or what else --model.pretrained takes")
    parser.add_argument("dest", type=folder_to_write, metavar="DEST", help="the folder to make")
    formats = get_args(FileFormat)
    parser.add_argument("--format", choices=formats, default="onnx", help=f"{', '.join(formats)}; default onnx")
    purpose = "to compare on, and for openvino-int8 every other one to calibrate on"
    help_ = f"a folder of pictures {purpose}: up to {MOST_PICTURES} of them, evenly taken"
    parser.add_argument("--pictures", metavar="FOLDER", help=help_)
    given = parser.parse_args(sys.argv[2:])
    model, pictures = load_model(given.model), None
    if given.pictures is not None:
        pictures = _read(Path(given.pictures), preprocessing_of(model))
    report = export_model(model, given.dest, given.format, pictures)
    print(f"{given.dest}: {', '.join(report.files)}, {report.nbytes / 1e6:.1f} MB")
    agreeing, kind = round(report.agreement * report.num_pictures), "random " if pictures is None else ""
    print(
        f"Compared on {report.num_pictures} {kind}pictures: outputs differ by at most {report.largest_difference:.1e}, "
        f"where the largest is {report.largest_output:.3g}; the same class comes first on {agreeing} of them."
    )


def _read(folder: Path, preprocessing: Preprocessing) -> Float[Tensor, "pictures channels height width"]:
    items = list(Search(recursive=True).below([str(folder)], ())) if folder.is_dir() else []
    if not items:
        raise ValueError(f"--pictures: there is no folder {folder} with pictures in it.")
    return torch.stack([preprocessing(picture_of(item)) for item in evenly(items, MOST_PICTURES)])
