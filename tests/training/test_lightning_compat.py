"""training/lightning_compat.py: what is not tested with the runs that need it."""

import os
from pathlib import Path

import pytest
from lightning.pytorch.loggers import WandbLogger

from vitmha.training.lightning_compat import write_into_run

NAMES = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")


def test_wandb_writes_into_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    online = WandbLogger()
    write_into_run(online, str(tmp_path))
    assert online.save_dir == str(tmp_path)
    assert not set(NAMES) & set(os.environ)
    offline = WandbLogger(offline=True)
    write_into_run(offline, str(tmp_path))
    assert [os.environ[name] for name in NAMES] == [
        str(tmp_path / "wandb" / name) for name in ("cache", "config", "data")
    ]


def test_a_directory_that_the_user_chose_is_kept(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir="elsewhere")
    write_into_run(logger, str(tmp_path))
    assert logger.save_dir == "elsewhere"
