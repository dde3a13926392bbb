"""The parser of fit, validate and test: its errors are one line and suggest the option that is meant."""

import logging
import re
import sys
from inspect import Parameter
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from vitmha.cli.arguments import option_names, refuse, unknown_option, with_flags
from vitmha.cli.fit_check import answer
from vitmha.cli.fit_values import type_message


class WarnDiscardedArgs(logging.Handler):
    """Warns once of options that are dropped because a later file or flag chooses another class."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "discarding init_args" in message and message not in self.printed:
            self.printed.add(message)
            print(f"warning: {message}", file=sys.stderr)


LOGGER = logging.getLogger(__name__)
LOGGER.setLevel(logging.DEBUG)
LOGGER.propagate = False

# Headings of `--help-all`, in place of Lightning's first sentences, by the name of the group of options.
HEADINGS = {
    "trainer": "Lightning's Trainer",
    "model": "The model and its training",
    "data": "The data module",
    "attention": "Log of attention maps and head metrics",
    "checkpoint": "The best checkpoint (Lightning's ModelCheckpoint)",
    "autosave": "The last checkpoint, from which --ckpt_path last resumes",
    **dict.fromkeys(("fit", "validate", "test"), "Checkpoints"),
}


class TrainParser(LightningArgumentParser):
    """Lightning's parser without abbreviated options, whose errors are one line and suggest the nearest option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **{"logger": LOGGER, **kwargs})

    def add_argument_group(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        return super().add_argument_group(*([HEADINGS[name]] if name in HEADINGS else args), name=name, **kwargs)

    def add_subclass_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Without the default null, around whose union jsonargparse before 4.51 puts the errors of a data module."""
        super().add_subclass_arguments(*args, **{"default": Parameter.empty, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002 (argparse's signature)
        missing = re.search(r'key "([^"]+)".*Expected a dot import path string: (\S+)', message, re.DOTALL)
        broken = re.search(r'key "([^"]+)".*Problem with given class_path \'(.+?)\':\s+([^\n]+)', message, re.DOTALL)
        required = re.search(
            r"the following arguments are required: (.+)|(?:Key|Option) [\"'](.+)[\"'] is required", message
        )
        unknown = re.search(r"[Uu]nrecognized arguments: --([^\s=]+)|[Oo]ption '([^']+)'", message)
        if missing:
            refuse(f"--{missing[1]} {missing[2]}: unknown class")
        if broken:
            refuse(f"--{broken[1]} {broken[2]}: {broken[3]}")
        if (of_type := type_message(message)) is not None:
            refuse(with_flags(of_type))
        if required:
            refuse("; ".join(with_flags(f"{name} is required") for name in (required[1] or required[2]).split(", ")))
        if unknown and (found := answer(unknown[1] or unknown[2])) is not None:
            refuse(f"unknown option --{unknown[1] or unknown[2]}{found}")
        if unknown:
            refuse(unknown_option(unknown[1] or unknown[2], option_names(self)))
        refuse(with_flags(" ".join(re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message).split())))
