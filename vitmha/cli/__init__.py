"""The command line: a module for each command, imported when the command is given."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

import vitmha
from vitmha.cli.arguments import CommandParser

COMMANDS: Mapping[str, str] = {
    "fit": "train a model",
    "validate": "evaluate a model on the validation data of a config",
    "test": "evaluate a model on the test data of a config",
    "classify": "predict labels of image files",
    "inspect": "write an HTML page, metrics and figures of every attention head",
    "heads": "measure, prune or group attention heads",
    "convert": "convert weights from and to timm, torchvision and Hugging Face",
    "export": "export a model to ONNX, OpenVINO or torch.export",
    "profile": "count parameters and MACs, measure time and memory",
    "serve": "serve predictions over HTTP",
    "shard": "pack an image directory into shards",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command `vitmha`.

    Args:
        args: The arguments after `vitmha`; those of the process by default.
    """
    args = list(sys.argv[1:] if args is None else args)
    parser = CommandParser(prog="vitmha", description=vitmha.__doc__)
    parser.add_argument("--version", action="version", version=f"vitmha {vitmha.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_args(args[:1] or ["--help"]).command
    try:
        if command in ("fit", "validate", "test"):
            import_module("vitmha.cli.fit").main(args[1:], command)
        else:
            import_module(f"vitmha.cli.{command}").main(args[1:])
    except ValueError as error:
        from vitmha.errors import UserError  # which takes the seconds of importing torch, that most commands need

        if not isinstance(error, UserError):
            raise
        parser.exit(2, f"error: {error}\n")
    except BrokenPipeError:  # `| head`; 141 is what a shell reports of a writer whose reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a file that has changed since it was checked, or a full disk
        if error.filename is None:
            raise
        parser.exit(2, f"error: {error.filename}: {error.strerror}\n")
    except KeyboardInterrupt:
        sys.exit(130)
