"""Pictures to labels: threads read while the model runs, and every answer stays with its own picture."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.images import ImageReadError, Source, read_image, source_name
from vitmha.images.find import ImageSource
from vitmha.inference.engines import (
    HALVES,
    Engine,
    Precision,
    _check_engine,
    _in_batches,
    is_openvino_dir,
    load_openvino,
    to_openvino,
)
from vitmha.inspection import record_attention
from vitmha.models.encoder_decoder import EncoderDecoder, get_preprocessing
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model

Pixels = UInt8[Tensor, "channels height width"]
Decoded = tuple[ImageSource, Pixels | ImageReadError]
CALIBRATION_PICTURES = 32
PATIENCE = 0.1  # seconds that a picture waits for others to come


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was found out about one picture."""

    path: Path | str
    """As it was given; "Image" or "ndarray" for a picture without a file."""
    labels: tuple[str, ...] = ()
    """Class names, the most probable first."""
    probabilities: tuple[float, ...] = ()
    """Of each of the labels, 0 to 1."""
    error: str | None = None
    """Why there is no answer, in one line; then nothing else is known."""
    vector: Float[Tensor, " classes"] | None = None
    """The probabilities of all classes in the model's order, where asked for."""
    features: Float[Tensor, " pooled"] | None = None
    """What the model's head reads, where asked for, in place of the labels."""
    attention: Float[Tensor, "heads height width"] | None = None
    """Where each head of the last layer that has heads looks, on the patch grid, where asked for: the attention of the
    class token, or where the model has none the mean over the patches."""


class Classifier(nn.Module):
    """A model that takes files.

    Args:
        source: A model, what `load_model` takes, or a folder that `vitmha export` made for OpenVINO, which is then the
            engine.
        device: Where the model runs; "auto" is CUDA where there is one.
        batch_size: Pictures in a pass of the model; the answers do not depend on it.
        workers: Threads that read pictures; by default one for each CPU, at most 8.
        engine: What computes: PyTorch, PyTorch compiled, or OpenVINO on the CPU (`pip install 'vitmha[openvino]'`).
        precision: Of the arithmetic. int8 is for OpenVINO, calibrated with the first `CALIBRATION_PICTURES` that can be
            read of those to be classified.
        flip: Whether the picture and its mirror image are classified, and the mean of both is the answer.
        exact: Whether a large JPEG is decoded in full, and not at the 1/2, 1/4 or 1/8 of its size that is at least
            twice as large as what the model sees.
        class_names: In place of those that came with the model.

    Raises:
        UserError: A model without a head or that reads sequences, without its preprocessing, or with another number of
            classes than names; an engine that is not here or does not compute in this precision.
    """

    def __init__(
        self,
        source: str | Path | nn.Module,
        *,
        device: str | torch.device = "auto",
        batch_size: int = 32,
        workers: int | None = None,
        engine: Engine = "torch",
        precision: Precision = "float32",
        flip: bool = False,
        exact: bool = False,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        is_exported = is_openvino_dir(source)
        if is_exported and (engine == "compile" or precision == "int8"):
            raise UserError(f"{source} was exported for OpenVINO, in its own precision: name no other.")
        engine = "openvino" if is_exported else engine
        _check_engine(engine, precision, device)
        # Compiled or converted when the first pictures come, which int8 is calibrated with.
        self.network: Callable[[Tensor], Tensor] | None = None
        model: VisionTransformer | EncoderDecoder
        if is_exported:
            model, self.network = load_openvino(cast(str | Path, source), precision)
        else:
            model = source if isinstance(source, VisionTransformer | EncoderDecoder) else load_model(source)
        if not isinstance(model, VisionTransformer):
            raise UserError("The model reads sequences: classify takes a model of single pictures.")
        names: Sequence[str] = model.class_names or [str(number) for number in range(model.config.num_classes)]
        names = names if class_names is None else class_names
        if len(names) != model.config.num_classes:
            raise UserError(f"The model has {model.config.num_classes} classes and was given {len(names)} names.")
        if batch_size < 1 or (workers is not None and workers < 1):
            raise UserError(f"batch_size and workers must be at least 1, got {batch_size} and {workers}.")
        self.class_names, self.preprocessing = tuple(names), get_preprocessing(model)
        self.batch_size, self.workers = batch_size, workers or min(8, os.cpu_count() or 1)
        self.engine, self.precision, self.flip, self.exact = engine, precision, flip, exact
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and engine != "openvino" else "cpu"
        self.model = model.to(device).eval()
        self.lock = threading.Lock()

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """The probabilities of the classes.

        Args:
            images: Normalised, as `preprocessing` gives them.
        """
        network: Callable[[Tensor], Tensor] = self.model
        if self.engine != "torch":
            network = self.network = self.network or self._build(images)
        with self._autocast(images):
            return torch.stack([network(each).float().softmax(-1) for each in self._sides(images)]).mean(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}  # copies, and those in other processes, have one of their own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "lock": threading.Lock()})

    def _sides(self, images: Tensor) -> list[Tensor]:
        """What is passed; the pictures themselves come last, since that pass is the one whose attention is recorded."""
        return [images.flip(-1), images] if self.flip else [images]

    def classify(
        self,
        sources: Iterable[ImageSource],
        top_k: int = 5,
        *,
        threshold: float = 0.0,
        vector: bool = False,
        features: bool = False,
        attention: bool = False,
        done: int = 0,
    ) -> Iterator[Prediction]:
        """Answers as they come, in the order of the pictures, one for each.

        However many there are, no more than three batches are held. Several threads may classify with one classifier.
        A thread of its own goes through the sources; where they come slowly, their answers do not wait for a batch.

        Args:
            sources: Files, pictures of Pillow's or arrays, as `read_image` takes them; an `ImageReadError` becomes the
                answer for a picture that is known to be missing. May be endless.
            top_k: Labels for each.
            threshold: Labels less probable are left out.
            vector: Whether the probabilities of all classes are wanted too.
            features: Whether what the head reads is wanted, in place of labels.
            attention: Whether the maps of the last layer are wanted too.
            done: Pictures classified before an interruption. The first batches are small, so that the first answer
                comes soon; batches go on as if there had been no interruption.

        Raises:
            UserError: As `check_wanted` does.
        """
        self.check_wanted(features=features, attention=attention)
        self.eval()
        batches = self._batches(sources, done)
        if self.engine != "torch" and self.network is None:
            batches = self._calibrated(batches)
        for batch in batches:
            seen = [pixels for _, pixels in batch if isinstance(pixels, Tensor)]
            answers = iter(self._answers(seen, top_k, threshold, vector, features, attention) if seen else ())
            for item, pixels in batch:
                if isinstance(pixels, ImageReadError):
                    yield Prediction(path=pixels.path, error=pixels.reason)
                else:
                    yield Prediction(path=source_name(cast(Source, item)), **next(answers))

    def check_wanted(self, *, features: bool, attention: bool) -> None:
        """Whether `classify` can give what is asked for, before there are pictures.

        Raises:
            UserError: Features of a converted or attention of any but PyTorch's plain model; labels of a model without
                a head.
        """
        if self.engine != "torch" and (features or attention):
            raise UserError(f"Features and attention maps come from engine 'torch', not from {self.engine!r}.")
        if not features and self.model.config.num_classes == 0:
            raise UserError("The model has no head and so no classes: it gives features alone (--embed).")

    def read(self, item: ImageSource) -> Pixels | ImageReadError:
        """The pixels that the model sees, or why there are none."""
        if isinstance(item, ImageReadError):
            return item
        try:
            return self.preprocessing.pixels(read_image(item, None if self.exact else self._min_size))
        except ImageReadError as error:
            return error

    @property
    def num_features(self) -> int:
        """Width of what the head reads."""
        config = self.model.config
        return config.embed_dim * (2 if config.pool == "cls_mean" else 1)

    def _min_size(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.preprocessing.resized(height, width)
        return 2 * rows, 2 * columns

    def _batches(self, sources: Iterable[ImageSource], done: int) -> Iterator[list[Decoded]]:
        """Reads ahead of the model; a batch is as large as all before it together, plus one, up to the batch size.

        Of a slow source it is what is there, for which nothing waits.
        """
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="read")
        waiting: SimpleQueue[tuple[ImageSource, Future[Pixels | ImageReadError]] | BaseException | None] = SimpleQueue()
        room = threading.Semaphore(3 * self.batch_size + self.workers - 1)  # one more is held while there is none

        def take() -> None:
            try:
                for item in sources:
                    room.acquire()
                    waiting.put((item, pool.submit(self.read, item)))  # which ends here when the pool is shut
                waiting.put(None)
            except BaseException as error:
                waiting.put(error)

        # A daemon: a source that gives nothing more, such as a terminal, must not keep a program from its end.
        taker = threading.Thread(target=take, name="read source", daemon=True)
        taker.start()
        try:
            while True:
                # A network made for one size gains nothing from smaller batches.
                size = self.batch_size if self.engine == "compile" else min(done + 1, self.batch_size)
                batch: list[Decoded] = []
                taken = waiting.get()
                until = time.monotonic() + PATIENCE
                while isinstance(taken, tuple):
                    batch.append((taken[0], taken[1].result()))
                    if len(batch) == size:
                        break
                    try:
                        taken = waiting.get(timeout=max(0, until - time.monotonic()))
                    except Empty:
                        break
                if batch:
                    yield batch
                    done += len(batch)
                    room.release(len(batch))
                if isinstance(taken, BaseException):
                    raise taken
                if taken is None:
                    return
        finally:
            pool.shutdown(cancel_futures=True)
            room.release()
            taker.join(PATIENCE)

    def _answers(
        self, seen: list[Pixels], top_k: int, threshold: float, vector: bool, features: bool, attention: bool
    ) -> list[dict[str, Any]]:
        """One pass of the model: what stands in each prediction."""
        with torch.inference_mode(), self.lock, self._recording() if attention else nullcontext() as recorded:
            images = self.preprocessing.normalize(torch.stack(seen).to(next(self.parameters()).device))
            if features:
                with self._autocast(images):
                    passes = [self.model.features(each).float() for each in self._sides(images)]
                found = torch.stack(passes).mean(0).cpu()
                return _or_errors([{"features": each} for each in found], found)
            probabilities = self(images).cpu()
        best, classes = probabilities.topk(min(top_k, probabilities.shape[1]))
        answers: list[dict[str, Any]] = []
        for numbers, values in zip(classes.tolist(), best.tolist(), strict=True):
            kept = [
                (self.class_names[n], value) for n, value in zip(numbers, values, strict=True) if value >= threshold
            ]
            labels, shares = zip(*kept, strict=True) if kept else ((), ())
            answers.append({"labels": labels, "probabilities": shares})
        if vector:
            answers = [{**answer, "vector": each} for answer, each in zip(answers, probabilities, strict=True)]
        if recorded is not None:
            maps = self.model.layout.to_grid(recorded.maps[0][:, :, 0]).cpu()
            answers = [{**answer, "attention": each} for answer, each in zip(answers, maps, strict=True)]
        return _or_errors(answers, probabilities)

    def _recording(self) -> AbstractContextManager[Any]:
        queries: Literal["cls", "pooled"] = "cls" if self.model.layout.num_class_tokens else "pooled"
        last = max(layer for layer, each in enumerate(self.model.attentions) if each.num_heads)
        return record_attention(self.model, layers=[last], queries=queries)

    def _autocast(self, images: Tensor) -> AbstractContextManager[Any]:
        half = HALVES.get(self.precision) if self.engine != "openvino" else None
        return torch.autocast(images.device.type, half) if half else nullcontext()

    def _calibrated(self, batches: Iterator[list[Decoded]]) -> Iterator[list[Decoded]]:
        """The same batches, after the network was made with the help of the first."""
        first: list[list[Decoded]] = []
        seen: list[Pixels] = []
        for batch in batches:
            first.append(batch)
            seen += [pixels for _, pixels in batch if isinstance(pixels, Tensor)]
            if len(seen) >= (CALIBRATION_PICTURES if self.precision == "int8" else 1):
                break
        with self.lock:
            if seen and self.network is None:
                seen = seen[:CALIBRATION_PICTURES]  # whatever the batches are
                images = self.preprocessing.normalize(torch.stack(seen).to(next(self.parameters()).device))
                self.network = self._build(images)
        yield from chain(first, batches)

    def _build(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        if self.engine == "compile":
            return _in_batches(torch.compile(self.model, dynamic=False), self.batch_size)
        return to_openvino(self.model, self.precision, images)


def _or_errors(answers: list[dict[str, Any]], outputs: Float[Tensor, "batch outputs"]) -> list[dict[str, Any]]:
    """The answers, in place of those whose output is no number an error."""
    error = {"error": "what the model gives for it is no number: its weights are broken or the precision too low"}
    return [answer if is_good else error for answer, is_good in zip(answers, outputs.isfinite().all(1), strict=True)]
