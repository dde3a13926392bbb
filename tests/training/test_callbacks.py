"""callbacks.py: the evaluation report, the check for a non-finite loss, the progress bar, and the saved model."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CONFIG, QUIET, pattern_loader, train
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from vitmha.training.callbacks import ClassificationReportCallback, ProgressBar, SaveModelCallback, StopOnNonFiniteLoss
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model


def test_a_non_finite_loss_stops_before_the_step_and_leaves_a_finite_checkpoint(tmp_path: Path) -> None:
    class SpoilImages(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LitViT, batch: list, batch_idx: int) -> None:
            if trainer.global_step == 5:
                batch[0].fill_(torch.nan)

    with pytest.raises(ValueError, match=r"loss is nan at step 5 .*nan_loss\.ckpt\. Lower learning_rate"):
        train(tmp_path, [StopOnNonFiniteLoss(), SpoilImages()])
    saved = load_model(tmp_path / "checkpoints" / "nan_loss.ckpt")
    assert all(parameter.isfinite().all() for parameter in saved.parameters())


def test_weights_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    class SpoilWeights(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LitViT, batch: list, batch_idx: int) -> None:
            pl_module.model.norm.weight.data.fill_(torch.nan)

    with pytest.raises(ValueError, match=r"loss is nan at step 0 .*The weights are no longer finite\. Lower"):
        train(tmp_path, [StopOnNonFiniteLoss(), SpoilWeights()])


def test_the_model_directory_holds_the_last_weights(tmp_path: Path) -> None:
    module = train(tmp_path, [SaveModelCallback()])
    loaded = load_model(tmp_path / "model")
    assert loaded.preprocessing == module.model.preprocessing
    for name, tensor in module.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_report_counts_every_prediction(tmp_path: Path, stage: str) -> None:
    module = LitViT(CONFIG)
    torch.nn.init.normal_(module.model.head.weight)
    options = {**QUIET, "logger": CSVLogger(tmp_path, name="", version="")}
    trainer = Trainer(**options, callbacks=[ClassificationReportCallback()])

    class NamedClasses(LightningDataModule):
        class_names = ("ant", "bee", "cat", "dog", "elk")  # the model gets them after the callback's setup

        def val_dataloader(self) -> DataLoader:
            return pattern_loader(41, 8)

        test_dataloader = val_dataloader

    getattr(trainer, stage)(module, datamodule=NamedClasses(), verbose=False)
    images, labels = (torch.cat(part) for part in zip(*pattern_loader(41, 8), strict=True))
    with torch.no_grad():
        predictions = module.model.eval()(images).argmax(1)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["top1"] == pytest.approx((predictions == labels).float().mean().item(), abs=1e-6)
    with (tmp_path / "evaluation" / "confusion.csv").open() as file:
        header, *lines = csv.reader(file)
        rows = [[int(cell) for cell in row[1:]] for row in lines]
    assert header[1:] == [line[0] for line in lines] == ["ant", "bee", "cat", "dog", "elk"]
    expected = [[int(((labels == i) & (predictions == j)).sum()) for j in range(5)] for i in range(5)]
    assert rows == expected
    assert metrics["num_images"] == 41


def test_the_progress_bar_reads_metrics_no_more_often_than_the_loggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, get_metrics = [], RichProgressBar.get_metrics

    def record(self: Any, trainer: Trainer, module: Any) -> Any:
        steps.append(trainer.global_step)
        return get_metrics(self, trainer, module)

    monkeypatch.setattr(RichProgressBar, "get_metrics", record)
    bar, options = ProgressBar(), {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, log_every_n_steps=5, callbacks=[bar], **options)
    trainer.fit(LitViT(CONFIG), pattern_loader(20, 1), pattern_loader(4, 4))
    assert set(steps) == {5, 10, 15, 20}
    assert "train/loss" in bar.metrics


def test_the_progress_bar_shows_neither_the_sanity_check_nor_a_version(tmp_path: Path) -> None:
    shown: list[dict[str, Any]] = []

    class Bar(ProgressBar):
        def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
            metrics = super().get_metrics(trainer, pl_module)
            shown.append({"sanity": trainer.sanity_checking, **metrics})
            return metrics

    train(tmp_path, [Bar()], epochs=1, enable_progress_bar=True)
    assert [metrics for metrics in shown if metrics["sanity"]]
    assert not any("val/loss" in metrics for metrics in shown if metrics["sanity"])
    assert "val/loss" in shown[-1]
    assert not any("v_num" in metrics for metrics in shown)
