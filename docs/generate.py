"""What the build writes from the code: the pages of every subcommand, option and config key, and the live page."""

import argparse
import io
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from vitmha import cli
from vitmha.cli import fit_options
from vitmha.cli.heads import PURPOSES

HEADS = [f"heads {command}" for command in PURPOSES]
COMMANDS = [name for command in cli.COMMANDS for name in (HEADS if command == "heads" else [command])]
TITLES = {
    "model": "model: the training",
    "model.vit": "model.vit: the architecture",
    "model.decoder": "model.decoder: the decoder of a sequence model",
    "model.distillation": "model.distillation: a teacher",
    "attention": "attention: the log of attention maps",
    "autosave": "autosave: last.ckpt",
}


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that `vitmha COMMAND --help` prints."""
    printed = []
    capture = patch.object(argparse.ArgumentParser, "print_help", lambda self, *_: printed.append(self))
    with capture, suppress(SystemExit), redirect_stdout(io.StringIO()):
        cli.main([*command.split(), "--help"])
    [parser] = printed
    return parser


def write_pages(directory: Path) -> None:
    """Writes the pages; one that does not change keeps its time, so that Sphinx does not read it again."""
    pages = {"command_line.md": command_line(), "config.md": config_keys()}
    for name, text in pages.items():
        path = directory / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def write_live_page(images: Path, directory: Path) -> None:
    """Writes the page of every head of the model `cifar10` for a directory of images; an earlier page is kept."""
    if not (directory / "page.html").is_file():
        command = [sys.executable, "-m", "vitmha", "inspect", images, "--model", "cifar10", "--output", directory]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def command_line() -> str:
    """One section per subcommand, one entry per option."""
    parts = [
        "# Command line\n",
        "`vitmha COMMAND --help` prints the same. `python -m vitmha` is the same command. "
        "[Exit statuses](exit_status.md) are the same for all commands.\n",
    ]
    for command in COMMANDS:
        parser = parser_of(command)
        parts.append(f"## vitmha {command}\n")
        parts.append(f"```{{program}} vitmha {command}\n```\n")
        parts.append(f"{_sentence(parser.description or '')}\n")
        parts.append(f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n")
        if command in ("validate", "test"):
            parts.append("The options are those of {ref}`vitmha fit <vitmha-fit>`.\n")
            continue
        if command == "fit":
            parts[-3] = "(vitmha-fit)=\n" + parts[-3]
        for group in parser._action_groups:
            parts += [_option(action) for action in group._group_actions if "-h" not in action.option_strings]
    return "\n".join(parts)


def _option(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    if not metavar and action.choices is not None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs in ("*", "+"):
        metavar = f"{metavar or action.dest.upper()} ..."
    elif not metavar and action.nargs != 0:
        metavar = action.dest.upper()
    names = [f"{flag} {metavar}".strip() for flag in action.option_strings] or [metavar]
    text = (action.help or "") % {**vars(action), "prog": "vitmha"}
    return f"````{{option}} {', '.join(names)}\n{_escape(_sentence(text))}\n````\n"


def config_keys() -> str:
    """One entry per key of a config file: type, default and the docstring of the argument."""
    parts = [
        "# Config keys\n",
        "A config is a YAML file, and every key is a flag too: `model.vit.depth` is `--model.vit.depth`. Later files "
        "override earlier ones, and flags override files. `vitmha fit --print_config` prints the resolved config. "
        "The keys `trainer` and `checkpoint` are the arguments of Lightning's `Trainer` and `ModelCheckpoint`: "
        "only the most used are listed here, and `vitmha fit --help-all` lists all.\n",
        "## General\n",
    ]
    for key, (metavar, text) in fit_options.GENERAL.items():
        if key not in ("config", "print_config"):
            parts.append(_key(key, metavar, None, text))
    options = fit_options.read_options()
    for group, title in TITLES.items():
        parts.append(f"## {title}\n")
        for key, option in options.items():
            if key.rpartition(".")[0] == group:
                parts.append(_key(key, option.type, option.default, option.help))
    for prefix in ("trainer", "checkpoint"):
        parts.append(f"## {prefix}: Lightning's {'Trainer' if prefix == 'trainer' else 'ModelCheckpoint'}\n")
        for key, (metavar, text) in fit_options.LIGHTNING.items():
            if key.startswith(f"{prefix}."):
                parts.append(_key(key, metavar, None, text))
    for name in fit_options.data_classes():
        parts.append(f"## data: {name}\n")
        for key, option in fit_options.data_options(name).items():
            parts.append(_key(f"data.{key}", option.type, option.default, option.help, f"{name}."))
    return "\n".join(parts)


def _key(key: str, type_: str, default: str | None, text: str, scope: str = "") -> str:
    lines = [f"```{{confval}} {scope}{key}"] + ([f":type: `{type_}`"] if type_ else [])
    lines += [f":default: `{default}`"] if default not in (None, "None") else []
    return "\n".join([*lines, "", _escape(_sentence(text)), "```\n"])


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) or not text else ".")


def _escape(text: str) -> str:
    """Text of argparse as Markdown: characters that Markdown reads otherwise are escaped outside of backquotes."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        for character in "*_<>[]$":
            parts[i] = parts[i].replace(character, f"\\{character}")
    return "`".join(parts)
