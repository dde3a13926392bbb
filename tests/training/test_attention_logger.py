"""attention_logger.py: what is logged, where, when, and that logging changes nothing."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from builders import CONFIG, pattern_loader, train
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from vitmha.inspection import HeadMetrics, attention_distance, attention_entropy, record_attention
from vitmha.inspection.epochs import read_epochs, write_animation, write_epoch
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.head_pruning import HeadPruning
from vitmha.weights.load import load_model


def test_logging_changes_neither_the_training_nor_the_random_numbers(tmp_path: Path) -> None:
    logged = train(tmp_path / "logged", [AttentionLogger(num_images=3)])
    drawn = torch.rand(4)
    plain = train(tmp_path / "plain")
    torch.testing.assert_close(drawn, torch.rand(4), rtol=0, atol=0)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(logged.state_dict()[name], tensor, rtol=0, atol=0)
    assert logged.training == plain.training


def test_images_are_evenly_spaced_over_the_validation_data_and_stay_the_same(tmp_path: Path) -> None:
    logger, loader = AttentionLogger(num_images=4), pattern_loader(11, 4)
    train(tmp_path, [logger], epochs=2, val_loader=loader)
    images = loader.dataset.tensors[0]  # three batches of 4, 4 and 3
    torch.testing.assert_close(torch.stack(logger.images), images[[0, 3, 6, 8]])


@pytest.mark.parametrize(
    ("every_n_epochs", "check_val_every_n_epoch", "expected"),
    [(3, 1, [0, 2]), (0, 1, []), (1, 2, [1, 2])],
)
def test_chosen_epochs_and_the_last_are_logged(
    tmp_path: Path, every_n_epochs: int, check_val_every_n_epoch: int, expected: list[int]
) -> None:
    logger = AttentionLogger(num_images=2, every_n_epochs=every_n_epochs)
    train(tmp_path, [logger], check_val_every_n_epoch=check_val_every_n_epoch)
    names = sorted(directory.name for directory in tmp_path.glob("attention/epoch_*"))
    assert names == [f"epoch_{epoch:03d}" for epoch in expected]
    for name in names:
        files = {file.name for file in (tmp_path / "attention" / name).iterdir()}
        assert files == {"image_0.png", "image_1.png", "heads.png", "attention.npz"}
    assert logger.state_dict() == {"last_epoch": expected[-1] if expected else None}


def test_a_run_in_bfloat16_is_logged(tmp_path: Path) -> None:
    train(tmp_path, [AttentionLogger(num_images=2)], epochs=1, precision="bf16-true")
    with np.load(tmp_path / "attention" / "images.npz") as arrays:
        assert arrays["images"].dtype == np.float32


def test_metrics_are_those_of_the_model_after_the_epoch(tmp_path: Path) -> None:
    logger = AttentionLogger(num_images=2)
    model = train(tmp_path, [logger], epochs=1).model.eval()
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        model(torch.stack(logger.images))
    entropy = torch.stack([attention_entropy(weights).mean((0, 2)) for weights in recorded.maps])
    distance = torch.stack([attention_distance(weights, model.layout).mean(0) for weights in recorded.maps])
    with (tmp_path / "attention" / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(i, j) for i in range(2) for j in range(3)]
    for name, values in (("entropy", entropy), ("distance", distance)):
        torch.testing.assert_close(torch.tensor([float(row[name]) for row in rows]), values.flatten())
    columns = set((tmp_path / "metrics.csv").read_text().splitlines()[0].split(","))
    assert [name for name in columns if name.startswith("attention/")] == []  # they are in heads.csv


def readout_attention(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    metrics = HeadMetrics(model)
    metrics.update(images)
    return metrics.readout_attention


@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_logged_rows_are_those_of_the_class_token_or_the_mean_over_the_patches(pool: str) -> None:
    model = VisionTransformer(ViTConfig(**{**vars(CONFIG), "pool": pool, "num_registers": 2})).eval()
    images = torch.randn(2, 3, 6, 9)
    with torch.no_grad(), record_attention(model, queries="cls" if pool == "cls" else "pooled") as recorded:
        model(images)
    rows = readout_attention(model, images)
    assert rows.shape == (2, 6, model.layout.num_tokens)
    torch.testing.assert_close(rows, torch.cat([weights[:, :, 0] for weights in recorded.maps], dim=1))


def test_the_file_of_each_epoch_holds_the_rows_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = AttentionLogger(num_images=2)
    model = train(tmp_path, [logger], epochs=2).model.eval()
    images, epochs = read_epochs(tmp_path / "attention", model)
    assert [epoch.name for epoch in epochs] == ["epoch 0", "epoch 1"]
    torch.testing.assert_close(images, torch.stack(logger.images))
    torch.testing.assert_close(epochs[1].rows, readout_attention(model, images), rtol=0, atol=5e-3)
    assert not torch.allclose(epochs[0].rows, epochs[1].rows, atol=5e-3)
    write_animation(tmp_path / "epochs.gif", model, images[1], epochs, 1)
    with Image.open(tmp_path / "epochs.gif") as animation:
        assert animation.n_frames == 2
        first = np.asarray(animation.convert("RGB"), dtype=float)
    write_animation(tmp_path / "epochs.mp4", model, images[1], epochs, 1, seconds=0.5)
    frames = iio.imread(tmp_path / "epochs.mp4", plugin="pyav").astype(float)
    assert len(frames) == 4  # the last one lasts three times as long
    assert np.abs(frames[0] - first[: frames.shape[1], : frames.shape[2]]).mean() < 3
    assert np.abs(frames[1] - frames[3]).mean() < 1
    assert iio.immeta(tmp_path / "epochs.mp4", plugin="pyav")["fps"] == 2
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        with pytest.raises(ValueError, match=r"pip install 'vitmha\[video\]'"):
            write_animation(tmp_path / "x.mp4", model, images[1], epochs)
    other = VisionTransformer(ViTConfig(**{**vars(CONFIG), "depth": 3}))
    with pytest.raises(
        ValueError,
        match="holds 6 heads and 7 tokens of 2 images, but the model has 9 heads and 7 tokens",
    ):
        read_epochs(tmp_path / "attention", other)
    with pytest.raises(ValueError, match=r"holds no logged epoch: train with attention\.every_n_epochs of at least 1"):
        read_epochs(tmp_path, model)


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_resumed_run_keeps_its_images_whatever_is_asked_for_now(tmp_path: Path) -> None:
    def interrupt(trainer: Trainer, _: LightningModule) -> None:
        trainer.should_stop = True

    first = AttentionLogger(num_images=2)
    interrupted = train(tmp_path, [first, LambdaCallback(on_train_epoch_end=interrupt)], epochs=2)
    interrupted.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert interrupted.trainer.current_epoch == 1
    resumed = AttentionLogger(num_images=3)
    module = train(tmp_path, [resumed], epochs=2, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(torch.stack(resumed.images), torch.stack(first.images), rtol=0, atol=0)
    images, epochs = read_epochs(tmp_path / "attention", module.model)
    assert (len(images), [len(epoch.rows) for epoch in epochs]) == (2, [2, 2])


def test_a_file_that_is_only_partly_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = AttentionLogger(num_images=1)
    model = train(tmp_path, [logger], epochs=1).model.eval()
    images, save = torch.stack(logger.images), np.savez_compressed

    def save_a_part(stream: Any, **arrays: Any) -> None:
        save(stream, **{name: array for name, array in arrays.items() if name == "maxima"})
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmha.inspection.epochs.np.savez_compressed", save_a_part)
    for epoch in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            write_epoch(tmp_path / "attention", epoch, images, readout_attention(model, images), model)
    _, epochs = read_epochs(tmp_path / "attention", model)
    assert [epoch.name for epoch in epochs] == ["epoch 0"]


def test_the_cost_of_logging_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, [AttentionLogger(num_images=1)], epochs=1)
    assert re.search(r"Logging attention took \d+\.\d s, \d+\.\d\d% of the run\.", capsys.readouterr().out)


def wandb_records(content: bytes) -> Iterator[Record]:
    """The records of an offline run: LevelDB's log format, after 7 bytes of W&B's own."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        if (remaining := 32768 - position % 32768) < 7:  # too short for a header in this block
            position += remaining
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield Record.FromString(parts)
            parts = b""


def test_tensorboard_and_wandb_offline_get_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    tensorboard = TensorBoardLogger(tmp_path / "tb", name="", version="")
    wandb = WandbLogger(offline=True, save_dir=tmp_path)
    train(tmp_path / "run", [AttentionLogger(num_images=1)], loggers=(tensorboard, wandb), epochs=2)
    wandb.experiment.finish()
    written = np.asarray(Image.open(tmp_path / "run" / "attention" / "epoch_001" / "image_0.png"))
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"images": 0}).Reload()
    figures = events.Images("attention/image_0")
    assert [event.step for event in figures] == [4, 8]
    assert (figures[1].width, figures[1].height) == (written.shape[1], written.shape[0])
    assert [event.step for event in events.Scalars("attention/entropy/layer0.head0")] == [4, 8]
    assert [event.step for event in events.Scalars("attention/sink_mass/layer1.head2")] == [4, 8]
    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/images/attention/image_0_*.png"))
    assert any(np.array_equal(np.asarray(Image.open(file)), written) for file in files)
    assert len(files) == 2
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps = []
    for record in wandb_records(file.read_bytes()):
        row = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if any(name.startswith("attention/image_0") for name in row):
            steps.append(json.loads(row["trainer/global_step"]))
    assert steps == [4, 8]


def test_epochs_before_pruning_are_shown_with_the_remaining_heads(tmp_path: Path) -> None:
    logger, pruning = AttentionLogger(num_images=2), HeadPruning(0.5, num_rounds=2)
    model = train(tmp_path, [logger, pruning, SaveModelCallback()]).model.eval()
    _, epochs = read_epochs(tmp_path / "attention", load_model(tmp_path / "model"))
    assert [epoch.rows.shape[1] for epoch in epochs] == [3, 3, 3]
    rows = readout_attention(model, torch.stack(logger.images))
    torch.testing.assert_close(epochs[2].rows, rows, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_images": 0}, "^num_images must be at least 1, got 0"),
        ({"every_n_epochs": -1}, r"^every_n_epochs must be at least 0 .* got -1"),
    ],
)
def test_numbers_below_their_minimum_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionLogger(**options)
