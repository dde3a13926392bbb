"""Saves a model directory, or pushes it to the Hugging Face hub."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.models.encoder_decoder import EncoderDecoder, Model, unwrapped
from vitmha.models.vit import VisionTransformer
from vitmha.weights.config_check import check_class_names
from vitmha.weights.convert.hugging_face import to_hugging_face
from vitmha.weights.convert.timm import to_timm
from vitmha.weights.model_card import CARD_FILE, Format, is_generated, model_card
from vitmha.weights.training_summary import SUMMARY_FILE, TrainingSummary


def save_model(
    model: nn.Module,
    directory: str | Path,
    format: Format = "vitmha",  # noqa: A002
    *,
    summary: TrainingSummary | None = None,
) -> None:
    """Saves a model directory: all that classification and inspection need.

    `config.json` holds the architecture, the class names and the preprocessing, `model.safetensors` the weights,
    `README.md` the model card, and `training_summary.json` the summary, if there is one. Each file is written
    completely or not at all. A `README.md` that was written or edited by someone else stays as it is.

    Args:
        model: A `VisionTransformer` or `EncoderDecoder`, compiled or not, or the `LitViT` that holds it. Its
            `class_names` and `preprocessing` are saved if they are set.
        directory: Created if it does not exist.
        format: "vitmha"; or "timm" or "hf", which `timm.create_model("local-dir:DIR", pretrained=True)` and Hugging
            Face's `AutoModelForImageClassification.from_pretrained` load.
        summary: What the card says about training; `vitmha.weights.training_summary.read_summary` reads that of another
            model directory.

    Raises:
        UserError: Class names that are repeated, or a part of the architecture that the other package does not have.

    Example:
        >>> save_model(model, "for_timm", format="timm")  # doctest: +SKIP
    """
    _save(model, Path(directory), format, summary or TrainingSummary(), location=str(directory))


def _save(model: nn.Module, directory: Path, format: Format, summary: TrainingSummary, location: str) -> None:  # noqa: A002
    """Saves a model directory whose card says that it is at `location`."""
    model = unwrapped(model)
    if not isinstance(model, VisionTransformer | EncoderDecoder):
        raise UserError(
            f"save_model saves a VisionTransformer or an EncoderDecoder, got {type(model).__name__}: load_model "
            "converts models of timm, torchvision and Hugging Face."
        )
    contents: dict[str, Any] = {"config.json": to_config_dict(model)}
    tensors = model.state_dict()
    if format != "vitmha":
        if isinstance(model, EncoderDecoder):
            raise UserError(f"The model is an encoder-decoder, which the format {format!r} cannot represent.")
        if format == "timm":
            contents["config.json"], tensors = to_timm(model)
        else:
            contents["config.json"], tensors, contents["preprocessor_config.json"] = to_hugging_face(model)
    texts = {name: content and json.dumps(content, indent=2) + "\n" for name, content in contents.items()}
    texts[SUMMARY_FILE] = summary.to_json()
    if not _has_own_card(directory):
        texts[CARD_FILE] = model_card(model, summary, location, format)
    with ExitStack() as files:
        for name, text in texts.items():
            if text is not None:
                files.enter_context(atomic_path(directory / name)).write_text(text, encoding="utf-8")
        file = files.enter_context(atomic_path(directory / "model.safetensors"))
        _write_safetensors(tensors, file)
    if texts[SUMMARY_FILE] is None:
        (directory / SUMMARY_FILE).unlink(missing_ok=True)  # of the model that was replaced


def _has_own_card(directory: Path) -> bool:
    """Whether a directory has a card that someone else wrote."""
    card = directory / CARD_FILE
    return card.is_file() and not is_generated(card.read_text(encoding="utf-8", errors="replace"))


def _write_safetensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a file with the permissions that the umask gives; safetensors' own are for the owner only."""
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the operating system's error is a part of the text
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
    file.chmod(mode)


def push_model(
    model: Model,
    repo: str,
    format: Format = "vitmha",  # noqa: A002
    *,
    summary: TrainingSummary | None = None,
) -> None:
    """Pushes a model directory to the Hugging Face hub in one commit; the repository is created if it does not exist.

    A model card in the repository that was written or edited by someone else stays as it is.

    Args:
        model: See `save_model`.
        repo: OWNER/NAME; `load_model("hf:OWNER/NAME")` loads it.
        format: See `save_model`.
        summary: See `save_model`.

    Raises:
        UserError: The upload failed, or the format cannot represent the model.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as directory:
        _save(model, Path(directory), format, summary or TrainingSummary(), location=f"hf:{repo}")
        try:
            api = HfApi()
            api.create_repo(repo, exist_ok=True)
            if api.file_exists(repo, CARD_FILE):
                card = Path(api.hf_hub_download(repo, CARD_FILE)).read_text(encoding="utf-8", errors="replace")
                if not is_generated(card):
                    Path(directory, CARD_FILE).unlink()
            api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Upload model")
        except Exception as error:  # the exceptions of its connections depend on the version
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"hf:{repo} could not be written ({reason}): check the name, the network and your login "
                "(`hf auth login`)."
            ) from None


def to_config_dict(model: Model) -> dict[str, Any]:
    """The content of `config.json` of a model: dictionaries, lists, strings and numbers.

    Raises:
        UserError: Class names that are repeated, or more or fewer than the classes.
    """
    check_class_names(model.class_names, model.config.num_classes)
    decoder = {"decoder": asdict(model.decoder)} if isinstance(model, EncoderDecoder) else {}
    return {
        "architecture": asdict(model.config),
        **decoder,
        "class_names": model.class_names and list(model.class_names),
        "preprocessing": model.preprocessing and asdict(model.preprocessing),
    }
