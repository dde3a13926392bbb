"""One run by one process, by two and three, and by two nodes: the same losses, counts, pruned heads and maps."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitmha.weights.load import load_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
OPTIONS = [
    *("--config", str(ROOT / "configs/quickstart.yaml"), "--run_name=run", "--attention.num_images=2"),
    "--trainer.callbacks+=vitmha.training.head_pruning.HeadPruning",
    *("--trainer.callbacks.amount=0.25", "--trainer.callbacks.num_rounds=2", "--trainer.accelerator=cpu"),
    *("--data=ImageFolder", "--data.root=data", "--data.image_size=8", "--data.num_workers=0"),
    *("--data.mixup=0.8", "--data.cutmix=1", "--model.vit.patch_size=4", "--model.vit.embed_dim=16"),
    *("--model.vit.num_heads=2", "--model.vit.mlp_dim=16"),
    *("--trainer.max_epochs=2", "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false"),
]
OVERLAY = ["--config", str(ROOT / "configs/overlays/ddp.yaml"), "--data.batch_size=6", "--trainer.precision=32-true"]
TORCHRUN = ["-m", "torch.distributed.run"]
TRAIN = str(ROOT / "train.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `data`: 48 training and 21 validation images of three classes."""
    directory, rng = tmp_path_factory.mktemp("processes"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 7)):
        for name in ("cat", "dog", "owl"):
            class_dir = directory / "data" / split / name
            class_dir.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(class_dir / f"{i}.png")
    return directory


def run(directory: Path, name: str, *commands: list[str]) -> dict[str, list[float]]:
    """The metrics of a run that the commands, one for each node, have made."""
    (directory / name).mkdir()
    (directory / name / "data").symlink_to(directory / "data")
    options: dict[str, Any] = {"cwd": directory / name, "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, *command], **options) for command in commands]
    for process in processes:
        _, printed = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        assert "sync_dist" not in printed
    # Only rank 0 writes.
    assert [version.name for version in (directory / name / "runs/run").iterdir()] == ["version_0"]
    run_dir = directory / name / "runs/run/version_0"
    columns = ("train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy")
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "step", *columns, "lr", "muon_lr"]
    assert [row["epoch"] for row in rows] == ["0", "1"]
    metrics = {column: [float(row[column]) for row in rows] for column in columns}
    with (run_dir / "attention/heads.csv").open() as file:
        metrics["entropy"] = [float(row["entropy"]) for row in csv.DictReader(file)]
    num_heads = [attention.num_heads for attention in load_model(run_dir / "model").attentions]
    assert sum(num_heads) == 6  # of 8
    return metrics | {"num_heads": num_heads}


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[float]]:
    return run(directory, "single", [TRAIN, *OPTIONS, "--data.batch_size=12", "--trainer.devices=1"])


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for column in ("train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy", "num_heads"):
        assert found[column] == pytest.approx(expected[column], abs=1e-4)
    # Muon's iteration amplifies the rounding of sums in another order, and the model is small.
    assert found["entropy"] == pytest.approx(expected["entropy"], abs=2e-3)
    assert len(found["val/loss"]) == 2
    assert len(found["entropy"]) == 16
    for accuracy in found["val/accuracy"]:
        assert 21 * accuracy == pytest.approx(round(21 * accuracy), abs=1e-4)  # every image counts once


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("processes", "batch_size"), [(2, 6), (3, 4)])
def test_processes_of_one_command(
    processes: int, batch_size: int, directory: Path, expected: dict[str, list[float]]
) -> None:
    options = [*OPTIONS, f"--data.batch_size={batch_size}", f"--trainer.devices={processes}"]
    assert_close(run(directory, f"devices_{processes}", [TRAIN, *options]), expected)
    # In a validation afterwards each of the 21 images counts once, too.
    command = [sys.executable, "-m", "vitmha", "validate", *options]
    command += ["--ckpt_path", "runs/run/version_0/checkpoints/last.ckpt"]
    cwd = directory / f"devices_{processes}"
    validated = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, check=False)
    assert validated.returncode == 0, validated.stderr
    [report] = cwd.glob("runs/run/*/evaluation/metrics.json")
    assert json.loads(report.read_text())["num_images"] == 21


@pytest.mark.slow
def test_torchrun_with_the_overlay(directory: Path, expected: dict[str, list[float]]) -> None:
    options = [*OPTIONS, *OVERLAY, "--trainer.devices=2", "--trainer.accelerator=cpu"]
    command = [*TORCHRUN, "--nproc-per-node", "2", TRAIN, *options]
    assert_close(run(directory, "torchrun", command), expected)


@pytest.mark.slow
def test_two_nodes_with_a_shared_directory(directory: Path, expected: dict[str, list[float]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", address]
    command = [*launch, TRAIN, *OPTIONS, *OVERLAY, "--trainer.devices=1", "--trainer.num_nodes=2"]
    assert_close(run(directory, "nodes", command, command), expected)
