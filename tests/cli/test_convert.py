"""cli/convert.py: from the command line, and to and from a hub that stands in for Hugging Face's."""

import base64
import hashlib
import json
import math
import os
import re
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
from torch import nn

import vitmha.weights.parity
from vitmha.cli import main
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


@pytest.fixture
def model() -> VisionTransformer:
    model = VisionTransformer(ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=3)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.class_names = ("cat", "dog", "owl")
    return model


CALLS = """
import sys
from vitmha.cli import main
for call in sys.argv[1:]:
    try:
        main(call.split())
    except SystemExit as ended:
        print(f"exit status {ended.code}", file=sys.stderr)
"""


def run(folder: Path, *calls: str, **environment: str) -> list[str]:
    """Calls of `vitmha` in a process of its own, one after the other; the lines on standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", CALLS, *calls],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.splitlines()


@torch.no_grad()
def test_a_bare_file_becomes_a_folder_of_any_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    theirs = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    torch.save({"model": theirs.state_dict()}, tmp_path / "x.pth")
    hints = "--set num_heads=3 --set norm_eps=1e-6 --set mlp=gelu --set pool=cls"
    main(f"convert {tmp_path}/x.pth {tmp_path}/ours {hints}".split())
    main(f"convert {tmp_path}/ours {tmp_path}/theirs --layout timm".split())
    assert f"{tmp_path}/theirs: written as timm" in capsys.readouterr().out
    images = torch.randn(2, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path}/theirs", pretrained=True).eval()
    torch.testing.assert_close(again(images), theirs(images), rtol=0, atol=1e-5)


def test_the_size_can_be_changed_on_the_way(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    main(f"convert {tmp_path}/a {tmp_path}/b --set image_size=[16,48]".split())
    assert load_model(tmp_path / "b").layout.grid_size == (2, 6)


def test_half_of_the_bytes_hold_the_same_numbers_rounded(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    main(f"convert {tmp_path}/a {tmp_path}/b --half".split())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"]
    assert sizes[1] < 0.6 * sizes[0]
    expected = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(load_model(tmp_path / "b").state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["timm", "hugging_face"])
def test_check_compares_with_the_other_package_both_ways(
    layout: str, model: VisionTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "theirs", layout)
    main(f"convert {tmp_path}/theirs {tmp_path}/again --layout {layout} --check".split())
    printed = capsys.readouterr().out.splitlines()
    found = [re.search(r"differ in logits by (\S+), attention maps by (\S+) at most", line) for line in printed]
    assert [line is not None for line in found] == [True, False, True]
    assert all(float(number) < 1e-5 for line in found if line for number in line.groups())


def test_ours_is_checked_against_what_it_becomes(
    model: VisionTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "ours")
    main(f"convert {tmp_path}/ours {tmp_path}/theirs --layout timm --check".split())
    printed = capsys.readouterr().out.splitlines()
    assert [f"{tmp_path}/theirs: on 2 random pictures its own package" in line for line in printed] == [False, True]


def test_what_a_file_does_not_tell_is_said_once_for_all_commands(model: VisionTransformer, tmp_path: Path) -> None:
    model.preprocessing = model.class_names = None
    save_model(model, tmp_path / "a")
    words = "--set mean=[0.1,0.2,0.3] --set std=[0.5,0.5,0.5] --set interpolation=bilinear --set crop_pct=0.9"
    main([*f"convert {tmp_path}/a {tmp_path}/b {words}".split(), "--set", 'class_names=["red cat", "dog", "owl"]'])
    found = load_model(tmp_path / "b")
    assert found.class_names == ("red cat", "dog", "owl")
    assert found.preprocessing == Preprocessing(
        image_size=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.5,) * 3, interpolation="bilinear", crop_pct=0.9
    )
    main(f"convert {tmp_path}/b {tmp_path}/c --set crop_pct=0.8".split())
    assert load_model(tmp_path / "c").preprocessing == replace(found.preprocessing, crop_pct=0.8)


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_check_compares_models_without_a_head(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "theirs")
    main(f"convert {tmp_path}/theirs {tmp_path}/ours --check".split())
    assert "its own package and the converted model differ in logits by " in capsys.readouterr().out
    assert load_model(tmp_path / "ours").config.num_classes == 0


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers"])
def test_check_builds_the_package_of_a_bare_file(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    file = tmp_path / "x.pth"
    if package == "timm":
        theirs = timm.create_model("deit_tiny_distilled_patch16_224", **sizes)
        torch.save({"model": theirs.state_dict()}, file)
    elif package == "torchvision":
        theirs = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5)
        torch.save(theirs.state_dict(), file)
    else:
        transformers = pytest.importorskip("transformers")
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, intermediate_size=96))
        torch.save(theirs.state_dict(), file)
    hints = "--set num_heads=3 --set norm_eps=1e-6 --set mlp=gelu --set pool=cls"
    main(f"convert {file} {tmp_path}/ours --check {hints}".split())
    found = re.search(r"differ in logits by (\S+), attention maps by (\S+) at most", capsys.readouterr().out)
    assert found
    assert all(float(number) < 1e-5 for number in found.groups())


@pytest.mark.parametrize(("place", "shift"), [("blocks.1.norm1", 0.1), ("head", math.nan)])
def test_check_finds_what_is_not_the_same(
    place: str,
    shift: float,
    model: VisionTransformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(model, tmp_path / "theirs", "timm")
    other = timm.create_model(f"local-dir:{tmp_path}/theirs", pretrained=True).eval()
    with torch.no_grad():
        other.get_submodule(place).weight.add_(shift)
    monkeypatch.setattr(vitmha.weights.parity, "original", lambda *_: other)
    with pytest.raises(SystemExit) as exit_:
        main(f"convert {tmp_path}/theirs {tmp_path}/ours --check".split())
    assert exit_.value.code == 2
    assert "the difference passes 0.0001" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere out", "nowhere must be a folder with config.json and model.safetensors"),
        ("a out --layout tim", "invalid choice: 'tim'"),
        ("a out --set depth", "expected NAME=VALUE, got 'depth'"),
        ("a out --set crop_pct=0.5", "--set: the preprocessing needs mean and std, such as mean=[0.5,0.5,0.5]"),
        ("a out --set class_names=cat", "--set class_names: a list of the 3 classes is needed, got 'cat'."),
        ("a out --set depth=5", "a has another architecture: depth is 2, here 5"),
        ("a out --check", "--check: a is no model of another package"),
        ("a out --check --set image_size=16", "leave out --check, or the --set of another size"),
        ("a hf:nobody", "hf:nobody could not be written"),
        ("a", "the following arguments are required: DEST"),
        ("nowhere a/config.json", "a/config.json cannot be made or written to, for"),
        ("nowhere a/config.json/x", "it is no folder"),
    ],
)
def test_a_wrong_call_gets_one_message_and_writes_nothing(
    words: str,
    message: str,
    model: VisionTransformer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    save_model(model, tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(f"convert {words}".split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as pushing and pulling a model needs; the files of a repository by their names."""

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
        if "/resolve/" in self.path:
            content = self.files[self.path.rpartition("/")[2]]
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, ETag=f'"{etag}"', X_Repo_Commit="0" * 40)
        elif "/tree/" in self.path:
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in self.files.items()])
        else:
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": "me/heads", "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []})

    do_HEAD = do_GET  # noqa: N815 (the name that the server looks for)


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.files.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_model_goes_to_a_hub_and_comes_back(model: VisionTransformer, hub: str, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    around = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    hints = run(tmp_path, "convert a hf:me/heads", "convert hf:me/heads b", **around)
    assert not any(line.startswith("exit") for line in hints), hints
    assert set(Hub.files) >= {"config.json", "model.safetensors"}
    again = load_model(tmp_path / "b")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.class_names == model.class_names


def test_without_a_network_one_message(model: VisionTransformer, tmp_path: Path) -> None:
    save_model(model, tmp_path / "a")
    around = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
    hints = run(tmp_path, "convert a hf:me/heads", "convert hf:me/heads b", **around)
    assert not any(line.startswith("Traceback") for line in hints)
    pushed, first, pulled, second = (line for line in hints if line.startswith(("error", "exit")))
    assert pushed.startswith("error: hf:me/heads could not be written (")
    assert pulled.startswith("error: hf:me/heads could not be fetched (")
    assert first == second == "exit status 2"
    assert not (tmp_path / "b").exists()
