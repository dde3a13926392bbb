"""Checks a call of `vitmha fit` before the seconds of importing PyTorch and Lightning and of building the full parser.

The full parser (`vitmha.cli.fit`) still checks what passes here: the types of values, the contents of config files, and
the options of Lightning's Trainer.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitmha.cli.arguments import refuse, register_flags
from vitmha.cli.checkpoint_path import find_checkpoint, not_found, run_config
from vitmha.cli.configs import find_config, shipped_configs
from vitmha.cli.fit_configs import options_of, read_config
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
    "aa": "data.rand_augment",
    "accum_iter": "trainer.accumulate_grad_batches",
    "accum_steps": "trainer.accumulate_grad_batches",
    "accumulate": "trainer.accumulate_grad_batches",
    "amp": "trainer.precision bf16-mixed",
    "arch": "model.name",
    "auto_augment": "data.rand_augment",
    "bf16": "trainer.precision bf16-mixed",
    "bs": "data.batch_size",
    "checkpoint_path": "ckpt_path",
    "ckpt": "ckpt_path",
    "clip_grad": "trainer.gradient_clip_val",
    "clip_grad_norm": "trainer.gradient_clip_val",
    "cutmix_alpha": "data.cutmix",
    "data_dir": "data.root",
    "data_path": "data.root",
    "dataset": "data",
    "dataset_path": "data.root",
    "device": "trainer.accelerator",
    "dim": "model.vit.embed_dim",
    "drop_path_rate": "model.vit.drop_path",
    "ema": "model.ema_decay",
    "epochs": "trainer.max_epochs",
    "experiment": "run_name",
    "finetune": "model.pretrained",
    "fp16": "trainer.precision bf16-mixed",
    "from_pretrained": "model.pretrained",
    "gpus": "trainer.devices",
    "grad_accum": "trainer.accumulate_grad_batches",
    "grad_clip": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "half": "trainer.precision bf16-mixed",
    "hidden_dim": "model.vit.embed_dim",
    "hidden_size": "model.vit.embed_dim",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "j": "data.num_workers",
    "layers": "model.vit.depth",
    "learn_rate": "model.learning_rate",
    "log_dir": "run_name",
    "lr": "model.learning_rate",
    "max_grad_norm": "trainer.gradient_clip_val",
    "mixed_precision": "trainer.precision bf16-mixed",
    "mixup_alpha": "data.mixup",
    "model_ema": "model.ema_decay",
    "model_ema_decay": "model.ema_decay",
    "model_name": "model.name",
    "name": "run_name",
    "num_epochs": "trainer.max_epochs",
    "num_gpus": "trainer.devices",
    "num_layers": "model.vit.depth",
    "num_train_epochs": "trainer.max_epochs",
    "opt": "model.optimizer",
    "optim": "model.optimizer",
    "output": "run_name",
    "output_dir": "run_name",
    "per_device_train_batch_size": "data.batch_size",
    "reprob": "data.random_erasing",
    "resolution": "data.image_size",
    "resume": "ckpt_path last",
    "save_dir": "run_name",
    "seed": "seed_everything",
    "size": "model.name",
    "smoothing": "model.label_smoothing",
    "steps": "trainer.max_steps",
    "stochastic_depth": "model.vit.drop_path",
    "tensorboard": "trainer.logger TensorBoardLogger",
    "train_batch_size": "data.batch_size",
    "train_dir": "data.root",
    "val_split": "data.val_fraction",
    "validation_split": "data.val_fraction",
    "wandb": "trainer.logger WandbLogger",
    "warmup": "model.warmup_fraction",
    "warmup_epochs": "model.warmup_fraction",
    "warmup_ratio": "model.warmup_fraction",
    "warmup_steps": "model.warmup_fraction",
    "wd": "model.weight_decay",
    "weights": "model.pretrained",
    "width": "model.vit.embed_dim",
    "workers": "data.num_workers",
}
# What other packages have as an option, and what takes its place here.
TO_STOP_EARLY = "to stop early: --trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val/loss"
DROPOUT = "choose from --model.vit.attention_dropout, --model.vit.drop_path and --model.vit.patch_dropout"
SCHEDULE = "the learning rate rises linearly for --model.warmup_fraction of the training and follows a cosine to zero"
ALL_WEIGHTS = "all weights are trained, or with --model.linear_probe true those of the head only"
ANSWERS = {
    **dict.fromkeys(("adapter", "lora", "lora_rank", "peft"), ALL_WEIGHTS),
    **dict.fromkeys(("drop", "drop_rate", "dropout"), DROPOUT),
    **dict.fromkeys(("early_stop", "early_stopping", "patience"), TO_STOP_EARLY),
    **dict.fromkeys(("lr_schedule", "lr_scheduler", "sched", "scheduler"), SCHEDULE),
    **dict.fromkeys(("in_channels", "in_chans", "num_classes"), "the data determines it"),
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
        names = [name for name in map(_data_class, self.configs) if name is not None]
        return [*names, *flags][-1].removeprefix("vitmha.data.") if names or flags else None

    def uses(self, group: str) -> bool:
        """Whether an option of a group such as model.decoder is set."""
        parts = group.split(".")
        return any(key.startswith(group) for key, _ in self.options) or any(
            isinstance(config.get(parts[0]), dict) and config[parts[0]].get(parts[1]) for config in self.configs
        )


def _data_class(config: Mapping[str, Any]) -> str | None:
    data = config.get("data")
    return data.get("class_path") if isinstance(data, dict) else data


def check_call(args: Sequence[str], command: str) -> list[str]:
    """The arguments with the names of shipped configs replaced by their paths; `fit` alone trains the quick start.

    Prints the short help and exits, or ends the process with a message that says which call would work.
    """
    if command == "fit" and not args:
        args = ["--config", "quickstart"]
    args = _find_configs(args)
    call = _split(args)
    if (config := _config_of_checkpoint(call)) is not None:
        args = ["--config", str(config), *args]
        call = _split(args)
    keys = {key for key, _ in call.options}
    options = {**read_options(), **{f"data.{name}": option for name, option in data_options(call.data_class).items()}}
    unused = tuple(group for group in ("model.decoder", "model.distillation") if not call.uses(group))
    in_use = {key: option for key, option in options.items() if not key.startswith(unused)}
    register_flags(f"--{key}" for key in (*GENERAL, *in_use, *LIGHTNING, *(key for key in keys if "." in key)))
    if keys & {"h", "help"}:
        print_help(command, in_use, call.data_class)
        sys.exit(0)
    if "help-all" in keys:
        return ["--help"]
    if call.positional:
        refuse(_unexpected(call.positional[0], command))
    _check_config_keys(call.configs)
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


def _check_config_keys(configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuses unknown keys of config files, those of the data module that the file or an earlier one chooses."""
    data_class: str | None = None
    for config in configs:
        data_class = (_data_class(config) or data_class or "").removeprefix("vitmha.data.") or None
        options = {**read_options(), **{f"data.{name}": option for name, option in data_options(data_class).items()}}
        for key, _ in options_of(config):
            if not _is_known(key, options, data_class):
                refuse(_unknown(key, options, data_class))


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
    return Call(options, positional, [read_config(file) for file in files])


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


def answer(key: str) -> str | None:
    """What takes the place of an option of other packages, without a distance between spellings; None if unknown."""
    name = key.rpartition(".")[2].replace("-", "_")
    if name.startswith("freeze"):
        return "; to train the head only: --model.linear_probe true"
    if name in SYNONYMS:
        return f" (did you mean --{SYNONYMS[name]}?)"
    return f"; {ANSWERS[name]}" if name in ANSWERS else None


def _unknown(key: str, options: Mapping[str, Option], data_class: str | None) -> str:
    """The message about an unknown option, with the option that is probably meant."""
    name = key.rpartition(".")[2]
    found = answer(key)
    if found is not None and "--data." not in found:
        return f"unknown option --{key}{found}"
    known = dict.fromkeys([*GENERAL, *options, *(f"data.{option}" for option in data_options(None)), *LIGHTNING])
    last_parts = {known_key.rpartition(".")[2]: known_key for known_key in reversed(known)}
    candidates = (
        key if key in known else None,
        SYNONYMS.get(name.replace("-", "_")),
        last_parts.get(name),
        *difflib.get_close_matches(key, known, n=1, cutoff=0.8),
        *(last_parts[near] for near in difflib.get_close_matches(name, last_parts, n=1, cutoff=0.75)),
    )
    near = next(filter(None, candidates), None)
    if near is None:
        return f"unknown option --{key}; --help-all lists the options"
    owners = [owner for owner in data_classes() if near.removeprefix("data.") in data_options(owner)]
    if near.startswith("data.") and near not in options and data_class is not None:
        it = "it" if near == key else f"--{near}"
        return f"unknown option --{key}: {data_class} does not have {it}, only --data {', '.join(owners)}"
    return f"unknown option --{key} (did you mean --{near}?)"
