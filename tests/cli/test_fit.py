"""cli/fit.py: training from the command line, in processes of their own where a test needs one."""

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from builders import ROOT, refused
from PIL import Image

import vitmha.cli.fit  # noqa: F401  (here: Lightning's log keeps the standard error that it finds when it is imported)
from vitmha.cli import main
from vitmha.cli.run_directory import written_command
from vitmha.data import FashionMNISTMini
from vitmha.images import Preprocessing
from vitmha.inspection import HeadMetrics
from vitmha.models.config import SIZES, ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.training_summary import read_summary

QUICK = ["--config", "quickstart"]
SHORT = [*QUICK, "--config", str(ROOT / "tests/short.yaml")]
SMALL = [
    "--model.vit.depth",
    "2",
    "--model.vit.embed_dim",
    "16",
    "--model.vit.mlp_dim",
    "16",
    "--attention.num_images",
    "1",
]
ON_CPU = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def run(args: list[str], directory: Path) -> str:
    """Runs `python train.py ARGS` in a directory and returns what it printed to both streams."""
    command = [sys.executable, str(ROOT / "train.py"), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    return printed


def printed_config(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    """The config that `vitmha fit ARGS --print_config` prints, and what it writes to standard error."""
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *args, "--print_config"])
    printed = capsys.readouterr()
    return yaml.safe_load(printed.out), printed.err


# Messages of the library are tested where they are raised; here, that each is one line with the flag in it.
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--trainer.max_epoch 3", "error: unknown option --trainer.max_epoch (did you mean --trainer.max_epochs?)"),
        ("--trainer.lr 3", "error: unknown option --trainer.lr (did you mean --model.learning_rate?)"),
        ("--trainer.epochs 3", "error: unknown option --trainer.epochs (did you mean --trainer.max_epochs?)"),
        (
            "--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.patience x",
            "error: --trainer.callbacks.patience must be an integer, got x",
        ),
        (
            "--trainer.callbacks LearningRateMonitor --checkpoint.monitor val/los",
            "error: --checkpoint.monitor: no run logs val/los (did you mean val/loss?)",
        ),
        ("--data no.Such", "error: --data no.Such: No module named 'no'"),
        ("--trainer.logger NoLogger", "error: --trainer.logger NoLogger: unknown class"),
        ("--data ImageFolder", "error: --data.root is required"),
        ("--model.vit.depth many", "error: --model.vit.depth must be an integer, got many"),
        ("--data.mixup many", "error: --data.mixup must be a number, got many"),
        ("--model.learning_rate -1", "error: --model.learning_rate must be above 0, got -1.0"),
        ("--trainer.max_epochs -2", "error: --trainer.max_epochs must be at least 1, or -1 for no limit, got -2"),
        ("--trainer.precision 16-true --trainer.accelerator cpu", "error: --trainer.precision 16-true needs a GPU"),
        (
            "--trainer.accelerator x",
            "error: You selected an invalid accelerator name: --trainer.accelerator='x'. Avail",
        ),
        ("--trainer.val_check_interval 1000", "error: --trainer.val_check_interval (1000) must be less than or equal"),
        ("--trainer.limit_train_batches 0.0001", "--trainer.limit_train_batches=0.0"),
        ("--trainer.min_steps 1000000", "error: --trainer.min_steps 1000000 is above the "),
        ("--model.vit.num_heads 5", "--model.vit.embed_dim 64 is not divisible by --model.vit.num_heads 5"),
        ("--model.vit.num_kv_heads 3", "--model.vit.num_heads 4 is not divisible by --model.vit.num_kv_heads 3"),
        ("--model.vit.patch_size 5", "image_size 28 x 28 is not divisible by --model.vit.patch_size 5 x 5"),
        ("--model.vit.backend efficient", "efficient"),
        ("--trainer.enable_checkpointing false", "error: --trainer.enable_checkpointing false: every run writes last"),
        ("--model.pretrained nowhere", "nowhere"),
        ("--data ImageFolder --data.root nowhere", "error: --data.root nowhere"),
        ("--data CIFAR10 --data.root nowhere", "nowhere/cifar-10-batches-bin"),
        ("--data.batch_size 10001", "10001"),
        ("--data.batch_size 0", "error: --data.batch_size must be at least 1, got 0"),
        ("--ckpt_path last", "error: --ckpt_path last: runs/quickstart/version_*/checkpoints/last.ckpt not found"),
        ("--ckpt_path nowhere.ckpt", "error: --ckpt_path nowhere.ckpt: no such file"),
        (f"--ckpt_path {Path(__file__).name}", "test_fit.py"),
        ("--ckpt_path empty.ckpt", "empty.ckpt"),
        ("--autosave.every_n_minutes -1", "error: --autosave.every_n_minutes must be "),
        ("--model.decoder.max_length 3 --model.decoder.depth 0", "error: depth of the decoder must be at least 1"),
        (
            "--model.distillation.teacher fashion-mnist --model.distillation.alpha 5",
            "error: --model.distillation.alpha must be in [0, 1], got 5.0",
        ),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    args: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.ckpt").touch()
    Path("test_fit.py").write_text(Path(__file__).read_text())
    assert message in refused(["fit", *QUICK, *args.split()], capsys)
    assert not list(tmp_path.glob("runs/*/*/checkpoints"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainr: {max_epochs: 3}", "unknown option --trainr.max_epochs (did you mean --trainer.max_epochs?)"),
        (
            "data: {class_path: CIFAR10, init_args: {rot: x}}",
            "unknown option --data.rot (did you mean --data.root?)",
        ),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(
    text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    assert message in refused(["fit", *QUICK, "--config", str(file)], capsys)


@pytest.mark.parametrize(
    ("directories", "message"),
    [
        ([], "error: --data.root {root}"),
        (["a"], "error: --data.root {root}: no image files found"),
        (["train/a", "val/a", "val/b"], ": b"),
    ],
)
def test_a_wrong_image_directory_is_refused_in_one_line(
    directories: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "images"
    root.mkdir()
    for name in directories:
        (root / name).mkdir(parents=True)
        if name != "a":
            Image.new("RGB", (8, 8)).save(root / name / "x.png")
    line = refused(["fit", *QUICK, "--data", "ImageFolder", "--data.root", str(root)], capsys)
    assert message.format(root=root) in line


def test_help_all_has_no_heading_of_lightning_that_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help-all"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: vitmha fit --config NAME_OR_FILE [--OPTION VALUE ...]\n")
    headings = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert {"Lightning's Trainer", "The model and its training", "The data module"} <= set(headings)
    assert [line for line in headings if re.search("main advantage|are passed|Customize|full optimization", line)] == []
    assert "--trainer.profiler" in printed


@pytest.mark.slow
def test_a_short_run_of_the_sequence_model_saves_a_model_that_generates(tmp_path: Path) -> None:
    sizes = [
        "--data.num_sequences",
        "40",
        "--data.batch_size",
        "8",
        "--model.vit.depth",
        "1",
        "--model.decoder.depth",
        "1",
    ]
    limits = ["--trainer.max_epochs", "1", "--attention.num_images", "1"]
    printed = run(["--config", "fashion_mnist_sequences", *sizes, *limits], tmp_path)
    assert re.search(r"Reached \d+\.\d\d% exact-match accuracy", printed)
    run_dir = tmp_path / "runs/fashion_mnist_sequences/version_0"
    assert (run_dir / "attention/epoch_000/image_0.png").is_file()
    model = load_model(run_dir / "model")
    sequences, _ = model.generate(torch.randn(2, 1, 28, 140), num_beams=2)
    assert sequences.shape == (2, 6)
    assert set(model.decode_labels(sequences[0])) <= set(model.class_names)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a short run of the quick start, and what it printed."""
    directory = tmp_path_factory.mktemp("finished")
    return directory, run([*SHORT, *SMALL], directory)


def column(file: Path, name: str) -> list[float]:
    """The values of one metric in a run's metrics.csv."""
    with file.open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def test_a_run_writes_its_files_and_prints_where_they_are(finished: tuple[Path, str]) -> None:
    directory, printed = finished
    version = directory / "runs" / "short" / "version_0"
    files = ["config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "attention/heads.csv"]
    files += ["model/config.json", "model/model.safetensors", "attention/epoch_000/image_0.png"]
    files += ["model/README.md", "model/training_summary.json"]
    assert [file for file in files if not (version / file).is_file()] == []
    accuracy = column(version / "metrics.csv", "val/accuracy")[-1]
    assert re.search(
        rf"Reached {accuracy:.2%} top-1 accuracy \(loss .*\) on the validation .* after 1 epoch\.$", printed, re.M
    )
    for name, path in (("run directory", ""), ("model directory", "/model"), ("attention maps", "/attention")):
        assert re.search(rf"^ +{name} +runs/short/version_0{path}$", printed, re.MULTILINE)
    model = load_model(version / "model")
    assert model.config.num_classes == 10
    assert model.class_names[:2] == ("T-shirt/top", "Trouser")
    assert model.preprocessing.image_size == (28, 28)
    summary = read_summary(version / "model")
    assert summary.name == "short"
    assert summary.result.accuracy == pytest.approx(accuracy, abs=1e-4)
    assert summary.command.startswith("vitmha fit --config ")


def test_a_run_prints_and_writes_nothing_beside_the_point(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, directory = tmp_path / "home", tmp_path / "work"
    for path in (home, directory):
        path.mkdir()
    monkeypatch.setenv("HOME", str(home))
    args = ["--attention.every_n_epochs", "0", "--trainer.limit_val_batches", "0", "--trainer.max_steps", "2"]
    args += ["--trainer.logger", "WandbLogger", "--trainer.logger.offline", "true"]
    printed = run([*SHORT, *SMALL, *args], directory)
    assert re.search(r"^  model directory  runs/short/version_0/model$", printed, re.MULTILINE)
    assert "attention maps" not in printed  # none are logged
    for text in (printed, finished[1]):
        assert not re.search(r"FLOPs|Tip:|HINT|log\('val", text)
        assert "Seed set" not in text
    assert [path.name for path in directory.iterdir()] == ["runs"]
    assert list(directory.glob("runs/short/version_0/wandb/offline-run-*/*.wandb"))
    assert [path for path in home.rglob("*") if "wandb" in path.name] == []


def test_a_metric_in_the_file_name_of_checkpoints_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "best-{epoch:02d}-{val/accuracy:.2f}"
    limits = [
        "--trainer.limit_train_batches",
        "1",
        "--trainer.limit_val_batches",
        "1",
        "--attention.every_n_epochs",
        "0",
    ]
    main(["fit", *SHORT, *SMALL, *ON_CPU, *limits, "--checkpoint.filename", name])
    [file] = Path("runs/short/version_0/checkpoints").glob("best*")
    assert re.fullmatch(r"best-00-0\.\d\d\.ckpt", file.name)


def test_ctrl_c_outside_of_the_training_steps_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LitViT, "validation_step", interrupt)  # of the sanity check
    with pytest.raises(SystemExit, match="130"):
        main(["fit", *SHORT, *SMALL, *ON_CPU])


@pytest.mark.slow
@pytest.mark.ci
def test_a_sigterm_to_all_processes_of_a_run_ends_it_with_143(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(240, 64, 64, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        path = tmp_path / "images" / ("train", "val")[index % 2] / "ab"[index % 4 // 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    args = ["--data", "ImageFolder", "--data.root", "images", "--data.image_size", "16", "--data.num_workers", "2"]
    args += [
        "--data.batch_size",
        "4",
        "--model.vit.patch_size",
        "8",
        "--model.vit.num_heads",
        "2",
        *SMALL,
        "--attention.every_n_epochs",
        "0",
    ]
    args += [*ON_CPU, "--autosave.every_n_minutes", "0"]
    checkpoints = tmp_path / "runs/vit/version_0/checkpoints"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "vitmha", "fit", "--trainer.max_epochs", "10000", *args]
    process = subprocess.Popen(call, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not (checkpoints / "last.ckpt").exists():
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    printed = process.communicate()[1].decode()
    assert process.returncode == 143, printed
    assert "Traceback" not in printed
    assert "To resume, add --ckpt_path last to the same command." in printed


def test_the_saved_config_alone_repeats_the_run_in_a_new_version(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = finished
    first = directory / "runs" / "short" / "version_0"
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    monkeypatch.chdir(directory)
    main(["fit", "--config", str(first / "config.yaml")])
    assert "runs/short/version_1" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in first.rglob("*") if file.is_file()} == before
    states = [load_model(first.parent / f"version_{i}" / "model").state_dict() for i in (0, 1)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0)


def test_validate_and_test_give_the_accuracy_of_the_checkpoint_and_the_model_directory(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, printed = finished
    version = directory / "runs" / "short" / "version_0"
    sources = {
        "validate": ["--ckpt_path", str(version / "checkpoints/last.ckpt")],
        "test": ["--model.pretrained", str(version / "model")],
    }
    for command, name in (("validate", "val"), ("test", "test")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        limit = ["--trainer.limit_test_batches", "4"]
        main([command, "--config", str(version / "config.yaml"), *limit, *sources[command]])
        [accuracy] = column(tmp_path / name / "runs/short/version_0/metrics.csv", f"{name}/accuracy")
        assert f"Reached {accuracy:.2%} top-1" in printed


@pytest.mark.slow
def test_two_processes_started_by_one_command_train_as_one_does(finished: tuple[Path, str], tmp_path: Path) -> None:
    args = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--data.batch_size", "64"]
    assert "distributed_backend=gloo" in run([*SHORT, *SMALL, *args], tmp_path)
    one, two = (column(path / "runs/short/version_0/metrics.csv", "val/loss") for path in (finished[0], tmp_path))
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
def test_the_quick_start_reaches_85_percent(tmp_path: Path) -> None:
    assert float(re.search(r"Reached ([\d.]+)% top-1", run([], tmp_path))[1]) >= 85


def test_a_named_size_is_resolved_in_the_config_and_in_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1", "--trainer.max_epochs", "1"]
    model = ["--model.name", "vit_mini", "--model.vit.depth", "1"]
    main(
        [
            "fit",
            "--data",
            "FashionMNISTMini",
            "--run_name",
            "x",
            *model,
            *limits,
            "--attention.every_n_epochs",
            "0",
            *ON_CPU,
        ]
    )
    run_dir = tmp_path / "runs/x/version_0"
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]
    assert saved["name"] == "vit_mini"
    found = load_model(run_dir / "model").config
    for field, value in {**SIZES["vit_mini"], "depth": 1}.items():
        assert saved["vit"][field] == getattr(found, field) == value
    assert found.image_size == (28, 28)


@pytest.mark.slow
@pytest.mark.ci
def test_a_compiled_run_saves_clean_keys_and_logs_the_attention_of_its_model(tmp_path: Path) -> None:
    limits = ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1", "--model.vit.depth", "1"]
    run([*SHORT, *SMALL, "--model.compile", "true", *limits], tmp_path)
    run_dir = tmp_path / "runs/short/version_0"
    state = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert "model.blocks.0.attn.q_proj.weight" in state
    assert not [key for key in state if "_orig_mod" in key]
    model = load_model(run_dir / "model")
    with np.load(run_dir / "attention/images.npz") as file:
        images = torch.from_numpy(file["images"])
    metrics = HeadMetrics(model)
    metrics.update(images)
    assert column(run_dir / "attention/heads.csv", "entropy") == pytest.approx(
        [record["entropy"] for record in metrics.records()], abs=1e-4
    )


@pytest.mark.parametrize(
    ("config", "sizes", "limit"),
    [
        ("fashion_mnist", {"image_size": 28, "in_channels": 1, "num_classes": 10}, 0.6e6),
        ("cifar10", {"image_size": 32, "in_channels": 3, "num_classes": 10}, 3e6),
        ("cifar10_30min", {"image_size": 32, "in_channels": 3, "num_classes": 10}, 3e6),
    ],
)
def test_small_configs_have_few_parameters(config: str, sizes: dict[str, int], limit: float) -> None:
    options = yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())["model"]
    vit, betas = ViTConfig(**options.pop("vit"), **sizes), tuple(options.pop("betas"))
    model = LitViT(vit, betas=betas, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) <= limit


@pytest.mark.parametrize("is_flag_first", [True, False])
@pytest.mark.parametrize("keys", [("batch_size: 32", "hflip: 0"), ("hflip: 0", "batch_size: 32")])
def test_flags_override_files_in_any_order(
    is_flag_first: bool, keys: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"data: {{class_path: FashionMNISTMini, init_args: {{{keys[0]}, {keys[1]}}}}}")
    flag, config = ["--data.batch_size", "64"], ["--config", str(file)]
    printed, _ = printed_config([*QUICK, *(flag + config if is_flag_first else config + flag)], capsys)
    assert printed["data"]["init_args"]["hflip"] == 0
    assert printed["data"]["init_args"]["batch_size"] == 64


def test_options_of_another_class_are_dropped_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "FashionMNIST", "--data.root", "x", "--data.batch_size", "64"]
    printed, errors = printed_config([*flags, *QUICK], capsys)
    arguments = printed["data"]["init_args"]
    assert (arguments["batch_size"], arguments["random_crop_padding"]) == (64, 1)  # which both classes have
    assert "warning" not in errors
    _, errors = printed_config([*QUICK, "--data", "ImageFolder", "--data.root", "x"], capsys)
    [line] = [line for line in errors.splitlines() if "discarding" in line]
    assert line.startswith("warning: Due to class_path change from ")
    assert line.endswith("discarding init_args: {'random_crop_padding': 1}.")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_and_names_its_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = [] if config.stem in ("quickstart", "fashion_mnist_sequences") else ["--data.root", "x"]
    printed, _ = printed_config(["--config", config.stem, *root], capsys)
    assert printed["run_name"] == config.stem
    names = rf"--config (configs/)?{config.stem}\b"
    assert re.search(names, config.read_text()) or config.stem == "quickstart"


@pytest.mark.parametrize("overlay", sorted((ROOT / "configs/overlays").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_overlay_is_accepted_and_names_its_command(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"overlays/{overlay.stem}"
    printed, _ = printed_config(["--config", "imagenet_vit_s16", "--data.root", "x", "--config", name], capsys)
    assert printed["trainer"]["strategy"] is not None
    assert re.search(rf"--config (configs/)?{name}\b", overlay.read_text())


@pytest.mark.parametrize("command", ["validate", "test"])
def test_weights_that_cannot_be_evaluated_are_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"error: {command} evaluates trained weights: add --ckpt_path CHECKPOINT or --model.pretrained MODEL."
    assert refused([command, *QUICK], capsys) == message
    vit = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["model"]["vit"]
    save_model(VisionTransformer(ViTConfig(**vit, image_size=28, in_channels=1, num_classes=3)), tmp_path / "other")
    args = [command, *QUICK, "--model.pretrained", "other"]
    message = refused(args, capsys)
    assert re.search(r"\b10\b", message)
    assert re.search(r"\b3\b", message)
    other = VisionTransformer(ViTConfig(**vit, image_size=28, in_channels=1, num_classes=10))
    other.preprocessing = Preprocessing(image_size=(28, 28), mean=(0.5,), std=(0.5,), crop_pct=0.9)
    other.class_names = FashionMNISTMini().class_names
    save_model(other, tmp_path / "other")
    message = refused(args, capsys)
    assert "(0.5,)" in message
    assert "0.9" in message


@pytest.mark.parametrize(("command", "workers"), [("fit", 2), ("validate", 0)])
def test_a_corrupt_image_ends_a_run_in_one_line(
    command: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(8):
        directory = tmp_path / "data" / "ab"[i % 2]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{i}.png").write_bytes(b"no image")
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=2))
    model.class_names = ("a", "b")
    save_model(model, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    data = ["--data.val_fraction", "0.5", "--data.image_size", "16", "--data.batch_size", "2"]
    limits = ["--trainer.max_epochs", "1", "--trainer.num_sanity_val_steps", "0"]
    vit = ["--model.vit.patch_size", "8", "--model.vit.depth", "1"]
    pretrained = ["--model.pretrained", "earlier"] if command == "validate" else []
    root = ["--data", "ImageFolder", "--data.root", str(tmp_path / "data"), "--data.num_workers", str(workers)]
    line = refused([command, *root, *data, *vit, *limits, *ON_CPU, *pretrained], capsys)
    assert re.match(rf"error: {re.escape(str(tmp_path))}/data/[ab]/\d\.png: ", line)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_of_any_size_are_mixed_and_an_incomplete_last_batch_is_reported(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mix = ["--data.mixup", "0.8", "--data.cutmix", "1", "--data.batch_size", str(batch_size)]
    limits = [
        "--trainer.limit_train_batches",
        "1.0",
        "--trainer.max_steps",
        "3",
        "--trainer.limit_val_batches",
        "1",
        "--attention.every_n_epochs",
        "0",
    ]
    main(["fit", *SHORT, *SMALL, *mix, *limits, *ON_CPU])
    assert all(map(math.isfinite, column(tmp_path / "runs/short/version_0/metrics.csv", "train/loss_epoch")))
    assert ("(1 images are left out of each epoch)" in capsys.readouterr().out) == (batch_size == 3)


def test_images_are_prepared_as_the_pretrained_weights_expect_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(8):
        directory = tmp_path / "data" / "ab"[i % 2]
        directory.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (30 * i, 0, 0)).save(directory / f"{i}.png")
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=2))
    model.class_names = ("a", "b")
    model.preprocessing = Preprocessing(
        image_size=(16, 16), mean=(0.1,) * 3, std=(0.2,) * 3, crop_pct=0.5, crop_mode="squash"
    )
    save_model(model, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    data = ["--data", "ImageFolder", "--data.root", "data", "--data.val_fraction", "0.5", "--data.num_workers", "0"]
    data += ["--data.image_size", "16", "--data.batch_size", "2"]
    args = ["validate", *data, "--model.pretrained", "earlier", *ON_CPU]
    main(args)
    written = yaml.safe_load((tmp_path / "runs/vit/version_0/config.yaml").read_text())["data"]["init_args"]
    assert [written[name] for name in ("mean", "crop_pct", "crop_mode")] == [[0.1, 0.1, 0.1], 0.5, "squash"]
    # An option that is set is kept, and differs from what these weights expect.
    assert "0.3" in refused([*args, "--data.std", "[0.3,0.3,0.3]"], capsys)


def test_a_sharded_model_has_neither_an_attention_log_nor_muon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sharded = ["--config", "overlays/fsdp", "--trainer.strategy.data_parallel_size", "1"]
    args = ["fit", *QUICK, *sharded, *ON_CPU, "--trainer.devices", "1", "--trainer.precision", "32-true"]
    assert "--attention.every_n_epochs" in refused([*args, "--attention.every_n_epochs", "1"], capsys)
    assert "muon needs whole matrices" in refused([*args, "--model.optimizer", "muon"], capsys)
    torch.distributed.destroy_process_group()  # else later tests in this process train in it, and Lightning warns


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--config", str(ROOT / "configs/cifar10.yaml"), "--data.root", "a b"], "--config cifar10 --data.root 'a b'"),
        (["--config", "my.yaml", "--ckpt_path", "last", "--run_name", "x"], "--config my.yaml --run_name x"),
        (["--ckpt_path=last", f"--config={ROOT}/configs/cifar10.yaml"], "--config=cifar10"),
    ],
)
def test_the_command_on_the_card_starts_the_run_anew(args: list[str], expected: str) -> None:
    assert written_command(args) == f"vitmha fit {expected}"
