"""The model card: `README.md` of a model directory, in the form of the Hugging Face hub."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from vitmha.errors import UserError, printable
from vitmha.models.encoder_decoder import EncoderDecoder, Model, get_encoder
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert.hugging_face import hugging_face_config
from vitmha.weights.convert.timm import timm_config
from vitmha.weights.training_summary import TrainingSummary, hub_id

CARD_FILE = "README.md"
Format = Literal["vitmha", "timm", "hf"]
LIBRARIES: Mapping[Format, str] = {"vitmha": "vitmha", "timm": "timm", "hf": "transformers"}
# Identifiers on the Hugging Face hub.
HUB_DATASETS = {
    "CIFAR10": "uoft-cs/cifar10",
    "CIFAR100": "uoft-cs/cifar100",
    "FashionMNIST": "zalando-datasets/fashion_mnist",
}
GENERATED = "<!-- Written by vitmha. Remove this line from a card that you edit: vitmha then never replaces it. -->"
MAX_CLASSES = 20  # that are listed


def model_card(model: Model, summary: TrainingSummary, location: str, format: Format = "vitmha") -> str:  # noqa: A002
    """Writes the model card of a model directory; what is not known is left out.

    Args:
        model: Its architecture, class names and preprocessing.
        summary: What is known of its training.
        location: Where the card says that the model is: a directory, hf:OWNER/NAME, or the name of a bundled model.
        format: Of the model directory; see `save_model`.

    Example:
        >>> from vitmha import load_model
        >>> from vitmha.weights.training_summary import read_summary
        >>> card = model_card(load_model("cifar10"), read_summary("cifar10"), "cifar10")
        >>> "90.50 % top-1 accuracy on 10,000 test images" in card
        True
    """
    repo = hub_id(location) if location.startswith("hf:") else None
    name = Path(repo or location).name if repo or not summary.name else summary.name
    sections = {
        "Use": _use(model, location, format),
        "Architecture": _architecture(model),
        "Preprocessing": _preprocessing(model),
        "Training": _training(summary),
        "Evaluation": _evaluation(summary),
        "Changes after training": [f"{i}. {change}" for i, change in enumerate(summary.changes, start=1)],
        "Limits": _limits(model, summary),
    }
    parts = [f"---\n{_front_matter(model, summary, name, repo, format)}\n---", GENERATED, f"# {_escape(name)}"]
    parts.append(_introduction(model, summary))
    for title, paragraphs in sections.items():
        if paragraphs:
            parts += [f"## {title}", *paragraphs]
    return "\n\n".join(parts) + "\n"


def is_generated(card: str) -> bool:
    """Whether a card was written by `model_card` and not edited since, as far as it says."""
    return GENERATED in card


def _front_matter(
    model: Model,
    summary: TrainingSummary,
    name: str,
    repo: str | None,
    format: Format,  # noqa: A002
) -> str:
    """The metadata that the hub reads: https://huggingface.co/docs/hub/model-cards."""
    from huggingface_hub import EvalResult, ModelCardData  # imported here since it is needed for cards only

    is_sequence_model, result, task = isinstance(model, EncoderDecoder), summary.result, _task(model)
    base_model = summary.base_model or hub_id(summary.pretrained or "")
    dataset, hub_dataset = summary.dataset, HUB_DATASETS.get(summary.dataset or "")
    results = None
    if result is not None:
        evaluated = result.dataset or dataset or "unknown"
        results = EvalResult(
            task_type=task,
            dataset_type=HUB_DATASETS.get(evaluated, evaluated),
            dataset_name=evaluated,
            dataset_split=result.split,
            dataset_args={"num_images": result.num_images} if result.num_images else None,
            metric_type=result.metric,
            metric_name="exact match" if is_sequence_model else "top-1 accuracy",
            metric_value=round(result.accuracy, 6),
        )
    data = ModelCardData(
        license=summary.license,
        library_name=LIBRARIES[format],
        pipeline_tag=task,
        tags=["vitmha", "vision-transformer"],
        base_model=base_model if base_model != repo else None,
        datasets=[hub_dataset] if hub_dataset else None,
        metrics=[result.metric] if result else None,
        model_name=name,
        eval_results=[results] if results else None,
    )
    if results is None:
        del data.model_name  # it is that of the model-index
    return data.to_yaml()


def _task(model: Model) -> str:
    if isinstance(model, EncoderDecoder):
        return "image-to-text"
    return "image-classification" if model.config.num_classes else "image-feature-extraction"


def _introduction(model: Model, summary: TrainingSummary) -> str:
    config, (height, width) = model.config, get_encoder(model).layout.image_size
    color = {1: "grayscale ", 3: "RGB "}.get(config.in_channels, "")
    does = f"classifies {color}images of {height} x {width} pixels into {config.num_classes} classes"
    if isinstance(model, EncoderDecoder):
        does = f"reads {color}images of {height} x {width} pixels as sequences of {config.num_classes} classes"
    elif not config.num_classes:
        does = f"computes features of {color}images of {height} x {width} pixels"
    source = f" It was trained from the weights of `{summary.pretrained}`." if summary.pretrained else ""
    reached = f" It has {_escape(str(summary.result))}." if summary.result else ""
    decoder = " with a decoder" if isinstance(model, EncoderDecoder) else ""
    return f"A Vision Transformer{decoder} that {does}.{source}{reached}"


def _use(model: Model, location: str, format: Format) -> list[str]:  # noqa: A002
    """How to load the model with each package, as code that runs; for a package that cannot load it, the reason."""
    paragraphs = ["With vitmha:", _code(_vitmha_code(model, location))]
    if isinstance(model, EncoderDecoder):
        return paragraphs
    packages: tuple[tuple[Format, Any, Any], ...] = (
        ("timm", timm_config, _timm_code),
        ("hf", hugging_face_config, _transformers_code),
    )
    for package, check, code in packages:
        name = LIBRARIES[package]
        try:
            check(model)
        except UserError as error:
            paragraphs.append(f"{name} cannot load this model: {_escape(str(error))}")
            continue
        if format == package:
            paragraphs += [f"With {name}:", _code(code(model, location))]
        else:
            converted = f"for_{name}"
            command = f"vitmha convert --model {shlex.quote(location)} --output {converted} --format {package}"
            paragraphs += [f"With {name}, after converting it:", _code(command, "sh")]
            paragraphs.append(_code(code(model, converted)))
    return paragraphs


def _vitmha_code(model: Model, location: str) -> str:
    channels, (height, width) = model.config.in_channels, get_encoder(model).layout.image_size
    random = f"torch.randn(1, {channels}, {height}, {width})"
    load = f"import torch\nfrom vitmha import load_model\n\nmodel = load_model({_quoted(location)})\n"
    if isinstance(model, EncoderDecoder):
        return f"{load}images = {random}  # normalized as below\nsequences, scores = model.generate(images)"
    if model.preprocessing is None:
        return f"{load}output = model({random})"
    classify = f"from vitmha import Classifier\n\nclassifier = Classifier({_quoted(location)})\n"
    if not model.config.num_classes:
        return f'{classify}[prediction] = classifier("image.jpg", embeddings=True)\nprint(prediction.embedding.shape)'
    return f'{classify}[prediction] = classifier("image.jpg")\nprint(prediction.labels, prediction.probabilities)'


def _timm_code(model: VisionTransformer, location: str) -> str:
    is_on_hub = location.startswith("hf:")
    source = f"hf-hub:{location.removeprefix('hf:')}" if is_on_hub else f"local-dir:{location}"
    lines = ["import timm", "import torch", "from PIL import Image", ""]
    lines.append(f"model = timm.create_model({_quoted(source)}, pretrained=True).eval()")
    if model.preprocessing is None:
        lines.remove("from PIL import Image")
        channels, (height, width) = model.config.in_channels, model.layout.image_size
        return "\n".join([*lines, f"output = model(torch.randn(1, {channels}, {height}, {width}))"])
    mode = "L" if model.config.in_channels == 1 else "RGB"
    lines += [
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        f'image = Image.open("image.jpg").convert("{mode}")',
        "with torch.no_grad():",
        "    output = model(transform(image)[None])",
    ]
    return "\n".join(lines)


def _transformers_code(model: VisionTransformer, location: str) -> str:
    source = location.removeprefix("hf:")
    lines = ["import torch", "from transformers import AutoModelForImageClassification", ""]
    lines.append(f"model = AutoModelForImageClassification.from_pretrained({_quoted(source)}).eval()")
    if model.preprocessing is None or model.config.in_channels != 3:  # its image processors expect RGB
        channels, (height, width) = model.config.in_channels, model.layout.image_size
        images = f"images = torch.randn(1, {channels}, {height}, {width})"
        return "\n".join([*lines, f"{images}  # preprocessed as below", "logits = model(images).logits"])
    lines[1:2] = [
        "from PIL import Image",
        "from transformers import AutoImageProcessor, AutoModelForImageClassification",
    ]
    lines += [
        f"processor = AutoImageProcessor.from_pretrained({_quoted(source)})",
        'inputs = processor(Image.open("image.jpg").convert("RGB"), return_tensors="pt")',
        "with torch.no_grad():",
        "    logits = model(**inputs).logits",
        "print(model.config.id2label[logits.argmax().item()])",
    ]
    return "\n".join(lines)


def _architecture(model: Model) -> list[str]:
    encoder, cost = get_encoder(model), total_cost(layer_costs(model))
    config, layout = model.config, encoder.layout
    heads = [attention.num_heads for attention in encoder.attentions]
    is_pruned = heads != [config.num_heads] * config.depth
    rows = {
        "parameters": f"{cost.parameters:,}",
        "multiply-accumulate operations (MACs) per image": f"{cost.macs:,}",
        "blocks": config.depth,
        "width": config.embed_dim,
        "attention heads per block": config.num_heads,
        "attention heads after pruning, by block": " ".join(map(str, heads)) if is_pruned else None,
        "key/value heads per block": config.num_kv_heads,
        "hidden width of the MLP": config.mlp_dim or 4 * config.embed_dim,
        "patch size in pixels": "{} x {}".format(*layout.patch_size),
        "tokens": layout.num_tokens,
        "position embeddings": config.pos_embed,
        "pooling": config.pool,
    }
    if isinstance(model, EncoderDecoder):
        rows |= {"blocks of the decoder": model.decoder.depth, "longest sequence": model.decoder.max_length}
    return [_table(rows), *_classes(model)]


def _classes(model: Model) -> Iterator[str]:
    if model.class_names:
        names = ", ".join(map(_escape, model.class_names[:MAX_CLASSES]))
        more = f" and {len(model.class_names) - MAX_CLASSES} more (`config.json` has all)"
        yield f"Classes: {names}{more if len(model.class_names) > MAX_CLASSES else ''}."


def _preprocessing(model: Model) -> list[str]:
    p = model.preprocessing
    if p is None:
        return []
    height, width = p.image_size
    if p.crop_mode == "squash":
        resize = f"resized to {round(height / p.crop_pct)} x {round(width / p.crop_pct)} pixels"
    else:
        resize = f"resized until {height / p.crop_pct:g} x {width / p.crop_pct:g} pixels just fit"
    mode = "grayscale" if len(p.mean) == 1 else "RGB"
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (p.mean, p.std))
    return [
        f"An image is made upright by its EXIF orientation and converted to {mode}, {resize} ({p.interpolation}, with "
        f"antialiasing), and cropped to the center of {height} x {width} pixels. Its values are divided by 255, then "
        f"the mean ({mean}) is subtracted and the result divided by the standard deviation ({std})."
    ]


def _training(summary: TrainingSummary) -> list[str]:
    paragraphs = []
    if summary.dataset:
        hub = HUB_DATASETS.get(summary.dataset)
        name = f"[{summary.dataset}](https://huggingface.co/datasets/{hub})" if hub else _escape(summary.dataset)
        count = f", {summary.num_train_images:,} training images" if summary.num_train_images else ""
        paragraphs.append(f"Data: {name}{count}.")
    if summary.command:
        paragraphs += ["Command:", _code(summary.command, "sh")]
    if summary.hyperparameters:
        rows = dict(_flat(summary.hyperparameters))
        paragraphs.append(_table({name: value for name, value in rows.items() if value != summary.dataset}))
    return [*paragraphs, *summary.notes]


def _evaluation(summary: TrainingSummary) -> list[str]:
    if summary.result is None:
        return []
    seed = summary.hyperparameters.get("seed")
    run = "" if seed is None else f" (one run, seed {seed})"
    return [f"{_escape(str(summary.result))}{run}."]


def _limits(model: Model, summary: TrainingSummary) -> list[str]:
    (height, width), limits = get_encoder(model).layout.image_size, []
    limits.append(
        f"- Images are resized to {height} x {width} pixels: what cannot be seen at that size cannot be recognized."
    )
    if model.config.num_classes and not isinstance(model, EncoderDecoder):
        limits.append("- Every image gets one of the classes, also an image that shows none of them.")
    tested = "on other data than that of the evaluation above" if summary.result else "on any data"
    limits.append(f"- vitmha has no record that these weights were tested {tested}.")
    return ["\n".join(limits)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested dictionaries, by names such as distillation.type."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, "" if name == "data_options" else f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _table(rows: Mapping[str, Any]) -> str:
    """A table of the rows whose value is known."""
    known = {name: value for name, value in rows.items() if value is not None}
    lines = [f"| {_escape(name)} | {_escape(_plain(value))} |" for name, value in known.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _quoted(text: str) -> str:
    """A string as Python code, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _code(text: str, language: str = "python") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, in a table too: names of classes and directories may be anything."""
    return re.sub(r"[\\`*\[\]<>|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", printable(text))
