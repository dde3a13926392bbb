"""run_record.py: every field of a checkpoint's record, in every stage, against docs/reference/resuming.md."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from builders import NO_DROPOUT_CONFIG, QUIET, ROOT, pattern_loader
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.training.callbacks import ClassificationReportCallback
from vitmha.training.module import LitViT
from vitmha.training.run_record import (
    RULES,
    STAGES,
    Stage,
    check_against_record,
    data_record,
    differences,
    recorded_in,
    run_record,
)
from vitmha.weights.save import save_model

DOCS = ROOT / "docs" / "reference" / "resuming.md"
CONFIG = replace(NO_DROPOUT_CONFIG, in_channels=3)
NAMES = ("ant", "bee", "cat", "dog", "eel")


class Patterns(LightningDataModule):
    """Images of one pattern per class, whose class names may have any order."""

    def __init__(self, class_names: tuple[str, ...] = NAMES, mean: float = 0.5) -> None:
        super().__init__()
        self.class_names = class_names
        self.preprocessing = Preprocessing(image_size=(6, 9), mean=(mean, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(30) % 5
        images = 2 * torch.randn(5, 3, 6, 9, generator=generator)[labels]
        images += torch.randn(images.shape, generator=generator) / 2
        order = [class_names.index(name) if name in class_names else 0 for name in NAMES]
        self.dataset = TensorDataset(images, torch.tensor(order)[labels])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=5)

    val_dataloader = test_dataloader = train_dataloader


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LitViT, Path]:
    """A module that has learned the patterns, and its checkpoint."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    trainer = Trainer(**QUIET, max_epochs=4)
    module = LitViT(CONFIG, learning_rate=0.01)
    trainer.fit(module, datamodule=Patterns())
    trainer.save_checkpoint(path)
    return module, path


def another(field: str, value: Any) -> Any:
    """A value of a field that differs from the one given."""
    kinds = ViTConfig.__dataclass_fields__
    if field == "class_names":
        return value[::-1]
    if field in kinds and get_args(kinds[field].type) and isinstance(value, str):
        return next(choice for choice in get_args(kinds[field].type) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return tuple(part + 1 for part in value)
    return 3 if value is None else f"not {value}"


def outcome(field: str, stage: Stage, record: dict[str, Any], printed: list[str]) -> str:
    """What a call does that differs from the record in one field."""
    call = {field: another(field, record[field])}
    [difference] = differences(record, call)
    assert (difference.recorded, difference.called) == (record[field], call[field])
    printed.clear()
    try:
        check_against_record("x.ckpt", record, call, stage)
    except UserError as error:
        line = str(error)
        assert "\n" not in line
        assert line.startswith("x.ckpt cannot be ")
        if field != "class_names":
            assert f"{call[field]}" in line
            assert f"{record[field]}" in line
        assert stage != "fit" or "start a new run from its weights (`pretrained` RUN/model)" in line
        return "refused"
    if printed:
        assert f"{field} is {call[field]}, the checkpoint's is {record[field]}" in printed[0]
        return "notice"
    return "used"


SEEN = {"refused": {"refused"}, "checkpoint's": {"refused"}, "notice": {"notice"}}


def test_every_field_in_every_stage_does_what_the_table_says(
    trained: tuple[LitViT, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded_in(torch.load(trained[1], weights_only=True))
    record |= {"split_seed": 0, "val_fraction": 0.1, "muon_learning_rate": 0.02, "data_options": {"hflip": 0.5}}
    assert set(record) == set(RULES)
    printed: list[str] = []
    monkeypatch.setattr("vitmha.training.run_record.rank_zero_info", printed.append)
    rows = ["| field | resume | validate | test | pretrained |", "|---|---|---|---|---|"]
    for field, rules in RULES.items():
        for stage, rule in zip(STAGES, rules, strict=True):
            assert outcome(field, stage, record, printed) in SEEN.get(rule, {"used"}), (field, stage)
        rows.append(f"| `{field}` | {' | '.join(rules)} |")
    text = DOCS.read_text()
    expected = re.sub(r"<!-- table -->.*", "<!-- table -->\n" + "\n".join(rows) + "\n", text, flags=re.DOTALL)
    assert text == expected


def test_a_record_holds_what_the_run_depends_on(trained: tuple[LitViT, Path]) -> None:
    record = torch.load(trained[1], weights_only=True)["run"]
    expected = {
        "num_heads": 3,
        "image_size": (6, 9),
        "mlp_dim": 20,
        "head_dim": None,  # the default, embed_dim / num_heads
        "class_names": NAMES,
        "mean": (0.5, 0.5, 0.5),
        "data": "Patterns",
        "num_train_images": 30,
        "global_batch_size": 5,
        "total_steps": 24,
        "learning_rate": 0.01,
        "accumulate_grad_batches": 1,
        "seed": 0,
        "precision": "32-true",
    }
    assert {name: record[name] for name in expected} == expected


ORDER = ("cat", "ant", "eel", "bee", "dog")


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("source", ["checkpoint", "model"])
def test_class_names_in_another_order_are_matched_by_name(
    stage: str, source: str, trained: tuple[LitViT, Path], tmp_path: Path
) -> None:
    module, path = trained
    save_model(module.model, tmp_path / "model")
    results = []
    for names in (NAMES, ORDER):
        pretrained = {"pretrained": str(tmp_path / "model")} if source == "model" else {}
        other = LitViT(CONFIG, **pretrained)
        directory = tmp_path / names[0]
        callbacks: list[Any] = [ClassificationReportCallback()]
        trainer = Trainer(**QUIET, callbacks=callbacks, default_root_dir=directory)
        ckpt_path = path if source == "checkpoint" else None
        [metrics] = getattr(trainer, stage)(other, datamodule=Patterns(names), ckpt_path=ckpt_path, verbose=False)
        assert other.model.class_names == names
        table = (directory / "evaluation/per_class.csv").read_text().splitlines()
        results.append((metrics, sorted(table)))
    assert results[0][0] == pytest.approx(results[1][0])
    assert results[0][0][f"{'val' if stage == 'validate' else 'test'}/accuracy"] > 0.9
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ORDER, "class 0 of the data is 'cat', the checkpoint's is 'ant'"),
        (("ant", "bee", "cat", "dog", "fox"), "in the data only: 'fox'; in the checkpoint only: 'eel'"),
    ],
)
def test_a_run_is_not_resumed_on_other_classes(
    names: tuple[str, ...], message: str, trained: tuple[LitViT, Path]
) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(**QUIET, max_epochs=5).fit(
            LitViT(CONFIG, learning_rate=0.01), datamodule=Patterns(names), ckpt_path=trained[1]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vit": replace(CONFIG, num_heads=2)}, "num_heads is 2, the checkpoint's is 3"),
        ({"vit": replace(CONFIG, norm_eps=1e-3)}, "norm_eps is 0.001, the checkpoint's is 1e-06"),
        ({"vit": replace(CONFIG, depth=1)}, "depth is 1, the checkpoint's is 2"),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_python_calls_are_refused_another_architecture(
    stage: str, change: dict[str, Any], message: str, trained: tuple[LitViT, Path]
) -> None:
    module = LitViT(**change, learning_rate=0.01)
    with pytest.raises(UserError, match=message):
        getattr(Trainer(**QUIET, max_epochs=5), stage)(module, datamodule=Patterns(), ckpt_path=trained[1])


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_python_calls_are_refused_other_preprocessing(stage: str, trained: tuple[LitViT, Path]) -> None:
    with pytest.raises(UserError, match=r"mean is \(0.1, 0.5, 0.5\), the checkpoint's is \(0.5, 0.5, 0.5\)"):
        getattr(Trainer(**QUIET), stage)(LitViT(CONFIG), datamodule=Patterns(mean=0.1), ckpt_path=trained[1])


def test_a_checkpoint_without_a_record_is_compared_by_its_model(trained: tuple[LitViT, Path], tmp_path: Path) -> None:
    checkpoint = torch.load(trained[1], weights_only=True)
    del checkpoint["run"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(UserError, match="num_heads is 2"):
        Trainer(**QUIET).validate(
            LitViT(replace(CONFIG, num_heads=2)), datamodule=Patterns(), ckpt_path=tmp_path / "old.ckpt"
        )


def test_the_record_of_a_data_module_holds_what_a_checkpoint_can() -> None:
    options = {"root": "x", "hflip": 0.5, "crop_scale": [0.1, 1.0], "transform": torch.relu, "split_seed": 3}
    expected = {"data": "Own", "split_seed": 3, "data_options": {"hflip": 0.5, "crop_scale": [0.1, 1.0]}}
    assert data_record("Own", options) == expected


def test_a_loader_of_pytorch_is_recorded(tmp_path: Path) -> None:
    trainer = Trainer(**QUIET, max_epochs=1)
    module = LitViT(CONFIG)
    trainer.fit(module, pattern_loader(20, 5), pattern_loader(20, 5))
    record = run_record(module, trainer)
    assert (record["num_train_images"], record["global_batch_size"]) == (20, 5)
    assert "class_names" not in record
    assert "data" not in record
