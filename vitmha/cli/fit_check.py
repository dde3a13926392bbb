"""Checks a call of `vitmha fit` before the seconds of importing PyTorch and Lightning and of building the full parser.

The full parser (`vitmha.cli.fit`) still checks what passes here: the types of values, the contents of config files, and
the options of Lightning's Trainer.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from vitmha.cli.arguments import refuse, register_flags
from vitmha.cli.checkpoint_path import find_checkpoint, not_found, run_config
from vitmha.cli.configs import find_config, shipped_configs
from vitmha.cli.fit_options import (
    GENERAL,
    LIGHTNING,
    OTHER,
    Option,
    data_classes,
    data_options,
    print_help,
    read_options,
)

# What other packages call an option, and the option here. A distance between spellings would not find it.
SYNONYMS = {
    "accumulate": "trainer.accumulate_grad_batches",
    "amp": "trainer.precision bf16-mixed",
    "arch": "model.name",
    "bs": "data.batch_size",
    "checkpoint_path": "ckpt_path",
    "clip_grad": "trainer.gradient_clip_val",
    "data_dir": "data.root",
    "device": "trainer.accelerator",
    "epochs": "trainer.max_epochs",
    "experiment": "run_name",
    "gpus": "trainer.devices",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "lr": "model.learning_rate",
    "model_name": "model.name",
    "name": "run_name",
    "opt": "model.optimizer",
    "output": "run_name",
    "resume": "ckpt_path last",
    "seed": "seed_everything",
    "size": "model.name",
    "smoothing": "model.label_smoothing",
    "steps": "trainer.max_steps",
    "wd": "model.weight_decay",
    "workers": "data.num_workers",
}


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
        name: str | None = (names + flags or [None])[-1]
        return name and name.removeprefix("vitmha.data.")

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
    if (config := _config_of_checkpoint(call)) is not None:
        args = ["--config", str(config), *args]
        call = _split(args)
    keys = {key for key, _ in call.options}
    options = {**read_options(), **{f"data.{name}": option for name, option in data_options(call.data_class).items()}}
    unused = tuple(group for group in ("model.decoder", "model.distillation") if not call.uses(group))
    in_use = {key: option for key, option in options.items() if not key.startswith(unused)}
    register_flags(f"--{key}" for key in (*in_use, *LIGHTNING))
    if keys & {"h", "help"}:
        print_help(command, in_use, call.data_class)
        sys.exit(0)
    if "help-all" in keys:
        return ["--help"]
    if call.positional:
        refuse(_unexpected(call.positional[0], command))
    for key, value in call.options:
        _check_value(key, value)
        if not _is_known(key, options, call.data_class):
            refuse(_unknown(key, in_use, call.data_class))
    if call.data_class is None and not any(key.endswith(".help") for key in keys):
        root = next((value for key, value in call.options if key == "data.root"), None)
        example = "--data CIFAR10" if root is None else f"--data ImageFolder --data.root {shlex.quote(root)}"
        refuse(f"--data is required, for example {example}, or --config quickstart")
    return args


def _config_of_checkpoint(call: Call) -> Path | None:
    """The config.yaml of the run whose checkpoint a call uses that names no data."""
    settings = {key: value for config in call.configs for key, value in config.items()} | dict(call.options)
    ckpt_path, run_name = settings.get("ckpt_path"), settings.get("run_name") or "vit"
    if ckpt_path is None or call.data_class is not None:
        return None
    checkpoint = find_checkpoint(ckpt_path, run_name)
    return run_config(checkpoint) if checkpoint is not None else refuse(not_found(ckpt_path, run_name))


def _check_value(key: str, value: str | None) -> None:
    """Refuses values of `--model` and `--data` that are valid in other packages."""
    if key == "model" and not (value or "").startswith("{") and not Path(value or "").is_file():
        refuse(
            f"--model takes no value: --model.name {value or 'vit_tiny'} chooses a size; "
            "--model.pretrained MODEL starts from trained weights"
        )
    if key == "data" and value and re.fullmatch(r"\w+", value) and value not in data_classes():
        refuse(f"--data {value}: unknown class; choose from {', '.join(data_classes())}")


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
    """The message about an argument that belongs to no option, with the call that is probably meant."""
    if Path(arg).suffix in (".yaml", ".yml") or arg in shipped_configs():
        return f"unexpected argument {arg}; to use a config: vitmha {command} --config {shlex.quote(arg)}"
    data = f"--data.root {shlex.quote(arg)}"
    if command == "fit":
        call = f"to train on a directory of images: vitmha fit --config finetune_folder {data}"
    else:
        call = f"for a directory of images: vitmha {command} --data ImageFolder {data} --model.pretrained MODEL"
    return f"unexpected argument {arg}; {call}"


def _is_known(key: str, options: Mapping[str, Option], data_class: str | None) -> bool:
    group = key.split(".")[0]
    if group in ("trainer", "checkpoint") or key in (*OTHER, *GENERAL) or key in options:
        return True
    if group == "data" and data_class not in (None, *data_classes()):
        return True  # a class of the user
    return key.endswith((".help", ".class_path")) or any(key.startswith(f"{name}.") for name in options)


def _unknown(key: str, options: Mapping[str, Option], data_class: str | None) -> str:
    """The message about an unknown option, with the option that is probably meant."""
    group, _, name = key.rpartition(".")
    owners = [owner for owner in data_classes() if group == "data" and name in data_options(owner)]
    if owners:
        return f"unknown option --{key}: {data_class} does not have it, only --data {', '.join(owners)}"
    if name.startswith("freeze"):
        return f"unknown option --{key}; to train the head only: --model.linear_probe true"
    known = dict.fromkeys([*GENERAL, *options, *(f"data.{option}" for option in data_options(None)), *LIGHTNING])
    last_parts = {known_key.rpartition(".")[2]: known_key for known_key in reversed(known)}
    candidates = (
        last_parts.get(name),
        SYNONYMS.get(name.replace("-", "_")),
        *difflib.get_close_matches(key, known, n=1),
        *(last_parts[near] for near in difflib.get_close_matches(name, last_parts, n=1, cutoff=0.8)),
    )
    near = next(filter(None, candidates), None)
    return f"unknown option --{key}" + (f" (did you mean --{near}?)" if near else "; --help-all lists the options")
