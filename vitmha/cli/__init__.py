"""The command line: one module per command, imported when the command is called."""

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

import vitmha
from vitmha.cli.arguments import CommandParser, refuse, with_flags

COMMANDS: Mapping[str, str] = {
    "fit": "train a model",
    "validate": "evaluate a model on the validation data of a config",
    "test": "evaluate a model on the test data of a config",
    "classify": "predict the labels of image files",
    "evaluate": "measure a model on labeled images: accuracy, per-class accuracy, confusion matrix",
    "inspect": "write an HTML page, metrics and figures of every attention head",
    "heads": "measure, prune or group attention heads",
    "convert": "convert weights from and to timm, torchvision and Hugging Face",
    "export": "export a model to ONNX, OpenVINO or torch.export",
    "profile": "count parameters and MACs, measure time and memory",
    "serve": "serve predictions over HTTP",
    "shard": "pack an image directory into shards",
    "configs": "list the shipped configs, or print one",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command `vitmha`.

    Args:
        args: The arguments after `vitmha`; those of the process by default.
    """
    command, *args = list(sys.argv[1:] if args is None else args) or [""]
    if command == "help":
        command, args = (args[0], ["--help"]) if args else ("--help", [])
    if command in ("--version", "--verbose"):
        _answer_version([command, *args])
    if command not in COMMANDS:
        _answer_without_command(command)
    try:
        if command in ("fit", "validate", "test"):
            # A wrong call and --help are answered without the seconds of importing Lightning.
            args = import_module("vitmha.cli.fit_check").check_call(args, command)
            import_module("vitmha.cli.fit").main(args, command)
        else:
            import_module(f"vitmha.cli.{command}").main(args)
    except ValueError as error:
        from vitmha.errors import UserError  # here, since it imports torch; where one is raised it has been imported

        if not isinstance(error, UserError):
            raise
        refuse(with_flags(str(error)))
    except BrokenPipeError:  # `| head`; a shell reports 141 for a process that SIGPIPE ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a file that changed after it was checked, or a full disk
        if error.strerror is None:
            raise
        refuse(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> CommandParser:
    """The parser of `vitmha` itself, for its help; the arguments of a command are parsed by its own module."""
    parser = CommandParser(prog="vitmha", description=vitmha.__doc__)
    parser.add_argument("--version", action="store_true", help="print the version")
    verbose = "with --version: also print what a bug report needs (packages, devices, directories)"
    parser.add_argument("--verbose", action="store_true", help=verbose)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser


def _answer_version(args: Sequence[str]) -> NoReturn:
    """Answers `vitmha --version` and `vitmha --version --verbose`."""
    options = _parser().parse_args(args)
    if not options.version or options.command is not None:
        refuse(f"vitmha {' '.join(args)}: expected vitmha --version or vitmha --version --verbose")
    if options.verbose:
        print(import_module("vitmha.cli.environment").describe_environment())
    else:
        print(f"vitmha {vitmha.__version__}")
    sys.exit(0)


def _answer_without_command(arg: str) -> NoReturn:
    """Answers `vitmha --help`, an unknown command and a call without one."""
    if arg.startswith("-"):
        _parser().parse_args([arg])
    names = ", ".join(COMMANDS)
    if not arg:
        refuse(f"choose a command: {names}")
    near = difflib.get_close_matches(arg, COMMANDS, n=1)
    refuse(f"unknown command {arg}" + (f" (did you mean {near[0]}?)" if near else f"; choose from {names}"))
