"""head_pruning.py: which heads are pruned in training, resuming, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CONFIG, NO_DROPOUT_CONFIG, pattern_loader, random_model, train
from lightning import Callback, Trainer

from vitmha.pruning.importance import head_importance, normalize_importance, rank_heads
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.head_pruning import HeadPruning
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


class SaveCheckpoint(Callback):
    """Saves a checkpoint at the end of one epoch."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class RecordPruned(Callback):
    """Records which heads were pruned, by their indices in training."""

    def __init__(self, pruning: HeadPruning) -> None:
        self.pruning = pruning

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.heads = list(self.pruning.pruned)


def test_the_least_important_heads_are_masked_in_training_and_removed_at_its_end(tmp_path: Path) -> None:
    model = random_model().eval()
    save_model(model, tmp_path / "before")
    path, pruning = tmp_path / "last.ckpt", HeadPruning(0.5, num_rounds=3, end_fraction=0.5)
    # With a learning rate of 0 the importance over the first steps is that of the initial model.
    options: dict[str, Any] = {"learning_rate": 1e-30, "label_smoothing": 0.0, "pretrained": str(tmp_path / "before")}
    record = RecordPruned(pruning)
    callbacks = [SaveCheckpoint(path, 2), pruning, record, SaveModelCallback()]
    module = train(tmp_path / "run", callbacks, vit=NO_DROPOUT_CONFIG, model=options)
    batches = [tuple(batch) for batch in pattern_loader(20, 5, channels=2)]
    first = rank_heads(normalize_importance(head_importance(model, batches[:2])))[0]
    assert record.heads[0] == first
    assert len(set(record.heads)) == len(record.heads) == 3
    remaining = [3 - sum(layer == pruned_layer for pruned_layer, _ in record.heads) for layer in range(2)]
    assert [block.attn.num_heads for block in module.model.blocks] == remaining
    assert pruning.pruned == []  # in a second run it would mask others
    images, late = batches[0][0], tmp_path / "late.ckpt"
    module.trainer.save_checkpoint(late)  # after the end, when the heads have other indices
    for source in (path, late, tmp_path / "run" / "model"):  # the checkpoint has all heads, some with zero weights
        torch.testing.assert_close(load_model(source)(images), module.model.eval()(images))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])  # LAMB's step depends on the norm of whole matrices
def test_pruning_resumes_where_it_was(optimizer: str, tmp_path: Path) -> None:
    uninterrupted, resumed = (RecordPruned(HeadPruning(0.7, num_rounds=4, end_fraction=0.9)) for _ in range(2))
    options: dict[str, Any] = {"vit": NO_DROPOUT_CONFIG, "model": {"optimizer": optimizer}}
    callbacks = [uninterrupted.pruning, uninterrupted, SaveCheckpoint(tmp_path / "x.ckpt", 1)]
    expected = train(tmp_path / "uninterrupted", callbacks, **options)
    options["ckpt_path"] = tmp_path / "x.ckpt"
    found = train(tmp_path / "resumed", [resumed.pruning, resumed], **options)
    assert resumed.heads == uninterrupted.heads
    assert len(resumed.heads) == 4
    with pytest.raises(ValueError, match=r"The checkpoint is from a run with HeadPruning .*0\.7.*: use the same"):
        train(tmp_path / "other", [HeadPruning(0.5, num_rounds=4, end_fraction=0.9)], **options)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"amount": 1.0}, {}, r"^amount must be in \(0, 1\), got 1.0"),
        ({"amount": 0.5, "num_rounds": 0}, {}, r"^num_rounds must be at least 1, got 0"),
        ({"amount": 0.5, "end_fraction": 1.0}, {}, r"^end_fraction must be in \(0, 1\), got 1.0"),
        ({"amount": 0.5}, {"ema_decay": 0.9}, "cannot be combined with compile or ema_decay"),
        ({"amount": 0.5}, {"compile": True}, "cannot be combined with compile or ema_decay"),
        ({"amount": 0.05}, {}, "would prune 0 of 6 heads"),
        ({"amount": 0.95}, {}, "would prune 6 of 6 heads, the last of them at step 6 of 12: change amount or end_frac"),
        ({"amount": 0.5, "end_fraction": 0.99}, {}, "would prune 3 of 6 heads, the last of them at step 12 of 12"),
    ],
)
def test_settings_that_cannot_prune_are_refused(
    arguments: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, [HeadPruning(**arguments)], vit=CONFIG, model=options)
