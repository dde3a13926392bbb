"""callbacks.py: attention logging that changes nothing, the guard against NaN, the model folder."""

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
from builders import CONFIG, pictures, train
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader
from wandb.proto.wandb_internal_pb2 import Record

from vitmha.inspection import HeadMetrics, attention_distance, attention_entropy, record_attention
from vitmha.inspection.epochs import read_epochs, write_animation, write_epoch
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.importance import head_importance, normalized, rank_heads
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import ClassificationReportCallback, ProgressBar, SaveModelCallback, StopOnNonFiniteLoss
from vitmha.training.head_pruning import HeadPruning
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


def test_logging_changes_neither_the_training_nor_the_random_stream(tmp_path: Path) -> None:
    with_pictures = train(tmp_path / "with", [AttentionLogger(num_images=3)])
    drawn = torch.rand(4)
    without = train(tmp_path / "without", [])
    torch.testing.assert_close(drawn, torch.rand(4), rtol=0, atol=0)
    for name, tensor in without.state_dict().items():
        torch.testing.assert_close(with_pictures.state_dict()[name], tensor, rtol=0, atol=0)
    assert with_pictures.training == without.training


def test_pictures_are_spread_over_the_validation_data_and_stay_the_same(tmp_path: Path) -> None:
    callback = AttentionLogger(num_images=4)
    train(tmp_path, [callback], epochs=2)
    images = pictures(11, 4).dataset.tensors[0]  # three batches of 4, 4 and 3
    torch.testing.assert_close(torch.stack(callback.pictures), images[[0, 3, 6, 8]])


@pytest.mark.parametrize(
    ("every", "validated_every", "expected"),
    [(3, 1, [0, 2]), (0, 1, []), (1, 2, [1, 2])],
)
def test_chosen_epochs_and_the_last_are_logged(
    tmp_path: Path, every: int, validated_every: int, expected: list[int]
) -> None:
    logger = AttentionLogger(num_images=2, every_n_epochs=every)
    train(tmp_path, [logger], validated_every=validated_every)
    folders = sorted(folder.name for folder in tmp_path.glob("attention/epoch_*"))
    assert folders == [f"epoch_{epoch:03d}" for epoch in expected]
    for folder in folders:
        files = {file.name for file in (tmp_path / "attention" / folder).iterdir()}
        assert files == {"picture_0.png", "picture_1.png", "heads.png", "rows.npz"}
    assert logger.state_dict() == {"logged": expected[-1] if expected else None}


def test_a_run_in_bfloat16_throughout_is_logged(tmp_path: Path) -> None:
    train(tmp_path, [AttentionLogger(num_images=2)], epochs=1, precision="bf16-true")
    with np.load(tmp_path / "attention" / "pictures.npz") as kept:
        assert kept["images"].dtype == np.float32


def test_numbers_are_those_of_the_model_after_the_epoch(tmp_path: Path) -> None:
    callback = AttentionLogger(num_images=2)
    module = train(tmp_path, [callback], epochs=1)
    model = module.model.eval()
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        model(torch.stack(callback.pictures))
    entropy = torch.stack([attention_entropy(weights).mean((0, 2)) for weights in recorded.maps])
    distance = torch.stack([attention_distance(weights, model.layout).mean(0) for weights in recorded.maps])
    with (tmp_path / "attention" / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(i, j) for i in range(2) for j in range(3)]
    for name, values in (("entropy", entropy), ("distance", distance)):
        torch.testing.assert_close(torch.tensor([float(row[name]) for row in rows]), values.flatten())
    metrics = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert {"entropy/layer_1_head_2", "distance/layer_0_head_0"} <= set(metrics.split(","))


def rows_of(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    numbers = HeadMetrics(model)
    numbers.update(images)
    return numbers.readout_attention


@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_rows_are_those_of_the_class_token_or_the_mean_over_the_patches(pool: str) -> None:
    model = VisionTransformer(ViTConfig(**{**vars(CONFIG), "pool": pool, "num_registers": 2})).eval()
    images = torch.randn(2, 3, 6, 9)
    with torch.no_grad(), record_attention(model, queries="cls" if pool == "cls" else "pooled") as recorded:
        model(images)
    rows = rows_of(model, images)
    assert rows.shape == (2, 6, model.layout.num_tokens)
    torch.testing.assert_close(rows, torch.cat([weights[:, :, 0] for weights in recorded.maps], dim=1))


def test_the_file_of_each_epoch_holds_the_rows_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = AttentionLogger(num_images=2)
    model = train(tmp_path, [callback], epochs=2).model.eval()
    images, epochs = read_epochs(tmp_path / "attention", model)
    assert [epoch.name for epoch in epochs] == ["epoch 0", "epoch 1"]
    torch.testing.assert_close(images, torch.stack(callback.pictures))
    torch.testing.assert_close(epochs[1].rows, rows_of(model, images), rtol=0, atol=5e-3)
    assert not torch.allclose(epochs[0].rows, epochs[1].rows, atol=5e-3)
    write_animation(tmp_path / "training.gif", model, images[1], epochs, picture=1)
    with Image.open(tmp_path / "training.gif") as film:
        assert film.n_frames == 2
        first = np.asarray(film.convert("RGB"), dtype=float)
    write_animation(tmp_path / "training.mp4", model, images[1], epochs, picture=1, seconds=0.5)
    frames = iio.imread(tmp_path / "training.mp4", plugin="pyav").astype(float)
    assert len(frames) == 4  # the last three times as long
    assert np.abs(frames[0] - first[: frames.shape[1], : frames.shape[2]]).mean() < 3
    assert np.abs(frames[1] - frames[3]).mean() < 1
    assert iio.immeta(tmp_path / "training.mp4", plugin="pyav")["fps"] == 2
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        with pytest.raises(ValueError, match=r"An .mp4 needs imageio and PyAV: pip install 'vitmha\[video\]'"):
            write_animation(tmp_path / "x.mp4", model, images[1], epochs)
    other = VisionTransformer(ViTConfig(**{**vars(CONFIG), "depth": 3}))
    with pytest.raises(
        ValueError,
        match="holds 6 heads and 7 tokens of 2 pictures, the model has 9 and 7, the run 2: give the run's own",
    ):
        read_epochs(tmp_path / "attention", other)
    with pytest.raises(ValueError, match=r"holds no epoch: train with --attention.every_n_epochs above 0"):
        read_epochs(tmp_path, model)


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_run_that_goes_on_keeps_its_pictures_whatever_is_asked_for_now(tmp_path: Path) -> None:
    first = AttentionLogger(num_images=2)
    train(tmp_path, [first], epochs=1).trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = AttentionLogger(num_images=3)
    module = train(tmp_path, [again], epochs=2, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(torch.stack(again.pictures), torch.stack(first.pictures), rtol=0, atol=0)
    images, epochs = read_epochs(tmp_path / "attention", module.model)
    assert (len(images), [len(epoch.rows) for epoch in epochs]) == (2, [2, 2])


def test_a_file_that_is_being_written_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = AttentionLogger(num_images=1)
    model = train(tmp_path, [callback], epochs=1).model.eval()
    images, whole = torch.stack(callback.pictures), np.savez_compressed

    def killed(stream: Any, **arrays: Any) -> None:
        whole(stream, **{name: array for name, array in arrays.items() if name == "tops"})
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmha.inspection.epochs.np.savez_compressed", killed)
    for epoch in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            write_epoch(tmp_path / "attention", epoch, images, rows_of(model, images), model)
    _, epochs = read_epochs(tmp_path / "attention", model)
    assert [epoch.name for epoch in epochs] == ["epoch 0"]


def test_what_the_logging_cost_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, [AttentionLogger(num_images=1)], epochs=1)
    assert re.search(r"Logging attention took \d+\.\d s, \d+\.\d\d% of the run\.", capsys.readouterr().out)


def wandb_records(content: bytes) -> Iterator[Record]:
    """The records of an offline run: LevelDB's log format, behind 7 bytes of W&B's own."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:  # no room for a header in this block
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_tensorboard_and_wandb_offline_get_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    board, wandb = TensorBoardLogger(tmp_path / "tb", name="", version=""), WandbLogger(offline=True, save_dir=tmp_path)
    train(tmp_path / "run", [AttentionLogger(num_images=1)], (board, wandb), epochs=2)
    wandb.experiment.finish()
    written = np.asarray(Image.open(tmp_path / "run" / "attention" / "epoch_001" / "picture_0.png"))
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"images": 0}).Reload()
    shown = events.Images("attention/picture_0")
    assert [event.step for event in shown] == [4, 8]
    assert (shown[1].width, shown[1].height) == (written.shape[1], written.shape[0])
    assert [event.step for event in events.Scalars("entropy/layer_0_head_0")] == [4, 8]
    assert [event.step for event in events.Scalars("sink_mass/layer_1_head_2")] == [4, 8]
    kept = sorted(tmp_path.glob("wandb/offline-run-*/files/media/images/attention/picture_0_*.png"))
    assert any(np.array_equal(np.asarray(Image.open(file)), written) for file in kept)
    assert len(kept) == 2
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps = []
    for record in wandb_records(file.read_bytes()):
        row = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if any(name.startswith("attention/picture_0") for name in row):
            steps.append(json.loads(row["trainer/global_step"]))
    assert steps == [4, 8]


def test_loss_that_is_not_finite_stops_before_the_step_and_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LitViT, batch: list, batch_idx: int) -> None:
            if trainer.global_step == 5:
                batch[0].fill_(torch.nan)

    with pytest.raises(ValueError, match=r"loss became nan at step 5 .*not_finite\.ckpt.*--model\.learning_rate"):
        train(tmp_path, [StopOnNonFiniteLoss(), Poison()])
    kept = load_model(tmp_path / "checkpoints" / "not_finite.ckpt")
    assert all(parameter.isfinite().all() for parameter in kept.parameters())


def test_the_guard_does_not_praise_weights_that_are_spoilt(tmp_path: Path) -> None:
    class Spoil(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LitViT, batch: list, batch_idx: int) -> None:
            pl_module.model.norm.weight.data.fill_(torch.nan)

    with pytest.raises(ValueError, match=r"loss became nan at step 0 .*The weights are no longer finite\. Lower"):
        train(tmp_path, [StopOnNonFiniteLoss(), Spoil()])


def test_model_folder_holds_the_last_weights(tmp_path: Path) -> None:
    module = train(tmp_path, [SaveModelCallback()])
    loaded = load_model(tmp_path / "model")
    assert loaded.preprocessing == module.model.preprocessing
    for name, tensor in module.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


def test_nonsense_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--attention.num_images .* got 0 and -1"):
        AttentionLogger(num_images=0, every_n_epochs=-1)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_report_says_how_right_the_answers_were(tmp_path: Path, stage: str) -> None:
    module = LitViT(CONFIG)
    torch.nn.init.normal_(module.model.head.weight)
    logger, options = CSVLogger(tmp_path, name="", version=""), {"enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(logger=logger, callbacks=[ClassificationReportCallback()], **options)

    class Named(LightningDataModule):
        class_names = ("ant", "bee", "cat", "dog", "elk")  # the model hears of them behind the callbacks

        def val_dataloader(self) -> DataLoader:
            return pictures(41, 8)

        test_dataloader = val_dataloader

    getattr(trainer, stage)(module, datamodule=Named(), verbose=False)
    images, labels = (torch.cat(part) for part in zip(*pictures(41, 8), strict=True))
    with torch.no_grad():
        answers = module.model.eval()(images).argmax(1)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["pictures"] == 41
    assert metrics["top1"] == pytest.approx((answers == labels).float().mean().item(), abs=1e-6)
    with (tmp_path / "evaluation" / "confusion.csv").open() as file:
        header, *lines = csv.reader(file)
        rows = [[int(cell) for cell in row[1:]] for row in lines]
    assert header[1:] == [line[0] for line in lines] == ["ant", "bee", "cat", "dog", "elk"]
    expected = [[int(((labels == truth) & (answers == answer)).sum()) for answer in range(5)] for truth in range(5)]
    assert rows == expected
    assert not module._forward_hooks


def test_the_bar_looks_no_more_often_than_the_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], RichProgressBar.get_metrics

    def counted(self: Any, trainer: Trainer, module: Any) -> Any:
        looks.append(trainer.global_step)
        return look(self, trainer, module)

    monkeypatch.setattr(RichProgressBar, "get_metrics", counted)
    bar, options = ProgressBar(), {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, log_every_n_steps=5, callbacks=[bar], **options)
    trainer.fit(LitViT(CONFIG), pictures(20, 1), pictures(4, 4))
    assert set(looks) == {5, 10, 15, 20}
    assert "train/loss" in bar.seen


class Saved(Callback):
    """Keeps a checkpoint of the end of one epoch."""

    def __init__(self, file: Path, epoch: int) -> None:
        self.file, self.epoch = file, epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.file)


class Gone(Callback):
    """Remembers which heads were removed in training, by their numbers there."""

    def __init__(self, pruning: HeadPruning) -> None:
        self.pruning = pruning

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.heads = list(self.pruning.removed)


CALM = ViTConfig(**{**vars(CONFIG), "attention_dropout": 0.0, "drop_path": 0.0})


def test_the_least_important_heads_are_removed_in_training_and_their_weights_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", CALM)
    model = VisionTransformer(CALM).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_model(model, tmp_path / "before")
    file, callback = tmp_path / "last.ckpt", HeadPruning(0.5, num_rounds=3, end_fraction=0.5)
    # With a rate of 0 the importance over the first steps is that of the model at the start.
    options: dict[str, Any] = {"rate": 0.0, "label_smoothing": 0.0, "pretrained": str(tmp_path / "before")}
    gone = Gone(callback)
    module = train(tmp_path / "run", [Saved(file, 2), callback, gone, SaveModelCallback()], **options)
    batches = [tuple(batch) for batch in pictures(20, 5)]
    first = rank_heads(normalized(head_importance(model, batches[:2])))[0]
    assert gone.heads[0] == first
    assert len(set(gone.heads)) == len(gone.heads) == 3
    left = [3 - sum(layer == of for of, _ in gone.heads) for layer in range(2)]
    assert [block.attn.num_heads for block in module.model.blocks] == left
    assert callback.removed == []  # a second run with it would mask others
    images, late = batches[0][0], tmp_path / "late.ckpt"
    module.trainer.save_checkpoint(late)  # when the run has ended, and the heads have other numbers
    for source in (file, late, tmp_path / "run" / "model"):  # in the checkpoint heads are there, with weights of zero
        torch.testing.assert_close(load_model(source)(images), module.model.eval()(images))


def test_a_run_that_lost_heads_shows_those_that_are_left(tmp_path: Path) -> None:
    logger, pruning = AttentionLogger(num_images=2), HeadPruning(0.5, num_rounds=2)
    model = train(tmp_path, [logger, pruning, SaveModelCallback()]).model.eval()
    _, epochs = read_epochs(tmp_path / "attention", load_model(tmp_path / "model"))
    assert [epoch.rows.shape[1] for epoch in epochs] == [3, 3, 3]
    torch.testing.assert_close(epochs[2].rows, rows_of(model, torch.stack(logger.pictures)), rtol=0, atol=5e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])  # whose steps hang on the size of whole matrices
def test_removal_of_heads_goes_on_where_it_was(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", CALM)
    whole, again = (Gone(HeadPruning(0.7, num_rounds=4, end_fraction=0.9)) for _ in range(2))
    files = [whole.pruning, whole, Saved(tmp_path / "x.ckpt", 1)]
    expected = train(tmp_path / "whole", files, optimizer=optimizer)
    found = train(tmp_path / "again", [again.pruning, again], ckpt_path=tmp_path / "x.ckpt", optimizer=optimizer)
    assert again.heads == whole.heads
    assert len(again.heads) == 4
    with pytest.raises(ValueError, match=r"The checkpoint is of a run with HeadPruning of .*0\.7.*: give the same"):
        train(tmp_path / "other", [HeadPruning(0.5, num_rounds=4, end_fraction=0.9)], ckpt_path=tmp_path / "x.ckpt")
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"amount": 1.0}, {}, r"HeadPruning takes amount and end_fraction in \(0, 1\) .* got 1.0, 0.5 and 8."),
        (
            {"amount": 0.5},
            {"ema_decay": 0.9},
            "HeadPruning changes the model in training: leave out --model.compile and --model.ema_decay.",
        ),
        ({"amount": 0.05}, {}, "would remove 0 of 6 heads"),
        ({"amount": 0.95}, {}, "would remove 6 of 6 heads, the last of them before step 6 of 12: change amount or end_fraction"),
        ({"amount": 0.5, "end_fraction": 0.99}, {}, "would remove 3 of 6 heads, the last of them before step 12 of 12"),
        (
            {"amount": 0.5},
            {"compile": True},
            "HeadPruning changes the model in training: leave out --model.compile and --model.ema_decay.",
        ),
    ],
)
def test_heads_that_cannot_be_removed_in_training_are_refused(
    arguments: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, [HeadPruning(**arguments)], **options)
