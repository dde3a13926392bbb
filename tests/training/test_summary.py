"""training/summary.py: what a run knows of its training, for the model card."""

from pathlib import Path

import pytest
import torch
from builders import QUIET, train
from huggingface_hub import ModelCard
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from vitmha.data import FashionMNISTMini, ImageFolder
from vitmha.models.config import ViTConfig
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.module import LitViT
from vitmha.training.summary import training_summary
from vitmha.weights.training_summary import EvaluationSummary, TrainingSummary, read_summary


def test_the_summary_is_that_of_the_run(tmp_path: Path) -> None:
    module = train(tmp_path, [SaveModelCallback("vitmha fit --config mine")], model={"learning_rate": 0.01})
    summary, metrics = read_summary(tmp_path / "model"), module.trainer.callback_metrics
    assert summary.command == "vitmha fit --config mine"
    assert summary.num_train_images == 20
    known = {"learning_rate": 0.01, "epochs": 3, "total_steps": 12, "global_batch_size": 5, "device": "cpu", "seed": 0}
    assert summary.hyperparameters.items() >= known.items()
    assert not {"embed_dim", "mean", "decoder", "num_train_images"} & summary.hyperparameters.keys()
    assert summary.result == EvaluationSummary(accuracy=round(metrics["val/accuracy"].item(), 6), num_images=11)
    note = "Training ended with the weights of the last step: the validation images chose no checkpoint."
    assert summary.notes == (note,)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.eval_results[0].metric_value == summary.result.accuracy
    assert f"\n{summary.result} (one run, seed 0).\n" in card.text


def test_weights_that_were_not_validated_have_no_result(tmp_path: Path) -> None:
    train(tmp_path, [SaveModelCallback()], epochs=3, max_steps=6)  # validated after 4 and 8 steps
    summary = read_summary(tmp_path / "model")
    assert summary.result is None
    assert summary.hyperparameters["total_steps"] == 6


def test_a_part_of_the_validation_images_is_not_counted_as_all(tmp_path: Path) -> None:
    train(tmp_path, [SaveModelCallback()], epochs=1, limit_val_batches=2)
    result = read_summary(tmp_path / "model").result
    assert result.num_images is None
    assert str(result).endswith("top-1 accuracy on part of the validation images")


def test_the_use_of_the_images_by_early_stopping_is_told(tmp_path: Path) -> None:
    train(tmp_path, [SaveModelCallback(), EarlyStopping("val/loss")], epochs=1)
    [note] = read_summary(tmp_path / "model").notes
    assert note.endswith("chose no checkpoint, but they decided when training ended (EarlyStopping).")


@pytest.mark.filterwarnings("ignore:.* exists and is not empty")
def test_a_complete_run_that_is_resumed_keeps_its_card(tmp_path: Path) -> None:
    train(tmp_path, [SaveModelCallback("first")], epochs=1, enable_checkpointing=True)
    [checkpoint] = tmp_path.glob("checkpoints/*.ckpt")
    before = (tmp_path / "model" / "README.md").read_text()
    assert "top-1 accuracy" in before
    train(tmp_path, [SaveModelCallback("second")], epochs=1, enable_checkpointing=True, ckpt_path=checkpoint)
    assert (tmp_path / "model" / "README.md").read_text() == before


def summarize(data: FashionMNISTMini | ImageFolder, directory: Path) -> TrainingSummary:
    """The summary at the end of a run of two steps."""
    summaries = []

    class Summarize(SaveModelCallback):
        def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            summaries.append(training_summary(pl_module, trainer))

    logger = CSVLogger(directory, name="leaves", version="")
    trainer = Trainer(**{**QUIET, "logger": logger}, callbacks=[Summarize()], max_epochs=1, limit_train_batches=2)
    vit = ViTConfig(patch_size=14, embed_dim=12, depth=1, num_heads=3, image_size=28, in_channels=data.in_channels)
    trainer.fit(LitViT(ViTConfig(**{**vars(vit), "num_classes": data.num_classes})), datamodule=data)
    return summaries[0]


def test_the_dataset_has_the_name_of_its_module_or_directory(image_folder: Path, tmp_path: Path) -> None:
    mini = summarize(FashionMNISTMini(batch_size=500), tmp_path)
    assert (mini.name, mini.dataset, mini.num_train_images) == ("leaves", "FashionMNISTMini", 10_000)
    assert (mini.result.split, mini.result.num_images) == ("test", 2000)
    folder = summarize(ImageFolder(image_folder, image_size=28, batch_size=2, num_workers=0), tmp_path / "run")
    assert (folder.dataset, folder.hyperparameters["data"]) == (image_folder.name, "ImageFolder")
    assert folder.result.split == "validation"
    assert folder.result.dataset == image_folder.name


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three images in each of two classes, and a directory for validation."""
    from torchvision.transforms.v2.functional import to_pil_image

    root = tmp_path / "some leaves"
    for split, name, i in ((s, c, i) for s in ("train", "val") for c in ("ash", "oak") for i in range(3)):
        (root / split / name).mkdir(parents=True, exist_ok=True)
        to_pil_image(torch.rand(3, 32, 32)).save(root / split / name / f"{i}.png")
    return root
