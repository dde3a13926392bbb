"""Saves a model directory, or pushes it to the Hugging Face hub."""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from safetensors.torch import save_file
from torch import nn

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.models.encoder_decoder import EncoderDecoder, Model
from vitmha.weights.convert.hugging_face import to_hugging_face
from vitmha.weights.convert.timm import to_timm

Layout = Literal["vitmha", "timm", "hugging_face"]


def save_model(model: nn.Module, folder: str | Path, layout: Layout = "vitmha") -> None:
    """Writes a model folder: all that classifying and inspecting need.

    `config.json` holds the architecture, the class names and the preprocessing; `model.safetensors` the weights. Each
    file is written whole or not at all.

    Args:
        model: A `VisionTransformer` or `EncoderDecoder`, compiled or not, with its `class_names` and `preprocessing`
            set where they are known.
        folder: Where to; made where it is not there.
        layout: Ours, which alone holds everything; or what `timm.create_model("local-dir:FOLDER", pretrained=True)` or
            Hugging Face's `AutoModelForImageClassification.from_pretrained` reads.

    Raises:
        UserError: The architecture has a part that the other package does not have.
    """
    model = cast(Model, getattr(model, "_orig_mod", model))  # what torch.compile has wrapped
    contents: dict[str, Any] = {"config.json": to_config_dict(model)}
    tensors = model.state_dict()
    if layout != "vitmha":
        if isinstance(model, EncoderDecoder):
            raise UserError(f"A model with a decoder has no counterpart in {layout}.")
        if layout == "timm":
            contents["config.json"], tensors = to_timm(model)
        else:
            contents["config.json"], tensors, contents["preprocessor_config.json"] = to_hugging_face(model)
    with ExitStack() as files:
        for name, content in contents.items():
            if content is None:
                continue
            file = files.enter_context(atomic_path(Path(folder, name)))
            file.write_text(json.dumps(content, indent=2) + "\n")
        file = files.enter_context(atomic_path(Path(folder, "model.safetensors")))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def push_model(model: Model, repo: str, layout: Layout = "vitmha") -> None:
    """Puts a model folder on the Hugging Face hub, as one commit; the repository is made where it is not there.

    Args:
        model: As for `save_model`.
        repo: OWNER/NAME; `load_model("hf:OWNER/NAME")` reads it again.
        layout: As for `save_model`.

    Raises:
        UserError: No network, no right to write there, or no such name; or as `save_model` does.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder, layout)
        try:
            api = HfApi()
            api.create_repo(repo, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A model of vitmha")
        except Exception as error:  # those of its connections are of another library in each version
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"hf:{repo} could not be written ({reason}): check the name, the network, and that you are logged in "
                "(`hf auth login`)."
            ) from None


def to_config_dict(model: Model) -> dict[str, Any]:
    """What stands in `config.json`: plain dictionaries, lists, strings and numbers."""
    decoder = {"decoder": asdict(model.decoder)} if isinstance(model, EncoderDecoder) else {}
    return {
        "architecture": asdict(model.config),
        **decoder,
        "class_names": model.class_names and list(model.class_names),
        "preprocessing": model.preprocessing and asdict(model.preprocessing),
    }
