"""Models for other engines: torch.export, ONNX and OpenVINO, each run and compared with the model before it is kept."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.export import ExportedProgram

from vitmha.errors import UserError
from vitmha.inference.engines import (
    OPENVINO_FILE,
    InferenceFn,
    _compiled,
    _converted,
    _description,
    _plain_copy,
    _shape,
    _to_onnx,
    _trace,
)
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.models.vit import VisionTransformer

FileFormat = Literal["torch", "onnx", "openvino", "openvino-int8"]
# What each format needs, and the extra that installs it. OpenVINO reads ONNX: it knows no grouped heads of PyTorch's.
NEEDED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "torch": ((), ""),
    "onnx": (("onnxscript", "onnxruntime"), "onnx"),
    "openvino": (("onnxscript", "openvino"), "openvino"),
    "openvino-int8": (("onnxscript", "openvino", "nncf"), "openvino"),
}
# How far outputs in float32 may lie from the model's, as a share of the largest.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, and how it compares with the model."""

    files: tuple[str, ...]
    nbytes: int
    """Of all files."""
    num_images: int
    """Pictures that both have seen."""
    largest_difference: float
    """Between an output of the file and the model's."""
    largest_output: float
    """Of the model, without its sign."""
    agreement: float
    """Share of the pictures on which the same class comes first, in [0, 1]."""


def export_model(
    model: VisionTransformer | EncoderDecoder,
    folder: str | Path,
    file_format: FileFormat,
    pictures: Float[Tensor, "pictures channels height width"] | None = None,
) -> ExportReport:
    """Writes a model for another engine, runs it there and compares it with the model.

    The folder holds `config.json`, with the class names, the preprocessing and the names and shapes of what goes in and
    comes out; and `model.pt2`, `model.onnx` (config.json's entries are its metadata too) or `model.xml` and
    `model.bin`. They take pictures of the model's size in batches of any size, and give logits, or what the head would
    read where there is none. The folder comes into being whole or not at all.

    Args:
        model: A classifier on any device; it stays as it is.
        folder: Where to; must not be there.
        file_format: openvino-int8 rounds weights and activations to 8 bits, after what the pictures make of them.
        pictures: Normalised, to compare on; random ones where not given. For int8 every other one is calibrated on,
            and the rest compared.

    Returns:
        How both compare.

    Raises:
        UserError: A decoder, an unknown format, an engine that is not installed, a folder that is there, no picture
            for int8, or an exported model that computes something else.
    """
    folder = Path(folder)
    _check(model, folder, file_format, pictures)
    assert isinstance(model, VisionTransformer)
    model = _plain_copy(model)
    calibration, seen = _shared_out(model, file_format, pictures)
    parent = next(each for each in folder.absolute().parents if each.is_dir())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".export-") as temporary:
        unfinished = Path(temporary, "finished")
        unfinished.mkdir()
        description = _description(model)
        (unfinished / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        write = {"torch": _write_torch, "onnx": _write_onnx}.get(file_format, _write_openvino)
        run = write(_trace(model), unfinished, description, calibration)
        report = _compare(model, run, seen, unfinished)
        limit = TOLERANCE * max(1.0, report.largest_output) if file_format != "openvino-int8" else float("inf")
        if not report.largest_difference < limit:
            raise UserError(
                f"{file_format}: an output of the exported model differs from the model's by "
                f"{report.largest_difference:.3g}, more than {limit:.3g}: nothing was written."
            )
        del run  # it may hold files open
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(folder)
    return report


def _check(model: object, folder: Path, file_format: str, pictures: Tensor | None) -> None:
    if file_format not in NEEDED:
        raise UserError(f"There is no format {file_format!r}; choose from {', '.join(get_args(FileFormat))}.")
    if not isinstance(model, VisionTransformer):
        raise UserError("The model has a decoder, which writes word by word: only classifiers can be exported.")
    if folder.exists():
        raise UserError(f"{folder} is there already: name a new folder.")
    modules, extra = NEEDED[file_format]
    if missing := [module for module in modules if find_spec(module) is None]:
        raise UserError(f"{file_format} needs {' and '.join(missing)}: pip install 'vitmha[{extra}]'.")
    if file_format == "openvino-int8" and (pictures is None or not len(pictures)):
        raise UserError("openvino-int8 rounds by what real pictures make of the model: give some (--pictures).")


def _shared_out(model: VisionTransformer, file_format: str, pictures: Tensor | None) -> tuple[Tensor, Tensor]:
    """What to calibrate on, if anything, and what to compare on."""
    if pictures is None:
        pictures = torch.randn(9, *_shape(model), generator=torch.Generator().manual_seed(0))
    if file_format != "openvino-int8":
        return pictures[:0], pictures
    return pictures[::2], pictures[1::2] if len(pictures) > 1 else pictures


def _write_torch(program: ExportedProgram, folder: Path, description: dict[str, Any], _: Tensor) -> InferenceFn:
    file = folder / "model.pt2"
    torch.export.save(program, file, extra_files={"config.json": json.dumps(description)})
    return torch.export.load(file).module()


def _write_onnx(program: ExportedProgram, folder: Path, description: dict[str, Any], _: Tensor) -> InferenceFn:
    import onnxruntime

    _to_onnx(program, folder / "model.onnx", description)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _write_openvino(
    program: ExportedProgram, folder: Path, description: dict[str, Any], calibration: Tensor
) -> InferenceFn:
    import openvino

    converted = _converted(program, folder.parent, description, calibration)
    openvino.save_model(converted, folder / OPENVINO_FILE, compress_to_fp16=False)
    return _compiled(folder / OPENVINO_FILE, "f32")


@torch.no_grad()
def _compare(model: VisionTransformer, run: InferenceFn, pictures: Tensor, folder: Path) -> ExportReport:
    """Runs both, on one picture alone and then on eight at a time."""
    batches = [pictures[:1], *pictures[1:].split(8)]
    ours, theirs = (torch.cat([each(batch) for batch in batches if len(batch)]) for each in (model, run))
    files = sorted(folder.iterdir())
    return ExportReport(
        files=tuple(file.name for file in files),
        nbytes=sum(file.stat().st_size for file in files),
        num_images=len(pictures),
        largest_difference=(theirs - ours).abs().max().item(),
        largest_output=ours.abs().max().item(),
        agreement=(theirs.argmax(1) == ours.argmax(1)).double().mean().item(),
    )
