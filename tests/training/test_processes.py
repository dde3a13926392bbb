"""A folder trained by one process, by two and three, and by two machines: the same losses, counts, heads and maps."""

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
WORDS = f"""--config {ROOT}/configs/quickstart.yaml --run_name run --attention.num_images 2 --trainer.accelerator cpu
    --trainer.callbacks+=vitmha.training.head_pruning.HeadPruning
    --trainer.callbacks.amount=0.25 --trainer.callbacks.num_rounds=2
    --data ImageFolder --data.root data --data.image_size 8 --data.num_workers 0 --data.mixup 0.8 --data.cutmix 1
    --model.vit.patch_size 4 --model.vit.embed_dim 16 --model.vit.num_heads 2 --model.vit.mlp_dim 16
    --trainer.max_epochs 2 --trainer.log_every_n_steps 1 --trainer.enable_progress_bar false"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 pictures to train on and 21 to validate on, of three classes."""
    place, rng = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 7)):
        for name in ("cat", "dog", "owl"):
            folder = place / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return place


def run(place: Path, name: str, *commands: str) -> dict[str, list[float]]:
    """The numbers of a run, that one command or several at once, a machine each, have made."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (place / name).mkdir()
    (place / name / "data").symlink_to(place / "data")
    options: dict[str, Any] = {"cwd": place / name, "env": environment, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, *line.split()], **options) for line in commands]
    for process in started:
        _, printed = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    # Only rank 0 writes.
    assert [folder.name for folder in (place / name / "runs/run").iterdir()] == ["version_0"]
    folder = place / name / "runs/run/version_0"
    columns = ("train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    numbers = {column: [float(row[column]) for row in rows if row[column]] for column in columns}
    with (folder / "attention/heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    numbers["entropy"] = [float(row["entropy"]) for row in rows]
    left = [attention.num_heads for attention in load_model(folder / "model").attentions]
    assert sum(left) == 6  # of 8
    return numbers | {"left": left}


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, list[float]]:
    return run(place, "alone", f"{ROOT}/train.py {WORDS} --data.batch_size 12 --trainer.devices 1")


def assert_alike(numbers: dict[str, list[float]], alone: dict[str, list[float]]) -> None:
    for column in ("train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy", "left"):
        assert numbers[column] == pytest.approx(alone[column], abs=1e-4)
    # Of these few weights; Muon's iteration enlarges what sums in another order differ by.
    assert numbers["entropy"] == pytest.approx(alone["entropy"], abs=2e-3)
    assert len(numbers["val/loss"]) == 2
    assert len(numbers["entropy"]) == 16
    for accuracy in numbers["val/accuracy"]:
        assert 21 * accuracy == pytest.approx(round(21 * accuracy), abs=1e-4)  # every picture once


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "batch_size"), [(2, 6), (3, 4)])
def test_processes_of_one_command(processes: int, batch_size: int, place: Path, alone: dict[str, list[float]]) -> None:
    words = f"{WORDS} --data.batch_size {batch_size} --trainer.devices {processes}"
    assert_alike(run(place, f"devices_{processes}", f"{ROOT}/train.py {words}"), alone)
    # And measured afterwards: each of the 21 counts once.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = "validate " + words + " --ckpt_path runs/run/version_0/checkpoints/last.ckpt"
    command = [Path(sys.executable).with_name("vitmha"), *words.split()]
    measured = subprocess.run(
        command, cwd=place / f"devices_{processes}", env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    assert measured.returncode == 0, measured.stderr
    [report] = (place / f"devices_{processes}").glob("runs/run/*/evaluation/metrics.json")
    assert json.loads(report.read_text())["pictures"] == 21


@pytest.mark.slow
def test_torchrun_with_the_overlay(place: Path, alone: dict[str, list[float]]) -> None:
    words = f"{WORDS} --config {ROOT}/configs/overlays/ddp.yaml --data.batch_size 6 --trainer.devices 2"
    words += " --trainer.precision 32-true --trainer.accelerator cpu"
    launch = "-m torch.distributed.run --nproc-per-node 2"
    assert_alike(run(place, "torchrun", f"{launch} {ROOT}/train.py {words}"), alone)


@pytest.mark.slow
def test_two_machines_with_a_common_folder(place: Path, alone: dict[str, list[float]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = f"{WORDS} --config {ROOT}/configs/overlays/ddp.yaml --data.batch_size 6 --trainer.devices 1"
    words += " --trainer.precision 32-true --trainer.num_nodes 2"
    launch = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1"
    launch += f" --rdzv-backend c10d --rdzv-id x --rdzv-endpoint {address}"
    assert_alike(run(place, "machines", *[f"{launch} {ROOT}/train.py {words}"] * 2), alone)
