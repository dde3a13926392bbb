"""A small server: POST a picture, get its labels as JSON. LitServe queues the requests and forms the batches."""

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


def server(
    model: str, *, device: str = "auto", batch_size: int = 16, wait: float = 0.01, max_megabytes: int = 20
) -> litserve.LitServer:
    """The server of one model, not yet running.

    Args:
        model: As `load_model` takes it.
        device: Where the model runs: cpu, cuda, or auto.
        batch_size: Most pictures in a pass of the model.
        wait: Seconds that a picture may wait for others to come.
        max_megabytes: Largest upload; larger ones get 413.
    """
    api = ClassifierAPI(model, max_batch_size=batch_size, batch_timeout=wait, api_path=PATH)
    uploads = (UploadMiddleware, {"max_bytes": max_megabytes * 1_000_000})
    return litserve.LitServer(api, accelerator=device, middlewares=[uploads], timeout=60)


class ClassifierAPI(litserve.LitAPI):
    """What LitServe does with requests, in a process of its own."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(**options)
        self.model = model

    def setup(self, device: str) -> None:
        self.classifier = Classifier(self.model, device=device, batch_size=self.max_batch_size)

    def decode_request(self, request: Request) -> Upload:
        return request  # type: ignore[return-value]  # LitServe has read the JSON that `UploadMiddleware` has made

    def batch(self, inputs: Sequence[Upload]) -> Sequence[Upload]:
        return inputs

    def predict(self, x: Sequence[Upload] | Upload) -> list[Upload]:
        """Answers to all requests of a batch, in their order."""
        uploads = [x] if isinstance(x, dict) else x
        has_maps = self.classifier.engine == "torch"
        pictures = [ImageBytes(base64.b64decode(each["picture"]), "upload") for each in uploads]
        answers = self.classifier.classify(
            pictures,
            max(each["top_k"] for each in uploads),
            attention=has_maps and any(each["attention"] for each in uploads),
            done=self.max_batch_size,
        )
        return [
            self._answer(upload, picture, answer)
            for upload, picture, answer in zip(uploads, pictures, answers, strict=True)
        ]

    def _answer(self, upload: Upload, picture: ImageBytes, answer: Prediction) -> Upload:
        if answer.error is not None:
            return {"error": answer.error}
        top_k = upload["top_k"]
        found: Upload = {"labels": answer.labels[:top_k], "probabilities": answer.probabilities[:top_k]}
        if upload["attention"]:
            if answer.attention is None:
                return {"error": f"attention maps come from engine 'torch', not from {self.classifier.engine!r}"}
            drawn = io.BytesIO()
            draw_attention(read_image(picture), answer.attention, self.classifier.preprocessing).save(drawn, "PNG")
            found["attention_png"] = base64.b64encode(drawn.getvalue()).decode()
        return found

    def unbatch(self, output: list[Upload]) -> list[Upload]:
        return output

    def encode_response(self, output: list[Upload] | Upload) -> JSONResponse:
        [answer] = output if isinstance(output, list) else [output]
        return JSONResponse(answer, status_code=422 if "error" in answer else 200)


class UploadMiddleware:
    """Reads what is posted before LitServe sees it: a form with the file `picture`, or the bytes of a picture alone.

    `top_k` and `attention` stand in the form or in the address. Whatever is wrong is answered here, with its reason.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", PATH):
            await self.app(scope, receive, send)
            return
        try:
            upload = await self._read(Request(scope, self._limited(receive)))
        except StarletteHTTPException as refused:
            await JSONResponse({"error": refused.detail}, refused.status_code)(scope, receive, send)
            return
        body = json.dumps(upload).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.app({**scope, "headers": headers}, again, send)

    def _limited(self, receive: Receive) -> Receive:
        total = 0

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise HTTPException(413, f"the upload is larger than {self.max_bytes} bytes")
            return message

        return limited

    async def _read(self, request: Request) -> Upload:
        options: dict[str, Any] = dict(request.query_params)
        kind = request.headers.get("content-type", "")
        if kind.startswith("multipart/form-data"):
            form = await request.form()
            options |= form
            file = options.get("picture")
            content = await file.read() if isinstance(file, UploadFile) else b""
        else:
            content = await request.body()
        if not content:
            raise HTTPException(400, "there is no picture: post a form with the file 'picture', or a picture's bytes")
        top_k, attention = str(options.get("top_k", "5")), str(options.get("attention", "false")).lower()
        if not top_k.isdecimal() or int(top_k) < 1:
            raise HTTPException(400, f"top_k must be a whole number of at least 1, got {top_k!r}")
        if attention not in ("true", "false"):
            raise HTTPException(400, f"attention must be true or false, got {attention!r}")
        picture = base64.b64encode(content).decode()
        return {"picture": picture, "top_k": int(top_k), "attention": attention == "true"}
