"""export: writes a model for another engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitmha.cli.arguments import CommandParser, add_model, add_size, refuse, writable_dir

if TYPE_CHECKING:  # a wrong call is answered without the seconds of importing torch
    from jaxtyping import Float
    from torch import Tensor

    from vitmha.images import Preprocessing

FORMATS = ("torch", "onnx", "openvino", "openvino-int8")  # as `ExportFormat`, whose module imports torch
MAX_IMAGES = 300


def main(args: Sequence[str]) -> None:
    """Exports a model and prints how the exported one compares with it."""
    parser = CommandParser(
        prog="vitmha export", description="Export a model to another engine, run it there and compare the outputs."
    )
    add_model(parser)
    parser.add_argument("--output", type=writable_dir, required=True, metavar="DEST", help="the directory to create")
    parser.add_argument("--format", choices=FORMATS, default="onnx", help="default onnx")
    add_size(parser, "--image-size", "input size of the exported model in pixels; one number for a square")
    purpose = "to compare on; openvino-int8 needs at least 64, of which every second one calibrates"
    help_ = f"images, labeled or not, {purpose}; at most {MAX_IMAGES} of them, evenly spaced"
    parser.add_argument("--calibration-data", metavar="DIR", help=help_)
    parsed = parser.parse_args(args)
    if parsed.format == "openvino-int8" and parsed.calibration_data is None:
        refuse("--format openvino-int8 is calibrated on images: add --calibration-data DIR")

    from vitmha.inference.export import export_model
    from vitmha.models.encoder_decoder import get_preprocessing
    from vitmha.weights.load import load_model

    changes = {} if parsed.image_size is None else {"image_size": parsed.image_size}
    model, images = load_model(parsed.model, **changes), None
    if parsed.calibration_data is not None:
        images = _read(Path(parsed.calibration_data), get_preprocessing(model))
    report = export_model(model, parsed.output, parsed.format, images)
    print(f"{parsed.output}: {', '.join(report.files)}, {report.num_bytes / 1e6:.1f} MB")
    agreeing, kind = round(report.top1_agreement * report.num_images), "random " if images is None else ""
    print(
        f"Compared on {report.num_images} {kind}images: outputs differ by at most {report.max_abs_difference:.1e}, the "
        f"largest is {report.max_abs_output:.3g}; the predicted class is the same for {agreeing} of them."
    )


def _read(directory: Path, preprocessing: "Preprocessing") -> "Float[Tensor, 'batch channels height width']":
    import torch

    from vitmha.errors import UserError
    from vitmha.images.find import ImageFinder, load_image, subsample

    sources = list(ImageFinder(recursive=True).below([str(directory)], ())) if directory.is_dir() else []
    if not sources:
        raise UserError(f"calibration_data {directory}: no image files found in such a directory.")
    return torch.stack([preprocessing(load_image(source)) for source in subsample(sources, MAX_IMAGES)])
