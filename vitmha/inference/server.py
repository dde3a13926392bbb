"""An HTTP server that classifies images: POST an image, receive its labels as JSON. LitServe forms the batches."""

import asyncio
import base64
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import litserve
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitmha.errors import UserError
from vitmha.images import MAX_PIXELS, TOO_LARGE, ImageBytes, reading
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.overlay import draw_attention

PATH, INFO_PATH = "/predict", "/info"
MAX_OVERLAY_SIDE = 2048  # pixels; an attention map of a larger image is drawn on a smaller copy of it
Upload = dict[str, Any]


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    batch_size: int = 16,
    batch_timeout: float = 0.01,
    max_upload_mb: int = 20,
    max_pixels: int = MAX_PIXELS,
    upload_timeout: int = 60,
    on_listening: Callable[[], object] = lambda: None,
) -> None:
    """Serves the predictions of a model until it is interrupted.

    Args:
        model: A source that `Classifier` accepts.
        host: The address to listen on: 127.0.0.1, 0.0.0.0 or ::.
        port: 1024 to 65535.
        device: cpu, cuda, or auto.
        batch_size: Largest number of images per batch.
        batch_timeout: Seconds that a request waits for others to form a batch.
        max_upload_mb: Largest upload in megabytes (10^6 bytes); larger ones get status 413.
        max_pixels: Images with more pixels get status 413 before they are decoded.
        upload_timeout: Seconds in which the headers of a request must arrive, or the connection is closed, and then
            its body, or it gets status 408.
        on_listening: Called once requests are answered.

    Raises:
        UserError: The model has no classification head.

    Example:
        >>> serve("cifar10", port=8000)  # doctest: +SKIP
    """
    # Loaded here first, so that an unusable model is an error of this process, not of a worker process.
    classifier = Classifier(model, device="cpu")
    if not classifier.class_names:
        raise UserError(f"model {model} has no classification head, so there are no labels to serve.")
    info = {"class_names": classifier.class_names, "image_size": classifier.preprocessing.image_size}
    options = {"max_bytes": max_upload_mb * 1_000_000, "timeout": upload_timeout, "info": {"model": info}}
    api = ClassifierAPI(model, max_pixels, max_batch_size=batch_size, batch_timeout=batch_timeout, api_path=PATH)
    server = litserve.LitServer(
        api,
        accelerator=device,
        middlewares=[(UploadMiddleware, options)],
        timeout=60,
        info_path=INFO_PATH,
        disable_openapi_url=True,  # and with it /docs, whose page would load scripts from another server
    )
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client is told what is wrong with its form
    threading.Thread(target=_wait_until_listening, args=(host, port, on_listening), daemon=True).start()
    server.run(
        host=host,
        port=port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        http=type("Protocol", (TimedProtocol,), {"timeout": upload_timeout}),
    )


def _wait_until_listening(host: str, port: int, on_listening: Callable[[], object]) -> None:
    while True:  # LitServe listens once its workers have loaded the model
        try:
            socket.create_connection((host, port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            on_listening()
            return


class TimedProtocol(H11Protocol):
    """uvicorn's protocol of one connection, which is closed if the headers of a request do not arrive in time.

    uvicorn itself closes only connections that are silent between two requests.
    """

    timeout: int
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.deadline = self.loop.call_later(self.timeout, transport.close)

    def data_received(self, data: bytes) -> None:
        self.deadline = self.deadline or self.loop.call_later(self.timeout, self.transport.close)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are complete
            self._end_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _end_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class ClassifierAPI(litserve.LitAPI):
    """LitServe's handling of requests, in a worker process."""

    def __init__(self, model: str, max_pixels: int = MAX_PIXELS, **options: Any) -> None:
        super().__init__(**options)
        self.model, self.max_pixels = model, max_pixels

    def setup(self, device: str) -> None:
        self.classifier = Classifier(
            self.model, device=device, batch_size=self.max_batch_size, max_pixels=self.max_pixels
        )

    def decode_request(self, request: Request) -> Upload:
        return request  # type: ignore[return-value]  # LitServe has parsed the JSON from `UploadMiddleware`

    def batch(self, inputs: Sequence[Upload]) -> Sequence[Upload]:
        return inputs

    def predict(self, x: Sequence[Upload] | Upload) -> list[Upload]:
        """Returns the responses to all requests of a batch, in order."""
        uploads = [x] if isinstance(x, dict) else x
        has_maps = self.classifier.engine == "torch"
        images = [ImageBytes(base64.b64decode(upload["image"]), "upload") for upload in uploads]
        predictions = self.classifier.classify(
            images,
            max(upload["top_k"] for upload in uploads),
            attention=has_maps and any(upload["attention"] for upload in uploads),
            _num_done=self.max_batch_size,  # the batch is complete: no small batches first
        )
        return [
            self._respond(upload, image, prediction)
            for upload, image, prediction in zip(uploads, images, predictions, strict=True)
        ]

    def _respond(self, upload: Upload, image: ImageBytes, prediction: Prediction) -> Upload:
        if prediction.error is not None:
            return {"error": prediction.error}
        top_k = upload["top_k"]
        response: Upload = {"labels": prediction.labels[:top_k], "probabilities": prediction.probabilities[:top_k]}
        if upload["attention"]:
            if prediction.attention is None:
                return {"error": f"attention maps require engine 'torch', got {self.classifier.engine!r}"}
            png = io.BytesIO()
            with reading(image, max_pixels=self.max_pixels) as (upright, _):
                upright.thumbnail((MAX_OVERLAY_SIDE, MAX_OVERLAY_SIDE))
            draw_attention(upright, prediction.attention, self.classifier.preprocessing).save(png, "PNG")
            response["attention_png"] = base64.b64encode(png.getvalue()).decode()
        return response

    def unbatch(self, output: list[Upload]) -> list[Upload]:
        return output

    def encode_response(self, output: list[Upload] | Upload) -> JSONResponse:
        [response] = output if isinstance(output, list) else [output]
        error = response.get("error", "")
        status = 413 if error.startswith(TOO_LARGE) else 422 if error else 200
        return JSONResponse(response, status_code=status)


class UploadMiddleware:
    """Reads uploads before LitServe does: a form with the file `image`, or the bytes of an image as the body.

    `top_k` and `attention` are form fields or query parameters. A wrong request is answered here, with the reason.

    Args:
        app: The application that receives the upload as JSON.
        max_bytes: Largest upload.
        timeout: Seconds in which an upload must arrive.
        info: The answer at `INFO_PATH`, in place of LitServe's, which tells devices.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: int, info: dict[str, Any]) -> None:
        self.app, self.max_bytes, self.timeout, self.info = app, max_bytes, timeout, info

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", INFO_PATH):
            await JSONResponse(self.info)(scope, receive, send)
        elif scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", PATH):
            await self._predict(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _predict(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                upload = await self._read(Request(scope, self._limited(receive)))
        except ClientDisconnect:
            return
        except TimeoutError:
            error = f"the upload did not arrive within {self.timeout} seconds"
            await JSONResponse({"error": error}, 408, {"connection": "close"})(scope, receive, send)
            return
        except StarletteHTTPException as error:
            await JSONResponse({"error": error.detail}, error.status_code)(scope, receive, send)
            return
        body = json.dumps(upload).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_json() -> Message:
            return messages.pop() if messages else await receive()

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.app({**scope, "headers": headers}, receive_json, send)

    def _limited(self, receive: Receive) -> Receive:
        total = 0

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise HTTPException(413, f"the upload has more than {self.max_bytes} bytes")
            return message

        return limited

    async def _read(self, request: Request) -> Upload:
        fields: list[tuple[str, Any]] = list(request.query_params.multi_items())
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            async with request.form() as form:
                fields += form.multi_items()
                file = form.get("image")
                content = await file.read() if isinstance(file, UploadFile) else b""
        else:
            content = await request.body()
            fields.append(("image", content))
        if not content:
            raise HTTPException(400, "no image found: post a form with the file 'image', or the bytes of an image")
        options = _to_options(fields)
        image = base64.b64encode(content).decode()
        return {"image": image, **options}


def _to_options(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The values of `top_k` and `attention`; everything that a request holds is used, or refused here."""
    names = [name for name, _ in fields]
    for name in names:
        if name not in ("image", "top_k", "attention"):
            raise HTTPException(400, f"unknown field {name[:40]!r}, expected image, top_k or attention")
        if names.count(name) > 1:
            raise HTTPException(400, f"{name} was given {names.count(name)} times, expected once")
    values = dict(fields)
    top_k, attention = str(values.get("top_k", "5")), str(values.get("attention", "false")).lower()
    if not re.fullmatch("[0-9]{1,9}", top_k) or int(top_k) < 1:  # Python refuses to convert thousands of digits
        raise HTTPException(400, f"top_k must be an integer from 1 to 999999999, got {_cut(top_k)!r}")
    if attention not in ("true", "false"):
        raise HTTPException(400, f"attention must be true or false, got {_cut(attention)!r}")
    return {"top_k": int(top_k), "attention": attention == "true"}


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
