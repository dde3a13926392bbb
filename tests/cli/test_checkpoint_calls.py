"""fit, validate and test with a checkpoint: what the call says is used, or refused in one line, and never ignored."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from builders import refused
from PIL import Image

import vitmha.cli.fit  # noqa: F401  (here: Lightning's log keeps the standard error that it finds when it is imported)
from vitmha.cli import main
from vitmha.weights.load import load_model

CLASSES = ("0", "1", "10", "11", "2")
COLORS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255))
MEAN = "[0.5,0.5,0.5]"
CPU = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
DATA = ["--data", "ImageFolder", "--data.root", "data", "--data.num_workers", "0"]
FIT = [
    *("fit", *DATA, *CPU, "--data.image_size", "8", "--data.batch_size", "10", "--data.mean", MEAN),
    *("--data.crop_scale", "[0.9,1]", "--data.val_fraction", "0.25"),
    *("--model.vit.patch_size", "4", "--model.vit.embed_dim", "16", "--model.vit.depth", "1"),
    *("--model.vit.num_heads", "2", "--model.vit.mlp", "gelu_tanh", "--model.vit.drop_path", "0.1"),
    *("--model.learning_rate", "0.01"),
    *("--model.label_smoothing", "0", "--trainer.max_epochs", "4", "--trainer.log_every_n_steps", "1"),
    *("--attention.every_n_epochs", "0", "--run_name", "first"),
]
SLOW = [pytest.mark.slow, pytest.mark.ci]
RUN = "runs/first/version_0"
LAST = f"{RUN}/checkpoints/last.ckpt"
SLOW_FIT = pytest.param("fit", marks=SLOW)


def write_data(root: Path, names: tuple[str, ...] = CLASSES) -> None:
    for name, color in zip(names, COLORS, strict=False):
        (root / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (8, 8), tuple(max(0, value - 4 * i) for value in color)).save(root / name / f"{i}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data of one color per class, and a run that learned it."""
    directory = tmp_path_factory.mktemp("trained")
    write_data(directory / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        main(FIT)
    return directory


@pytest.fixture
def work(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def files(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


def refused_without_a_trace(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line; nothing was written, and no directory is left."""
    before, directories = files(Path("runs")), sorted(Path("runs").rglob("*"))
    line = refused(args, capsys)
    assert files(Path("runs")) == before
    assert sorted(Path("runs").rglob("*")) == directories
    assert "weights_only" not in line
    return line


def accuracy(command: str, args: list[str]) -> float:
    """What `validate` or `test` measures."""
    known = set(Path("runs").glob("*/version_*"))
    main([command, *args])
    [run] = set(Path("runs").glob("*/version_*")) - known
    with (run / "metrics.csv").open() as lines:
        name = "val" if command == "validate" else "test"
        return float(next(row for row in csv.DictReader(lines))[f"{name}/accuracy"])


@pytest.mark.parametrize(
    ("command", "args"),
    [
        *(("validate", f"--config {RUN}/config.yaml --ckpt_path {path}") for path in ("last", "best", LAST, RUN)),
        ("validate", f"--config {RUN}/config.yaml --ckpt_path {RUN}/model"),
        ("validate", f"--config {RUN}/config.yaml --ckpt_path {RUN}/model/model.safetensors"),
        *(("test", f"--ckpt_path {path}") for path in (LAST, RUN, f"{RUN}/model")),
        ("validate", "--ckpt_path last --run_name first"),
        ("validate", f"--config overlay.yaml --ckpt_path {RUN}"),
        ("validate", f"{' '.join(DATA)} --data.val_fraction 0.25 --ckpt_path {LAST}"),
    ],
)
def test_a_checkpoint_is_evaluated_as_it_was_trained(
    command: str, args: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (work / RUN / "metrics.csv").open() as lines:
        reached = [float(row["val/accuracy"]) for row in csv.DictReader(lines) if row["val/accuracy"]]
    Path("overlay.yaml").write_text("model: {label_smoothing: 0.2}")
    assert accuracy(command, [*args.split(), *CPU]) == reached[-1] >= 0.8
    assert re.search(
        r"run directory    (runs/\w+/version_\d)\n  evaluation       \1/evaluation\n", capsys.readouterr().out
    )


def test_renamed_or_missing_classes_are_refused_in_every_stage(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0", "1", "2"):
        Path("data", name).rename(f"data/0{name}")
    for command in ("fit", "validate", "test"):
        line = refused_without_a_trace([command, "--config", f"{RUN}/config.yaml", "--ckpt_path", LAST], capsys)
        assert (
            "the class names differ, in the data only: '00', '01', '02'; in the checkpoint only: '0', '1', '2'" in line
        )
    shutil.rmtree("data/00")
    for command in ("fit", "validate"):
        line = refused_without_a_trace([command, "--config", f"{RUN}/config.yaml", "--ckpt_path", LAST], capsys)
        assert "class names differ" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model.vit.num_heads 4", "--model.vit.num_heads is 4, the checkpoint's is 2"),
        ("--model.vit.mlp quick_gelu", "--model.vit.mlp is quick_gelu, the checkpoint's is gelu_tanh"),
        (
            "--model.vit.mlp gelu",
            "--model.vit.mlp is gelu, the checkpoint's is gelu_tanh",
        ),  # ViTConfig's default, but set
        ("--model.vit.norm_eps 0.1", "--model.vit.norm_eps is 0.1, the checkpoint's is 1e-06"),
        ("--model.vit.pos_embed sincos2d", "--model.vit.pos_embed is sincos2d, the checkpoint's is learned"),
        ("--model.vit.depth 2", "--model.vit.depth is 2, the checkpoint's is 1"),
        ("--data.mean [0.4,0.5,0.5]", "--data.mean is (0.4, 0.5, 0.5), the checkpoint's is (0.5, 0.5, 0.5)"),
        ("--data.std [0.4,0.5,0.5]", "--data.std is (0.4, 0.5, 0.5), the checkpoint's is (0.229, 0.224, 0.225)"),
        ("--data.interpolation nearest", "--data.interpolation is nearest, the checkpoint's is bicubic"),
        ("--data.crop_pct 0.5", "--data.crop_pct is 0.5, the checkpoint's is 0.875"),
        ("--data.crop_mode squash", "--data.crop_mode is squash, the checkpoint's is center"),
        ("--data.image_size 16", "image_size is (16, 16), the checkpoint's is (8, 8)"),
    ],
)
@pytest.mark.parametrize("command", [SLOW_FIT, "validate"])
def test_a_checkpoint_is_not_contradicted(
    command: str, args: str, message: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [command, *DATA, "--data.val_fraction", "0.25", "--run_name", "first", "--ckpt_path", LAST]
    assert message in refused_without_a_trace([*call, *args.split()], capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model.learning_rate 0.1", "--model.learning_rate is 0.1, the checkpoint's is 0.01"),
        pytest.param(
            "--model.weight_decay 0.9",
            "--model.weight_decay is 0.9, the checkpoint's is 0.05",
            marks=SLOW,
        ),
        ("--model.optimizer sgd", "optimizer is sgd, the checkpoint's is adamw"),
        pytest.param(
            "--model.warmup_fraction 0.3",
            "--model.warmup_fraction is 0.3, the checkpoint's is 0.05",
            marks=SLOW,
        ),
        pytest.param(
            "--model.loss bce",
            "loss is bce, the checkpoint's is cross_entropy",
            marks=SLOW,
        ),
        pytest.param(
            "--model.ema_decay 0.9",
            "--model.ema_decay is 0.9, the checkpoint's is None",
            marks=SLOW,
        ),
        ("--model.vit.drop_path 0.5", "--model.vit.drop_path is 0.5, the checkpoint's is 0.1"),
        pytest.param(
            "--trainer.gradient_clip_val 1",
            "--trainer.gradient_clip_val is 1, the checkpoint's is None",
            marks=SLOW,
        ),
        ("--trainer.accumulate_grad_batches 2", "--trainer.accumulate_grad_batches is 2, the checkpoint's is 1"),
        ("--data.batch_size 5 --trainer.accumulate_grad_batches 2", "accumulate_grad_batches is 2"),
        ("--data.batch_size 5", "global_batch_size (--data.batch_size times processes) is 5, the checkpoint's is 10"),
        ("--seed_everything 5", "seed_everything is 5, the checkpoint's is 0"),
        pytest.param("--data.hflip 0", "hflip is 0.0, the checkpoint's is 0.5", marks=SLOW),
        pytest.param("--data.mixup 0.5", "mixup is 0.5, the checkpoint's is 0.0", marks=SLOW),
        ("--data.split_seed 3", "--data.split_seed is 3, the checkpoint's is 0"),
        ("--data FashionMNISTMini", "data is FashionMNISTMini, the checkpoint's is ImageFolder"),
        ("--trainer.max_epochs 5", "the learning rate would jump) is 15, the checkpoint's is 12"),
        (f"--ckpt_path {RUN}/model", f"To resume its run, give {RUN}; to start a new run from the weights: --model.p"),
        ("--ckpt_path=", "error: --ckpt_path : it is empty. Give a checkpoint, a run directory, last or best."),
        ("--ckpt_path data", "error: --ckpt_path data: no checkpoint in this directory"),
        ("--run_name ../evil", "error: --run_name '../evil' must be a directory name without a path"),
        ("--run_name=", "error: --run_name '' must be a directory name without a path"),
        ("--trainer.max_epochs 0", "max_epochs is 0, so nothing would be trained"),
        pytest.param(
            "--trainer.limit_train_batches 0",
            "limit_train_batches is 0, so nothing would be trained",
            marks=SLOW,
        ),
        pytest.param(
            "--trainer.max_steps 0",
            "max_steps is 0, so nothing would be trained",
            marks=SLOW,
        ),
    ],
)
def test_a_run_is_not_resumed_with_other_values(
    args: str, message: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused_without_a_trace(
        ["fit", "--config", f"{RUN}/config.yaml", "--ckpt_path", LAST, *args.split()], capsys
    )
    assert message in line
    assert "checkpoint's" not in line or f"start a new run from its weights (--model.pretrained {RUN}/model)" in line


def test_a_complete_run_that_is_resumed_says_so(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(work / RUN)
    main(["fit", "--ckpt_path", LAST, *CPU])
    assert "Nothing was left to do: the run was complete after 4 epochs." in capsys.readouterr().out
    assert files(work / RUN).keys() == before.keys()


def test_a_fine_tuned_run_is_evaluated_by_its_own_config(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("10", "11"):
        shutil.rmtree(work / "data" / name)
    call = [*FIT[:3], *FIT[3:5], *DATA[4:], *CPU, "--data.batch_size", "6", "--run_name", "tuned"]
    sizes = ["--data.image_size", "16", "--attention.every_n_epochs", "0", "--trainer.max_epochs", "2"]
    pretrained = ["--model.pretrained", f"{RUN}/model"]
    main([*call, *sizes, *pretrained, "--trainer.log_every_n_steps", "1"])
    run = Path("runs/tuned/version_0")
    architecture = json.loads((run / "model/config.json").read_text())["architecture"]
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"]["vit"] == {key: architecture[key] for key in written["model"]["vit"]}
    assert written["model"]["vit"]["mlp"] == "gelu_tanh"
    assert written["model"]["vit"]["drop_path"] == 0  # of the call, not of the weights
    assert written["data"]["init_args"]["mean"] == [0.5, 0.5, 0.5]
    with (run / "metrics.csv").open() as lines:
        reached = [float(row["val/accuracy"]) for row in csv.DictReader(lines) if row["val/accuracy"]]
    config = ["--config", str(run / "config.yaml"), *CPU]
    for path in ("last", str(run), str(run / "checkpoints/best.ckpt")):
        assert accuracy("validate", [*config, "--ckpt_path", path]) in reached
    line = refused_without_a_trace(["validate", *config, *pretrained, "--ckpt_path", "last"], capsys)
    assert "--ckpt_path and --model.pretrained name two sets of weights" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model.vit.num_heads 4", "--model.vit.num_heads is 4, the checkpoint's is 2"),
        ("--model.vit.mlp gelu", "--model.vit.mlp is gelu, the checkpoint's is gelu_tanh"),
        ("--model.vit.depth 12", "depth is 12, the checkpoint's is 1"),  # ViTConfig's default, but set
    ],
)
def test_another_architecture_than_that_of_pretrained_weights_is_refused(
    args: str, message: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["fit", *DATA, "--data.batch_size", "5", "--model.pretrained", f"{RUN}/model", *CPU]
    line = refused_without_a_trace([*call, *args.split()], capsys)
    assert line.startswith(f"error: --model.pretrained {RUN}/model cannot be used by this call: ")
    assert message in line


def test_a_checkpoint_that_would_run_code_is_refused_without_advice_to_allow_it(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"vitmha": Path("x")}, "code.ckpt")
    for command in ("fit", "validate"):
        line = refused_without_a_trace([command, "--config", f"{RUN}/config.yaml", "--ckpt_path", "code.ckpt"], capsys)
        assert "code.ckpt is corrupt or not a checkpoint: it holds pathlib." in line


def test_a_run_is_continued_with_other_workers_and_logger(work: Path) -> None:
    config, options = f"{RUN}/config.yaml", ["--data.num_workers", "1", "--attention.num_images", "3"]
    main(["fit", "--config", config, "--ckpt_path", "last", *options])
    assert load_model(f"{RUN}/model").class_names == CLASSES


def test_the_patch_size_that_is_set_is_used_though_it_is_the_default(work: Path) -> None:
    call = ["fit", *DATA, "--data.image_size", "32", "--data.batch_size", "5", "--model.pretrained", f"{RUN}/model"]
    limits = ["--trainer.max_epochs", "1", "--attention.every_n_epochs", "0", "--run_name", "patches"]
    main([*call, *limits, "--model.vit.patch_size", "16", "--trainer.log_every_n_steps", "1", *CPU])
    config = load_model("runs/patches/version_0/model").config
    assert config.layout.patch_size == (16, 16)


def test_a_field_that_the_named_size_would_override_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["fit", *DATA, "--data.image_size", "8", "--model.name", "vit_mini", "--model.vit.depth", "12", *CPU]
    assert "--model.vit.depth 12 cannot be combined with" in refused_without_a_trace(call, capsys)


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.parametrize(
    ("ckpt_path", "message"),
    [
        ("nowhere", "error: --ckpt_path nowhere: no such file. Give a checkpoint, a run directory, last or best."),
        ("best", "error: --ckpt_path best: runs/vit/version_*/checkpoints/best.ckpt not found."),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(
    command: str, ckpt_path: str, message: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in ([], [*DATA, *CPU]):
        assert message in refused_without_a_trace([command, "--ckpt_path", ckpt_path, *args], capsys)


def test_a_sequence_model_is_evaluated_and_not_contradicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--data.num_sequences", "40", "--data.batch_size", "8", "--model.vit.depth", "1", "--model.decoder.depth"]
    limits = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--attention.every_n_epochs", "0"]
    main(["fit", "--config", "fashion_mnist_sequences", *sizes, "1", *limits, "--run_name", "first", *CPU])
    data = ["--data", "FashionMNISTSequences", "--data.num_sequences", "40", "--data.batch_size", "8"]
    assert accuracy("validate", [*data, "--ckpt_path", LAST, *CPU]) == accuracy("test", ["--ckpt_path", RUN, *CPU])
    line = refused_without_a_trace(["validate", "--ckpt_path", LAST, "--model.decoder.depth", "2", *CPU], capsys)
    assert "decoder.depth is 2, the checkpoint's is 1" in line
