"""Inference engines: PyTorch, torch.compile and OpenVINO."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.export import Dim, ExportedProgram

from vitmha.attention import MultiHeadAttention
from vitmha.errors import UserError
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import build_empty_model
from vitmha.weights.save import to_config_dict

Engine = Literal["torch", "compile", "openvino"]
Precision = Literal["float32", "bfloat16", "float16", "int8"]
CALIBRATION_IMAGES = 32  # of int8
InferenceFn = Callable[[Tensor], Tensor]
OPENVINO_FILE = "model.xml"
HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def with_fixed_batch_size(network: InferenceFn, size: int) -> InferenceFn:
    """Runs a network that is compiled for one batch size on any number of images: the last batch is padded."""

    def run(images: Tensor) -> Tensor:
        parts = [F.pad(part, (0, 0) * 3 + (0, size - len(part))) for part in images.split(size)]
        return torch.cat([network(part).clone() for part in parts])[: len(images)]

    return run


def check_engine(engine: str, precision: str, device: str | torch.device) -> None:
    """Checks that an engine is installed and supports the precision and the device.

    Raises:
        UserError: It is not, or does not.
    """
    supported = {
        "torch": ("float32", *HALF_DTYPES),
        "compile": ("float32", *HALF_DTYPES),
        "openvino": ("float32", "bfloat16", "int8"),
    }
    if engine not in supported:
        raise UserError(f"engine must be one of {', '.join(supported)}; got {engine!r}.")
    if precision not in supported[engine]:
        choices = ", ".join(supported[engine])
        raise UserError(f"precision must be one of {choices} for engine {engine!r}; got {precision!r}.")
    if engine != "openvino":
        return
    if str(device) not in ("auto", "cpu"):
        raise UserError(f"device must be 'cpu' or 'auto' for engine 'openvino', got {str(device)!r}.")
    for package in ("openvino", *(["nncf"] if precision == "int8" else [])):
        if find_spec(package) is None:
            raise UserError(f"engine 'openvino' needs {package}: pip install 'vitmha[openvino]'.")


def cpu_float_copy(model: VisionTransformer) -> VisionTransformer:
    """Returns a copy in float32 on the CPU, in evaluation mode, with backend "auto"."""
    model = deepcopy(model).cpu().float().eval()
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.backend = "auto"
    return model


def input_shape(model: VisionTransformer) -> tuple[int, int, int]:
    """(channels, height, width) of an image."""
    return model.config.in_channels, *model.layout.image_size


def export_config(model: VisionTransformer) -> dict[str, Any]:
    """The contents of `config.json` next to an exported model."""
    with torch.no_grad():
        width = model(torch.zeros(1, *input_shape(model))).shape[1]
    output = {"name": "logits" if model.config.num_classes else "features", "shape": ["batch", width]}
    return {
        **to_config_dict(model),
        "input": {"name": "images", "shape": ["batch", *input_shape(model)]},
        "output": output,
    }


def export_program(model: VisionTransformer) -> ExportedProgram:
    """The model as a `torch.export` program for batches of any size."""
    images = torch.zeros(2, *input_shape(model))
    program = torch.export.export(model, (images,), dynamic_shapes=({0: Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it holds paths of this machine
    return program


def write_onnx(program: ExportedProgram, file: Path, config: dict[str, Any]) -> None:
    """Writes an ONNX file with the entries of `config` as metadata."""
    exported = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=[config["input"]["name"]],
        output_names=[config["output"]["name"]],
        dynamic_shapes=({0: "batch"},),
    )
    assert exported is not None
    exported.model.metadata_props.update({name: json.dumps(value) for name, value in config.items()})
    exported.save(file)


def to_openvino(
    model: VisionTransformer,
    precision: str = "float32",
    images: Float[Tensor, "batch channels height width"] | None = None,
) -> InferenceFn:
    """Converts a model to OpenVINO on the CPU; returns a function from normalized images to outputs.

    Args:
        model: Not changed.
        precision: Of the arithmetic: float32, bfloat16 or int8.
        images: The images that calibrate int8.
    """
    model = cpu_float_copy(model)
    calibration = images if precision == "int8" and images is not None else torch.zeros(0)
    with tempfile.TemporaryDirectory() as directory:
        converted = convert_to_openvino(export_program(model), Path(directory), export_config(model), calibration)
        return compile_openvino(converted, "bf16" if precision == "bfloat16" else "f32")


def is_openvino_dir(source: object) -> bool:
    """Whether a source is a directory that `export_model` wrote for OpenVINO."""
    return isinstance(source, str | Path) and (Path(source) / OPENVINO_FILE).is_file()


def load_openvino(directory: str | Path, precision: str = "float32") -> tuple[VisionTransformer, InferenceFn]:
    """Loads what `export_model` wrote for OpenVINO, to run on the CPU.

    Args:
        directory: The directory it wrote.
        precision: float32 or bfloat16, for the operations that are not in int8.

    Returns:
        The model without its weights, for its config, class names and preprocessing, and a function from normalized
        images to outputs.

    Raises:
        UserError: A corrupt file.
    """
    file = Path(directory) / OPENVINO_FILE
    model = build_empty_model(directory)
    try:
        return model, compile_openvino(file, "bf16" if precision == "bfloat16" else "f32")
    except RuntimeError as error:
        raise UserError(f"{file} is corrupt: {str(error).splitlines()[0]}.") from None


def convert_to_openvino(
    program: ExportedProgram, directory: Path, config: dict[str, Any], calibration: Float[Tensor, "..."]
) -> Any:
    """Converts a program to an OpenVINO model, through an ONNX file that it writes to the directory.

    Args:
        program: From `export_program`.
        directory: For the ONNX file, which the model may read until it is compiled or saved.
        config: From `export_config`.
        calibration: Normalized images that calibrate int8; the model stays in float32 if there are none.
    """
    import openvino

    write_onnx(program, directory / "model.onnx", config)
    model = openvino.Core().read_model(directory / "model.onnx")
    return _quantize(model, calibration) if len(calibration) else model


def compile_openvino(model: Any, precision: str) -> InferenceFn:
    """Compiles an OpenVINO model or file for the CPU.

    Args:
        model: The model or the path of its .xml file.
        precision: "f32" or "bf16". By default OpenVINO would compute in bfloat16 where the CPU can.
    """
    import openvino

    network = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    return lambda images: torch.from_numpy(network(images.numpy())[0])


def _quantize(model: Any, calibration: Tensor) -> Any:
    """Quantizes an OpenVINO model to int8."""
    os.environ.setdefault("NNCF_CI", "1")  # otherwise NNCF sends telemetry
    import nncf

    nncf.set_log_level(logging.ERROR)
    # With SmoothQuant, the default, OpenVINO 2026.4's output for an image depends on the rest of its batch.
    no_smoothing = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.quantize(
        model,
        nncf.Dataset([image[None].numpy() for image in calibration]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(calibration),
        advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=no_smoothing),
    )
