"""cli.py: the command line as its user meets it, in processes of its own where it trains."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from vitmha.cli import main
from vitmha.pretrained import load_model

ROOT = Path(__file__).parents[1]
QUICK = f"--config {ROOT}/configs/quickstart.yaml"
SHORT = f"{QUICK} --config {ROOT}/tests/short.yaml"
SMALL = "--model.vit.depth 2 --model.vit.embed_dim 16 --model.vit.mlp_dim 16 --attention.num_pictures 1"


def run(words: str, folder: Path, expected: int = 0) -> str:
    """`python train.py WORDS` in a folder; what it printed, both streams."""
    command = [sys.executable, str(ROOT / "train.py"), *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == expected, printed
    return printed


def refused(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The one message of a call that is refused before anything is trained or written."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    with pytest.raises(SystemExit) as exit_:
        main(words.split())
    assert exit_.value.code != 0
    printed = capsys.readouterr().err + (exit_.value.code if isinstance(exit_.value.code, str) else "")
    assert "Traceback" not in printed
    assert not list(folder.glob("runs/*/*/checkpoints"))
    return next(line for line in printed.splitlines() if line.startswith("error:"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.vit.dept 3", "there is no option 'model.vit.dept'; the nearest is 'model.vit.depth'"),
        ("--trainer.max_epoch 3", "there is no option 'trainer.max_epoch'; the nearest is 'trainer.max_epochs'"),
        ("--data.batchsize 3", "there is no option 'batchsize'; the nearest is 'batch_size'"),
        ("--data CIFAR", "--data CIFAR: there is no such class; choose from CIFAR10, CIFAR100, FashionMNIST"),
        ("--model.vit.depth many", "--model.vit.depth: Expected a <class 'int'>. Got value: many"),
        (
            "--model.vit.num_heads 5",
            "embed_dim 64 is not divisible by num_heads 5: change one of them, or set head_dim.",
        ),
        ("--model.vit.num_kv_heads 3", "num_heads 4 is not divisible by num_kv_heads 3"),
        ("--model.vit.patch_size 5", "image_size 28 x 28 is not divisible by patch_size 5 x 5"),
        ("--model.vit.backend efficient", "backend 'efficient' cannot run here"),
        ("--model.pretrained nowhere", "nowhere must be a folder with config.json and model.safetensors"),
        ("--data ImageFolder --data.root nowhere", "--data.root: there is no folder nowhere"),
        ("--data CIFAR10 --data.root nowhere", "nowhere/cifar-10-batches-bin is absent and its download failed"),
        ("--data.batch_size 10001", "the training set has 10000 pictures, but one step takes 10001"),
        ("--config nowhere.yaml", "--config: File does not exist"),
    ],
)
def test_a_wrong_call_gets_one_message(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert message in refused(f"fit {QUICK} {words}", capsys, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {vit: {dept: 3}}", "there is no option 'model.vit.dept'; the nearest is 'model.vit.depth'"),
        ("trainr: {max_epochs: 3}", "there is no option 'trainr.max_epochs'; the nearest is 'trainer.max_epochs'"),
        ("data: {class_path: CIFAR10, init_args: {rot: x}}", "there is no option 'rot'; the nearest is 'root'"),
        ("trainer: {max_epochs: ", "Problems parsing config"),
    ],
)
def test_a_wrong_yaml_gets_one_message(
    text: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    assert message in refused(f"fit {QUICK} --config {tmp_path}/wrong.yaml", capsys, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ([], "has no folders of pictures"),
        (["a"], "a"),
        (["train/a", "val/a", "val/b"], "has classes that {root}/train lacks: b"),
    ],
)
def test_a_wrong_picture_folder_gets_one_message(
    folders: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    for folder in folders:
        (root / folder).mkdir(parents=True)
        if folder != "a":
            Image.new("RGB", (8, 8)).save(root / folder / "x.png")
    words = f"fit {QUICK} --data ImageFolder --data.root {root}"
    assert message.format(root=root) in refused(words, capsys, monkeypatch, tmp_path)


def test_an_unknown_word_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "'fit', 'validate', 'test'" in refused("fot", capsys, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A short run of the quick start, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(f"{SHORT} {SMALL}", folder)


def column(file: Path, name: str) -> list[float]:
    """The numbers of one metric in a run's metrics.csv."""
    with file.open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def test_a_run_leaves_what_it_promises_and_says_so(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    version = folder / "runs" / "short" / "version_0"
    files = ["config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "attention/heads.csv"]
    files += ["model/config.json", "model/model.safetensors", "attention/epoch_000/picture_0.png"]
    assert [file for file in files if not (version / file).is_file()] == []
    assert f"Reached {column(version / 'metrics.csv', 'val/accuracy')[-1]:.2%} top-1" in printed
    for place in ("", "/model", "/attention"):
        assert re.search(rf"runs/short/version_0{place}$", printed, re.MULTILINE)
    model = load_model(version / "model")
    assert model.config.num_classes == 10
    assert model.class_names[:2] == ("T-shirt/top", "Trouser")
    assert model.preprocessing.image_size == (28, 28)


def test_the_saved_config_alone_repeats_the_run_in_a_new_version(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    first = folder / "runs" / "short" / "version_0"
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    printed = run(f"--config {first}/config.yaml", folder)
    assert "runs/short/version_1" in printed
    assert {file: file.read_bytes() for file in first.rglob("*") if file.is_file()} == before
    ours, again = (load_model(first.parent / f"version_{i}" / "model").state_dict() for i in (0, 1))
    for name, tensor in ours.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)


def test_validate_and_test_give_the_accuracy_of_the_checkpoint(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = finished
    version = folder / "runs" / "short" / "version_0"
    for word in ("validate", "test"):
        command = [
            sys.executable,
            "-c",
            "from vitmha.cli import main; main()",
            word,
            "--config",
            f"{version}/config.yaml",
        ]
        command += ["--ckpt_path", f"{version}/checkpoints/last.ckpt", "--trainer.limit_test_batches", "4"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for number, name in enumerate(("val", "test")):
        [accuracy] = column(tmp_path / f"runs/short/version_{number}/metrics.csv", f"{name}/accuracy")
        assert f"Reached {accuracy:.2%} top-1" in printed


def test_two_processes_train_as_one_does_with_the_same_global_batch(finished: tuple[Path, str], tmp_path: Path) -> None:
    words = "--trainer.accelerator cpu --trainer.devices 2 --data.batch_size 64"
    assert "distributed_backend=gloo" in run(f"{SHORT} {SMALL} {words}", tmp_path)
    one, two = (column(folder / "runs/short/version_0/metrics.csv", "val/loss") for folder in (finished[0], tmp_path))
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
def test_the_quick_start_reaches_85_percent(tmp_path: Path) -> None:
    assert float(re.search(r"Reached ([\d.]+)% top-1", run("", tmp_path))[1]) >= 85


@pytest.mark.slow
def test_a_compiled_run_saves_clean_keys(tmp_path: Path) -> None:
    words = "--model.compile true --trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --model.vit.depth 1"
    run(f"{SHORT} {SMALL} {words}", tmp_path)
    state = torch.load(tmp_path / "runs/short/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert "model.blocks.0.attn.q_proj.weight" in state
    assert not [key for key in state if "_orig_mod" in key]


@pytest.mark.parametrize("order", ["--data.batch_size 64 {file}", "{file} --data.batch_size 64"])
@pytest.mark.parametrize("keys", [("batch_size: 32", "flip: false"), ("flip: false", "batch_size: 32")])
def test_flags_win_over_files_in_every_order(
    order: str,
    keys: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x.yaml").write_text(f"data: {{class_path: FashionMNISTMini, init_args: {{{keys[0]}, {keys[1]}}}}}")
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    with pytest.raises(SystemExit, match="0"):
        main(f"fit {QUICK} {order.format(file=f'--config {tmp_path}/x.yaml')} --print_config".split())
    arguments = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert arguments["flip"] is False
    assert arguments["batch_size"] == (64 if order.endswith("64") else 32)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_and_names_itself(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    root = [] if config.stem == "quickstart" else ["--data.root", "x"]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", str(config), *root, "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["name"] == config.stem
    assert f"python train.py --config configs/{config.name}" in config.read_text() or config.stem == "quickstart"
