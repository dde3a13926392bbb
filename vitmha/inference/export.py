"""Exports models to torch.export, ONNX and OpenVINO; each file is run and compared with the model before it is kept."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.export import ExportedProgram

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.inference.engines import (
    CALIBRATION_IMAGES,
    OPENVINO_FILE,
    InferenceFn,
    compile_openvino,
    convert_to_openvino,
    cpu_float_copy,
    export_config,
    export_program,
    input_shape,
    write_onnx,
)
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.models.vit import VisionTransformer

ExportFormat = Literal["torch", "onnx", "openvino", "openvino-int8"]
# The packages that each format needs, and the extra that installs them. OpenVINO reads ONNX, since it does not support
# PyTorch's grouped heads.
REQUIREMENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "torch": ((), ""),
    "onnx": (("onnxscript", "onnxruntime"), "onnx"),
    "openvino": (("onnxscript", "openvino"), "openvino"),
    "openvino-int8": (("onnxscript", "openvino", "nncf"), "openvino"),
}
# How far outputs in float32 may differ from the model's, as a fraction of the largest.
TOLERANCE = 1e-3
MIN_INT8_IMAGES = 2 * CALIBRATION_IMAGES  # half of them calibrate


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, and how its outputs compare with the model's."""

    files: tuple[str, ...]
    num_bytes: int
    """Of all files together."""
    num_images: int
    """Number of images compared."""
    max_abs_difference: float
    """Largest absolute difference between outputs of the file and of the model."""
    max_abs_output: float
    """Largest absolute output of the model."""
    top1_agreement: float
    """Fraction of the images with the same most probable class, in [0, 1]."""


def export_model(
    model: VisionTransformer | EncoderDecoder,
    directory: str | Path,
    format: ExportFormat = "onnx",  # noqa: A002 (as the flag)
    images: Float[Tensor, "batch channels height width"] | None = None,
) -> ExportReport:
    """Writes a model for another engine, runs it there and compares it with the model.

    The directory holds `config.json`, with the class names, the preprocessing and the names and shapes of input and
    output; and `model.pt2`, `model.onnx` (with the entries of config.json as metadata), or `model.xml` and `model.bin`.
    The exported model takes images of the model's size in batches of any size, and returns logits, or embeddings if the
    model has no head. The directory is written completely or not at all.

    Args:
        model: A classifier on any device; not changed.
        directory: Must not exist.
        format: openvino-int8 quantizes weights and activations to 8 bits, calibrated on the images.
        images: Normalized images to compare on; random ones by default. int8 needs at least `MIN_INT8_IMAGES`: every
            second one calibrates, and the others are compared.

    Returns:
        How the exported model compares with the model.

    Raises:
        UserError: An encoder-decoder, an unknown format, an engine that is not installed, an existing directory, too
            few images for int8, or an exported model whose outputs differ.

    Example:
        >>> export_model(load_model("cifar10"), "cifar10_onnx").max_abs_difference < 1e-4  # doctest: +SKIP
        True
    """
    directory = Path(directory)
    _check(model, directory, format, images)
    assert isinstance(model, VisionTransformer)
    model = cpu_float_copy(model)
    calibration, compared = _split(model, format, images)
    config = export_config(model)
    write = {"torch": _write_torch, "onnx": _write_onnx}.get(format, _write_openvino)
    missing = [parent for parent in directory.absolute().parents if not parent.exists()]
    try:
        with atomic_path(directory) as partial:
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            exported = write(export_program(model), partial, config, calibration)
            report = _compare(model, exported, compared, partial)
            limit = TOLERANCE * max(1.0, report.max_abs_output) if format != "openvino-int8" else float("inf")
            if not report.max_abs_difference < limit:
                raise UserError(
                    f"format {format}: an output of the exported model differs from the model's by "
                    f"{report.max_abs_difference:.3g}, more than {limit:.3g}: nothing was written."
                )
            del exported  # it may hold files open
    except BaseException:
        for parent in missing:  # which atomic_path has created
            with suppress(OSError):
                parent.rmdir()
        raise
    return report


def _check(model: object, directory: Path, file_format: str, images: Tensor | None) -> None:
    if file_format not in REQUIREMENTS:
        raise UserError(f"format must be one of {', '.join(get_args(ExportFormat))}; got {file_format!r}.")
    if not isinstance(model, VisionTransformer):
        raise UserError("The model is an encoder-decoder (a sequence model); only classifiers can be exported.")
    if directory.exists():
        raise UserError(f"{directory} already exists; choose another output directory.")
    packages, extra = REQUIREMENTS[file_format]
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"format {file_format} needs {' and '.join(missing)}: pip install 'vitmha[{extra}]'.")
    count = 0 if images is None else len(images)
    if file_format == "openvino-int8" and count < MIN_INT8_IMAGES:
        raise UserError(
            f"format openvino-int8 needs at least {MIN_INT8_IMAGES} images, of which every second one calibrates; "
            f"got {count}."
        )


def _split(model: VisionTransformer, file_format: str, images: Tensor | None) -> tuple[Tensor, Tensor]:
    """The images that calibrate, if any, and those that are compared."""
    if images is None:
        images = torch.randn(9, *input_shape(model), generator=torch.Generator().manual_seed(0))
    if file_format != "openvino-int8":
        return images[:0], images
    return images[::2], images[1::2]


def _write_torch(program: ExportedProgram, directory: Path, config: dict[str, Any], _: Tensor) -> InferenceFn:
    file = directory / "model.pt2"
    content = BytesIO()  # where writing to the file fails, torch ends the process
    torch.export.save(program, content, extra_files={"config.json": json.dumps(config)})
    file.write_bytes(content.getbuffer())
    return torch.export.load(file).module()


def _write_onnx(program: ExportedProgram, directory: Path, config: dict[str, Any], _: Tensor) -> InferenceFn:
    import onnxruntime

    write_onnx(program, directory / "model.onnx", config)
    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _write_openvino(
    program: ExportedProgram, directory: Path, config: dict[str, Any], calibration: Tensor
) -> InferenceFn:
    import openvino

    with tempfile.TemporaryDirectory() as temporary:
        converted = convert_to_openvino(program, Path(temporary), config, calibration)
        openvino.save_model(converted, directory / OPENVINO_FILE, compress_to_fp16=False)
    return compile_openvino(directory / OPENVINO_FILE, "f32")


@torch.no_grad()
def _compare(model: VisionTransformer, exported: InferenceFn, images: Tensor, directory: Path) -> ExportReport:
    """Runs both, on one image first and then on eight at a time."""
    batches = [images[:1], *images[1:].split(8)]
    expected, actual = (torch.cat([run(batch) for batch in batches if len(batch)]) for run in (model, exported))
    files = sorted(directory.iterdir())
    return ExportReport(
        files=tuple(file.name for file in files),
        num_bytes=sum(file.stat().st_size for file in files),
        num_images=len(images),
        max_abs_difference=(actual - expected).abs().max().item(),
        max_abs_output=expected.abs().max().item(),
        top1_agreement=(actual.argmax(1) == expected.argmax(1)).double().mean().item(),
    )
