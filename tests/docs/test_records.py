"""docs/reference/records.md lists every field of every format."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitmha import create_model, save_model
from vitmha.cli import main
from vitmha.cli.evaluate import COLUMNS
from vitmha.data.fashion_mnist import FASHION_MNIST_CLASSES
from vitmha.data.labeled import real_labels
from vitmha.images import ImageBytes, Preprocessing
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.evaluation import LabeledEvaluation
from vitmha.inference.records import RecordWriter, to_record

TEXT = (Path(__file__).parents[2] / "docs/reference/records.md").read_text()


def listed(begin: str) -> set[str]:
    """The names in the first column of the table that follows a line of the page."""
    table = TEXT.split(f"\n{begin}", 1)[1].split("\n|---", 1)[1].split("\n\n", 1)[0]
    return {name for cell in re.findall(r"^\| (.+?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", cell)}


def test_every_field_of_a_prediction_is_listed() -> None:
    everything = {"labels": ("a",), "probabilities": (1.0,), "all_probabilities": torch.ones(1)}
    predictions = [{}, everything, {"embedding": torch.ones(2)}, {"error": "corrupt"}]
    records = [to_record(Prediction(path="x.jpg", **fields), attention="y.png") for fields in predictions]
    assert listed("## Fields of a prediction") == set().union(*records) == set(Prediction.__dataclass_fields__)


def test_every_column_of_the_csv_is_listed() -> None:
    def header(num_labels: int, **vectors: list[str]) -> list[str]:
        return RecordWriter("csv", None, resume=False, num_labels=num_labels, vectors=vectors).header

    columns = {*header(2, all_probabilities=["probability of CLASS"])}
    columns |= {*header(0, embedding=["embedding_0", "embedding_1"])}
    assert listed("## CSV") - {"--top-k"} == columns


def test_every_field_of_an_evaluation_is_listed(tmp_path: Path) -> None:
    evaluation = LabeledEvaluation([str(index) for index in range(1000)])
    images = (f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 9))
    image = next(image for image in images if real_labels(image))  # some have none
    evaluation.update(Prediction(path=image, labels=("0",), all_probabilities=torch.eye(1000)[0]), label=0)
    evaluation.write(tmp_path)
    assert listed("| `metrics.json`") == set(json.loads((tmp_path / "metrics.json").read_text()))
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.json", *listed("Its numbers are rounded")}
    [columns] = re.findall(r"^\| `per_class.csv` \| (.+?);", TEXT, re.M)
    assert (tmp_path / "per_class.csv").read_text().startswith(columns.replace("`", "").replace(", ", ",") + "\n")
    assert listed("### Predictions") == set(COLUMNS)


def test_every_field_of_a_response_is_listed() -> None:
    pytest.importorskip("litserve")
    from vitmha.inference.server import ClassifierAPI

    api = ClassifierAPI("fashion-mnist", max_batch_size=2)
    api.setup("cpu")
    png = (Path(__file__).parents[2] / "docs/images/page.png").read_bytes()
    image, upload = ImageBytes(png, "x.png"), {"top_k": 2, "attention": True}
    [prediction] = Classifier("fashion-mnist").classify([image], attention=True)
    responses = [api._respond(upload, image, each) for each in (prediction, Prediction(path="x", error="corrupt"))]
    assert listed("## Responses") == set().union(*responses)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a small model of Fashion-MNIST, and an image."""
    monkeypatch.chdir(tmp_path)
    size = {"embed_dim": 12, "num_heads": 2, "depth": 2, "image_size": 28, "patch_size": 14, "in_channels": 1}
    model = create_model("vit_mini", num_classes=10, **size)
    model.class_names = FASHION_MNIST_CLASSES
    model.preprocessing = Preprocessing(image_size=(28, 28), mean=(0.5,), std=(0.5,))
    save_model(model, "model")
    Image.new("L", (28, 28), 99).save("cat.jpg")


@pytest.mark.usefixtures("here")
def test_every_field_of_the_files_of_inspect_is_listed() -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", "cat.jpg", "--model", "model", "--compare-to", "model", "--output", "heads"])
    directory = Path("heads")
    for name in ("heads", "faithfulness", "comparison"):
        assert listed(f"| `{name}.json`") == set(json.loads((directory / f"{name}.json").read_text()))
    [pair] = re.findall(r"one object per head of the first model: (.+)", TEXT)
    record = json.loads((directory / "comparison.json").read_text())["heads"][0]
    assert set(re.findall(r"`(\w+)`", pair)) == set(record)
    assert listed("| array in") == set(np.load(directory / "image_0.npz"))
    assert set(np.load(directory / "image_0_difference.npz")) <= set(np.load(directory / "image_0.npz"))
    assert set(np.load(directory / "divergence.npz")) == {"divergence", "heads"}


CURVES = r"(importance|ablation|random_[012])_(zero|mean|reconstructed)_(accuracy|loss)"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("importance", ["importance --ablation"]),
        ("curve", ["curve --reconstruct"]),
        ("layers", ["curve --per-layer"]),
        ("prune", ["prune --amount 0.5 --global", "prune --amount 0.5", "prune --amount 0.5 --criterion ablation"]),
        ("group", ["group --num-kv-heads 1"]),
    ],
)
def test_every_column_of_the_files_of_heads_is_listed(name: str, calls: list[str]) -> None:
    columns: set[str] = set()
    for number, call in enumerate(calls):
        output = Path(f"output_{number}")
        args = f"--model model --data FashionMNISTMini --num-images 4 --output {output}"
        main(["heads", *call.split(), *args.split()])
        with (output / f"{name}.csv").open() as file:
            columns |= set(next(csv.reader(file)))
        facts: dict[str, Any] = json.loads((output / f"{name}.json").read_text())
        results = {"before", "after"} if name in ("prune", "group") else {"accuracy", "loss"}
        assert set(facts) == {"model", "num_images", "rows", *results}
    columns = {re.sub(f"^{CURVES}$", r"ORDER_METHOD_\3", column) for column in columns}
    assert listed(f"| `{name}.csv`") == columns
