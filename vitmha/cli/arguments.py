"""What the words of the command line share: parsers that answer a wrong call in one sentence, and kinds of values."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch


class WordParser(argparse.ArgumentParser):
    """argparse's parser, without shortened flags, and with one message that names the nearest valid option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {plain(message, self)}\n")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return number


def folder_to_write(text: str) -> str:
    """A folder that is there or can be made, so that it does not turn out to be none when all the work is done."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "nothing can be written there" if there.is_dir() else "it is no folder"
        raise argparse.ArgumentTypeError(f"{text} cannot be made or written to, for {there}: {what}")
    return text


def device_named(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device here; take cpu or auto.")
    return torch.device(name)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names a user may give, those of the subcommands included."""
    for action in parser._actions:
        for choice in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from options(choice)
        yield max(action.option_strings, key=len).lstrip("-") if action.option_strings else action.dest


def plain(message: str, parser: argparse.ArgumentParser) -> str:
    """A refusal of the parser in one sentence, with the nearest valid name."""
    unknown = re.search(r"unrecognized arguments: --([^\s=]+)|[Oo]ption '([^']+)'", message)
    if unknown:
        key = unknown[1] or unknown[2]
        near = difflib.get_close_matches(key, list(options(parser)), n=1, cutoff=0)
        return f"there is no option {key!r}; the nearest is {near[0]!r}."
    return re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message)
