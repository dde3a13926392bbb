"""ema.py: which weights are averaged, validated, saved, and trained."""

from pathlib import Path

import pytest
import torch
from builders import NO_DROPOUT_CONFIG, QUIET, pattern_loader, train
from lightning import Callback, Trainer

from vitmha.training.module import LitViT
from vitmha.weights.load import load_model

MODEL = {"optimizer": "muon", "warmup_fraction": 0.1}


class RecordWeight(Callback):
    """Records one weight after each step and each validation, and its two values in a checkpoint of that moment."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.saved: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LitViT, *_: object) -> None:
        self.trained.append(pl_module.model.head.bias[0].item())

    def on_validation_end(self, trainer: Trainer, pl_module: LitViT) -> None:
        if not trainer.sanity_checking:
            self.validated.append(pl_module.model.head.bias[0].item())
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            averaged, current = (checkpoint[key]["model.head.bias"] for key in ("state_dict", "current_model_state"))
            self.saved.append((averaged[0].item(), current[0].item()))


def test_averaged_weights_are_validated_and_saved_while_training_uses_the_raw_ones(tmp_path: Path) -> None:
    options = {
        "vit": NO_DROPOUT_CONFIG,
        "train_loader": pattern_loader(40, 4, channels=2),
        "accumulate_grad_batches": 2,
    }
    record = RecordWeight()
    module = train(tmp_path / "1", [record], model={**MODEL, "ema_decay": 0.4}, **options)
    plain = train(tmp_path / "2", model=MODEL, **options)
    steps = record.trained[1::2]
    averages = [steps[0]]
    for step, weight in enumerate(steps[1:], start=1):
        decay = min(0.4, (1 + step) / (10 + step))
        averages.append(decay * averages[-1] + (1 - decay) * weight)
    assert record.validated == pytest.approx(averages[4::5], rel=1e-4)
    assert record.saved == list(zip(record.validated, steps[4::5], strict=True))
    assert record.trained[-1] == plain.model.head.bias[0].item()
    assert module.model.head.bias[0].item() == record.validated[-1]


def test_a_checkpoint_with_averaged_weights_loads_as_the_model_that_was_validated(tmp_path: Path) -> None:
    val_loader = pattern_loader(21, 8, channels=2)
    options = {"vit": NO_DROPOUT_CONFIG, "model": {**MODEL, "ema_decay": 0.5}, "val_loader": val_loader}
    module = train(tmp_path, epochs=1, **options)
    trainer = module.trainer
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    torch.testing.assert_close(load_model(tmp_path / "x.ckpt").state_dict(), module.model.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"ema_decay is None, the checkpoint's is 0\.5"):
        Trainer(**QUIET, max_epochs=2).fit(
            LitViT(NO_DROPOUT_CONFIG), val_loader, val_loader, ckpt_path=tmp_path / "x.ckpt"
        )
    accuracy = trainer.callback_metrics["val/accuracy"]
    validated = Trainer(**QUIET)
    module = LitViT(NO_DROPOUT_CONFIG, ema_decay=0.5)
    validated.validate(module, val_loader, ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert validated.callback_metrics["val/accuracy"] == accuracy
