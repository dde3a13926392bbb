"""cli.py: the command line as its user meets it, in processes of its own where it trains."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import vitmha.cli.fit  # at once: the log of Lightning keeps the standard error that it finds when it is imported
import vitmha.cli.profile
from vitmha.cli import COMMANDS, main
from vitmha.data import FashionMNISTMini
from vitmha.images import Preprocessing
from vitmha.inspection import HeadMetrics
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.profiling import Measurement, layer_costs
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

ROOT = Path(__file__).parents[2]
QUICK = f"--config {ROOT}/configs/quickstart.yaml"
SHORT = f"{QUICK} --config {ROOT}/tests/short.yaml"
SMALL = "--model.vit.depth 2 --model.vit.embed_dim 16 --model.vit.mlp_dim 16 --attention.num_images 1"


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
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
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
        ("--trainer.enable_checkpointing false", "enable_checkpointing false: every run keeps last.ckpt"),
        ("--model.pretrained nowhere", "nowhere must be a folder with config.json and model.safetensors"),
        ("--data ImageFolder --data.root nowhere", "--data.root: there is no folder nowhere"),
        ("--data CIFAR10 --data.root nowhere", "nowhere/cifar-10-batches-bin is absent and its download failed"),
        ("--data.batch_size 10001", "the training set has 10000 pictures, but one step takes 10001"),
        ("--config nowhere.yaml", "--config: File does not exist"),
        ("--ckpt_path last", "--ckpt_path last: there is no runs/quickstart/version_*/checkpoints/last.ckpt"),
        ("--ckpt_path nowhere.ckpt", "--ckpt_path: there is no checkpoint nowhere.ckpt"),
        (f"--ckpt_path {__file__}", "test_cli.py is damaged, or no checkpoint: "),
        (f"--ckpt_path {ROOT}/vitmha/py.typed", "py.typed is damaged, or no checkpoint: it ends too soon"),
        ("--autosave.every_n_minutes -1", "--autosave.every_n_minutes must be 0 (after every step) or more, got -1"),
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
        (["a"], "class folders without a picture, remove or fill them: a"),
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
    message = refused("fot", capsys, monkeypatch, tmp_path)
    assert [word for word in COMMANDS if not re.search(rf"\b{word}\b", message)] == []


def test_help_names_every_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        printed = capsys.readouterr().out
        assert [word for word in COMMANDS if not re.search(rf"^ +{word} ", printed, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "nowhere must be a folder with config.json and model.safetensors"),
        ("nowhere", "sizes that need no weights are vit_mini, vit_tiny"),
        ("nowhere --patch-size 4", "--patch-size goes with the name of a size (vit_mini"),
        ("vit_mini --image-size 30", "image_size 30 x 30 is not divisible by patch_size 4 x 4: change one of them"),
        ("vit_mini --image-size 8 8 8", "--image-size takes height and width, or one number for both; got [8, 8, 8]"),
        ("vit_mini --batch-size 0", "argument --batch-size: expected a whole number of at least 1, got '0'"),
        ("vit_mini --imagesize 8", "there is no option 'imagesize'; the nearest is 'image-size'"),
    ],
)
def test_profile_refuses_a_wrong_call(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert message in refused(f"profile {words}", capsys, monkeypatch, tmp_path)


def test_profile_refuses_a_device_that_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused("profile vit_mini --device cuda", capsys, monkeypatch, tmp_path)
    assert "--device cuda: PyTorch finds no CUDA device here" in message


def profiled(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `vitmha profile WORDS` answers."""
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    monkeypatch.setenv("COLUMNS", "80")
    main(["profile", "--device", "cpu", *words.split()])
    return capsys.readouterr().out


def test_profile_gives_programs_the_numbers_of_the_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = profiled("vit_mini --image-size 8 12 --patch-size 2 4 --batch-size 3 --format json", capsys, monkeypatch)
    facts = json.loads(answer)
    costs = layer_costs(create_model("vit_mini", image_size=(8, 12), patch_size=(2, 4)), batch_size=3)
    assert facts["image_size"] == [8, 12]
    assert (facts["num_tokens"], facts["batch_size"], facts["device"]) == (13, 3, "cpu")
    assert [layer["macs"] for layer in facts["layers"]] == [cost.macs for cost in costs]
    assert facts["total"]["parameters"] == sum(cost.parameters for cost in costs)
    assert [run["backend"] for run in facts["measured"]] == ["auto", "explicit"]
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 0 for run in facts["measured"])


def test_profile_prints_a_saved_model_at_another_size_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields = {"depth": 2, "embed_dim": 12, "num_heads": 3, "mlp_dim": 10, "num_classes": 7, "backend": "explicit"}
    save_model(create_model("vit_mini", image_size=8, **fields), tmp_path)
    printed = profiled(f"{tmp_path} --image-size 8 12", capsys, monkeypatch)
    assert "8 x 12 pixels, 7 tokens, batch of 1" in re.sub(r"\s+", " ", printed)
    # Parameters 4 (12 12 + 12) + 2 12 10 + 10 + 12 + 2 24; multiply-adds 7 4 12 12, 2 7 7 12, 7 2 12 10 and 1 2 12 10.
    assert re.search(r"block 0 +934 +4.03k +1.18k +1.68k +0 +6.89k +588B +672B", printed)
    assert re.search(r"block 1 +934 +4.03k +1.18k +240 +0 +5.45k +588B +672B", printed)
    assert len(re.findall(r"^ +explicit +[\d.]+ ms ", printed, re.MULTILINE)) == 1
    assert "auto" not in printed


def test_profile_counts_a_reader_with_its_decoder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ViTConfig(image_size=8, in_channels=1, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    reader = EncoderDecoder(config, DecoderConfig(max_length=3, depth=2, num_heads=2))
    save_model(reader, tmp_path)
    facts = json.loads(profiled(f"{tmp_path} --format json", capsys, monkeypatch))
    assert [layer["name"] for layer in facts["layers"]][1:] == ["block 0", "tokens", "decoder 0", "decoder 1", "head"]
    assert facts["total"]["parameters"] == sum(parameter.numel() for parameter in reader.parameters())


@pytest.mark.slow
def test_a_short_run_of_the_reader_leaves_a_model_that_reads(tmp_path: Path) -> None:
    words = (
        "--data.num_sequences 40 --data.batch_size 8 --trainer.max_epochs 1 --model.vit.depth 1 --model.decoder.depth 1"
    )
    printed = run(f"--config {ROOT}/configs/fashion_mnist_sequences.yaml {words} --attention.num_images 1", tmp_path)
    assert re.search(r"Reached \d+\.\d\d% of the sequences without a fault", printed)
    folder = tmp_path / "runs/fashion_mnist_sequences/version_0"
    assert (folder / "attention/epoch_000/picture_0.png").is_file()
    reader = load_model(folder / "model")
    sequences, _ = reader.generate(torch.randn(2, 1, 28, 140), num_beams=2)
    assert sequences.shape == (2, 6)
    assert set(reader.decode_labels(sequences[0])) <= set(reader.class_names)


def test_profile_stores_no_scores_that_could_fill_the_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(model: VisionTransformer, images: torch.Tensor, backend: str) -> Measurement:
        return Measurement(backend=backend, seconds=1e-3, peak_bytes=8)

    monkeypatch.setattr(vitmha.cli.profile, "measure", measured)
    # A picture has 4 heads of 257 x 257 scores of 4 bytes: 1016 pictures stay under 1 GiB, 1017 do not.
    for batch_size, kernels in ((1016, ["auto", "explicit"]), (1017, ["auto"])):
        printed = profiled(f"vit_mini --image-size 64 --batch-size {batch_size}", capsys, monkeypatch)
        assert re.findall(r"^ +(\w+) +1.00 ms +1.02M +8B", printed, re.MULTILINE) == kernels


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


def test_the_saved_config_alone_repeats_the_run_in_a_new_version(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    first = folder / "runs" / "short" / "version_0"
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    main(f"fit --config {first}/config.yaml".split())
    assert "runs/short/version_1" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in first.rglob("*") if file.is_file()} == before
    ours, again = (load_model(first.parent / f"version_{i}" / "model").state_dict() for i in (0, 1))
    for name, tensor in ours.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)


def test_validate_and_test_give_the_accuracy_of_the_checkpoint_and_the_model_folder(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = finished
    version = folder / "runs" / "short" / "version_0"
    sources = {
        "validate": f"--ckpt_path {version}/checkpoints/last.ckpt",
        "test": f"--model.pretrained {version}/model",
    }
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    for word, name in (("validate", "val"), ("test", "test")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        main(f"{word} --config {version}/config.yaml --trainer.limit_test_batches 4 {sources[word]}".split())
        [accuracy] = column(tmp_path / name / "runs/short/version_0/metrics.csv", f"{name}/accuracy")
        assert f"Reached {accuracy:.2%} top-1" in printed


@pytest.mark.slow
def test_two_processes_started_by_one_command_train_as_one_does(finished: tuple[Path, str], tmp_path: Path) -> None:
    words = "--trainer.accelerator cpu --trainer.devices 2 --data.batch_size 64"
    assert "distributed_backend=gloo" in run(f"{SHORT} {SMALL} {words}", tmp_path)
    one, two = (column(folder / "runs/short/version_0/metrics.csv", "val/loss") for folder in (finished[0], tmp_path))
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
def test_the_quick_start_reaches_85_percent(tmp_path: Path) -> None:
    assert float(re.search(r"Reached ([\d.]+)% top-1", run("", tmp_path))[1]) >= 85


@pytest.mark.slow
def test_a_compiled_run_saves_clean_keys_and_logs_the_attention_of_its_model(tmp_path: Path) -> None:
    words = "--model.compile true --trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --model.vit.depth 1"
    run(f"{SHORT} {SMALL} {words}", tmp_path)
    state = torch.load(tmp_path / "runs/short/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert "model.blocks.0.attn.q_proj.weight" in state
    assert not [key for key in state if "_orig_mod" in key]
    folder = tmp_path / "runs/short/version_0"
    model = load_model(folder / "model")
    with np.load(folder / "attention/pictures.npz") as kept:
        images = torch.from_numpy(kept["images"])
    numbers = HeadMetrics(model)
    numbers.update(images)
    assert column(folder / "attention/heads.csv", "entropy") == pytest.approx(
        [record["entropy"] for record in numbers.records()], abs=1e-4
    )


@pytest.mark.parametrize(
    ("config", "facts", "most"),
    [
        ("fashion_mnist", {"image_size": 28, "in_channels": 1, "num_classes": 10}, 0.6e6),
        ("cifar10", {"image_size": 32, "in_channels": 3, "num_classes": 10}, 3e6),
        ("cifar10_30min", {"image_size": 32, "in_channels": 3, "num_classes": 10}, 3e6),
    ],
)
def test_small_recipes_are_small(config: str, facts: dict[str, int], most: float) -> None:
    recipe = yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())["model"]
    vit, betas = ViTConfig(**recipe.pop("vit"), **facts), tuple(recipe.pop("betas"))
    model = LitViT(vit, betas=betas, **recipe)
    assert sum(parameter.numel() for parameter in model.parameters()) <= most


@pytest.mark.parametrize("order", ["--data.batch_size 64 {file}", "{file} --data.batch_size 64"])
@pytest.mark.parametrize("keys", [("batch_size: 32", "hflip: 0"), ("hflip: 0", "batch_size: 32")])
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
    assert arguments["hflip"] == 0
    assert arguments["batch_size"] == 64


def test_options_of_another_class_are_dropped_with_one_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    with pytest.raises(SystemExit, match="0"):
        main(f"fit --data FashionMNIST {QUICK} --data.root x --data.batch_size 64 --print_config".split())
    printed = capsys.readouterr()
    arguments = yaml.safe_load(printed.out)["data"]["init_args"]
    assert (arguments["batch_size"], arguments["padding"]) == (64, 1)  # which both classes have
    assert "warning" not in printed.err
    with pytest.raises(SystemExit, match="0"):
        main(f"fit {QUICK} --data ImageFolder --data.root x --print_config".split())
    [line] = [line for line in capsys.readouterr().err.splitlines() if "discarding" in line]
    assert line.startswith("warning: Due to class_path change from ")
    assert line.endswith("discarding init_args: {'padding': 1}.")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_and_names_itself(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    root = [] if config.stem in ("quickstart", "fashion_mnist_sequences") else ["--data.root", "x"]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", str(config), *root, "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["name"] == config.stem
    assert f"python train.py --config configs/{config.name}" in config.read_text() or config.stem == "quickstart"


@pytest.mark.parametrize("overlay", sorted((ROOT / "configs/overlays").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_overlay_is_accepted_and_names_itself(
    overlay: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    with pytest.raises(SystemExit, match="0"):
        main(
            f"fit --config {ROOT}/configs/imagenet_vit_s16.yaml --data.root x --config {overlay} --print_config".split()
        )
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] is not None
    assert f"--config configs/overlays/{overlay.name}" in overlay.read_text()


@pytest.mark.parametrize("word", ["validate", "test"])
def test_nothing_trained_is_not_measured(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert f"{word} measures trained weights: give" in refused(f"{word} {QUICK}", capsys, monkeypatch, tmp_path)
    vit = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["model"]["vit"]
    save_model(VisionTransformer(ViTConfig(**vit, image_size=28, in_channels=1, num_classes=3)), tmp_path / "other")
    words = f"{word} {QUICK} --model.pretrained other"
    message = refused(words, capsys, monkeypatch, tmp_path)
    assert "other has no head for these 10 classes, but one for 3: there is nothing to measure before" in message
    other = VisionTransformer(ViTConfig(**vit, image_size=28, in_channels=1, num_classes=10))
    other.preprocessing = Preprocessing(image_size=(28, 28), mean=(0.5,), std=(0.5,), crop_pct=0.9)
    other.class_names = FashionMNISTMini().class_names
    save_model(other, tmp_path / "other")
    message = refused(words, capsys, monkeypatch, tmp_path)
    assert "other sees pictures otherwise: mean is (0.5,), here (0.28" in message
    assert "crop is 0.9, here 1.0. Give --data.mean and so on as they are there" in message


@pytest.mark.parametrize(("word", "workers"), [("fit", 2), ("validate --model.pretrained earlier", 0)])
def test_a_damaged_picture_ends_a_run_in_one_line(
    word: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(8):
        place = tmp_path / "data" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.png").write_bytes(b"no picture")
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=2))
    model.class_names = ("a", "b")
    save_model(model, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    words = f"--data.root {tmp_path}/data --data.val_fraction 0.5 --data.image_size 16 --data.batch_size 2"
    words += f" --data.num_workers {workers} --trainer.accelerator cpu --trainer.enable_progress_bar false"
    words += " --trainer.max_epochs 1 --trainer.num_sanity_val_steps 0 --model.vit.patch_size 8 --model.vit.depth 1"
    with pytest.raises(SystemExit, match="2"):
        main(f"{word} --data ImageFolder {words}".split())
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert re.match(rf"error: {tmp_path}/data/[ab]/\d\.png: not a picture", line)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pictures_are_mixed_in_batches_of_any_size_and_what_is_left_over_is_said(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    words = f"{SHORT} {SMALL} --data.mixup 0.8 --data.cutmix 1 --data.batch_size {batch_size}"
    limits = "--trainer.limit_train_batches 3 --trainer.limit_val_batches 1 --attention.every_n_epochs 0"
    with caplog.at_level("INFO"):
        main(f"fit {words} {limits} --trainer.accelerator cpu --trainer.enable_progress_bar false".split())
    assert all(map(math.isfinite, column(tmp_path / "runs/short/version_0/metrics.csv", "train/loss_epoch")))
    said = "3333 steps an epoch; of 10000 pictures 1, others each time, are left over." in caplog.messages
    assert said == (batch_size == 3)


def test_folders_are_seen_as_the_pretrained_weights_have_seen_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        place = tmp_path / "data" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (30 * i, 0, 0)).save(place / f"{i}.png")
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=2))
    model.class_names = ("a", "b")
    model.preprocessing = Preprocessing(
        image_size=(16, 16), mean=(0.1,) * 3, std=(0.2,) * 3, crop_pct=0.5, crop_mode="squash"
    )
    save_model(model, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    words = "--data.root data --data.val_fraction 0.5 --data.image_size 16 --data.batch_size 2 --data.num_workers 0"
    words += " --model.pretrained earlier --trainer.accelerator cpu --trainer.enable_progress_bar false"
    main(f"validate --data ImageFolder {words}".split())
    written = yaml.safe_load((tmp_path / "runs/vit/version_0/config.yaml").read_text())["data"]["init_args"]
    assert [written[name] for name in ("mean", "crop_pct", "crop_mode")] == [[0.1, 0.1, 0.1], 0.5, "squash"]
    with pytest.raises(SystemExit, match="2"):  # what is said counts, and is not what these weights have seen
        main(f"validate --data ImageFolder {words} --data.std [0.3,0.3,0.3]".split())


def test_a_sharded_model_can_be_neither_drawn_nor_trained_with_muon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sharded = f"--config {ROOT}/configs/overlays/fsdp.yaml --trainer.strategy.data_parallel_size 1"
    words = f"{sharded} --trainer.accelerator cpu --trainer.devices 1 --trainer.precision 32-true"
    message = refused(f"fit {QUICK} {words} --attention.every_n_epochs 1", capsys, monkeypatch, tmp_path)
    assert "sharded model to draw: set --attention.every_n_epochs 0" in message
    message = refused(f"fit {QUICK} {words} --model.optimizer muon", capsys, monkeypatch, tmp_path)
    assert "--model.optimizer muon needs whole matrices, a sharded model has parts: take adamw." in message
