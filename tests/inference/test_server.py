"""serve.py: a real server, real requests, many at once."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitmha import Classifier, create_model, load_model, save_model
from vitmha.cli import main
from vitmha.images import Preprocessing

pytest.importorskip("litserve")
httpx = pytest.importorskip("httpx")

from vitmha.inference.server import ClassifierAPI  # noqa: E402 (needs LitServe)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    sizes = {"image_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_dim": 20}
    model = create_model("vit_mini", num_classes=7, **sizes)
    torch.nn.init.normal_(model.head.weight)
    model.preprocessing = Preprocessing(image_size=(24, 40), mean=(0.5,) * 3, std=(0.3,) * 3)
    directory = tmp_path_factory.mktemp("model")
    save_model(model, directory)
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """A server in processes of its own, for all tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ["serve", "--model", str(model), "--port", str(port), "--max-upload-mb", "1", "--batch-size", "8"]
    command = [sys.executable, "-c", "from vitmha.cli import main; main()", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            printed, _ = process.communicate(timeout=60)  # returns when all of its processes have ended
            assert b"Traceback" not in printed


def wait_for(address: str, process: subprocess.Popen[bytes]) -> str:
    for _ in range(600):
        assert process.poll() is None
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return address
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(address)


def png(number: int) -> bytes:
    """A PNG of random pixels that depend on `number`, 50 + number wide."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (3, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).resize((50 + number, 40), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def test_each_of_sixteen_concurrent_clients_gets_its_own_predictions(address: str, model: Path) -> None:
    images = [png(number) for number in range(160)]
    expected = list(Classifier(model).classify([Image.open(io.BytesIO(each)) for each in images], top_k=7))

    def post(number: int) -> dict[str, object]:
        options = {"top_k": str(1 + number % 7), "attention": "true" if number % 5 == 0 else "false"}
        with httpx.Client(timeout=60) as client:
            if number % 2:
                answer = client.post(f"{address}/predict", content=images[number], params=options)
            else:
                answer = client.post(f"{address}/predict", files={"image": images[number]}, data=options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(post, range(160)))
    for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        count = 1 + number % 7
        assert answer["probabilities"] == pytest.approx(right.probabilities[:count], abs=1e-5)
        assert tuple(answer["labels"]) == right.labels[:count]
        assert ("attention_png" in answer) == (number % 5 == 0)
        if number % 5 == 0:
            with Image.open(io.BytesIO(base64.b64decode(answer["attention_png"]))) as drawn:
                assert (drawn.format, drawn.size) == ("PNG", (50 + number, 40))


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        ({"content": b"text"}, 422, "not an image in a format that Pillow reads"),
        ({"content": png(1)[:200]}, 422, "truncated|Truncated|broken"),
        ({"files": {"image": b"text"}}, 422, "not an image"),
        ({"content": b""}, 400, "no image found: post a form with the file 'image'"),
        ({"files": {"photo": png(1)}}, 400, "no image found"),
        ({"content": b"abc", "headers": {"content-type": "multipart/form-data"}}, 400, "oundary"),
        ({"content": b"abc", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "."),
        (
            {"content": png(1), "params": {"top_k": "many"}},
            400,
            "top_k must be an integer of at least 1, got 'many'",
        ),
        ({"content": png(1), "params": {"attention": "1"}}, 400, "attention must be true or false, got '1'"),
        ({"content": bytes(1_000_001)}, 413, "the upload has more than 1000000 bytes"),
        ({"files": {"image": bytes(1_000_001)}}, 413, "the upload has more than 1000000 bytes"),
    ],
)
def test_bad_uploads_are_refused_with_the_reason(
    address: str, request_: dict[str, object], status: int, reason: str
) -> None:
    answer = httpx.post(f"{address}/predict", timeout=60, **request_)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    assert any(part in answer.json()["error"] for part in reason.split("|"))


def test_a_bad_upload_affects_no_other_of_its_batch(address: str) -> None:
    def post(number: int) -> int:
        return httpx.post(f"{address}/predict", content=png(number) if number % 2 else b"text", timeout=60).status_code

    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(post, range(48))) == [422, 200] * 24


def test_only_the_request_for_a_map_is_refused_if_the_engine_has_none(model: Path) -> None:
    api = ClassifierAPI(str(model), max_batch_size=8, batch_timeout=0.01, api_path="/predict")
    api.setup("cpu")
    expected = api.predict([{"image": base64.b64encode(png(1)).decode(), "top_k": 2, "attention": False}])
    api.classifier.engine, api.classifier.network = "openvino", api.classifier.model
    wanted = [{"image": base64.b64encode(png(1)).decode(), "top_k": 2, "attention": each} for each in (True, False)]
    refused, answered = api.predict(wanted)
    assert refused == {"error": "attention maps require engine 'torch', got 'openvino'"}
    assert api.encode_response(refused).status_code == 422
    assert answered["labels"] == expected[0]["labels"]
    assert answered["probabilities"] == pytest.approx(expected[0]["probabilities"], abs=1e-5)


def test_a_wrong_call_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    headless = load_model(model, num_classes=0)
    headless.preprocessing = load_model(model).preprocessing
    save_model(headless, tmp_path / "headless")
    for args, message in (
        ([str(tmp_path / "headless")], "headless has no classification head, so there are no labels to serve."),
        (["nowhere"], "nowhere: no such file or directory"),
        ([str(model), "--port", "80"], "--port must be from 1024 to 65535, got 80."),
        ([str(model), "--max-upload-m", "80"], "did you mean --max-upload-mb?"),
    ):
        monkeypatch.setattr(sys, "argv", ["vitmha"])
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--model", *args])
        assert message in capsys.readouterr().err
    assert json.loads((model / "config.json").read_text())["class_names"] is None
