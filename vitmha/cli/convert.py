"""convert: weights from any source into a folder of ours, of timm's or of Hugging Face's."""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from vitmha.cli.arguments import CommandParser, writable_dir
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.encoder_decoder import Model, get_encoder
from vitmha.weights.convert.canonical import NOT_IN_SHAPES
from vitmha.weights.load import load_model
from vitmha.weights.parity import compare, folder_of
from vitmha.weights.save import Layout, push_model, save_model
from vitmha.weights.sources import list_models

PREPARED = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


def main(args: Sequence[str]) -> None:
    """Converts, says what became of the weights, and compares where asked."""
    given = _arguments(args)
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # the report of the load
    for name in ("timm", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
    said = dict(given.set)
    prepared, names = {name: said.pop(name) for name in PREPARED if name in said}, said.pop("class_names", None)
    if given.check and folder_of(given.source).is_dir() and not NOT_IN_SHAPES.keys() >= said.keys():
        raise UserError("--check compares with the source as it is: leave out --check, or the --set of another size.")
    model = load_model(given.source, ignore_keys=tuple(given.ignore_keys), **said)
    if given.check and (given.layout == "vitmha" or not _is_ours(given.source)):
        compare(model, given.source)
    if prepared:
        model.preprocessing = _preprocessing(model, prepared)
    if names is not None:
        model.class_names = _names(model, names)
    if given.half:
        model.half()
    if given.dest.startswith("hf:"):
        push_model(model, given.dest.removeprefix("hf:"), given.layout)
    else:
        save_model(model, given.dest, given.layout)
    print(f"{given.dest}: written as {given.layout}")
    if given.check and given.layout != "vitmha" and not given.dest.startswith("hf:"):
        compare(model.float(), given.dest)


def _arguments(args: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="vitmha convert", description="Weights from any source into one folder.")
    parser.add_argument("source", metavar="SOURCE", help="a folder, a file, timm:NAME, torchvision:NAME or hf:REPO")
    dest = "the folder to write, or hf:REPO to push it to the hub"
    parser.add_argument("dest", type=_dest, metavar="DEST", help=dest)
    parser.add_argument("--layout", choices=get_args(Layout), default="vitmha", help="whose folder; default vitmha")
    field = "what a file does not tell of the architecture, mean, std, ... or class_names; or another image_size, ..."
    parser.add_argument("--set", type=_field, action="append", default=[], metavar="NAME=VALUE", help=field)
    left = "beginning of the names of tensors that may be left over"
    parser.add_argument("--leave-out", action="append", default=[], metavar="NAME", help=left)
    half = "store the weights in 16 bits, which halves the file; they are read as 32 bits again"
    parser.add_argument("--half", action="store_true", help=half)
    check = "compare logits and attention maps with the package that the weights come from or go to"
    parser.add_argument("--check", action="store_true", help=check)
    return parser.parse_args(args)


def _dest(text: str) -> str:
    return text if text.startswith("hf:") else writable_dir(text)


def _field(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed


def _preprocessing(model: Model, said: dict[str, Any]) -> Preprocessing:
    """The model's with what is said, or all of it."""
    try:
        if model.preprocessing is not None:
            return replace(model.preprocessing, **said)
        return Preprocessing(image_size=get_encoder(model).config.layout.image_size, **said)
    except TypeError as error:
        raise UserError(f"--set: the preprocessing needs mean and std, such as mean=[0.5,0.5,0.5]: {error}.") from None


def _names(model: Model, names: Any) -> tuple[str, ...]:
    count = get_encoder(model).config.num_classes
    if not isinstance(names, tuple) or len(names) != count:
        raise UserError(f"--set class_names: a list of the {count} classes is needed, got {names!r}.")
    return tuple(map(str, names))


def _is_ours(source: str) -> bool:
    """Whether no other package has made it."""
    config = folder_of(source) / "config.json"
    described = json.loads(config.read_text()) if config.is_file() else {}
    return source in list_models() or source.endswith(".ckpt") or isinstance(described.get("architecture"), dict)
