"""The model card of a model directory, and the summary of training that fills it."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from vitmha.cli import main
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder, Model
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.model_card import GENERATED, model_card
from vitmha.weights.save import save_model
from vitmha.weights.shipped import SHIPPED, list_models
from vitmha.weights.training_summary import EvaluationSummary, TrainingSummary, hub_id, read_summary

RESULT = EvaluationSummary(accuracy=0.8125, num_images=1600, split="test", dataset="CIFAR10")
SUMMARY = TrainingSummary(
    name="small",
    license="mit",
    dataset="CIFAR10",
    num_train_images=50_000,
    hyperparameters={"optimizer": "muon", "data_options": {"hflip": 0.5}, "distillation": {"alpha": 0.3}, "seed": 7},
    command="vitmha fit --config cifar10",
    pretrained="timm:vit_tiny_patch16_224",
    result=RESULT,
    notes=("The weights are those of the last step.",),
)


def small_model(channels: int = 3, num_classes: int = 3, **fields: Any) -> VisionTransformer:
    sizes = {"image_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_dim": 48}
    config = ViTConfig(**{**sizes, **fields}, in_channels=channels, num_classes=num_classes)
    model = VisionTransformer(config).eval()
    model.class_names = ("ant", "b_e|e", "<cat>")[:num_classes] or None
    mean = (0.5,) * channels
    model.preprocessing = Preprocessing(image_size=(16, 16), mean=mean, std=mean, crop_pct=0.875)
    return model


def without_preprocessing(model: Model) -> Model:
    model.preprocessing = model.class_names = None
    return model


def small_decoder() -> EncoderDecoder:
    model = EncoderDecoder(small_model().config, DecoderConfig(max_length=2, num_heads=3)).eval()
    model.class_names = ("ant", "bee", "cat")
    return model


def run_code(card: str) -> list[str]:
    """Runs the code of a card's section on use in the working directory, and returns its languages."""
    use = card.partition("## Use\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)\n```", use, re.DOTALL)
    for language, code in blocks:
        if language == "sh":
            main(shlex.split(code)[1:])
        else:
            exec(code, {})
    return [language for language, _ in blocks]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with an image."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (30, 20), "red").save("image.jpg")


@pytest.mark.parametrize(
    ("build", "format_", "languages"),
    [
        (small_model, "vitmha", "python sh python sh python"),
        (small_model, "timm", "python python sh python"),
        (small_model, "hf", "python sh python python"),
        (lambda: small_model(channels=1), "vitmha", "python sh python sh python"),
        (lambda: small_model(pos_embed="rope"), "vitmha", "python"),
        (lambda: small_model(num_classes=0), "vitmha", "python sh python"),
        (lambda: without_preprocessing(small_model()), "vitmha", "python sh python sh python"),
        (small_decoder, "vitmha", "python"),
    ],
    ids=["vitmha", "timm", "hf", "grayscale", "rope", "headless", "without preprocessing", "encoder-decoder"],
)
@pytest.mark.usefixtures("here")
def test_the_code_of_a_card_runs(build: Any, format_: Any, languages: str) -> None:
    directory = 'it\'s "a" model'
    save_model(build(), directory, format_)
    assert run_code(Path(directory, "README.md").read_text()) == languages.split()


@pytest.mark.usefixtures("here")
def test_a_card_says_why_a_package_cannot_load_the_model() -> None:
    card = model_card(small_model(pos_embed="rope"), TrainingSummary(), "model")
    assert "\ntimm cannot load this model: timm cannot represent pos_embed 'rope'.\n" in card
    assert "\ntransformers cannot load this model: Hugging Face cannot represent pos_embed 'rope'.\n" in card


def test_the_front_matter_is_that_of_the_hub() -> None:
    card = ModelCard(model_card(small_model(), SUMMARY, "runs/x/model"))
    assert card.data.to_dict() == {
        "license": "mit",
        "library_name": "vitmha",
        "pipeline_tag": "image-classification",
        "tags": ["vitmha", "vision-transformer"],
        "base_model": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "datasets": ["uoft-cs/cifar10"],
        "metrics": ["accuracy"],
        "model-index": [
            {
                "name": "small",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {
                            "name": "CIFAR10",
                            "type": "uoft-cs/cifar10",
                            "split": "test",
                            "args": {"num_images": 1600},
                        },
                        "metrics": [{"type": "accuracy", "value": 0.8125, "name": "top-1 accuracy"}],
                    }
                ],
            }
        ],
    }
    assert ModelCard(model_card(small_model(), TrainingSummary(), "m", "timm")).data.library_name == "timm"
    assert ModelCard(model_card(small_model(), TrainingSummary(), "m", "hf")).data.library_name == "transformers"
    assert ModelCard(model_card(small_decoder(), SUMMARY, "m")).data.pipeline_tag == "image-to-text"
    headless = ModelCard(model_card(small_model(num_classes=0), TrainingSummary(), "m")).data.to_dict()
    assert headless == {
        "library_name": "vitmha",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["vitmha", "vision-transformer"],
    }


def test_the_text_holds_what_is_known_and_nothing_else() -> None:
    model = small_model()
    card, cost = model_card(model, SUMMARY, "runs/x/model"), total_cost(layer_costs(model))
    for line in (
        "# small",
        f"| parameters | {cost.parameters:,} |",
        f"| multiply-accumulate operations (MACs) per image | {cost.macs:,} |",
        r"Classes: ant, b_e\|e, \<cat\>.",
        "Data: [CIFAR10](https://huggingface.co/datasets/uoft-cs/cifar10), 50,000 training images.",
        "vitmha fit --config cifar10",
        "| hflip | 0.5 |",
        "| distillation.alpha | 0.3 |",
        "The weights are those of the last step.",
        "81.25 % top-1 accuracy on 1,600 test images of CIFAR10 (one run, seed 7).",
    ):
        assert f"\n{line}\n" in card
    assert "resized until 18.2857 x 18.2857 pixels just fit (bicubic, with antialiasing)" in card
    unknown = model_card(without_preprocessing(small_model()), TrainingSummary(), "runs/x/model")
    titles = re.findall("^#+ (.*)", unknown, re.MULTILINE)
    assert titles == ["model", "Use", "Architecture", "Limits"]
    assert not re.search("None|nan|unknown", unknown)


def test_pruned_heads_are_counted_by_block() -> None:
    model = small_model()
    model.attentions[1].prune_heads({0, 2})
    assert "\n| attention heads after pruning, by block | 3 1 |\n" in model_card(model, SUMMARY, "model")


@pytest.mark.parametrize("name", list_models())
def test_the_card_of_a_bundled_model_is_what_the_code_writes(name: str) -> None:
    written = model_card(load_model(name), read_summary(name), location=name)
    assert (SHIPPED / name / "README.md").read_text() == written, "run python scripts/write_model_cards.py"
    assert ModelCard(written).data.license == "apache-2.0"


def test_a_card_that_was_edited_is_never_replaced_but_another_is(tmp_path: Path) -> None:
    save_model(small_model(), tmp_path, summary=SUMMARY)
    card = tmp_path / "README.md"
    assert read_summary(tmp_path) == SUMMARY
    card.write_text(card.read_text().replace(GENERATED, "").replace("# small", "# mine"))
    save_model(small_model(depth=1), tmp_path)
    assert "# mine" in card.read_text()
    assert not (tmp_path / "training_summary.json").exists()  # it was that of the other model
    card.write_text(GENERATED)
    save_model(small_model(depth=1), tmp_path)
    assert "| blocks | 1 |" in card.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is corrupt: "),
        ('{"epochs": 3}', r"is not valid: unknown field 'epochs'\. Correct the file or remove it\."),
        ('{"name": 3}', r"is not valid: name must be a string or null, got 3\."),
        ('{"hyperparameters": []}', r"is not valid: hyperparameters must be an object, got \[\]\."),
        ('{"result": {"accuracy": "high"}}', r"is not valid: accuracy must be a number, got 'high'\."),
        ('{"result": {"metric": "accuracy"}}', "is not valid: .*accuracy"),
        ('{"result": []}', "is not valid: expected an object"),
    ],
)
def test_a_summary_that_is_not_valid_is_refused_with_its_file(tmp_path: Path, content: str, message: str) -> None:
    save_model(small_model(), tmp_path)
    (tmp_path / "training_summary.json").write_text(content)
    with pytest.raises(ValueError, match=rf"training_summary\.json {message}"):
        read_summary(tmp_path)
    load_model(tmp_path)  # does not read it


def test_a_result_belongs_to_the_weights_that_were_evaluated() -> None:
    assert SUMMARY.changed("`x`.", keeps_result=True) == replace(SUMMARY, changes=("`x`.",))
    changed = SUMMARY.changed("`x`.")
    assert changed.result is None
    assert changed.changes == ("`x`. Before that, it had 81.25 % top-1 accuracy on 1,600 test images of CIFAR10.",)
    assert SUMMARY.changed("`x`.", result=replace(RESULT, accuracy=0.5)).result.accuracy == 0.5
    assert "\n1. `x`. Before that, " in model_card(small_model(), changed, "model")


@pytest.mark.usefixtures("here")
def test_facts_survive_conversions() -> None:
    save_model(small_model(), "model", summary=SUMMARY)
    main(["convert", "--model", "model", "--output", "timm", "--format", "timm"])
    main(["convert", "--model", "timm", "--output", "hf", "--format", "hf"])
    main(["convert", "--model", "hf", "--output", "half", "--dtype", "float16"])
    calls = [
        f"`vitmha convert --model {a} --output {b}" for a, b in (("model", "timm"), ("timm", "hf"), ("hf", "half"))
    ]
    hf, half = read_summary("hf"), read_summary("half")
    assert (hf.result, hf.hyperparameters, hf.license) == (RESULT, SUMMARY.hyperparameters, "mit")
    assert hf.changes == (f"{calls[0]} --format timm`.", f"{calls[1]} --format hf`.")
    assert half.result is None
    assert half.changes[-1].startswith(f"{calls[2]} --dtype float16`. Before that, it had 81.25 %")
    assert ModelCard.load("hf/README.md").data.library_name == "transformers"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:google/vit@main", "google/vit"),
        ("timm:hf-hub:timm/x", "timm/x"),
        ("timm:vit_tiny_patch16_224", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("torchvision:vit_b_16", None),
        ("runs/x/version_0/model", None),
    ],
)
def test_the_identifier_on_the_hub(source: str, expected: str | None) -> None:
    assert hub_id(source) == expected


def test_the_license_comes_from_timm_or_the_card_of_the_source(tmp_path: Path) -> None:
    assert read_summary("timm:vit_base_patch16_224.mae").license == "cc-by-nc-4.0"
    save_model(small_model(), tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nTheirs.")
    assert read_summary(tmp_path) == TrainingSummary(license="mit")
    (tmp_path / "README.md").write_text("No front matter.")
    assert read_summary(tmp_path) == TrainingSummary()


def test_a_checkpoint_knows_its_hyperparameters(tmp_path: Path) -> None:
    run = {"embed_dim": 24, "mean": (0.5,), "data": "CIFAR10", "num_train_images": 9, "seed": 3, "precision": None}
    torch.save({"state_dict": {}, "run": run}, tmp_path / "last.ckpt")
    expected = {"data": "CIFAR10", "seed": 3}
    assert read_summary(tmp_path / "last.ckpt") == TrainingSummary(
        dataset="CIFAR10", num_train_images=9, hyperparameters=expected
    )


def test_the_summary_is_plain_json(tmp_path: Path) -> None:
    save_model(small_model(), tmp_path, summary=SUMMARY)
    written = json.loads((tmp_path / "training_summary.json").read_text())
    assert "base_model" not in written
    assert written["result"]["num_images"] == 1600
