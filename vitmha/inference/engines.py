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
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _in_batches(network: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    """A network that is made for batches of one size, for any: what is left over is filled up."""

    def run(images: Tensor) -> Tensor:
        parts = [F.pad(part, (0, 0) * 3 + (0, size - len(part))) for part in images.split(size)]
        return torch.cat([network(part).clone() for part in parts])[: len(images)]

    return run


def _check_engine(engine: str, precision: str, device: str | torch.device) -> None:
    known = {
        "torch": ("float32", *HALVES),
        "compile": ("float32", *HALVES),
        "openvino": ("float32", "bfloat16", "int8"),
    }
    if engine not in known:
        raise UserError(f"engine must be one of {', '.join(known)}; got {engine!r}.")
    if precision not in known[engine]:
        raise UserError(f"engine {engine!r} computes in {', '.join(known[engine])}; got precision {precision!r}.")
    if engine != "openvino":
        return
    if str(device) not in ("auto", "cpu"):
        raise UserError(f"engine 'openvino' runs on the CPU, not on {device}.")
    for package in ("openvino", *(["nncf"] if precision == "int8" else [])):
        if find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install 'vitmha[openvino]'")


OPENVINO_FILE = "model.xml"
InferenceFn = Callable[[Tensor], Tensor]


def _plain_copy(model: VisionTransformer) -> VisionTransformer:
    """The model in float32 on the CPU, with the kernel left to the engine."""
    model = deepcopy(model).cpu().float().eval()
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.backend = "auto"
    return model


def _shape(model: VisionTransformer) -> tuple[int, int, int]:
    """(channels, height, width) of a picture."""
    return model.config.in_channels, *model.layout.image_size


def _description(model: VisionTransformer) -> dict[str, Any]:
    """What stands in `config.json` beside an exported model."""
    with torch.no_grad():
        width = model(torch.zeros(1, *_shape(model))).shape[1]
    output = {"name": "logits" if model.config.num_classes else "features", "shape": ["batch", width]}
    return {**to_config_dict(model), "input": {"name": "images", "shape": ["batch", *_shape(model)]}, "output": output}


def _trace(model: VisionTransformer) -> ExportedProgram:
    """The model as a graph of PyTorch's operators, for batches of any size."""
    images = torch.zeros(2, *_shape(model))
    program = torch.export.export(model, (images,), dynamic_shapes=({0: Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine, no business of whom the file is given to
    return program


def _to_onnx(program: ExportedProgram, file: Path, description: dict[str, Any]) -> None:
    exported = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=[description["input"]["name"]],
        output_names=[description["output"]["name"]],
        dynamic_shapes=({0: "batch"},),
    )
    assert exported is not None
    exported.model.metadata_props.update({name: json.dumps(value) for name, value in description.items()})
    exported.save(file)


def to_openvino(
    model: VisionTransformer,
    precision: str = "float32",
    pictures: Float[Tensor, "pictures channels height width"] | None = None,
) -> InferenceFn:
    """The model run by OpenVINO on the CPU, without files: a function from normalised pictures to outputs.

    Args:
        model: A classifier; it stays as it is.
        precision: Of the arithmetic: float32, bfloat16 or int8.
        pictures: What int8 is calibrated on.
    """
    model = _plain_copy(model)
    calibration = pictures if precision == "int8" and pictures is not None else torch.zeros(0)
    with tempfile.TemporaryDirectory() as folder:
        converted = _converted(_trace(model), Path(folder), _description(model), calibration)
        return _compiled(converted, "bf16" if precision == "bfloat16" else "f32")


def is_openvino_dir(source: object) -> bool:
    """Whether a source is a folder that `export_model` wrote for OpenVINO."""
    return isinstance(source, str | Path) and (Path(source) / OPENVINO_FILE).is_file()


def load_openvino(folder: str | Path, precision: str = "float32") -> tuple[VisionTransformer, InferenceFn]:
    """What `export_model` wrote for OpenVINO, to be run on the CPU.

    Args:
        folder: Its folder.
        precision: float32 or bfloat16, of what was not rounded to 8 bits.

    Returns:
        The model without its weights, for all else that is known of it, and a function from normalised pictures to
        outputs.

    Raises:
        UserError: A damaged folder.
    """
    file = Path(folder) / OPENVINO_FILE
    model = build_empty_model(folder)
    try:
        return model, _compiled(file, "bf16" if precision == "bfloat16" else "f32")
    except RuntimeError as error:
        raise UserError(f"{file} is damaged: {str(error).splitlines()[0]}.") from None


def _converted(program: ExportedProgram, folder: Path, description: dict[str, Any], calibration: Tensor) -> Any:
    """An OpenVINO model, in 8 bits where there are pictures to calibrate on; leaves an ONNX file in the folder."""
    import openvino

    _to_onnx(program, folder / "model.onnx", description)
    model = openvino.Core().read_model(folder / "model.onnx")
    return _rounded(model, calibration) if len(calibration) else model


def _compiled(model: Any, precision: str) -> InferenceFn:
    import openvino

    # Left to itself, OpenVINO computes in bfloat16 where the processor can.
    network = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    return lambda images: torch.from_numpy(network(images.numpy())[0])


def _rounded(model: Any, calibration: Tensor) -> Any:
    """An OpenVINO model in 8 bits."""
    os.environ.setdefault("NNCF_CI", "1")  # otherwise NNCF tells its makers over the network that it was used
    import nncf

    nncf.set_log_level(logging.ERROR)
    # With SmoothQuant, on by default, what OpenVINO 2026.4 gives for a picture hangs on the batch that it is in.
    without = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.quantize(
        model,
        nncf.Dataset([picture[None].numpy() for picture in calibration]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(calibration),
        advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=without),
    )
