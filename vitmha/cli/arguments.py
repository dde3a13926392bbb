"""What the commands share: parsers whose errors are one line, argument types, and the options that several have."""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import vitmha
from vitmha.text import printable

if TYPE_CHECKING:  # a wrong call is answered without the seconds of importing torch
    import torch


# Of `Classifier` and `read_image`; written here, since their modules import torch.
MAX_PIXELS = 160_000_000
ENGINES = ("torch", "compile", "openvino")
PRECISIONS = ("float32", "bfloat16", "float16", "int8")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser without abbreviated options, whose errors are one line and suggest the nearest option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        register_flags(flag for action in self._actions for flag in action.option_strings)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if re.match("the following arguments are required:.* --model(,|$)", message):
            names = bundled_models()
            refuse(f"--model is required, for example --model {names[0]} (bundled models: {', '.join(names)})")
        unknown = re.match(r"unrecognized arguments: --([^\s=]+)", message)
        refuse(unknown_option(unknown[1], option_names(self)) if unknown else message)


def refuse(message: str) -> NoReturn:
    """Ends the process with one line on standard error and exit status 2."""
    print("error:", *map(printable, message.splitlines()), file=sys.stderr)
    sys.exit(2)


# The flags of the command that runs: by argument name, such as batch_size, all flags that end in it.
_flags: dict[str, set[str]] = {}


def register_flags(flags: Iterable[str]) -> None:
    """Makes these the flags that `with_flags` writes; each parser calls it with its own when it starts to parse."""
    _flags.clear()
    add_flags(flags)


def add_flags(flags: Iterable[str]) -> None:
    """Adds flags to those of `register_flags`."""
    for flag in flags:
        name = flag.lstrip("-").rpartition(".")[2].replace("-", "_")
        _flags.setdefault(name, set()).add(flag)


def with_flags(message: str) -> str:
    """Writes argument names in a message of the library as the flags of the command that runs.

    `batch_size must be at least 1, got 0.` becomes `--data.batch_size must be ...` in `vitmha fit` and `--batch-size
    must be ...` in `vitmha classify`. A name is replaced if it has an underscore, begins the message, is in backquotes
    or begins a list's entry such as `; depth is 2`, so that `The model has no head.` stays. Names without a flag, names
    that several flags end in, and parts of paths stay.
    """

    message = re.sub(r"^[a-z]+(?=[ :=])|(?<=[:;] )[a-z]+(?= is )", lambda match: _flag(match[0]) or match[0], message)
    message = re.sub(r"`([a-z]\w*)`", lambda match: _flag(match[1]) or match[0], message)
    name = r"(?<![\w./-])[a-z]\w*_\w*(?![\w/-]|\.\w)"
    return re.sub(name, lambda match: _flag(match[0]) or match[0], message)


def _flag(name: str) -> str | None:
    """The flag of an argument, if there is exactly one."""
    flags = _flags.get(name, ())
    return next(iter(flags)) if len(flags) == 1 else None


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return number


def writable_dir(text: str) -> str:
    """A directory that exists or can be created, checked before the work is done."""
    path = Path(text).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a directory"
        raise argparse.ArgumentTypeError(f"{text} cannot be created or written to: {existing} {reason}")
    return text


def add_model(parser: argparse.ArgumentParser, *, required: bool = True, note: str = "") -> None:
    """Adds `--model`."""
    sources = "a model directory, a .ckpt file, timm:NAME, torchvision:NAME, hf:REPO, or the name of a bundled model"
    parser.add_argument("--model", required=required, metavar="MODEL", help=sources + note)


def bundled_models() -> list[str]:
    """The names of the bundled models, found without the seconds of importing torch."""
    shipped = Path(vitmha.__file__).parent / "weights" / "shipped"
    return sorted(config.parent.name for config in shipped.glob("*/config.json"))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`; `parse_device` reads it."""
    help_ = "default auto: cuda if there is a CUDA device, else cpu"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=help_)


def add_batch_size(parser: argparse.ArgumentParser, default: int = 32) -> None:
    """Adds `--batch-size`."""
    parser.add_argument(
        "--batch-size", type=positive_int, default=default, metavar="N", help=f"images per batch; default {default}"
    )


class _StoreSize(argparse.Action):
    """Stores one or two numbers as (height, width)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if len(values) > 2:
            parser.error(f"{option_string} takes height and width, or one number for both; got {values}")
        setattr(namespace, self.dest, (values[0], values[-1]))


def add_size(parser: argparse.ArgumentParser, flag: str, help_: str) -> None:
    """Adds an option that takes a size in pixels, and stores it as (height, width)."""
    metavar = ("HEIGHT", "WIDTH")
    parser.add_argument(flag, action=_StoreSize, type=positive_int, nargs="+", metavar=metavar, help=help_)


def add_max_pixels(parser: argparse.ArgumentParser) -> None:
    help_ = f"refuse images with more pixels; default {MAX_PIXELS}"
    parser.add_argument("--max-pixels", type=positive_int, default=MAX_PIXELS, metavar="N", help=help_)


def add_data(parser: argparse.ArgumentParser, *, required: bool = True, note: str = "") -> None:
    """Adds `--data` and `--data-root`; `read_labeled` reads them."""
    source = "labeled images: a directory of class directories (CLASS/x.jpg), or the name of a built-in dataset"
    parser.add_argument("--data", required=required, metavar="SOURCE", help=source + note)
    root = "where a built-in dataset is stored; default data"
    parser.add_argument("--data-root", default="data", metavar="DIR", help=root)


def add_classifier(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Classifier`; `classifier_options` reads them."""
    add_model(parser, note=", or a directory that vitmha export wrote for OpenVINO")
    parser.add_argument("--class-names", metavar="FILE", help="class names, one per line, instead of the model's")
    add_batch_size(parser)
    parser.add_argument(
        "--num-workers", type=positive_int, metavar="N", help="threads that read images; default the CPUs, at most 8"
    )
    parser.add_argument("--cluster", choices=("ray",), help="distribute the images over the workers of a Ray cluster")
    add_device(parser)
    parser.add_argument("--engine", choices=ENGINES, default="torch", help="inference engine; default torch")
    parser.add_argument(
        "--compile", action="store_const", dest="engine", const="compile", help="same as --engine compile"
    )
    parser.add_argument(
        "--precision",
        type=lambda text: {"bf16": "bfloat16", "fp16": "float16"}.get(text, text),
        choices=PRECISIONS,
        default="float32",
        help="default float32; bf16 and fp16 are accepted too. int8 needs --engine openvino and is calibrated on the "
        "first images of the call",
    )
    parser.add_argument("--tta", choices=("hflip",), help="average over the image and its mirror image")
    parser.add_argument("--full-decode", action="store_true", help="decode large JPEGs at full size, which is slower")
    add_max_pixels(parser)


def check_classifier(args: argparse.Namespace, *, resume: bool = False) -> None:
    """Refuses options of `add_classifier` that cannot be combined, before torch is imported."""
    is_shared = resume or args.cluster or int(os.environ.get("WORLD_SIZE", 1)) > 1
    if args.precision == "int8" and is_shared:
        refuse(
            "--precision int8 is calibrated on the first images of one call, which --resume, --cluster and torchrun "
            "divide: run vitmha export --format openvino-int8, and pass its directory as --model."
        )
    if args.cluster and find_spec("ray") is None:
        refuse("--cluster ray needs Ray: pip install 'vitmha[ray]'.")


def classifier_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Classifier` from the options of `add_classifier`."""
    from vitmha.errors import UserError
    from vitmha.inference.engines import is_openvino_dir

    device = parse_device(args.device).type
    if args.engine == "openvino" or is_openvino_dir(args.model):
        device = args.device  # "auto" is the CPU then
    elif device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    class_names = None
    if args.class_names:
        try:
            class_names = Path(args.class_names).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"class_names {args.class_names} cannot be read: {error}.") from None
    return {
        "model": args.model,
        "device": device,
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "engine": args.engine,
        "precision": args.precision,
        "tta": args.tta,
        "full_decode": args.full_decode,
        "max_pixels": args.max_pixels,
        "class_names": class_names,
    }


def parse_device(name: str) -> "torch.device":
    import torch

    from vitmha.errors import UserError

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no CUDA device; use --device cpu or auto.")
    return torch.device(name)


def option_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names of the options of a parser and its subparsers, without dashes."""
    for action in parser._actions:
        for choice in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from option_names(choice)
        if action.option_strings:
            yield max(action.option_strings, key=len).strip("-+")  # x+ appends to the list x


def unknown_option(key: str, names: Iterable[str]) -> str:
    """The message about an unknown option, which suggests the nearest of the valid names."""
    near = difflib.get_close_matches(key, list(names), n=1, cutoff=0.6)
    suggestion = f" (did you mean {_flag(near[0]) or f'--{near[0]}'}?)" if near else "; --help lists the options"
    return f"unknown option --{key}{suggestion}"
