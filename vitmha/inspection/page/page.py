"""One HTML file to explore every head of a model: pictures, maps, numbers, heads switched off."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection.ablation import ablate_each_head, mean_outputs
from vitmha.inspection.adapters import get_attention_spec
from vitmha.inspection.compare import HeadComparison, compare_heads, renormalized_for
from vitmha.inspection.faithfulness import Faithfulness, faithfulness, patch_maps
from vitmha.inspection.figures import denormalized
from vitmha.inspection.head_metrics import HeadMetrics, for_json
from vitmha.inspection.maps import quantize_rows
from vitmha.inspection.page.storage import RANK, _pack, _store
from vitmha.models.vit import VisionTransformer

LARGEST = 50_000_000  # bytes that browsers still open with ease
LABELS = 5  # classes shown of each prediction


@dataclass(frozen=True, kw_only=True)
class PageImage:
    """A picture on a page."""

    name: str
    """Its file's."""
    image: Float[Tensor, "channels height width"]
    """Normalised."""


@dataclass(frozen=True, kw_only=True)
class EpochAttention:
    """Where a model in training looked."""

    name: str
    """Stands beside the slider."""
    rows: Float[Tensor, "pictures all_heads tokens"]
    """The attention of what the head reads."""


@dataclass(frozen=True, kw_only=True)
class PageResult:
    """What was computed for a page."""

    error: dict[str, float]
    """What the compact storage costs: `probability`, the greatest error of a weight; `variation`, the mean share of a
    row's mass that lies elsewhere; `relevance`, the error of the relevance maps relative to their size."""
    maps: list[dict[str, Float[Tensor, "1 patches"]]]
    """For each picture `patch_maps`, for the class that is predicted."""
    faithfulness: Faithfulness | None
    """None for a model without a head."""
    comparison: HeadComparison | None
    """With the second model, if there is one."""


def write_page(
    file: str | Path,
    model: VisionTransformer,
    pictures: Sequence[PageImage],
    *,
    title: str,
    numbers: HeadMetrics | None = None,
    against: tuple[str, VisionTransformer] | None = None,
    epochs: Sequence[EpochAttention] = (),
) -> PageResult:
    """Writes the page.

    Args:
        file: The .html file.
        model: In eval mode, with its preprocessing.
        pictures: At least one.
        title: The model's name.
        numbers: Of more pictures than these; of these by default.
        against: The name of a second model with the same tokens, and the model.
        epochs: Of a training run, the oldest first.

    Raises:
        UserError: No picture or no head of attention, another layout in the second model, or a page above 50 MB.
    """
    check_page(model, len(pictures), against)
    images = torch.stack([shown.image for shown in pictures]).to(next(model.parameters()).device)
    if numbers is None:
        numbers = HeadMetrics(model)
        numbers.update(images)
    compared = None if against is None else compare_heads(model, against[1], images)
    means = mean_outputs(model, [images])
    blobs: list[str] = []
    shown, errors, labels, maps = [], [], [], []
    for picture, image in zip(pictures, images, strict=True):
        with torch.no_grad():
            logits = model.forward(image[None])[0]
        labels.append(int(logits.argmax()))
        maps.append(patch_maps(model, image[None], labels[-1:]))
        facts, error = _picture_facts(model, image, logits, means, blobs, None if against is None else against[1])
        through = {name: _short(maps[-1][name][0]) for name in ("rollout", "relevance")}
        shown.append({"name": picture.name, **facts, "through": through})
        errors.append(error)
    worst = {name: max(error[name] for error in errors) for name in errors[0]}
    has_head = model.config.num_classes > 0
    measured = faithfulness(model, images, labels, steps=10, maps=maps) if has_head else None
    facts = {
        "title": title,
        "layout": _layout_facts(model),
        "heads": get_attention_spec(model).num_heads,
        "reader": "class" if model.layout.num_class_tokens else "pooled",
        "target": "the predicted class" if has_head else "the length of the features",
        "numbers": numbers.records(),
        "counted": numbers.count,
        "pictures": shown,
        "error": worst,
        "trust": "Attention is not by itself an explanation." if measured is None else measured.sentence,
        "against": None if against is None or compared is None else _comparison_facts(against[0], compared),
        "epochs": _epoch_facts(epochs, blobs),
    }
    page = _filled(facts, blobs)
    if len(page) > LARGEST:
        raise _too_large(len(page), len(pictures))
    Path(file).write_bytes(page)
    return PageResult(error=worst, maps=maps, faithfulness=measured, comparison=compared)


def _too_large(size: int, pictures: int) -> UserError:
    remedy = "load the model with a smaller image_size or larger patch_size"
    if pictures > 1:
        remedy = "give fewer pictures, of a run its model and some pictures"
    return UserError(f"The page would have {size / 1e6:.0f} MB, more than {LARGEST / 1e6:.0f}: {remedy}.")


def check_page(model: VisionTransformer, pictures: int, against: tuple[str, VisionTransformer] | None) -> int:
    """Refuses what cannot be shown, before the work is done.

    Returns:
        How many epochs of a run there is room for beside the rest.

    Raises:
        UserError: As `write_page`.
    """
    if not pictures or not any(get_attention_spec(model).num_heads):
        raise UserError("A page needs at least one picture and a model with at least one head.")
    if against is not None:
        name, other = against
        if other.layout != model.layout:
            raise UserError(f"--against {name} has other tokens than the model: {other.layout}, not {model.layout}.")
        ours, theirs = model.config.in_channels, other.config.in_channels
        if ours != theirs:
            raise UserError(f"--against {name} sees pictures of {theirs} channels, the model of {ours}.")
    heads, tokens = sum(get_attention_spec(model).num_heads), model.layout.num_tokens
    width = max(attention.head_dim for attention in model.attentions)
    per_token = min(2 * width, tokens) + 2 * min(RANK, width) + 20  # as `_pack` keeps them
    size = heads * tokens * per_token * pictures * (1 if against is None else 2) * 4 // 3
    if size > 1.05 * LARGEST:
        raise _too_large(size, pictures)
    per_epoch = heads * pictures * (tokens + 4) * 4 // 3 + 20  # its name
    return max(0, int(0.95 * LARGEST) - size) // per_epoch


def _layout_facts(model: VisionTransformer) -> dict[str, Any]:
    layout = model.layout
    return {**asdict(layout), "num_tokens": layout.num_tokens, "num_prefix_tokens": layout.num_prefix_tokens}


def _picture_facts(
    model: VisionTransformer,
    image: Float[Tensor, "channels height width"],
    logits: Float[Tensor, " classes"],
    means: Sequence[Tensor],
    blobs: list[str],
    against: VisionTransformer | None,
) -> tuple[dict[str, Any], dict[str, float]]:
    """What the page shows of one picture, and the errors of its storage."""
    sections, error = _pack(model, image[None], int(logits.argmax()))
    facts: dict[str, Any] = {"src": _data_url(model, image), "blob": _store(sections, blobs)}
    if against is not None:
        theirs = renormalized_for(against, model, image[None])
        with torch.no_grad():
            wanted = int(against.forward(theirs)[0].argmax())
        others, worse = _pack(against, theirs, wanted)
        facts["other"] = _store(others, blobs)
        error = {name: max(each, worse[name]) for name, each in error.items()}
    if model.config.num_classes:
        facts |= _prediction_facts(model, image, logits, means)
    return facts, error


def _prediction_facts(
    model: VisionTransformer, image: Tensor, logits: Float[Tensor, " classes"], means: Sequence[Tensor]
) -> dict[str, Any]:
    """The classes that are most probable, and their probabilities with each head switched off."""
    names = model.class_names or [str(number) for number in range(len(logits))]
    values, classes = logits.softmax(-1).topk(min(LABELS, len(logits)))
    changes = {}
    for replacement, values_of_heads in (("zero", None), ("mean", means)):
        each = torch.cat(ablate_each_head(model, image[None], values_of_heads))[:, 0].softmax(-1)
        best = each.max(-1)
        changes[replacement] = [
            {"p": _short(probabilities[classes]), "top": names[top], "top_p": round(value, 6)}
            for probabilities, top, value in zip(each, best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    labels = [names[number] for number in classes.tolist()]
    return {"labels": labels, "probabilities": _short(values), "changes": changes}


def _comparison_facts(name: str, found: HeadComparison) -> dict[str, Any]:
    """Which head of the second model is paired with which of the first, and how far each has drifted."""
    return {
        "name": name,
        "heads": found.heads[1],
        "partner": found.partner,
        "drift": _short(torch.tensor(found.drift)),
        "same_place": None if found.same_place is None else _short(torch.tensor(found.same_place)),
    }


def _epoch_facts(epochs: Sequence[EpochAttention], blobs: list[str]) -> dict[str, Any] | None:
    if not epochs:
        return None
    levels, tops = quantize_rows(torch.stack([epoch.rows for epoch in epochs]).float())
    stored = {"maps": levels.numpy(), "tops": tops.numpy()}
    return {"names": [epoch.name for epoch in epochs], "blob": _store(stored, blobs)}


def _data_url(model: VisionTransformer, image: Float[Tensor, "channels height width"]) -> str:
    """The picture as the model sees it."""
    shown = denormalized(model.preprocessing, image).clamp(0, 1)
    pixels: UInt8[Tensor, "channels height width"] = (255 * shown).round().byte().cpu()
    array = pixels.permute(1, 2, 0).numpy()
    picture, stream = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array), BytesIO()
    kind = "png" if picture.width * picture.height <= 64 * 64 else "jpeg"
    picture.save(stream, kind, **({"quality": 90} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _filled(facts: Mapping[str, Any], blobs: Sequence[str]) -> bytes:
    """The page with its style, its code and its data in place."""
    page, style, code = (
        files("vitmha.inspection.page").joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    clean = {**facts, "numbers": for_json(facts["numbers"])}
    # "</script>" in a file's name would end the data: "<" is written as its number.
    data = json.dumps(clean, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    stored = "\n".join(f'<script type="text/plain" id="blob-{i}">{blob}</script>' for i, blob in enumerate(blobs))
    for mark, content in (("/*STYLE*/", style), ("/*CODE*/", code), ("<!--BLOBS-->", stored), ("/*FACTS*/", data)):
        page = page.replace(mark, content, 1)
    return page.encode()
