"""metrics.py: metrics against numbers made by hand and torchmetrics, and the files of a report."""

import csv
import json
from pathlib import Path

import pytest
import torch
from builders import full_disk
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from vitmha.metrics import Evaluation, is_correct, write_report


def test_metrics_by_hand() -> None:
    evaluation = Evaluation(3)
    evaluation.update(torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.5, 0.25]]), torch.tensor([0, 0]))
    evaluation.update(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([2]))
    report = evaluation.compute()
    assert report.top1 == pytest.approx(2 / 3)
    assert report.top5 == 1
    assert report.confusion.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]  # rows are true classes
    assert report.per_class[:1].tolist() == [0.5]
    assert report.per_class[1].isnan()
    assert report.ece == pytest.approx((0.25 + 0.5 + 0) / 3)


def test_metrics_equal_torchmetrics() -> None:
    probabilities = (3 * torch.randn(311, 13)).softmax(-1)
    labels = torch.randint(13, (311,))
    evaluation = Evaluation(13)
    for batch in zip(probabilities.split(29), labels.split(29), strict=True):
        evaluation.update(*batch)
    report = evaluation.compute()
    for k, accuracy in ((1, report.top1), (5, report.top5)):
        expected = multiclass_accuracy(probabilities, labels, 13, top_k=k, average="micro")
        assert accuracy == pytest.approx(expected.item())
    expected = multiclass_calibration_error(probabilities, labels, 13, n_bins=15, norm="l1")
    assert report.ece == pytest.approx(expected.item(), abs=1e-6)
    per_class = multiclass_accuracy(probabilities, labels, 13, average=None)
    torch.testing.assert_close(report.per_class, per_class)


@pytest.mark.parametrize("num_classes", [4, 5, 6])
def test_top5_is_a_metric_of_more_than_five_classes(num_classes: int) -> None:
    evaluation = Evaluation(num_classes)
    evaluation.update(torch.eye(num_classes), torch.arange(num_classes))
    names = ["num_images", "top1", *["top5"] * (num_classes > 5), "ece"]
    assert list(evaluation.compute().summary) == names


def test_nan_and_inf_are_refused() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [torch.nan, 0.2], [0.1, torch.inf]])
    with pytest.raises(ValueError, match="The model outputs NaN or inf for 2 of 3 images: its weights"):
        Evaluation(2).update(probabilities, torch.tensor([0, 1, 1]))


def test_an_update_allocates_no_matrix_of_all_classes() -> None:
    evaluation, probabilities = Evaluation(3000), torch.rand(1, 3000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        evaluation.update(probabilities, torch.tensor([7]))
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert 0 < largest < 3000**2  # bytes; the confusion matrix has 8 * 3000**2
    assert evaluation.confusion.sum() == 1


def test_the_files_of_a_report_can_be_read_back(tmp_path: Path) -> None:
    evaluation = Evaluation(2)
    evaluation.update(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]), torch.tensor([0, 1, 1, 1]))
    write_report(evaluation.compute(), ["a, b", "c"], tmp_path / "new", top1_real=0.5)
    metrics = json.loads((tmp_path / "new" / "metrics.json").read_text())
    assert (metrics["num_images"], metrics["top1"], metrics["top1_real"]) == (4, 0.75, 0.5)
    assert "top5" not in metrics  # of two classes it is always 1
    with (tmp_path / "new" / "confusion.csv").open() as file:
        assert list(csv.reader(file)) == [["true", "a, b", "c"], ["a, b", "1", "0"], ["c", "1", "2"]]
    with (tmp_path / "new" / "per_class.csv").open() as file:
        assert list(csv.DictReader(file))[1] == {"class": "c", "num_images": "3", "accuracy": "0.666667"}
    with Image.open(tmp_path / "new" / "confusion.png") as image:
        assert min(image.size) > 300


def test_a_report_that_the_disk_cannot_hold_replaces_no_file(tmp_path: Path) -> None:
    evaluation = Evaluation(2)
    evaluation.update(torch.eye(2), torch.arange(2))
    write_report(evaluation.compute(), ["a", "b"], tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    evaluation.update(torch.eye(2), torch.tensor([0, 0]))
    with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"), full_disk():
        write_report(evaluation.compute(), ["a", "b"], tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_class_names_in_the_confusion_matrix_are_text(tmp_path: Path) -> None:
    evaluation = Evaluation(2)
    evaluation.update(torch.eye(2), torch.arange(2))
    write_report(evaluation.compute(), ["$\\nosuch$", "\x1b[31mred"], tmp_path)  # no formula, no control character
    assert (tmp_path / "confusion.png").is_file()


def test_the_label_of_a_mixed_image_is_its_largest_class() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.0], [3, 2, 1]])
    torch.testing.assert_close(is_correct(logits, torch.tensor([1, 1])), torch.tensor([1.0, 0]))
    mixed = torch.tensor([[0.4, 0.6, 0], [0.3, 0.5, 0.2]])
    torch.testing.assert_close(is_correct(logits, mixed), torch.tensor([1.0, 0]))
