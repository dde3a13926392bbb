"""What is known of how a model was trained: `training_summary.json` of a model directory, which fills its card.

`load_model` does not read it, since a model that is trained on in Python would keep facts that are no longer true. Who
writes a model that is another form of a saved one, such as `vitmha convert`, passes the summary on.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from vitmha.errors import UserError
from vitmha.models.config import ViTConfig
from vitmha.weights.config_check import check_types
from vitmha.weights.files import read_file, read_json
from vitmha.weights.sources import model_directory

SUMMARY_FILE = "training_summary.json"
# Of a run's record: what config.json has, and what a summary has as fields.
NOT_HYPERPARAMETERS = (
    *(each.name for each in fields(ViTConfig)),
    *("decoder", "class_names", "mean", "std", "interpolation", "crop_pct", "crop_mode", "num_train_images"),
)


@dataclass(frozen=True, kw_only=True)
class EvaluationSummary:
    """The result of one evaluation of the saved weights; `str` gives it in one phrase."""

    accuracy: float
    """Fraction of the images, in [0, 1], whose prediction is right."""
    metric: Literal["accuracy", "exact_match"] = "accuracy"
    """Exact match of the sequence for encoder-decoders."""
    num_images: int | None = None
    """Number of images, if all of the split were evaluated."""
    split: str = "validation"
    """Name of the split, such as test."""
    dataset: str | None = None
    """Name of the dataset."""

    def __str__(self) -> str:
        name = {"accuracy": "top-1 accuracy", "exact_match": "exact-match accuracy"}[self.metric]
        count = "part of the" if self.num_images is None else f"{self.num_images:,}"
        of = f" of {self.dataset}" if self.dataset else ""
        return f"{100 * self.accuracy:.2f} % {name} on {count} {self.split} images{of}"


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What is known of how a model was trained; what is not known is None or empty.

    Example:
        >>> summary = read_summary("cifar10")
        >>> print(summary.result)
        90.50 % top-1 accuracy on 10,000 test images of CIFAR10
    """

    name: str | None = None
    """Name of the model: that of its run."""
    license: str | None = None
    """Identifier of the license as the Hugging Face hub writes it, such as apache-2.0."""
    dataset: str | None = None
    """Name of the dataset."""
    num_train_images: int | None = None
    """Number of training images."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Everything else that the training depended on, by name."""
    command: str | None = None
    """The command that trained the model."""
    pretrained: str | None = None
    """The trained weights that training started from, as `load_model` takes them."""
    base_model: str | None = None
    """Identifier on the Hugging Face hub of the model that this one was trained or converted from."""
    result: EvaluationSummary | None = None
    """Evaluation of exactly these weights."""
    notes: tuple[str, ...] = ()
    """Further facts about training and evaluation, a sentence or more each."""
    changes: tuple[str, ...] = ()
    """What was done to the model after training, in order."""

    def changed(
        self, what: str, *, keeps_result: bool = False, result: EvaluationSummary | None = None
    ) -> "TrainingSummary":
        """Adds something that was done to the model.

        Args:
            what: One or more sentences in Markdown.
            keeps_result: Whether the predictions are the same as before. Otherwise the old result becomes a part of the
                history.
            result: The result after the change, if it was evaluated.
        """
        if keeps_result:
            return replace(self, changes=(*self.changes, what))
        before = f" Before that, it had {self.result}." if self.result else ""
        return replace(self, name=None, result=result, changes=(*self.changes, what + before))

    def to_json(self) -> str | None:
        """The content of `training_summary.json`; None if nothing is known."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}
        return json.dumps(known, indent=2) + "\n" if known else None


def read_summary(source: str | Path) -> TrainingSummary:
    """Reads what is known of a model.

    Args:
        source: See `load_model`. A checkpoint of a run knows its hyperparameters, and a model of the hub its license.

    Raises:
        UserError: A `training_summary.json` that is corrupt, or whose values are of another type.

    Example:
        >>> read_summary("cifar10").num_train_images
        50000
    """
    path = model_directory(str(source))
    if path.suffix == ".ckpt" and path.is_file():
        return summary_of_record(read_file(path).get("run", {}))
    file = path / SUMMARY_FILE
    if file.is_file():
        summary = _from_dict(file, read_json(file))
        return replace(summary, base_model=summary.base_model or hub_id(str(source)))
    return TrainingSummary(license=_license(str(source), path), base_model=hub_id(str(source)))


def summary_of_record(record: Mapping[str, Any]) -> TrainingSummary:
    """The summary of a run from its record, as `vitmha.training.run_record` makes it and checkpoints hold it."""
    known = {key: value for key, value in record.items() if key not in NOT_HYPERPARAMETERS and value is not None}
    return TrainingSummary(
        dataset=record.get("data"), num_train_images=record.get("num_train_images"), hyperparameters=known
    )


def _from_dict(file: Path, values: dict[str, Any]) -> TrainingSummary:
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "result" in values:
            check_types(values["result"], EvaluationSummary)
            values["result"] = EvaluationSummary(**values["result"])
        check_types(values, TrainingSummary)
        return TrainingSummary(**values)
    except (UserError, TypeError) as error:
        raise UserError(f"{file} is not valid: {error} Correct the file or remove it.") from None


def hub_id(source: str) -> str | None:
    """The identifier of a source on the Hugging Face hub; None if it is not there.

    Example:
        >>> hub_id("hf:google/vit-base-patch16-224")
        'google/vit-base-patch16-224'
    """
    hub, _, name = source.partition(":")
    if hub in ("hf", "hf-hub", "hf_hub"):
        return name.partition("@")[0]
    config = _timm_config(source)
    if config is not None:
        return config.hf_hub_id or None
    return hub_id(name) if hub == "timm" else None


def _license(source: str, directory: Path) -> str | None:
    """The license that a model of timm or of the hub says it has."""
    from huggingface_hub import ModelCard

    config = _timm_config(source)
    if config is not None:
        return config.license
    if not (directory / "README.md").is_file():
        return None
    card = ModelCard.load(directory / "README.md", ignore_metadata_errors=True)
    return card.data.license if isinstance(card.data.license, str) else None


def _timm_config(source: str) -> Any:
    hub, _, name = source.partition(":")
    if hub != "timm":
        return None
    import timm  # imported here since it takes a second

    return timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
