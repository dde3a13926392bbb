"""metrics_csv.py: one row per epoch, whatever is logged when; a resumed run is in test_checkpoints.py."""

from pathlib import Path
from typing import Any

import pytest
from builders import train
from lightning import Callback, LightningModule, Trainer

from vitmha.training.metrics_csv import ResumableCSVLogger, read_table, remove_rows


def rows_of(tmp_path: Path, *callbacks: Callback, **options: Any) -> list[dict[str, str]]:
    """metrics.csv of two epochs of four steps."""
    logger = ResumableCSVLogger(tmp_path, name="", version="run")
    train(tmp_path, callbacks, epochs=2, loggers=(logger,), **options)
    return list(read_table(tmp_path / "run/metrics.csv"))


@pytest.mark.parametrize("model", [{}, {"optimizer": "muon"}])
def test_training_and_validation_of_an_epoch_are_one_row_with_the_metrics_first(
    model: dict[str, Any], tmp_path: Path
) -> None:
    rows = rows_of(tmp_path, model=model)
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("1", "7")]
    rates = ["lr", "muon_lr"] if model else ["lr"]
    metrics = ["train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy"]
    assert list(rows[0]) == ["epoch", "step", *metrics, *rates]
    assert all(all(row.values()) for row in rows)


def test_epochs_without_validation_have_a_row_too(tmp_path: Path) -> None:
    first, second = rows_of(tmp_path, check_val_every_n_epoch=2)
    assert first["train/accuracy"]
    assert first["val/accuracy"] == ""
    assert second["train/accuracy"]
    assert second["val/accuracy"]


def test_a_validation_in_the_middle_of_an_epoch_has_a_row_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, val_check_interval=2)
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1"), ("0", "3"), ("1", "5"), ("1", "7")]
    assert [row["train/accuracy"] != "" for row in rows] == [False, True, False, True]
    assert all(row["val/accuracy"] for row in rows)


class OwnMetric(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.log("own/metric", 0.25)
        trainer.loggers[-1].log_metrics({"of a step": 1.0}, step=trainer.global_step)


def test_a_metric_of_a_callback_is_a_column_from_the_epoch_on_that_has_it(tmp_path: Path) -> None:
    first, second = rows_of(tmp_path, OwnMetric())
    assert list(second)[-2:] == ["own/metric", "lr"]
    assert first["own/metric"] == ""
    assert second["own/metric"] == "0.25"
    assert second["train/accuracy"]
    assert "of a step" not in second


def test_the_file_has_each_epoch_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = ResumableCSVLogger(tmp_path, name="", version="run")
    logger.log_metrics({"epoch": 0, "val/loss": 1 / 3}, step=4)
    logger.log_metrics({"epoch": 0, "train/loss": 9.0}, step=4)
    logger.log_metrics({"epoch": 0, "train/accuracy": 0.5, "lr": 1e-3}, step=4)
    text = "epoch,step,train/accuracy,val/loss,lr\n0,4,0.5,0.3333333,0.001\n"
    assert (tmp_path / "run/metrics.csv").read_text() == text
    later = ResumableCSVLogger(tmp_path, name="", version="run")  # of the resumed run
    later.log_metrics({"epoch": 1, "val/loss": 2.0}, step=12_345_678)
    assert (tmp_path / "run/metrics.csv").read_text() == f"{text}1,12345678,,2,\n"


def test_rows_that_a_killed_run_has_logged_after_its_checkpoint_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    remove_rows(file, 1, 5)
    assert not file.exists()
    file.write_text("epoch,step\n0,9\n0,4\n1,5\n1,6\n")
    remove_rows(file, 1, 6)
    assert file.read_text() == "epoch,step\n0,9\n0,4\n1,5\n"
    remove_rows(file, 0, 0)
    assert not file.exists()
