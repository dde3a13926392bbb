"""Every word of the command line: a module with a `main` for each, loaded when its word is given."""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module

import vitmha
from vitmha.cli.arguments import WordParser

COMMANDS: Mapping[str, tuple[str, str]] = {
    "fit": ("fit", "train a model"),
    "validate": ("fit", "measure a model on the validation pictures"),
    "test": ("fit", "measure a model on the test pictures"),
    "classify": ("classify", "files to labels"),
    "serve": ("serve", "answer pictures over HTTP"),
    "inspect": ("inspect", "see, measure and compare what every head of a model does, on one page"),
    "pack": ("shard", "put a folder of pictures into a few large files"),
    "export": ("export", "write a model for another engine"),
    "convert": ("convert", "weights from any source into a folder of ours, of timm's or of Hugging Face's"),
    "heads": ("heads", "measure attention heads, remove them or let them share keys and values"),
    "profile": ("profile", "count and measure what a model costs"),
}


def main(args: Sequence[str] | None = None) -> None:
    """The command `vitmha`.

    Args:
        args: The words behind the command; those of the process by default.
    """
    if args is not None:
        sys.argv[1:] = args
    parser = WordParser(prog="vitmha", description=vitmha.__doc__)
    words = parser.add_subparsers(title="words", metavar="WORD", dest="word", required=True)
    for word, (_, purpose) in COMMANDS.items():
        words.add_parser(word, help=purpose)
    module, _ = COMMANDS[parser.parse_args(sys.argv[1:2] or ["--help"]).word]
    try:
        import_module(f"vitmha.cli.{module}").main()
    except ValueError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not _is_ours(cause):
            raise
        parser.exit(2, f"error: {cause}\n")
    except BrokenPipeError:  # `| head`; 141 is what a shell says of a writer whose reader has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a file or folder that is not as it was when it was checked, a disk that is full
        if error.filename is None:
            raise
        parser.exit(2, f"error: {error.filename}: {error.strerror}\n")
    except KeyboardInterrupt:
        sys.exit(130)


def _is_ours(error: BaseException) -> bool:
    """Whether the error is a message of this package, meant for its user."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(name.startswith("vitmha.") for name in (frame.f_globals["__name__"], type(error).__module__))
