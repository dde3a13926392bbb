"""What a checkpoint records of its run, and what happens when a call that uses the checkpoint says something else."""

import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_info

from vitmha.errors import UserError
from vitmha.models.config import ViTConfig
from vitmha.weights.load import FREE, RESIZABLE
from vitmha.weights.save import to_config_dict

if TYPE_CHECKING:
    from vitmha.training.module import LitViT

Stage = Literal["fit", "validate", "test", "pretrained"]
STAGES: tuple[Stage, ...] = ("fit", "validate", "test", "pretrained")

REFUSED = "refused"
"""The call is refused."""
INHERITED = "checkpoint's"
"""The checkpoint's value is used if the call does not set the field; a value that is set and differs is refused."""
MAPPED = "by name"
"""The same names in another order are matched by name; other names are refused."""
NOTICE = "notice"
"""The call's value is used, and both values are printed."""
FREE_TO_DIFFER = "may differ"
"""The call's value is used, or the stage does not use the field."""
RESIZED = "resized"
"""The call's value is used, and the weights are resized to it; a head of other class names is initialized."""

PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
# Arguments of `LitViT`; resumed with another value, a run would be neither the old one nor a new one.
TRAINING = (
    *("optimizer", "learning_rate", "muon_learning_rate", "betas", "weight_decay", "layer_decay", "warmup_fraction"),
    *("loss", "label_smoothing", "patch_dropout_until", "ema_decay", "distillation", "linear_probe"),
)
TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
# Fields that messages name by the arguments that set them.
SET_BY = {
    "seed": "seed_everything",
    "global_batch_size": "global_batch_size (batch_size times processes)",
    "total_steps": "total_steps (set by max_epochs or max_steps; the learning rate would jump)",
}


def _rules() -> dict[str, tuple[str, str, str, str]]:
    rules: dict[str, tuple[str, str, str, str]] = {}
    for name in (field.name for field in fields(ViTConfig)):
        rules[name] = (INHERITED,) * 4
    for name in FREE:
        rules[name] = (INHERITED, FREE_TO_DIFFER, FREE_TO_DIFFER, FREE_TO_DIFFER)
    for name in RESIZABLE:
        rules[name] = (INHERITED, INHERITED, INHERITED, RESIZED)
    rules["in_channels"] = rules["num_classes"] = (REFUSED, REFUSED, REFUSED, RESIZED)
    rules["backend"] = (FREE_TO_DIFFER,) * 4
    rules["decoder"] = (INHERITED, INHERITED, INHERITED, REFUSED)
    rules["class_names"] = (REFUSED, MAPPED, MAPPED, RESIZED)
    for name in PREPROCESSING:
        rules[name] = (INHERITED, INHERITED, INHERITED, NOTICE)
    for name in ("data", "split_seed", "val_fraction"):  # images of training may be among those that are evaluated
        rules[name] = (REFUSED, NOTICE, NOTICE, FREE_TO_DIFFER)
    for name in (*TRAINING, *TRAINER, "data_options", "num_train_images", "global_batch_size", "total_steps", "seed"):
        rules[name] = (REFUSED, FREE_TO_DIFFER, FREE_TO_DIFFER, FREE_TO_DIFFER)
    rules["precision"] = (NOTICE, NOTICE, NOTICE, FREE_TO_DIFFER)
    return rules


RULES: Mapping[str, tuple[str, str, str, str]] = _rules()
"""For every field of a record what happens if the call differs in it: in fit (resume), validate, test, pretrained."""


class Difference(NamedTuple):
    """A field in which a call differs from a checkpoint."""

    field: str
    recorded: Any
    called: Any


def run_record(module: "LitViT", trainer: Trainer) -> dict[str, Any]:
    """The record of a run: architecture, class names, preprocessing, data, and everything that training depends on.

    Args:
        module: What is trained.
        trainer: Its trainer, with the data.

    Returns:
        Strings, numbers, tuples and dictionaries by the names of `RULES`. A value that is not known is missing.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    arguments = {name: getattr(module, name) for name in TRAINING}
    return {
        **model_record(to_config_dict(module.model)),
        **training_record({**arguments, "distillation": module.distillation and asdict(module.distillation)}),
        **data_record(None if data is None else type(data).__name__, getattr(data, "hparams", {})),
        **{name: getattr(value := getattr(trainer, name), "value", value) for name in TRAINER},
        **_schedule_record(trainer),
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
        "precision": str(trainer.precision),
    }


def model_record(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that `vitmha.weights.save.to_config_dict` holds."""
    names, preprocessing = config["class_names"], config["preprocessing"] or {}
    decoder = config.get("decoder")
    return {
        **_architecture(config["architecture"]),
        "decoder": decoder,
        **({"class_names": tuple(names)} if names else {}),
        **{name: value for name, value in preprocessing.items() if name in PREPROCESSING},
    }


def _architecture(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ViTConfig` with sizes as pairs, and None for numbers that are what they are by default."""
    defaults = {
        "mlp_dim": 4 * values["embed_dim"],
        "num_kv_heads": values["num_heads"],
        "head_dim": values["embed_dim"] // values["num_heads"],
    }
    unset = {name: None for name, default in defaults.items() if values[name] == default}
    sizes = {name: values[name] for name in ("image_size", "patch_size")}
    # Not by `pair`: of its sequence beartype checks one item at random in tests, which moves the run's random numbers.
    return {
        **values,
        **unset,
        **{name: (size, size) if isinstance(size, int) else size for name, size in sizes.items()},
    }


def training_record(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that the arguments of `LitViT` determine."""
    record = {name: arguments[name] for name in TRAINING}
    if record["optimizer"] != "muon":
        del record["muon_learning_rate"]
    return record


def data_record(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a data module determines.

    Args:
        name: Of its class; None if there is none.
        options: Its arguments as far as they are known.
    """
    options = plain_options(options)
    own = ("root", "num_workers", "skip_corrupt", "batch_size", "image_size", "split_seed", "val_fraction")
    record = {
        "data": name,
        "split_seed": options.get("split_seed"),
        "val_fraction": options.get("val_fraction"),
        "data_options": {key: options[key] for key in options if key not in (*own, *PREPROCESSING)} or None,
    }
    return {key: value for key, value in record.items() if value is not None}


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are numbers, strings, or lists of them, which a checkpoint holds without code."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, plain)
        or (isinstance(value, list | tuple) and all(isinstance(part, plain) for part in value))
    }


def count_images(loader: Any) -> int | None:
    """The number of images of a loader over all processes, if it knows."""
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    return getattr(sampler, "samples", None) or (len(dataset) if isinstance(dataset, Sized) else None)


def _schedule_record(trainer: Trainer) -> dict[str, Any]:
    """What the training loader determines; nothing before it is built, as in validation."""
    loader: Any = trainer.train_dataloader
    if loader is None:
        return {}
    sampler, batch_size = getattr(loader, "batch_sampler", None), getattr(loader, "batch_size", None)
    record = {
        "num_train_images": count_images(loader),
        "global_batch_size": getattr(sampler, "global_batch_size", batch_size and batch_size * trainer.world_size),
        "total_steps": trainer.estimated_stepping_batches,
    }
    return {name: value for name, value in record.items() if value is not None}


def recorded_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint; of one that was written without it what it holds of the model."""
    return {**model_record(checkpoint["vitmha"]), **checkpoint.get("run", {})}


def differences(record: Mapping[str, Any], call: Mapping[str, Any]) -> list[Difference]:
    """The fields in which a call differs from a record; fields that only one of them knows are not compared."""
    record, call = _with_tuples(record), _with_tuples(call)
    return [
        Difference(name, record[name], call[name])
        for name in RULES
        if name in record and name in call and record[name] != call[name]
    ]


def check_against_record(source: str, record: Mapping[str, Any], call: Mapping[str, Any], stage: Stage) -> None:
    """Compares a call with the record of the checkpoint that it uses, and prints what differs and is allowed to.

    Args:
        source: The checkpoint, for messages.
        record: Of the checkpoint.
        call: The record of the call, or a part of it.
        stage: What the call does with the checkpoint.

    Raises:
        UserError: A difference that the stage does not allow. The message has both values of each.
    """
    rule = {name: outcomes[STAGES.index(stage)] for name, outcomes in RULES.items()}
    found = differences(record, call)
    if any(difference.field == "data" for difference in found):  # another data module has other options
        own = ("data_options", "split_seed", "val_fraction")
        found = [difference for difference in found if difference.field not in own]
    refused = [
        difference
        for difference in found
        if rule[difference.field] in (REFUSED, INHERITED)
        or (rule[difference.field] == MAPPED and set(difference.recorded) != set(difference.called))
    ]
    if refused:
        raise UserError(_refusal(source, refused, stage))
    for difference in found:
        if rule[difference.field] == NOTICE:
            rank_zero_info(f"{_describe(difference)} {_consequence(difference.field)}".rstrip())


def _refusal(source: str, refused: Iterable[Difference], stage: Stage) -> str:
    details = "; ".join(_describe(difference) for difference in refused)
    if stage == "fit":
        advice = "A run is resumed with the values it was started with; with others, start a new run from its weights"
        return f"{source} cannot be resumed: {details}. {advice} (`pretrained` {_model_of(source)})."
    return f"{source} cannot be used by this call: {details}. Use the checkpoint's values."


def _model_of(source: str) -> str:
    run, found, _ = str(source).rpartition("/checkpoints/")
    return f"{run}/model" if found else "RUN/model"


def _describe(difference: Difference) -> str:
    name, recorded, called = difference
    if name == "class_names":
        return _describe_names(recorded, called)
    if isinstance(recorded, dict) and isinstance(called, dict):
        keys = [key for key in {**recorded, **called} if recorded.get(key) != called.get(key)]
        prefix = "" if name == "data_options" else f"{name}."
        return "; ".join(f"{prefix}{key} is {called.get(key)}, the checkpoint's is {recorded.get(key)}" for key in keys)
    return f"{SET_BY.get(name, name)} is {called}, the checkpoint's is {recorded}"


def _describe_names(recorded: tuple[str, ...], called: tuple[str, ...]) -> str:
    def some(names: Iterable[str]) -> str:
        first, *rest = names = list(names)
        return ", ".join(map(repr, [first, *rest[:4]])) + (f", ... ({len(names)} names)" if len(names) > 5 else "")

    if set(recorded) == set(called):
        place = next(index for index, (old, new) in enumerate(zip(recorded, called, strict=True)) if old != new)
        return f"class {place} of the data is {called[place]!r}, the checkpoint's is {recorded[place]!r}"
    parts = [
        f"{whose} only: {some(names)}"
        for whose, names in (
            ("in the data", [name for name in called if name not in recorded]),
            ("in the checkpoint", [name for name in recorded if name not in called]),
        )
        if names
    ]
    return f"the class names differ, {'; '.join(parts)}"


def _consequence(field: str) -> str:
    if field in ("data", "split_seed", "val_fraction"):
        return "(images of its training may be among those that are evaluated)."
    return "(results may differ in rounding)." if field == "precision" else ""


def _with_tuples(value: Any) -> Any:
    """A value with tuples in place of its lists, as YAML and JSON hold them."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_tuples, value))
    return {name: _with_tuples(part) for name, part in value.items()} if isinstance(value, Mapping) else value
