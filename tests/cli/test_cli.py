"""cli.py: the command line as its user meets it, in processes of its own where it trains."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import vitmha.cli.fit  # at once: the log of Lightning keeps the standard error that it finds when it is imported
import vitmha.cli.profile
from vitmha.cli import main
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.profiling import Measurement, layer_costs
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.save import save_model

ROOT = Path(__file__).parents[2]
QUICK = f"--config {ROOT}/configs/quickstart.yaml"
SHORT = f"{QUICK} --config {ROOT}/tests/short.yaml"
SMALL = "--model.vit.depth 2 --model.vit.embed_dim 16 --model.vit.mlp_dim 16 --attention.num_images 1"


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
