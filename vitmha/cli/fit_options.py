"""The options of `vitmha fit`, read from the source: wrong calls and `--help` are answered without importing PyTorch.

The full parser (`vitmha.cli.fit`) takes seconds to import and to build. It stays the judge of everything that is let
through here: the types of values, the contents of config files, and the options of Lightning's Trainer.
"""

import argparse
import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import vitmha
from vitmha.cli.arguments import CommandParser, refuse, register_flags
from vitmha.cli.configs import find_config, shipped_configs

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
OTHER = ("c", "h", "help", "help-all", "verbose", "weights_only", "data", "trainer", "checkpoint", *GROUPS)
# What other packages call an option, and the option here. A distance between spellings would not find it.
SYNONYMS = {
    "accumulate": "--trainer.accumulate_grad_batches",
    "amp": "--trainer.precision bf16-mixed",
    "arch": "--model.name",
    "bs": "--data.batch_size",
    "checkpoint_path": "--ckpt_path",
    "clip_grad": "--trainer.gradient_clip_val",
    "data_dir": "--data.root",
    "device": "--trainer.accelerator",
    "epochs": "--trainer.max_epochs",
    "experiment": "--run_name",
    "gpus": "--trainer.devices",
    "img_size": "--data.image_size",
    "input_size": "--data.image_size",
    "lr": "--model.learning_rate",
    "model_name": "--model.name",
    "name": "--run_name",
    "opt": "--model.optimizer",
    "output": "--run_name",
    "resume": "--ckpt_path last",
    "seed": "--seed_everything",
    "size": "--model.name",
    "smoothing": "--model.label_smoothing",
    "steps": "--trainer.max_steps",
    "wd": "--model.weight_decay",
    "workers": "--data.num_workers",
}
FREEZE = "to train the head only: --model.linear_probe true"


@dataclass(frozen=True)
class Option:
    """An option as its source defines it."""

    type: str
    default: str | None
    """Its source text; None if the option is required."""
    help: str


@dataclass(frozen=True)
class Call:
    """The parts of a call: options in order, arguments that belong to no option, and the contents of the configs."""

    options: Sequence[tuple[str, str | None]]
    positional: Sequence[str]
    configs: Sequence[Mapping[str, Any]]

    @property
    def data_class(self) -> str | None:
        """The data module, from the last flag or else the last config that chooses one."""
        flags = [value for key, value in self.options if key in ("data", "data.class_path") and value]
        sections = [config["data"] for config in self.configs if config.get("data")]
        names = [data.get("class_path", "") if isinstance(data, dict) else data for data in sections]
        return (names + flags or [None])[-1]

    def uses(self, group: str) -> bool:
        """Whether an option of a group such as model.decoder is set."""
        parts = group.split(".")
        return any(key.startswith(group) for key, _ in self.options) or any(
            isinstance(config.get(parts[0]), dict) and config[parts[0]].get(parts[1]) for config in self.configs
        )


def check_call(args: Sequence[str], command: str) -> list[str]:
    """The arguments with the names of shipped configs replaced by their paths.

    Prints the short help and exits, or ends the process with a message that says which call would work.
    """
    args = _find_configs(args)
    call = _split(args)
    options = read_options()
    data = {f"data.{name}": option for name, option in data_options(call.data_class).items()}
    in_use = {
        key: option
        for key, option in {**options, **data}.items()
        if all(call.uses(group) for group in ("model.decoder", "model.distillation") if key.startswith(group))
    }
    register_flags(f"--{key}" for key in (*in_use, *LIGHTNING))
    keys = {key for key, _ in call.options}
    if keys & {"h", "help"}:
        _print_help(command, in_use, call.data_class)
        sys.exit(0)
    if "help-all" in keys:
        return ["--help"]
    if call.positional:
        refuse(_unexpected(call.positional[0], command))
    for key, value in call.options:
        if key == "model" and not Path(value or "").is_file():
            refuse(
                f"--model takes no value: --model.name {value or 'vit_tiny'} chooses a size; "
                "--model.pretrained MODEL starts from trained weights"
            )
        if key == "data" and value and re.fullmatch(r"\w+", value) and value not in data_classes():
            refuse(f"--data {value}: unknown class; choose from {', '.join(data_classes())}")
        if not _is_known(key, {**options, **data}, call.data_class):
            refuse(unknown(key, in_use, call.data_class))
    if call.data_class is None and not any(key.endswith(".help") for key in keys):
        root = next((value for key, value in call.options if key == "data.root"), None)
        example = "--data CIFAR10" if root is None else f"--data ImageFolder --data.root {root}"
        refuse(f"--data is required, for example {example}, or --config quickstart")
    return args


def _find_configs(args: Sequence[str]) -> list[str]:
    """The arguments with the paths of configs in place of their names."""
    found: list[str] = []
    for i, arg in enumerate(args):
        if arg.startswith("--config="):
            found.append(f"--config={find_config(arg.removeprefix('--config='))}")
        else:
            found.append(str(find_config(arg)) if i and args[i - 1] in ("--config", "-c") else arg)
    return found


def _split(args: Sequence[str]) -> Call:
    """The parts of a call. An option takes the next argument as its value if that is not an option."""
    options: list[tuple[str, str | None]] = []
    positional: list[str] = []
    awaits_value = False
    for arg in args:
        if re.match(r"--|-[a-z]$", arg):
            key, equals, value = arg.lstrip("-").partition("=")
            key = key.rstrip("+").replace(".init_args.", ".").replace(".dict_kwargs.", ".")
            options.append((key, value if equals else None))
            awaits_value = not equals and key not in ("h", "help", "help-all", "print_config")
        elif awaits_value:
            options[-1] = (options[-1][0], arg)
            awaits_value = False
        else:
            positional.append(arg)
    files = [value for key, value in options if key in ("c", "config") and value]
    return Call(options, positional, list(_read_configs(files)))


def _read_configs(files: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        try:
            content = yaml.safe_load(Path(file).read_text())
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # the full parser says what is wrong
        if isinstance(content, dict):
            yield content


def _unexpected(arg: str, command: str) -> str:
    if Path(arg).suffix in (".yaml", ".yml") or arg in shipped_configs():
        return f"unexpected argument {arg}; to use a config: vitmha {command} --config {arg}"
    known = "to train on a directory of images" if command == "fit" else "to use a directory of images"
    return f"unexpected argument {arg}; {known}: vitmha {command} --config finetune_folder --data.root {arg}"


def _is_known(key: str, options: Mapping[str, Option], data_class: str | None) -> bool:
    group = key.split(".")[0]
    if group in ("trainer", "checkpoint") or key in (*OTHER, *GENERAL) or key in options:
        return True
    if group == "data" and data_class not in (None, *data_classes()):
        return True  # a class of the user
    return key.endswith((".help", ".class_path")) or any(key.startswith(f"{name}.") for name in options)


def unknown(key: str, options: Mapping[str, Option], data_class: str | None) -> str:
    """The message about an unknown option, with the option that is probably meant."""
    group, _, name = key.rpartition(".")
    owners = [owner for owner in data_classes() if group == "data" and name in data_options(owner)]
    if owners:
        return f"unknown option --{key}: {data_class} does not have it, only --data {', '.join(owners)}"
    if name.startswith("freeze"):
        return f"unknown option --{key}; {FREEZE}"
    keys = [*GENERAL, *options, *(f"data.{option}" for option in data_options(None)), *LIGHTNING]
    near = [f"--{known}" for known in keys if known.rpartition(".")[2] == name]
    near = near or [SYNONYMS[text] for text in [name.replace("-", "_")] if text in SYNONYMS]
    near = near or [f"--{known}" for known in difflib.get_close_matches(key, keys, n=1)]
    names = difflib.get_close_matches(name, {known.rpartition(".")[2] for known in keys}, n=1, cutoff=0.8)
    near = near or [f"--{known}" for known in keys if known.rpartition(".")[2] in names]
    return f"unknown option --{key}" + (f" (did you mean {near[0]}?)" if near else "; --help-all lists the options")


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
    type_ = ast.unparse(annotation) if annotation else ""
    choices = re.fullmatch(r"Literal\[(.*)\]", type_)
    return Option(
        choices[1].replace("'", "").replace(", ", "|") if choices else type_.replace(" | None", ""),
        None if default is None else ast.unparse(default).strip("'"),
        text,
    )


def _print_help(command: str, options: Mapping[str, Option], data_class: str | None) -> None:
    """Prints vitmha's own options, and the main ones of Lightning."""
    parser = CommandParser(
        prog=f"vitmha {command}",
        usage=f"vitmha {command} --config NAME_OR_FILE [--data NAME --data.root DIR] [--OPTION VALUE ...]",
        description="Options override config files; later files override earlier ones.",
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
    return re.split(r"[.;](?: |$)", text)[0]
