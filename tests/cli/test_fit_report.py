"""cli/fit_report.py: what a run prints at its start and at its end; the commands that it prints work."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from vitmha.cli import main
from vitmha.cli.fit_report import _duration
from vitmha.weights.load import load_model

RUN = "runs/vit/version_0"
CPU = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
DATA = [*CPU, "--data=ImageFolder", "--data.root=images", "--data.image_size=16", "--data.num_workers=0"]
SMALL = ["--model.vit.patch_size=8", "--model.vit.embed_dim=16", "--model.vit.depth=3", "--model.vit.num_heads=2"]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Class directories in the working directory's `images`."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("cat", 10), ("dog", 21), ("owl", 30)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(f"images/{name}/{i:02d}.png")
    return tmp_path / "images"


def fit(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[list[str], str]:
    """The lines that `vitmha fit ARGS` prints, and what it writes to standard error."""
    main(["fit", *args])
    printed = capsys.readouterr()
    return printed.out.splitlines(), printed.err


def test_a_run_says_what_it_will_do_what_it_reached_and_what_to_do_next(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*DATA, *SMALL, "--data.batch_size", "8", "--attention.num_images", "1"]
    lines, _ = fit(capsys, *args, "--trainer.max_epochs", "2")
    parameters = sum(parameter.numel() for parameter in load_model(f"{RUN}/model").parameters())
    threads = torch.get_num_threads()
    assert lines[:5] == [
        "Data    images: 55 training images of 3 classes, from 9 (cat) to 27 (owl) each; 6 held out for validation, "
        f"listed in {RUN}/held_out.txt",
        f"Model   ViT, 3 layers of 2 heads, width 16; 16 x 16 pixels in 4 patches; {parameters:,} parameters",
        "Recipe  2 epochs of 6 steps of 8 images (7 images are left out of each epoch); adamw, learning rate 0.001; "
        "seed 0",
        f"Device  CPU with {threads} thread{'s' * (threads > 1)}, precision 32-true",
        f"Output  {RUN}; the time per epoch is printed after the first one",
    ]
    assert lines[5].startswith("Time    ")
    end = lines.index("Next:")
    assert lines[end - 4].startswith("Reached ")
    commands = [line[line.index("vitmha ") :] for line in lines[end + 1 :]]
    assert [command.split()[1] for command in commands] == ["classify", "validate", "inspect"]
    assert "classify images/" in commands[0]
    for command in commands:
        try:
            main(shlex.split(command)[1:])
        except SystemExit as ended:
            assert not ended.code, command  # noqa: PT017
    assert "1 classified, 0 failed" in capsys.readouterr().err
    assert Path("runs/vit/version_1/evaluation/per_class.csv").is_file()
    assert Path(f"{RUN}/heads/page.html").is_file()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # this run starts anew from a checkpoint of another
def test_a_resumed_run_says_where_it_starts(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every_epoch = ["--checkpoint.save_top_k", "-1", "--checkpoint.filename", "epoch{epoch}"]
    args = [*DATA, *SMALL, *every_epoch, "--data.batch_size", "11", "--trainer.accumulate_grad_batches", "2"]
    args += ["--trainer.max_epochs", "2", "--attention.every_n_epochs", "0"]
    fit(capsys, *args)
    lines, err = fit(capsys, *args, "--ckpt_path", f"{RUN}/checkpoints/epoch0.ckpt")
    assert lines[2].startswith("Recipe  2 epochs of 3 steps of 22 images; adamw")
    assert lines[4].startswith("Output  runs/vit/version_1, resumed after 3 of 6 steps")
    assert "Restor" not in err


def test_the_config_of_a_run_from_a_bare_file_is_the_architecture_that_was_trained(
    images: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, qk_norm=True, init_values=0.1, **sizes)
    torch.save(model.state_dict(), images.parent / "bare.pth")
    args = ["--model.pretrained", "bare.pth", "--model.vit.num_heads", "4", "--attention.every_n_epochs", "0"]
    lines, _ = fit(
        capsys, *DATA, *args, "--model.linear_probe", "true", "--trainer.max_steps", "2", "--data.batch_size=8"
    )
    assert ", 2 layers of 4 heads, width 64; " in lines[1]
    assert lines[1].endswith(", of which the 195 of the head are trained, weights from bare.pth")
    trained = load_model(f"{RUN}/model")
    config = yaml.safe_load(Path(f"{RUN}/config.yaml").read_text())
    written = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config["model"]["vit"].items()
    }
    assert written == {name: getattr(trained.config, name) for name in written}
    fit(capsys, "--config", f"{RUN}/config.yaml")
    repeated = load_model("runs/vit/version_1/model").state_dict()
    torch.testing.assert_close(dict(repeated), dict(trained.state_dict()), rtol=0, atol=0)
    config["model"] |= {"pretrained": None, "linear_probe": False}
    Path("from_scratch.yaml").write_text(yaml.safe_dump(config))
    fit(capsys, "--config", "from_scratch.yaml")
    assert load_model("runs/vit/version_2/model").config == trained.config


def test_an_accuracy_of_other_weights_than_the_saved_ones_is_not_what_a_run_reached(
    images: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = [*DATA, *SMALL, "--data.batch_size=8", "--attention.every_n_epochs", "0", "--trainer.max_steps", "8"]
    lines, _ = fit(capsys, *args)  # validated after step 6
    assert "Trained after 2 epochs." in lines
    assert [line for line in lines if "Reached" in line] == []


def test_durations_have_a_unit_that_fits() -> None:
    assert [_duration(seconds) for seconds in (0.04, 9.94, 61.2, 125.0, 5399.0, 9000.0)] == [
        *("0.0 s", "9.9 s", "61 s", "2 min", "1 h 30 min", "2 h 30 min"),
    ]
