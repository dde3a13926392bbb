"""serve.py: a real server, real requests, many at once."""

import base64
import io
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
UPLOAD_TIMEOUT = 3


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
def server(model: Path) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server in processes of its own, for all tests."""
    flags = ("--max-upload-mb", "1", "--batch-size", "8", "--upload-timeout", str(UPLOAD_TIMEOUT))
    with running(model, *flags) as server:
        yield server


@pytest.fixture
def address(server: tuple[str, int]) -> str:
    return server[0]


@contextmanager
def running(model: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server, which must print nothing but its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from vitmha.cli import main; main()", "serve", "--model", str(model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, "--port", str(port), *flags], env=environment, **streams) as process:
        try:
            assert process.stdout.readline() == f"POST images to http://127.0.0.1:{port}/predict\n".encode()
            assert httpx.get(f"http://127.0.0.1:{port}/health").text == "ok"
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            printed, _ = process.communicate(timeout=60)  # returns when all of its processes have ended
            assert printed == b""


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
            "top_k must be an integer from 1 to 999999999, got 'many'",
        ),
        ({"content": png(1), "params": {"top_k": "0"}}, 400, "from 1 to 999999999, got '0'"),
        (
            {"files": {"image": png(1)}, "data": {"top_k": "9" * 5000}},
            400,
            f"top_k must be an integer from 1 to 999999999, got '{'9' * 40}...'",
        ),
        ({"content": png(1), "params": {"topk": "3"}}, 400, "unknown field 'topk', expected image, top_k or attention"),
        (
            {"files": {"image": png(1)}, "data": {"threshold": "3"}},
            400,
            "unknown field 'threshold', expected image, top_k or attention",
        ),
        ({"files": [("image", png(1)), ("image", png(2))]}, 400, "image was given 2 times, expected once"),
        ({"content": png(1), "params": [("top_k", "1"), ("top_k", "2")]}, 400, "top_k was given 2 times"),
        (
            {"files": {"image": png(1)}, "data": {"top_k": "1"}, "params": {"top_k": "2"}},
            400,
            "top_k was given 2 times",
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


@pytest.mark.parametrize(
    ("sent", "dribbled", "answer"),
    [
        (b"", b"", b""),
        (b"GET /health HTTP/1.1\r\nx: ", b"y", b""),
        (b"GET /info HTTP/1.1\r\nhost: a\r\n\r\n", b"G", b"HTTP/1.1 200 OK"),  # and then half of another request
        (b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: 900000\r\n\r\n", b"y", b"HTTP/1.1 408 Request Timeout"),
    ],
)
def test_unfinished_requests_end(address: str, sent: bytes, dribbled: bytes, answer: bytes) -> None:
    host, port = address.removeprefix("http://").split(":")
    start = time.monotonic()
    with ExitStack() as clients:
        sockets = [clients.enter_context(socket.create_connection((host, int(port)))) for _ in range(15)]
        for client in sockets:
            client.sendall(sent)
            client.setblocking(False)
        received, unfinished = dict.fromkeys(sockets, b""), set(sockets)
        while unfinished:
            time.sleep(0.1)
            assert time.monotonic() - start < 10 * UPLOAD_TIMEOUT
            for client in list(unfinished):
                try:
                    client.sendall(dribbled)
                    chunk = client.recv(4096)
                    received[client] += chunk
                    finished = not chunk
                except BlockingIOError:
                    finished = False
                except OSError:  # closed by the server
                    finished = True
                if finished:
                    unfinished.remove(client)
        assert time.monotonic() - start >= UPLOAD_TIMEOUT
        assert {content.split(b"\r\n")[0] for content in received.values()} == {answer}
    assert httpx.post(f"{address}/predict", content=png(1)).status_code == 200


def test_a_kept_connection_may_send_requests_for_longer_than_the_timeout(address: str) -> None:
    with httpx.Client(timeout=60) as client:
        end = time.monotonic() + 1.5 * UPLOAD_TIMEOUT
        while time.monotonic() < end:
            answer = client.post(f"{address}/predict", content=png(1))
            assert answer.status_code == 200
            assert "connection" not in answer.headers
            time.sleep(0.2)


@pytest.mark.parametrize("sent", [5, 1000, None])
def test_clients_may_leave(address: str, sent: int | None) -> None:
    host, port = address.removeprefix("http://").split(":")
    for content in (png(1), b"text"):
        upload = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        for _ in range(5):
            with socket.create_connection((host, int(port))) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
                client.sendall(upload[:sent])
                time.sleep(0.01)
    assert httpx.post(f"{address}/predict", content=png(1)).status_code == 200  # `running` checks what was printed


def test_info_describes_the_model_and_no_page_loads_scripts(address: str) -> None:
    assert httpx.get(f"{address}/info").json() == {
        "model": {"class_names": [str(index) for index in range(7)], "image_size": [24, 40]}
    }
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert httpx.get(f"{address}{path}").status_code == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_refused_before_the_model_is_loaded(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--model", "nowhere", "--host", host, "--port", str(port)])
    assert capsys.readouterr().err == f"error: --port {port} of --host {host} is in use, choose another.\n"


def black_png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def peak_memory(pid: int) -> int:
    """The largest number of bytes that a process and its descendants have held, added up."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 + sum(peak_memory(int(child)) for child in children)


def post_at_once(address: str, content: bytes, count: int = 16) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda _: httpx.post(f"{address}/predict", content=content, timeout=300), range(count)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
def test_images_with_too_many_pixels_are_refused_before_they_are_decoded(server: tuple[str, int]) -> None:
    address, pid = server
    httpx.post(f"{address}/predict", content=png(1), timeout=60)
    before = peak_memory(pid)
    for answer in post_at_once(address, black_png(13_000)):
        assert answer.status_code == 413
        assert answer.json() == {"error": "too large: 13000 x 13000 pixels, at most 160000000 (max_pixels)"}
    assert peak_memory(pid) - before < 100e6


def test_the_map_of_a_large_image_is_drawn_on_a_smaller_one(address: str) -> None:
    params = {"attention": "true"}
    answer = httpx.post(f"{address}/predict", content=black_png(2500), params=params, timeout=60)
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["attention_png"]))) as drawn:
        assert drawn.size == (2048, 2048)


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
