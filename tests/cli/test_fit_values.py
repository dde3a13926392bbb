"""cli/fit_values.py: values of Lightning's options are checked before the data is read."""

from typing import Any

import pytest
from builders import refused

from vitmha.cli.fit_values import RANGES, check_values, type_message
from vitmha.errors import UserError

UNSET = {
    **dict.fromkeys(RANGES),
    "trainer.accelerator": "cpu",
    "trainer.callbacks": None,
    "checkpoint.monitor": "val/accuracy",
    "checkpoint.auto_insert_metric_name": False,
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed_everything", (-1, 2**32)),
        ("trainer.max_epochs", (-2,)),
        ("trainer.max_steps", (-2,)),
        ("trainer.min_epochs", (-1,)),
        ("trainer.min_steps", (-1,)),
        ("trainer.max_time", ("00:00:00:00",)),
        ("trainer.num_nodes", (0,)),
        ("trainer.accumulate_grad_batches", (0,)),
        ("trainer.gradient_clip_val", (-1, float("nan"), float("inf"))),
        ("trainer.gradient_clip_algorithm", ("norms",)),
        ("trainer.check_val_every_n_epoch", (0, -1)),
        ("trainer.val_check_interval", (0, -1, 1.5)),
        ("trainer.limit_train_batches", (1.5, -1)),
        ("trainer.limit_val_batches", (1.5, -1)),
        ("trainer.limit_test_batches", (1.5, -1)),
        ("trainer.limit_predict_batches", (1.5, -1)),
        ("trainer.overfit_batches", (1.5, -1)),
        ("trainer.num_sanity_val_steps", (-2,)),
        ("trainer.log_every_n_steps", (-1,)),
        ("trainer.fast_dev_run", (-1,)),
        ("trainer.reload_dataloaders_every_n_epochs", (-1,)),
        ("checkpoint.mode", ("mx",)),
        ("checkpoint.save_top_k", (-2,)),
        ("checkpoint.every_n_epochs", (-1,)),
        ("checkpoint.every_n_train_steps", (-1,)),
        ("checkpoint.filename", ("",)),
        ("model.pretrained", ("",)),
    ],
)
def test_values_out_of_range_are_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"^--{name} must be .*, got {value or repr(value)}$"):
            check_values({**UNSET, name: value})


def test_values_in_range_pass() -> None:
    check_values(UNSET)
    for valid in (
        {"trainer.max_epochs": -1, "trainer.max_steps": 1, "trainer.min_steps": 1, "seed_everything": 2**32 - 1},
        {"trainer.max_epochs": 3, "trainer.min_epochs": 3, "trainer.max_time": "00:00:00:01"},
        {"trainer.gradient_clip_val": 0, "trainer.val_check_interval": 1.0, "trainer.limit_train_batches": 0},
        {"trainer.val_check_interval": "00:01:00:00", "trainer.limit_val_batches": 0.5, "checkpoint.save_top_k": -1},
        {"checkpoint.monitor": None, "checkpoint.filename": None},
        {"checkpoint.monitor": "train/loss", "checkpoint.filename": "best-{epoch:03d}-{val/accuracy:.2f}"},
    ):
        check_values({**UNSET, **valid})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"trainer.min_epochs": 5, "trainer.max_epochs": 3},
            "^--trainer.min_epochs 5 is above --trainer.max_epochs 3: change one of them",
        ),
        ({"trainer.accelerator": "gpu"}, "^--trainer.accelerator gpu: PyTorch finds no GPU; use cpu or auto"),
        (
            {"checkpoint.monitor": "val/acc"},
            r"^--checkpoint.monitor: no run logs val/acc \(did you mean val/accuracy\?\); expected one of ",
        ),
        ({"checkpoint.filename": "best-{val/acc:.2f}"}, "^--checkpoint.filename: no run logs val/acc "),
        ({"checkpoint.filename": "best-{val/loss:.2q}"}, "^--checkpoint.filename: best-.*: Unknown format code 'q'"),
        ({"checkpoint.filename": "best-{val/loss:.2"}, "^--checkpoint.filename: best-.*: unmatched '{'"),
        ({"checkpoint.filename": "../best"}, "^--checkpoint.filename: ../best would make a directory: "),
        (
            {"checkpoint.filename": "best-{val/loss:.2f}", "checkpoint.auto_insert_metric_name": True},
            "^--checkpoint.filename: best-{val/loss:.2f} would make a directory: ",
        ),
        (
            {"trainer.callbacks": {"class_path": "lightning.ModelCheckpoint", "init_args": {"filename": "{val/loss}"}}},
            "^--trainer.callbacks.filename of lightning.ModelCheckpoint: {val/loss} would make a directory: ",
        ),
        (
            {"trainer.callbacks": [{"class_path": "lightning.EarlyStopping", "init_args": {"monitor": "val/acc"}}]},
            "^--trainer.callbacks.monitor of lightning.EarlyStopping: no run logs val/acc ",
        ),
    ],
)
def test_values_that_contradict_each_other_and_unknown_metrics_are_refused(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        check_values({**UNSET, **values})


def test_a_callback_of_the_user_may_log_the_monitored_metric() -> None:
    callback = {"class_path": "my.Callback", "init_args": {}}
    check_values({**UNSET, "checkpoint.monitor": "val/top5", "trainer.callbacks": [callback]})


def test_the_checked_keys_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    message = "error: --trainer.reload_dataloaders_every_n_epochs must be 0 (never) or more, got -1"
    assert (
        refused(["fit", "--config", "quickstart", "--trainer.reload_dataloaders_every_n_epochs", "-1"], capsys)
        == message
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Parser key \"batch_size\":\n  Expected a <class 'int'>. Got value: abc",
            "batch_size must be an integer, got abc",
        ),
        (
            "Parser key \"model.loss\":\n  Expected a typing.Literal['cross_entropy', 'bce']. Got value: x",
            "--model.loss must be cross_entropy or bce, got x",
        ),
        (
            'Parser key "model.vit.patch_size":\n  Does not validate against any of the Union subtypes\n'
            "  Subtypes: [<class 'int'>, tuple[int, int]]\n  Errors:\n    - Expected a <class 'int'>\n"
            "    - Expected a tuple with 2 elements\n  Given value type: <class 'list'>\n  Given value: [2]",
            "--model.vit.patch_size must be an integer or [int,int], got [2]",
        ),
        (
            'Parser key "model.betas":\n  Expected a tuple with 2 elements. Got value: [0.9]',
            "--model.betas must be a tuple with 2 elements, got [0.9]",
        ),
        ("unrecognized arguments: --x", None),
    ],
)
def test_a_value_of_a_wrong_type_is_answered_in_a_sentence(message: str, expected: str | None) -> None:
    assert type_message(message) == expected
