"""The command profile: the wrong calls it refuses, and its tables and JSON."""

import json
import re
from pathlib import Path

import pytest
import torch

import vitmha.models.profiling
from vitmha.cli import main
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.profiling import Measurement, layer_costs
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.save import save_model


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line of a call that ends with status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(["profile", *args])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model nowhere", "nowhere: no such file or directory (expected a directory with config.json"),
        ("--model nowhere", "profile also takes a size: vit_mini, vit_tiny"),
        ("--model nowhere --patch-size 4", "--patch-size needs a size as the model (vit_mini"),
        (
            "--model vit_mini --image-size 30",
            "--image-size 30 x 30 is not divisible by --patch-size 4 x 4: change one of them",
        ),
        (
            "--model vit_mini --image-size 8 8 8",
            "--image-size takes height and width, or one number for both; got [8, 8, 8]",
        ),
        ("--model vit_mini --batch-size 0", "argument --batch-size: expected an integer of at least 1, got '0'"),
        ("--model vit_mini --imagesize 8", "unknown option --imagesize (did you mean --image-size?)"),
        ("", "--model is required, for example --model cifar10"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    args: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(args.split(), capsys)


def test_cuda_without_a_device_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(["--model", "vit_mini", "--device", "cuda"], capsys)
    assert "--device cuda: PyTorch finds no CUDA device" in message


def profile(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `vitmha profile` prints."""
    main(["profile", "--device", "cpu", *args])
    return capsys.readouterr().out


def test_json_holds_the_numbers_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--model",
        "vit_mini",
        "--image-size",
        "8",
        "12",
        "--patch-size",
        "2",
        "4",
        "--batch-size",
        "3",
        "--format",
        "json",
    ]
    report = json.loads(profile(args, capsys))
    costs = layer_costs(create_model("vit_mini", image_size=(8, 12), patch_size=(2, 4)), batch_size=3)
    assert report["image_size"] == [8, 12]
    assert (report["num_tokens"], report["batch_size"], report["device"]) == (13, 3, "cpu")
    assert [layer["macs"] for layer in report["layers"]] == [cost.macs for cost in costs]
    assert report["total"]["parameters"] == sum(cost.parameters for cost in costs)
    assert [run["backend"] for run in report["measured"]] == ["auto", "explicit"]
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 0 for run in report["measured"])


def test_a_saved_model_at_another_image_size_is_printed_as_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = {"depth": 2, "embed_dim": 12, "num_heads": 3, "mlp_dim": 10, "num_classes": 7, "backend": "explicit"}
    save_model(create_model("vit_mini", image_size=8, **fields), tmp_path)
    printed = profile(["--model", str(tmp_path), "--image-size", "8", "12"], capsys)
    assert "8 x 12 pixels, 7 tokens, batch of 1" in re.sub(r"\s+", " ", printed)
    # Parameters 4 (12 12 + 12) + 2 12 10 + 10 + 12 + 2 24; MACs 7 4 12 12, 2 7 7 12, 7 2 12 10 and 1 2 12 10.
    assert re.search(r"block 0 +934 +4.03k +1.18k +1.68k +0 +6.89k +588B +672B", printed)
    assert re.search(r"block 1 +934 +4.03k +1.18k +240 +0 +5.45k +588B +672B", printed)
    assert len(re.findall(r"^ +explicit +[\d.]+ ms ", printed, re.MULTILINE)) == 1
    assert "auto" not in printed


def test_an_encoder_decoder_is_counted_with_its_decoder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = ViTConfig(image_size=8, in_channels=1, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    model = EncoderDecoder(config, DecoderConfig(max_length=3, depth=2, num_heads=2))
    save_model(model, tmp_path)
    report = json.loads(profile(["--model", str(tmp_path), "--format", "json"], capsys))
    assert [layer["name"] for layer in report["layers"]][1:] == ["block 0", "tokens", "decoder 0", "decoder 1", "head"]
    assert report["total"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_explicit_attention_is_not_measured_if_its_scores_could_fill_the_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(model: VisionTransformer, images: torch.Tensor, backend: str) -> Measurement:
        return Measurement(backend=backend, seconds=1e-3, peak_bytes=8)

    monkeypatch.setattr(vitmha.models.profiling, "measure", measured)
    # An image has 4 heads of 257 x 257 scores of 4 bytes: 1016 images stay under 1 GiB, 1017 do not.
    for batch_size, kernels in ((1016, ["auto", "explicit"]), (1017, ["auto"])):
        printed = profile(f"--model vit_mini --image-size 64 --batch-size {batch_size}".split(), capsys)
        assert re.findall(r"^ +(\w+) +1.00 ms +1.02M +8B", printed, re.MULTILINE) == kernels


def test_the_path_of_a_model_is_printed_in_one_line_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    directory = tmp_path / ("long [name] " * 10).strip()
    fields = {"depth": 1, "embed_dim": 12, "num_heads": 3, "mlp_dim": 10, "num_classes": 7, "image_size": 8}
    save_model(create_model("vit_mini", **fields), directory)
    assert str(directory) in profile(["--model", str(directory)], capsys)
