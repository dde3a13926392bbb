"""The command convert, also to and from a local server with the API of the Hugging Face hub."""

import base64
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
import torchvision
from builders import full_disk
from torch import nn

import vitmha.weights.parity
from vitmha.cli import main
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.training_summary import TrainingSummary, read_summary


@pytest.fixture
def model() -> VisionTransformer:
    model = VisionTransformer(ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=3)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.class_names = ("cat", "dog", "owl")
    return model


CALLS = """
import json, sys
from vitmha.cli import main
for call in sys.argv[1:]:
    try:
        main(json.loads(call))
    except SystemExit as ended:
        print(f"exit status {ended.code}", file=sys.stderr)
"""


def convert(source: str | Path, output: str | Path, *options: str) -> None:
    main(["convert", "--model", str(source), "--output", str(output), *options])


def override(**fields: str) -> list[str]:
    return [arg for name, value in fields.items() for arg in ("--override", f"{name}={value}")]


HINTS = override(num_heads="3", norm_eps="1e-6", mlp="gelu", pool="cls")


def run(directory: Path, *calls: list[str], **environment: str) -> list[str]:
    """Runs `vitmha` with each list of arguments in one new process; returns the lines on standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", CALLS, *map(json.dumps, calls)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.splitlines()


@torch.no_grad()
def test_a_bare_file_is_converted_to_any_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    reference = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    torch.save({"model": reference.state_dict()}, tmp_path / "x.pth")
    convert(tmp_path / "x.pth", tmp_path / "vitmha", *HINTS)
    convert(tmp_path / "vitmha", tmp_path / "timm", "--format", "timm")
    assert f"{tmp_path}/timm: written in the format timm" in capsys.readouterr().out
    images = torch.randn(2, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True).eval()
    torch.testing.assert_close(again(images), reference(images), rtol=0, atol=1e-5)


def test_override_changes_the_image_size(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", *override(image_size="[16,48]"))
    assert load_model(tmp_path / "b").layout.grid_size == (2, 6)


def test_float16_halves_the_file_and_rounds_the_weights(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "--dtype", "float16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"]
    assert sizes[1] < 0.6 * sizes[0]
    expected = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(load_model(tmp_path / "b").state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("format_", ["timm", "hf"])
def test_verify_compares_source_and_output_with_their_package(
    format_: str, model: VisionTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "reference", format_)
    convert(tmp_path / "reference", tmp_path / "again", "--format", format_, "--verify")
    printed = capsys.readouterr().out.splitlines()
    found = [re.search(r"differs .* by at most (\S+) in logits and (\S+) in attention maps", line) for line in printed]
    assert [line is not None for line in found] == [True, False, True]
    assert all(float(number) < 1e-5 for line in found if line for number in line.groups())


def test_verify_of_a_vitmha_model_compares_the_output_only(
    model: VisionTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "vitmha")
    convert(tmp_path / "vitmha", tmp_path / "timm", "--format", "timm", "--verify")
    printed = capsys.readouterr().out.splitlines()
    assert [f"{tmp_path}/timm: on 2 random images the converted model" in line for line in printed] == [False, True]


def test_override_stores_class_names_and_preprocessing(model: VisionTransformer, tmp_path: Path) -> None:
    model.preprocessing = model.class_names = None
    save_model(model, tmp_path / "a")
    preprocessing = override(mean="[0.1,0.2,0.3]", std="[0.5,0.5,0.5]", interpolation="bilinear", crop_pct="0.9")
    names = override(class_names='["red cat", "dog", "owl"]')
    convert(tmp_path / "a", tmp_path / "b", *preprocessing, *names)
    found = load_model(tmp_path / "b")
    assert found.class_names == ("red cat", "dog", "owl")
    assert found.preprocessing == Preprocessing(
        image_size=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.5,) * 3, interpolation="bilinear", crop_pct=0.9
    )
    convert(tmp_path / "b", tmp_path / "c", *override(crop_pct="0.8"))
    assert load_model(tmp_path / "c").preprocessing == replace(found.preprocessing, crop_pct=0.8)


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_verify_compares_models_without_a_head(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "reference")
    convert(tmp_path / "reference", tmp_path / "vitmha", "--verify")
    assert "the converted model differs from its own package by at most " in capsys.readouterr().out
    assert load_model(tmp_path / "vitmha").config.num_classes == 0


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers"])
def test_verify_builds_the_reference_of_a_bare_file(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    file = tmp_path / "x.pth"
    if package == "timm":
        reference = timm.create_model("deit_tiny_distilled_patch16_224", **sizes)
        torch.save({"model": reference.state_dict()}, file)
    elif package == "torchvision":
        reference = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5)
        torch.save(reference.state_dict(), file)
    else:
        transformers = pytest.importorskip("transformers")
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        reference = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, intermediate_size=96))
        torch.save(reference.state_dict(), file)
    convert(file, tmp_path / "vitmha", "--verify", *HINTS)
    found = re.search(r"differs .* by at most (\S+) in logits and (\S+) in attention maps", capsys.readouterr().out)
    assert found
    assert all(float(number) < 1e-5 for number in found.groups())


@pytest.mark.parametrize(("layer", "shift"), [("blocks.1.norm1", 0.1), ("head", math.nan)])
def test_verify_finds_a_difference_and_writes_nothing(
    layer: str,
    shift: float,
    model: VisionTransformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(model, tmp_path / "reference", "timm")
    other = timm.create_model(f"local-dir:{tmp_path}/reference", pretrained=True).eval()
    with torch.no_grad():
        other.get_submodule(layer).weight.add_(shift)
    monkeypatch.setattr(vitmha.weights.parity, "build_reference", lambda *_: other)
    with pytest.raises(SystemExit) as exit_:
        convert(tmp_path / "reference", tmp_path / "vitmha", "--verify")
    assert exit_.value.code == 2
    assert "in attention maps, more than 0.0001." in capsys.readouterr().err
    assert not (tmp_path / "vitmha").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model nowhere --output out", "nowhere: no such file or directory (expected a directory with config.json"),
        ("--model vit_tiny --output out", "vit_tiny is a model size without trained weights"),
        ("--model a --output out --format tim", "invalid choice: 'tim'"),
        ("--model a --output out --override depth", "expected KEY=VALUE, got 'depth'"),
        ("--model a --output out --override crop_pct=0.5", "the preprocessing needs mean and std, such as mean=["),
        ("--model a --output out --override class_names=cat", "class_names: expected a list of 3 names, got 'cat'."),
        ("--model a --output out --override depth=5", "a has another architecture: depth is 2, requested 5"),
        ("--model a --output out --verify", "--verify: a is not a model of another package"),
        ("--model a --output out --verify --override image_size=16", "remove --verify, or the --override of another"),
        ("--model a --output hf:nobody", "hf:nobody could not be written"),
        ("--model a", "the following arguments are required: --output"),
        ("--model nowhere --output a/config.json", "a/config.json cannot be created or written to: "),
        ("--model nowhere --output a/config.json/x", "is not a directory"),
        ("--model cifar10 --output a", "a already exists; choose another output directory"),
        ("--model a --output a --override image_size=16", "a already exists; choose another output directory"),
        ("--model a --output out --override nosuch=1", "the architecture has no field 'nosuch'; its fields are "),
        ("--model a --output out --override num_head=3", "has no field 'num_head' (did you mean num_heads?)"),
    ],
)
def test_a_wrong_call_is_refused_and_writes_nothing(
    args: str,
    message: str,
    model: VisionTransformer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    save_model(model, tmp_path / "a")
    content = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["convert", *args.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == content
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_every_file_has_the_permissions_of_the_umask(umask: int, model: VisionTransformer, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for format_ in ("vitmha", "timm", "hf"):
            save_model(model, tmp_path / format_, format_)
    finally:
        os.umask(before)
    files = [*tmp_path.glob("*/*")]
    assert len(files) == 9
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_a_full_disk_is_one_line_with_the_name_of_the_file_and_leaves_no_file(
    model: VisionTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "a")
    with pytest.raises(SystemExit) as exit_, full_disk():
        main(["convert", "--model", f"{tmp_path}/a", "--output", f"{tmp_path}/b"])
    assert exit_.value.code == 2
    assert f"error: {tmp_path}/b/model.safetensors: File too large" in capsys.readouterr().err
    assert not [*tmp_path.glob("b/*")]


PUSH = ["convert", "--model", "a", "--output", "hf:me/heads"]
PULL = ["convert", "--model", "hf:me/heads", "--output", "b"]


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that pushing and loading a model needs; `files` holds one repository."""

    files: ClassVar[dict[str, bytes]] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/me/heads", "name": "me/heads"})
        elif "/preupload/" in self.path:
            wanted = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in wanted]})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer({"commitUrl": f"http://{self.headers['Host']}/me/heads/commit/0", "commitOid": "0" * 40})
        else:
            self.answer({})

    def do_GET(self) -> None:
        if "/resolve/" in self.path and self.path.rpartition("/")[2] not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "/resolve/" in self.path:
            content = self.files[self.path.rpartition("/")[2]]
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, ETag=f'"{etag}"', X_Repo_Commit="0" * 40)
        elif "/tree/" in self.path:
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in self.files.items()])
        else:
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": "me/heads", "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []})

    do_HEAD = do_GET  # noqa: N815 (the name that http.server calls)


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.files.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_model_is_pushed_to_a_hub_and_loaded_again(model: VisionTransformer, hub: str, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    lines = run(tmp_path, PUSH, PULL, **environment)
    assert not any(line.startswith("exit") for line in lines), lines
    assert set(Hub.files) >= {"config.json", "model.safetensors"}
    again = load_model(tmp_path / "b")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.class_names == model.class_names
    assert b'load_model("hf:me/heads")' in Hub.files["README.md"]
    calls = (f"`vitmha {shlex.join(call)}`." for call in (PUSH, PULL))
    assert read_summary(tmp_path / "b") == TrainingSummary(base_model="me/heads", changes=tuple(calls))
    Hub.files["README.md"], Hub.files["config.json"] = b"Written by hand.", b"{}"
    environment["HF_HOME"] = str(tmp_path / "another home")  # all commits of this hub have the same name
    assert not any(line.startswith("exit") for line in run(tmp_path, PUSH, **environment))
    assert Hub.files["README.md"] == b"Written by hand."
    assert Hub.files["config.json"] != b"{}"


def test_without_a_network_the_error_is_one_line(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
    lines = run(tmp_path, PUSH, PULL, **environment)
    assert not any(line.startswith("Traceback") for line in lines)
    pushed, first, pulled, second = (line for line in lines if line.startswith(("error", "exit")))
    assert pushed.startswith("error: hf:me/heads could not be written (")
    assert pulled.startswith("error: hf:me/heads could not be downloaded (")
    assert first == second == "exit status 2"
    assert not (tmp_path / "b").exists()
