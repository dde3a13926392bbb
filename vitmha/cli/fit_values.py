"""Checks values of Lightning's options, which Lightning refuses with a traceback, hours later, or not at all."""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import Trainer

from vitmha.errors import UserError, check_argument
from vitmha.training.module import METRICS


def _at_least(minimum: int) -> Callable[[Any], bool]:
    return lambda value: minimum <= value < math.inf


def _is_limit(value: Any) -> bool:
    """Whether a value is a fraction, or a whole number of batches."""
    return 0 <= value <= 1 or (value > 1 and value % 1 == 0)


def _is_interval(value: Any) -> bool:
    """Whether a value is a fraction, a whole number of batches, or a time, which Lightning checks."""
    return not isinstance(value, int | float) or (value > 0 and _is_limit(value))


LIMIT = "a fraction from 0.0 to 1.0, or a whole number of batches"
# Of each option, if it is set: whether a value may be used, and what completes the sentence "OPTION must be ...".
RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "seed_everything": (lambda value: 0 <= value < 2**32, "from 0 to 4294967295"),
    "trainer.max_epochs": (_at_least(-1), "at least 1, or -1 for no limit"),
    "trainer.max_steps": (_at_least(-1), "at least 1, or -1 for no limit"),
    "trainer.min_epochs": (_at_least(0), "at least 0"),
    "trainer.min_steps": (_at_least(0), "at least 0"),
    "trainer.max_time": (lambda value: not re.fullmatch(r"[0:]*", str(value)), "above 0, as DD:HH:MM:SS"),
    "trainer.num_nodes": (_at_least(1), "at least 1"),
    "trainer.accumulate_grad_batches": (_at_least(1), "at least 1"),
    "trainer.gradient_clip_val": (_at_least(0), "0 (no limit) or more"),
    "trainer.gradient_clip_algorithm": (lambda value: value in ("norm", "value"), "norm or value"),
    "trainer.check_val_every_n_epoch": (_at_least(1), "at least 1"),
    "trainer.val_check_interval": (_is_interval, "above 0: a fraction of the epoch, or a whole number of batches"),
    "trainer.limit_train_batches": (_is_limit, LIMIT),
    "trainer.limit_val_batches": (_is_limit, LIMIT),
    "trainer.limit_test_batches": (_is_limit, LIMIT),
    "trainer.limit_predict_batches": (_is_limit, LIMIT),
    "trainer.overfit_batches": (_is_limit, LIMIT),
    "trainer.num_sanity_val_steps": (_at_least(-1), "at least 0, or -1 for all"),
    "trainer.log_every_n_steps": (_at_least(0), "0 (no logging) or more"),
    "trainer.fast_dev_run": (_at_least(0), "0 (off) or more"),
    "trainer.reload_dataloaders_every_n_epochs": (_at_least(0), "0 (never) or more"),
    "checkpoint.mode": (lambda value: value in ("max", "min"), "max or min"),
    "checkpoint.save_top_k": (_at_least(-1), "at least 0, or -1 for all"),
    "checkpoint.every_n_epochs": (_at_least(0), "0 (never) or more"),
    "checkpoint.every_n_train_steps": (_at_least(0), "0 (never) or more"),
    "checkpoint.filename": (lambda value: value != "", "a file name"),
    "model.pretrained": (lambda value: value != "", "a model, as for --model of vitmha classify"),
}


def check_values(config: Namespace | Mapping[str, Any]) -> None:
    """Checks the values of Lightning's options that no class of vitmha checks.

    Args:
        config: The parsed options of one subcommand, by key such as trainer.max_epochs.

    Raises:
        UserError: A value out of its range, values that contradict each other, or a metric that no run logs.
    """
    for key, (is_valid, expected) in RANGES.items():
        value = config[key]
        check_argument(f"--{key}", value, value is None or is_valid(value), expected)
    for unit in ("epochs", "steps"):
        least, most = config[f"trainer.min_{unit}"], config[f"trainer.max_{unit}"]
        if least and most is not None and -1 < most < least:
            raise UserError(f"--trainer.min_{unit} {least} is above --trainer.max_{unit} {most}: change one of them.")
    accelerator = config["trainer.accelerator"]
    has_gpu = torch.cuda.is_available() or (accelerator == "gpu" and torch.backends.mps.is_available())
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise UserError(f"--trainer.accelerator {accelerator}: PyTorch finds no GPU; use cpu or auto.")
    _check_metrics(config)


def _check_metrics(config: Namespace | Mapping[str, Any]) -> None:
    """Checks the metrics that checkpoints and callbacks ask for, unless a callback of the user may log them."""
    callbacks = config["trainer.callbacks"] or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    own = {name: config[f"checkpoint.{name}"] for name in ("monitor", "filename", "auto_insert_metric_name")}
    asking = [("--checkpoint.{}", own)]
    for callback in callbacks:
        asking.append((f"--trainer.callbacks.{{}} of {callback['class_path']}", callback.get("init_args") or {}))
    names = []
    for option, arguments in asking:
        names.append((option.format("monitor"), arguments.get("monitor")))
        if arguments is not own and not option.endswith("ModelCheckpoint"):
            continue  # a file name of another kind
        with_names = arguments.get("auto_insert_metric_name", True)
        filename = option.format("filename")
        names += [(filename, name) for name in _metrics_of(filename, arguments.get("filename") or "", with_names)]
    if all(callback["class_path"].startswith(("lightning.", "vitmha.")) for callback in callbacks):
        for option, name in names:
            _check_metric(option, name)


def _check_metric(option: str, name: str | None) -> None:
    if name is None or name in (*METRICS, "epoch", "step") or name.startswith("lr-"):
        return
    [near] = difflib.get_close_matches(name, METRICS, n=1, cutoff=0)
    raise UserError(f"{option}: no run logs {name} (did you mean {near}?); expected one of {', '.join(METRICS)}.")


def _metrics_of(option: str, filename: str, with_names: bool) -> list[str]:
    """The metrics in the braces of the file name of checkpoints, in which Lightning may write their names too."""
    try:
        parts = list(Formatter().parse(filename))
        for _, name, spec, _ in parts:
            format(1 if name in ("epoch", "step") else 0.5, spec or "")
    except ValueError as error:
        raise UserError(f"{option}: {filename}: {error}.") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if (with_names and any("/" in name for name in names)) or any("/" in text for text, *_ in parts):
        raise UserError(
            f"{option}: {filename} would make a directory: use no slash outside of braces and set "
            "auto_insert_metric_name to false; dirpath chooses the directory."
        )
    return names


def plain_message(error: Exception) -> str:
    """The message of an error of Lightning in one line, with the trainer's arguments written as flags."""
    names = "|".join(inspect.signature(Trainer).parameters)
    return re.sub(rf"`({names})(=[^`]*)?`", r"--trainer.\1\2", " ".join(str(error).split()))


# What a value of a Python type is called in YAML.
TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "NoneType": "null"}


def type_message(message: str) -> str | None:
    """jsonargparse's message about a value of a wrong type as "OPTION must be TYPES, got VALUE"; None for others."""
    head = r'Parser key "([^"]+)":\s+'
    one = re.fullmatch(
        head + r"Expected (?:an? (?=<|typing))?(?P<types>.+)\. Got value: (?P<value>.*)", message, re.DOTALL
    )
    union = re.fullmatch(head + r".*Subtypes: \[(?P<types>.+?)\]\n.*Given value: (?P<value>.*)", message, re.DOTALL)
    wrong = one or union
    if wrong is None:
        return None
    types = re.sub(r"<class '(?:\w+\.)*(\w+)'>", lambda match: TYPES.get(match[1], match[1]), wrong["types"])
    types = re.sub(r"tuple\[(.+?)\]", lambda match: f"[{match[1].replace(' ', '')}]", types)
    types = re.sub(r"typing\.Literal\[(.+?)\]", lambda match: match[1].replace("'", ""), types)
    expected = ", ".join(dict.fromkeys(types.split(", "))) if union else types
    flag = f"--{wrong[1]}" if "." in wrong[1] else wrong[1]  # the key of a class's argument is its name only
    return f"{flag} must be {' or '.join(expected.rsplit(', ', 1))}, got {' '.join(wrong['value'].split())}"
