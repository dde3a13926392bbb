"""evaluation.py: measures by hand and against torchmetrics, and what a report holds."""

import csv
import json
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from vitmha.data.labeled import class_to_idx, real_labels
from vitmha.metrics import Evaluation, is_correct, write_report


def test_numbers_made_by_hand() -> None:
    evaluation = Evaluation(3)
    evaluation.update(torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.5, 0.25]]), torch.tensor([0, 0]))
    evaluation.update(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([2]))
    report = evaluation.compute()
    assert report.top1 == pytest.approx(2 / 3)
    assert report.top5 == 1
    assert report.confusion.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]  # rows are the truth
    assert report.per_class[:1].tolist() == [0.5]
    assert report.per_class[1].isnan()
    assert report.ece == pytest.approx((0.25 + 0.5 + 0) / 3)


def test_measures_equal_torchmetrics() -> None:
    probabilities = (3 * torch.randn(311, 13)).softmax(-1)
    labels = torch.randint(13, (311,))
    evaluation = Evaluation(13)
    for rows, truth in zip(probabilities.split(29), labels.split(29), strict=True):
        evaluation.update(rows, truth)
    report = evaluation.compute()
    for k, ours in ((1, report.top1), (5, report.top5)):
        assert ours == pytest.approx(multiclass_accuracy(probabilities, labels, 13, top_k=k, average="micro").item())
    expected = multiclass_calibration_error(probabilities, labels, 13, n_bins=15, norm="l1")
    assert report.ece == pytest.approx(expected.item(), abs=1e-6)
    per_class = multiclass_accuracy(probabilities, labels, 13, average=None)
    torch.testing.assert_close(report.per_class, per_class)


def test_what_is_no_number_is_told() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [torch.nan, 0.2], [0.1, torch.inf]])
    with pytest.raises(ValueError, match="The model outputs NaN or inf for 2 of 3 images: its weights"):
        Evaluation(2).update(probabilities, torch.tensor([0, 1, 1]))


def test_a_picture_costs_no_table_of_all_classes() -> None:
    evaluation, probabilities = Evaluation(3000), torch.rand(1, 3000)
    began = time.process_time()
    for label in range(300):  # a table of 72 MB each would take many seconds
        evaluation.update(probabilities, torch.tensor([label]))
    assert time.process_time() - began < 2
    assert evaluation.confusion.sum() == 300


def test_a_report_is_read_back(tmp_path: Path) -> None:
    evaluation = Evaluation(2)
    evaluation.update(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1, 1]))
    write_report(evaluation.compute(), ["a, b", "c"], tmp_path / "new", top1_real=0.5)
    metrics = json.loads((tmp_path / "new" / "metrics.json").read_text())
    assert (metrics["num_images"], metrics["top1"], metrics["top1_real"]) == (3, 0.666667, 0.5)
    with (tmp_path / "new" / "confusion.csv").open() as file:
        assert list(csv.reader(file)) == [["true", "a, b", "c"], ["a, b", "1", "0"], ["c", "1", "1"]]
    with (tmp_path / "new" / "per_class.csv").open() as file:
        assert list(csv.DictReader(file))[1] == {"class": "c", "num_images": "2", "accuracy": "0.5"}
    with Image.open(tmp_path / "new" / "confusion.png") as picture:
        assert min(picture.size) > 300


def test_class_folders_are_numbered_by_name_or_by_imagenets_synsets() -> None:
    assert class_to_idx(["dog", "ant"], ["ant", "bee", "dog"]) == {"dog": 2, "ant": 0}
    words = [f"word {i}" for i in range(1000)]
    assert class_to_idx(["n15075141", "n01440764"], words) == {"n15075141": 999, "n01440764": 0}
    with pytest.raises(ValueError, match="no class 'n01440764': its 3 classes are ant, bee, dog"):
        class_to_idx(["n01440764"], ["ant", "bee", "dog"])
    with pytest.raises(ValueError, match="no class 'n0'"):
        class_to_idx(["n0"], words)


def test_real_labels_go_by_the_name_of_the_file() -> None:
    assert real_labels("x/ILSVRC2012_val_00000002.JPEG") == [970, 795]  # a skier in the Alps
    assert real_labels("ILSVRC2012_val_00050001.JPEG") is None
    assert real_labels("a.jpg") is None


def test_the_label_of_a_mixed_image_is_its_largest_class() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.0], [3, 2, 1]])
    torch.testing.assert_close(is_correct(logits, torch.tensor([1, 1])), torch.tensor([1.0, 0]))
    mixed = torch.tensor([[0.4, 0.6, 0], [0.3, 0.5, 0.2]])
    torch.testing.assert_close(is_correct(logits, mixed), torch.tensor([1.0, 0]))
