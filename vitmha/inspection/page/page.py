"""One HTML file to explore every head of a model: images, maps, metrics and ablations."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.inspection.ablation import ablate_each_head, traced_mean_outputs
from vitmha.inspection.adapters import get_attention_spec
from vitmha.inspection.compare import HeadComparison, compare_heads, renormalized_for
from vitmha.inspection.faithfulness import Faithfulness, faithfulness, traced_patch_maps
from vitmha.inspection.figures import denormalized
from vitmha.inspection.head_metrics import HeadMetrics, for_json, traced_query_rows
from vitmha.inspection.maps import head_divergences, quantize_rows
from vitmha.inspection.page.storage import RANK, pack_attention, store
from vitmha.inspection.trace import class_target, trace
from vitmha.models.vit import VisionTransformer
from vitmha.text import printable

MAX_BYTES = 50_000_000  # browsers open larger files slowly
TOP_K = 5  # classes of each prediction


@dataclass(frozen=True, kw_only=True)
class PageImage:
    """An image on the page."""

    name: str
    """File name."""
    image: Float[Tensor, "channels height width"]
    """Normalized."""


@dataclass(frozen=True, kw_only=True)
class EpochAttention:
    """Attention of the model after one epoch of training."""

    name: str
    """Label of the slider."""
    rows: Float[Tensor, "images all_heads tokens"]
    """Attention rows of every head, as `HeadMetrics.readout_attention`."""


@dataclass(frozen=True, kw_only=True)
class PageResult:
    """What was computed for a page."""

    error: dict[str, float]
    """Errors of the compact storage: `probability`, the maximum error of a weight; `variation`, the mean total
    variation distance of a row; `relevance`, the error of the relevance maps relative to their norm."""
    metrics: HeadMetrics
    """The metrics on the page."""
    rows: list[Float[Tensor, "all_heads tokens"]]
    """`HeadMetrics.readout_attention` of each image."""
    divergence: Float[Tensor, "all_heads all_heads"]
    """`head_divergence` over the images."""
    maps: list[dict[str, Float[Tensor, "1 patches"]]]
    """`patch_maps` of each image, for the predicted class."""
    faithfulness: Faithfulness | None
    """None for a model without a classification head."""
    comparison: HeadComparison | None
    """Comparison with the second model, if there is one."""


def write_page(
    file: str | Path,
    model: VisionTransformer,
    images: Sequence[PageImage],
    *,
    title: str,
    metrics: HeadMetrics | None = None,
    compare_to: tuple[str, VisionTransformer] | None = None,
    epochs: Sequence[EpochAttention] = (),
) -> PageResult:
    """Writes the page.

    Args:
        file: The .html file.
        model: In eval mode, with its preprocessing.
        images: At least one.
        title: Name of the model.
        metrics: Metrics over more images than these; default: over these.
        compare_to: The name of a second model with the same tokens, and the model.
        epochs: Attention during a training run, first epoch first.

    Raises:
        UserError: No image or no attention head, another layout in the second model, or a page above 50 MB.
    """
    check_page(model, len(images), compare_to)
    batch = torch.stack([image.image for image in images]).to(next(model.parameters()).device)
    comparison = None if compare_to is None else compare_heads(model, compare_to[1], batch)
    of_images = HeadMetrics(model)
    analyses = [_analyze_image(model, image, of_images) for image in batch]
    metrics = metrics or of_images
    blobs: list[str] = []
    image_facts, errors = _image_facts(model, images, batch, analyses, compare_to, blobs)
    worst = {name: max(error[name] for error in errors) for name in errors[0]}
    has_head = model.config.num_classes > 0
    labels, maps = [int(one.logits.argmax()) for one in analyses], [one.maps for one in analyses]
    measured = faithfulness(model, batch, labels, steps=10, maps=maps) if has_head else None
    page_facts = {
        "title": printable(title),
        "layout": _layout_facts(model),
        "heads": get_attention_spec(model).num_heads,
        "readout": "class" if model.layout.num_class_tokens else "pooled",
        "target": "the predicted class" if has_head else "the norm of the features",
        "metrics": metrics.records(),
        "num_images": metrics.count,
        "images": image_facts,
        "error": worst,
        "trust": "Attention is not by itself an explanation." if measured is None else measured.summary,
        "comparison": _comparison_facts(compare_to[0], comparison) if compare_to and comparison else None,
        "epochs": _epoch_facts(epochs, blobs),
    }
    page = _render(page_facts, blobs)
    if len(page) > MAX_BYTES:
        raise _too_large(len(page), len(images))
    with atomic_path(file) as partial:
        partial.write_bytes(page)
    sampled = torch.cat([one.query_rows for one in analyses])
    return PageResult(
        error=worst,
        metrics=metrics,
        rows=[one.rows for one in analyses],
        divergence=head_divergences(sampled, sampled),
        maps=maps,
        faithfulness=measured,
        comparison=comparison,
    )


@dataclass(frozen=True, kw_only=True)
class _ImageAnalysis:
    """What one trace of the model gives for the page and the files next to it."""

    logits: Float[Tensor, " classes"]
    rows: Float[Tensor, "all_heads tokens"]
    query_rows: Float[Tensor, "1 all_heads rows tokens"]
    maps: dict[str, Float[Tensor, "1 patches"]]
    mean_outputs: list[Float[Tensor, "_heads _head_dim"]]
    sections: dict[str, np.ndarray]
    error: dict[str, float]


def _analyze_image(
    model: VisionTransformer, image: Float[Tensor, "channels height width"], metrics: HeadMetrics
) -> _ImageAnalysis:
    """Runs the model once over an image; only ablation and faithfulness, which change the input, run it again."""
    traced = trace(model, image[None], class_target(model))
    metrics.add(traced)
    sections, error = pack_attention(model, traced)
    return _ImageAnalysis(
        logits=traced.logits[0],
        rows=metrics.readout_attention[0],
        query_rows=traced_query_rows(traced),
        maps=traced_patch_maps(model, traced),
        mean_outputs=traced_mean_outputs(model, traced),
        sections=sections,
        error=error,
    )


def _too_large(size: int, num_images: int) -> UserError:
    remedy = "load the model with a smaller image_size or larger patch_size"
    if num_images > 1:
        remedy = "pass fewer images (instead of a run directory: the model of the run and some images)"
    return UserError(f"The page would have {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB: {remedy}.")


def check_page(model: VisionTransformer, num_images: int, compare_to: tuple[str, VisionTransformer] | None) -> int:
    """Checks that a page can be written, before the work is done.

    Returns:
        How many epochs of a run fit on the page as well.

    Raises:
        UserError: As in `write_page`.
    """
    if not num_images or not any(get_attention_spec(model).num_heads):
        raise UserError("A page needs at least one image and a model with at least one attention head.")
    if compare_to is not None:
        name, other = compare_to
        if other.layout != model.layout:
            raise UserError(
                f"compare_to must have the tokens of the model: expected {model.layout}, got {other.layout} of {name}."
            )
        channels, other_channels = model.config.in_channels, other.config.in_channels
        if channels != other_channels:
            raise UserError(
                f"compare_to must have the input channels of the model: expected {channels}, got {other_channels} of "
                f"{name}."
            )
    heads, tokens = sum(get_attention_spec(model).num_heads), model.layout.num_tokens
    width = max(attention.head_dim for attention in model.attentions)
    per_token = min(2 * width, tokens) + 2 * min(RANK, width) + 20  # as `pack_attention` stores them
    size = heads * tokens * per_token * num_images * (1 if compare_to is None else 2) * 4 // 3
    if size > 1.05 * MAX_BYTES:
        raise _too_large(size, num_images)
    per_epoch = heads * num_images * (tokens + 4) * 4 // 3 + 20  # its name
    return max(0, int(0.95 * MAX_BYTES) - size) // per_epoch


def _layout_facts(model: VisionTransformer) -> dict[str, Any]:
    layout = model.layout
    return {**asdict(layout), "num_tokens": layout.num_tokens, "num_prefix_tokens": layout.num_prefix_tokens}


def _image_facts(
    model: VisionTransformer,
    images: Sequence[PageImage],
    batch: Float[Tensor, "images channels height width"],
    analyses: Sequence[_ImageAnalysis],
    compare_to: tuple[str, VisionTransformer] | None,
    blobs: list[str],
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Returns the data of each image, and the errors of everything that was stored."""
    means = [torch.stack(outputs).mean(0) for outputs in zip(*(one.mean_outputs for one in analyses), strict=True)]
    image_facts, errors = [], [one.error for one in analyses]
    for page_image, image, analysis in zip(images, batch, analyses, strict=True):
        facts: dict[str, Any] = {"name": printable(page_image.name), "src": _data_url(model, image)}
        facts["blob"] = store(analysis.sections, blobs)
        facts["all_layers"] = {name: _short(analysis.maps[name][0]) for name in ("rollout", "relevance")}
        if model.config.num_classes:
            facts |= _prediction_facts(model, image, analysis.logits, means)
        if compare_to is not None:
            facts["other"], error = _pack_other(model, compare_to[1], image, blobs)
            errors.append(error)
        image_facts.append(facts)
    return image_facts, errors


def _pack_other(
    model: VisionTransformer, other: VisionTransformer, image: Float[Tensor, "channels height width"], blobs: list[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Stores the attention of the second model; returns where it is, and the errors of the storage."""
    renormalized = renormalized_for(other, model, image[None])
    sections, error = pack_attention(other, trace(other, renormalized, class_target(other)))
    return store(sections, blobs), error


def _prediction_facts(
    model: VisionTransformer, image: Tensor, logits: Float[Tensor, " classes"], means: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns the most probable classes, and their probabilities with each head ablated."""
    names = [printable(name) for name in model.class_names or map(str, range(len(logits)))]
    values, classes = logits.softmax(-1).topk(min(TOP_K, len(logits)))
    ablations = {}
    for kind, replacement in (("zero", None), ("mean", means)):
        ablated = torch.cat(ablate_each_head(model, image[None], replacement))[:, 0].softmax(-1)
        best = ablated.max(-1)
        ablations[kind] = [
            {"p": _short(probabilities[classes]), "top": names[top], "top_p": round(value, 6)}
            for probabilities, top, value in zip(ablated, best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    labels = [names[index] for index in classes.tolist()]
    return {"labels": labels, "probabilities": _short(values), "ablations": ablations}


def _comparison_facts(name: str, comparison: HeadComparison) -> dict[str, Any]:
    """Returns which head of the second model is paired with each of the first, and their divergence."""
    same_index = comparison.same_index
    return {
        "name": printable(name),
        "heads": comparison.heads[1],
        "partner": comparison.partner,
        "drift": _short(torch.tensor(comparison.drift)),
        "same_index": None if same_index is None else _short(torch.tensor(same_index)),
    }


def _epoch_facts(epochs: Sequence[EpochAttention], blobs: list[str]) -> dict[str, Any] | None:
    if not epochs:
        return None
    levels, maxima = quantize_rows(torch.stack([epoch.rows for epoch in epochs]).float())
    sections = {"maps": levels.numpy(), "maxima": maxima.numpy()}
    return {"names": [printable(epoch.name) for epoch in epochs], "blob": store(sections, blobs)}


def _data_url(model: VisionTransformer, image: Float[Tensor, "channels height width"]) -> str:
    """Returns the image at the model's input size as a data URL."""
    unit = denormalized(model.preprocessing, image).clamp(0, 1)
    pixels: UInt8[Tensor, "channels height width"] = (255 * unit).round().byte().cpu()
    array = pixels.permute(1, 2, 0).numpy()
    encoded, stream = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array), BytesIO()
    suffix = "png" if encoded.width * encoded.height <= 64 * 64 else "jpeg"
    encoded.save(stream, suffix, **({"quality": 90} if suffix == "jpeg" else {}))
    return f"data:image/{suffix};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _render(facts: Mapping[str, Any], blobs: Sequence[str]) -> bytes:
    """Fills the template with the style, the code and the data."""
    directory = files("vitmha.inspection.page")
    page, style, decode, code = (
        directory.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "decode.js", "page.js")
    )
    # "</script>" in a file name would end the data: "<" is escaped.
    data = {**facts, "metrics": for_json(facts["metrics"])}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    stored = "\n".join(f'<script type="text/plain" id="blob-{i}">{blob}</script>' for i, blob in enumerate(blobs))
    for mark, content in (
        ("/*STYLE*/", style),
        ("/*CODE*/", decode + code),
        ("<!--BLOBS-->", stored),
        ("/*FACTS*/", text),
    ):
        page = page.replace(mark, content, 1)
    return page.encode()
