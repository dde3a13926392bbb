"""convert: weights from any source into a model directory of vitmha, timm or Hugging Face."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmha.cli.arguments import CommandParser, add_model, writable_dir

if TYPE_CHECKING:  # --help and a wrong call are answered without the seconds of importing torch
    from vitmha.images import Preprocessing
    from vitmha.models.encoder_decoder import Model

FORMATS = ("vitmha", "timm", "hf")
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


def main(args: Sequence[str]) -> None:
    """Converts a model, prints what was loaded, and verifies the result if asked to."""
    options = _parse(args)
    import logging

    from vitmha.errors import UserError
    from vitmha.weights.convert.canonical import NOT_IN_SHAPES
    from vitmha.weights.load import load_model
    from vitmha.weights.save import push_model, save_model
    from vitmha.weights.sources import model_directory
    from vitmha.weights.training_summary import read_summary

    logging.basicConfig(format="%(message)s", level=logging.INFO)  # prints the load report
    for name in ("timm", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
    fields = dict(options.override)
    preprocessing = {name: fields.pop(name) for name in PREPROCESSING if name in fields}
    class_names = fields.pop("class_names", None)
    if options.verify and model_directory(options.model).is_dir() and not NOT_IN_SHAPES.keys() >= fields.keys():
        raise UserError(
            "--verify compares with the source as it is: remove --verify, or the --override of another size."
        )
    model = load_model(options.model, ignore_keys=tuple(options.ignore_keys), **fields)
    if options.verify and (options.format == "vitmha" or not _is_own_format(options.model)):
        _verify(model, options.model)
    if preprocessing:
        model.preprocessing = _override_preprocessing(model, preprocessing)
    if class_names is not None:
        model.class_names = _check_class_names(model, class_names)
    if options.dtype == "float16":
        model.half()
    is_same = not fields and not preprocessing and options.dtype == "float32"
    summary = read_summary(options.model).changed(_as_code(args), keeps_result=is_same)
    if options.output.startswith("hf:"):
        push_model(model, options.output.removeprefix("hf:"), options.format, summary=summary)
    else:
        save_model(model, options.output, options.format, summary=summary)
    print(f"{options.output}: written in the format {options.format}")
    if options.verify and options.format != "vitmha" and not options.output.startswith("hf:"):
        _verify(model.float(), options.output)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="vitmha convert", description="Convert weights from and to timm and Hugging Face.")
    add_model(parser)
    output = "the model directory to write, or hf:OWNER/NAME to push it to the hub"
    parser.add_argument("--output", type=_output, required=True, metavar="DEST", help=output)
    parser.add_argument("--format", choices=FORMATS, default="vitmha", help="format of the output; default vitmha")
    override = (
        "a field of the architecture that the file does not contain, another image_size or num_classes, or the mean, "
        "std, interpolation, crop_pct, crop_mode or class_names; VALUE is JSON"
    )
    parser.add_argument("--override", type=_override, action="append", default=[], metavar="KEY=VALUE", help=override)
    ignore = "prefix of tensor names that may be unexpected"
    parser.add_argument("--ignore-keys", action="append", default=[], metavar="PREFIX", help=ignore)
    dtype = "float16 halves the size of the file; weights are loaded as float32 again"
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help=dtype)
    verify = "compare logits and attention maps with the model of the package that the weights come from or go to"
    parser.add_argument("--verify", action="store_true", help=verify)
    return parser.parse_args(args)


def _as_code(args: Sequence[str]) -> str:
    """The call as the model card shows it."""
    return f"`{shlex.join(['vitmha', 'convert', *args])}`."


def _output(text: str) -> str:
    if text.startswith("hf:"):
        return text
    path = Path(writable_dir(text))
    if path.is_dir() and any(path.iterdir()):
        raise argparse.ArgumentTypeError(f"{text} already exists; choose another output directory")
    return text


def _override(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed


def _verify(model: "Model", source: str) -> None:
    from vitmha.weights.parity import check_parity

    parity = check_parity(model, source)
    print(
        f"{source}: on 2 random images the converted model differs from its own package by at most {parity.logits:.1e} "
        f"in logits and {parity.attention_maps:.1e} in attention maps"
    )


def _override_preprocessing(model: "Model", values: dict[str, Any]) -> "Preprocessing":
    """The model's preprocessing with the values replaced, or a new one of all values."""
    from dataclasses import replace

    from vitmha.errors import UserError
    from vitmha.images import Preprocessing
    from vitmha.models.encoder_decoder import get_encoder

    try:
        if model.preprocessing is not None:
            return replace(model.preprocessing, **values)
        return Preprocessing(image_size=get_encoder(model).config.layout.image_size, **values)
    except TypeError as error:
        raise UserError(
            f"--override: the preprocessing needs mean and std, such as mean=[0.5,0.5,0.5]: {error}."
        ) from None


def _check_class_names(model: "Model", names: Any) -> tuple[str, ...]:
    from vitmha.errors import UserError
    from vitmha.models.encoder_decoder import get_encoder

    count = get_encoder(model).config.num_classes
    if not isinstance(names, tuple) or len(names) != count:
        raise UserError(f"--override class_names: expected a list of {count} names, got {names!r}.")
    return tuple(map(str, names))


def _is_own_format(source: str) -> bool:
    """Whether the source was written by vitmha and not by another package."""
    from vitmha.weights.files import read_json
    from vitmha.weights.shipped import list_models
    from vitmha.weights.sources import model_directory

    file = model_directory(source) / "config.json"
    config = read_json(file) if file.is_file() else {}
    return source in list_models() or source.endswith(".ckpt") or isinstance(config.get("architecture"), dict)
