"""`vitmha evaluate`: metrics by hand, files and messages."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import (
    CLASS_NAMES,
    CLASSIFY,
    ENVIRONMENT,
    classifier_model,
    classify,
    expected_probabilities,
    files_in,
    read_records,
)

from vitmha import save_model
from vitmha.cli import main
from vitmha.data.labeled import real_labels
from vitmha.models.vit import VisionTransformer


def test_predictions_are_evaluated_against_class_directories(
    model: VisionTransformer,
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    files = [file for file in files_in(image_dir) if " " not in Path(file).name]
    predictions = [CLASS_NAMES[int(expected_probabilities(model, file).argmax())] for file in files]
    for i, (file, name) in enumerate(zip(files, predictions, strict=True)):
        wrong = CLASS_NAMES[(CLASS_NAMES.index(name) + 1) % 7]
        place = tmp_path / "data" / (name if i >= 4 else wrong)  # the first four get a wrong label
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    shutil.copy(image_dir / "05 cut.jpg", place)
    args = ["--data", str(tmp_path / "data"), "--model", str(model_dir)]
    more = ["--output", str(tmp_path / "report"), "--predictions", str(tmp_path / "rows.jsonl")]
    out, err = classify([*args, *more], capfdbinary, expected=1, command="evaluate")
    lines = out.decode().splitlines()
    assert lines[0].split() == ["num_images", "23", *str(tmp_path / "data").split()]
    assert lines[1].split() == ["top1", "82.61%"]
    assert [line.split()[0] for line in lines] == ["num_images", "top1", "top5", "ece"]
    assert f"error: {place}/05 cut.jpg: " in err
    assert err.endswith("1 of 24 images could not be read and are not counted\n")
    rows = read_records((tmp_path / "rows.jsonl").read_bytes())
    assert [row["correct"] for row in rows].count(True) == 19
    assert [row["correct"] for row in rows].count(None) == 1
    assert all(row["correct"] == (row["label"] == row["predicted"]) for row in rows if row["predicted"])
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert metrics["top1"] == pytest.approx(19 / 23, abs=1e-6)
    assert metrics["num_images"] == 23
    with (tmp_path / "report" / "confusion.csv").open() as file:
        table = {row["true"]: row for row in csv.DictReader(file)}
    for i, name in enumerate(predictions[:4]):
        wrong = CLASS_NAMES[(CLASS_NAMES.index(name) + 1) % 7]
        assert int(table[wrong][name]) >= 1, i
    assert (tmp_path / "report" / "per_class.csv").is_file()
    classify([*args, "--predictions", str(tmp_path / "rows.csv")], capfdbinary, expected=1, command="evaluate")
    with (tmp_path / "rows.csv").open() as file:
        csv_rows = list(csv.DictReader(file))
    assert [row["path"] for row in csv_rows] == [row["path"] for row in rows]
    assert [row["correct"] for row in csv_rows].count("true") == 19
    none = ["--data", str(tmp_path / "none"), "--model", str(model_dir)]
    (tmp_path / "none").mkdir()
    _, err = classify(none, capfdbinary, expected=2, command="evaluate")
    assert "none: no image files found" in err
    (tmp_path / "data" / "yak").mkdir()
    _, err = classify(args, capfdbinary, expected=2, command="evaluate")
    assert "The model has no class 'yak': its 7 classes are ant, bee" in err


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_an_interrupted_call_leaves_the_predictions_of_an_earlier_one(
    image_dir: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    (tmp_path / "data" / "ant").mkdir(parents=True)
    shutil.copy(image_dir / "03.png", tmp_path / "data" / "ant")
    file = tmp_path / f"rows{suffix}"
    file.write_text("earlier")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmha.cli.evaluate._row", interrupt)
    args = ["evaluate", "--data", str(tmp_path / "data"), "--model", str(model_dir), "--predictions", str(file)]
    with pytest.raises(SystemExit, match="130"):
        main(args)
    assert file.read_text() == "earlier"
    assert {entry.name for entry in tmp_path.iterdir()} == {"data", file.name}


def test_imagenet_validation_images_are_evaluated_with_real_labels(
    image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    (tmp_path / "val").mkdir()
    model = classifier_model(num_classes=1000)
    model.class_names = None
    files = [tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.png" for number in range(1, 9)]
    for file in files:
        shutil.copy(image_dir / "03.png", file)
    first = next(real for file in files if (real := real_labels(file)))  # some images have none
    torch.nn.init.constant_(model.head.bias[first[0]], 50.0)
    save_model(model, tmp_path / "m")
    prediction = int(expected_probabilities(model, files[0]).argmax())
    seen = [real for file in files if (real := real_labels(file))]
    args = ["--data", str(tmp_path / "val"), "--model", str(tmp_path / "m"), "--output", str(tmp_path / "report")]
    out, _ = classify(args, capfdbinary, command="evaluate")
    assert re.search(rb"top1_real +[\d.]+%", out)
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    expected = sum(prediction in real for real in seen) / len(seen)
    assert metrics == {"num_images": 0, "top1_real": pytest.approx(expected, abs=1e-6)}
    assert 0 < metrics["top1_real"] < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "nowhere", "--model", "cifar10"], "--data nowhere is not a directory of class directories"),
        (["--model", "cifar10"], "the following arguments are required: --data"),
        (["--data", "x"], "--model is required, for example --model cifar10"),
        (["--data", "x", "--model", "cifar10", "--predictions", "a.txt"], "--predictions must end in .csv or .jsonl"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    args: list[str], message: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    _, err = classify(args, capfdbinary, expected=2, command="evaluate")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_two_processes_report_the_same_metrics(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    for i, file in enumerate(files_in(image_dir)):
        place = tmp_path / "data" / CLASS_NAMES[i % 7]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    args = ["--data", str(tmp_path / "data"), "--model", str(model_dir), "--output"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    call = [*torchrun, *CLASSIFY[:-1], "evaluate", *args, str(tmp_path / "two")]
    ended = subprocess.run(call, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert "2 of 25 images could not be read" in ended.stderr
    classify([*args, str(tmp_path / "one")], capfdbinary, expected=1, command="evaluate")
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)
