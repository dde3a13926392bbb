"""An HTTP server that classifies images: POST an image, receive its labels as JSON. LitServe forms the batches."""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import litserve
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitmha.images import ImageBytes, read_image
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.overlay import draw_attention

PATH = "/predict"
Upload = dict[str, Any]


def build_server(
    model: str,
    *,
    device: str = "auto",
    batch_size: int = 16,
    batch_timeout: float = 0.01,
    max_upload_mb: int = 20,
) -> litserve.LitServer:
    """Builds the server of a model; `run` starts it.

    Args:
        model: A source that `Classifier` accepts.
        device: cpu, cuda, or auto.
        batch_size: Largest number of images per batch.
        batch_timeout: Seconds that a request waits for others to form a batch.
        max_upload_mb: Largest upload in megabytes (10^6 bytes); larger ones get status 413.

    Example:
        >>> build_server("cifar10", device="cpu").run(port=8000)  # doctest: +SKIP
    """
    api = ClassifierAPI(model, max_batch_size=batch_size, batch_timeout=batch_timeout, api_path=PATH)
    uploads = (UploadMiddleware, {"max_bytes": max_upload_mb * 1_000_000})
    return litserve.LitServer(api, accelerator=device, middlewares=[uploads], timeout=60)


class ClassifierAPI(litserve.LitAPI):
    """LitServe's handling of requests, in a worker process."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(**options)
        self.model = model

    def setup(self, device: str) -> None:
        self.classifier = Classifier(self.model, device=device, batch_size=self.max_batch_size)

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
            draw_attention(read_image(image), prediction.attention, self.classifier.preprocessing).save(png, "PNG")
            response["attention_png"] = base64.b64encode(png.getvalue()).decode()
        return response

    def unbatch(self, output: list[Upload]) -> list[Upload]:
        return output

    def encode_response(self, output: list[Upload] | Upload) -> JSONResponse:
        [response] = output if isinstance(output, list) else [output]
        return JSONResponse(response, status_code=422 if "error" in response else 200)


class UploadMiddleware:
    """Reads uploads before LitServe does: a form with the file `image`, or the bytes of an image as the body.

    `top_k` and `attention` are form fields or query parameters. A wrong request is answered here, with the reason.

    Args:
        app: The application that receives the upload as JSON.
        max_bytes: Largest upload.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", PATH):
            await self.app(scope, receive, send)
            return
        try:
            upload = await self._read(Request(scope, self._limited(receive)))
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
        options: dict[str, Any] = dict(request.query_params)
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            form = await request.form()
            options |= form
            file = options.get("image")
            content = await file.read() if isinstance(file, UploadFile) else b""
        else:
            content = await request.body()
        if not content:
            raise HTTPException(400, "no image found: post a form with the file 'image', or the bytes of an image")
        top_k, attention = str(options.get("top_k", "5")), str(options.get("attention", "false")).lower()
        if not top_k.isdecimal() or int(top_k) < 1:
            raise HTTPException(400, f"top_k must be an integer of at least 1, got {top_k!r}")
        if attention not in ("true", "false"):
            raise HTTPException(400, f"attention must be true or false, got {attention!r}")
        image = base64.b64encode(content).decode()
        return {"image": image, "top_k": int(top_k), "attention": attention == "true"}
