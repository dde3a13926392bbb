"""The options of `vitmha fit`, read from the source of the classes that define them, and the short help.

Importing those classes takes seconds, since they import PyTorch and Lightning; parsing their source does not.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import vitmha
from vitmha.cli.arguments import CommandParser

PACKAGE = Path(vitmha.__file__).parent
# Where the options of each group are defined: the fields of a dataclass, or the arguments of an `__init__`.
GROUPS = {
    "model": ("training/module.py", "LitViT"),
    "model.vit": ("models/config.py", "ViTConfig"),
    "model.decoder": ("models/encoder_decoder.py", "DecoderConfig"),
    "model.distillation": ("training/distillation.py", "DistillationConfig"),
    "attention": ("training/attention_logger.py", "AttentionLogger"),
    "autosave": ("training/checkpoints.py", "AutosaveCheckpoint"),
}
FROM_DATA = ("image_size", "in_channels", "num_classes")  # of model.vit: linked to the data module
# Options of the command itself: metavar and help.
GENERAL = {
    "config": ("NAME_OR_FILE", "a shipped config (`vitmha configs` lists them) or a YAML file; later ones override"),
    "run_name": ("NAME", "the run is written to runs/NAME/version_N; default vit"),
    "ckpt_path": ("CHECKPOINT", "resume from this checkpoint; `last`: from the newest last.ckpt of --run_name"),
    "seed_everything": ("SEED", "random seed; default 0"),
    "print_config": ("", "print the resolved config and exit"),
}
# The main ones of Lightning's options; --help-all lists all.
LIGHTNING = {
    "trainer.max_epochs": ("N", "number of epochs"),
    "trainer.max_steps": ("N", "number of optimizer steps, in place of epochs"),
    "trainer.accelerator": ("NAME", "auto, cpu, cuda, ...; default auto"),
    "trainer.devices": ("N", "number of devices; default auto: all"),
    "trainer.precision": ("NAME", "32-true, bf16-mixed, 16-mixed, ...; default 32-true"),
    "trainer.strategy": ("NAME", "ddp, ...; see also --config overlays/ddp and overlays/fsdp"),
    "trainer.accumulate_grad_batches": ("N", "batches per optimizer step; default 1"),
    "trainer.gradient_clip_val": ("NORM", "largest norm of the gradient; default: no limit"),
    "trainer.check_val_every_n_epoch": ("N", "validate every N epochs; default 1"),
    "trainer.logger": ("CLASS", "a logger in addition to metrics.csv: WandbLogger, TensorBoardLogger, ..."),
    "trainer.callbacks": ("CLASS", "further callbacks; --trainer.callbacks+ CLASS adds one"),
    "checkpoint.monitor": ("METRIC", "the metric of best.ckpt; default val/accuracy"),
    "checkpoint.mode": ("max or min", "which value of it is the best; default max"),
    "checkpoint.save_top_k": ("K", "number of best checkpoints to keep; default 1"),
}
# Valid keys without a line of their own in the short help.
OTHER = ("c", "h", "help", "help-all", "verbose", "weights_only", "data", "trainer", "checkpoint", *GROUPS)


@dataclass(frozen=True)
class Option:
    """An option as its source defines it."""

    type: str
    default: str | None
    """Its source text; None if the option is required."""
    help: str


def read_options() -> dict[str, Option]:
    """The options of the model and of our callbacks, by key such as model.vit.depth."""
    options: dict[str, Option] = {}
    for group, (file, name) in GROUPS.items():
        definition = _classes(PACKAGE / file)[name]
        found = _fields(definition) or _arguments(definition)
        for key, option in found.items():
            if f"{group}.{key}" not in GROUPS and not (group == "model.vit" and key in FROM_DATA):
                options[f"{group}.{key}"] = option
    return options


def data_classes() -> list[str]:
    """The data modules that `--data NAME` chooses from."""
    [exported] = (
        node.value
        for node in ast.parse((PACKAGE / "data/__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [name for name in ast.literal_eval(exported) if name[0].isupper()]


def data_options(name: str | None) -> dict[str, Option]:
    """The options of a data module; of all, if it is not one of them."""
    name = (name or "").rpartition(".")[2]
    classes = {key: node for file in (PACKAGE / "data").glob("*.py") for key, node in _classes(file).items()}
    options: dict[str, Option] = {}
    for key in [name] if name in data_classes() else data_classes():
        options = {**_arguments_with_inherited(classes[key], classes), **options}
    return options


def _arguments_with_inherited(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, Option]:
    """Arguments of `__init__` and, where it hands on `**options`, those of the base class that it does not set."""
    options = _arguments(node)
    init = _init(node)
    if init is None or init.args.kwarg is not None:
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        is_set = {
            keyword.arg for call in calls if ast.unparse(call.func) == "super().__init__" for keyword in call.keywords
        }
        for base in (ast.unparse(base) for base in node.bases):
            if base in classes:
                inherited = _arguments_with_inherited(classes[base], classes)
                options |= {key: option for key, option in inherited.items() if key not in {*options, *is_set}}
    return options


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}


def _init(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)


def _arguments(node: ast.ClassDef) -> dict[str, Option]:
    """The arguments of `__init__`, with the help of the section `Args` in the docstring of the class."""
    init = _init(node)
    if init is None:
        return {}
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(ast.get_docstring(node) or ""), re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:      .*\n?)*)", section[1] if section else "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    positional = init.args.args[1:]
    defaults = [None] * (len(positional) - len(init.args.defaults)) + list(init.args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)]
    return {arg.arg: _option(arg.annotation, default, texts.get(arg.arg, "")) for arg, default in pairs}


def _fields(node: ast.ClassDef) -> dict[str, Option]:
    """The fields of a dataclass, with the help of the docstring after each."""
    options: dict[str, Option] = {}
    for part, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            docstring = following.value if isinstance(following, ast.Expr) else None
            text = docstring.value if isinstance(docstring, ast.Constant) else ""
            options[part.target.id] = _option(part.annotation, part.value, " ".join(str(text).split()))
    return options


def _option(annotation: ast.expr | None, default: ast.expr | None, text: str) -> Option:
    type_ = ast.unparse(annotation).replace(" | None", "") if annotation else ""
    value = None if default is None else ast.unparse(default).strip("'")
    choices = re.fullmatch(r"Literal\[(.*)\]", type_)
    return Option(
        choices[1].replace("'", "").replace(", ", "|") if choices else type_.replace("bool", "true|false"),
        None if value is None else {"True": "true", "False": "false"}.get(value, value),
        text,
    )


def print_help(command: str, options: Mapping[str, Option], data_class: str | None) -> None:
    """Prints vitmha's own options, and the main ones of Lightning."""
    parser = CommandParser(
        prog=f"vitmha {command}",
        usage=f"vitmha {command} --config NAME_OR_FILE [--data NAME --data.root DIR] [--OPTION VALUE ...]",
        description="Options override config files; later files override earlier ones."
        + (" Without arguments: --config quickstart." if command == "fit" else ""),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=36),
        add_help=False,
    )
    general = parser.add_argument_group("general")
    _add(general, "help", "", "print this help and exit")
    _add(general, "help-all", "", "print the help of all options, Lightning's included, and exit")
    for key, (metavar, text) in GENERAL.items():
        _add(general, key, metavar, text)
    data = parser.add_argument_group("data")
    _add(data, "data", "NAME", f"{', '.join(data_classes())}, or the path of a class, such as my_package.MyData")
    if data_class is None:
        _add(data, "data.root", "DIR", f"where the data is; for all options: vitmha {command} --data NAME --help")
    titles = {"model.vit": "architecture", "attention": "log of attention maps", "autosave": "checkpoints"}
    group = {"": data, "data": data}
    for key, option in options.items():
        name = key.rpartition(".")[0]
        if name == "data" and data_class is None:
            continue
        if name not in group:
            group[name] = parser.add_argument_group(titles.get(name, name))
        default = "; required" if option.default is None else f"; default {option.default}"
        _add(group[name], key, option.type, _first_sentence(option.help) + default.replace("; default None", ""))
    for key, (metavar, text) in LIGHTNING.items():
        name = "checkpoints" if key.startswith("checkpoint.") else "Lightning's trainer"
        group.setdefault("checkpoints", group["autosave"])
        if name not in group:
            group[name] = parser.add_argument_group(name)
        _add(group[name], key, metavar, text)
    parser.print_help()


def _add(group: Any, key: str, metavar: str, text: str) -> None:
    takes_value: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
    group.add_argument(f"--{key}", help=text.replace("%", "%%"), **takes_value)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\.)\.(?: [A-Z]|$)", text)[0]
