"""Predicts the labels of images: threads read ahead while the model runs; predictions keep the order of the images."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.errors import UserError, printable
from vitmha.images import MAX_PIXELS, ImageReadError, Source, source_name
from vitmha.images.find import ImageSource, each_image
from vitmha.inference.engines import (
    CALIBRATION_IMAGES,
    HALF_DTYPES,
    Engine,
    InferenceFn,
    Precision,
    check_engine,
    is_openvino_dir,
    load_openvino,
    to_openvino,
    with_fixed_batch_size,
)
from vitmha.inference.reader import BatchReader, Pixels
from vitmha.inspection import record_attention
from vitmha.models.encoder_decoder import EncoderDecoder, get_preprocessing, unwrapped
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model

Decoded = tuple[ImageSource, Pixels | ImageReadError]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one image."""

    path: Path | str
    """The path as passed in; the type's name, such as "Image" or "ndarray", for an image without a file."""
    labels: tuple[str, ...] = ()
    """Class names, the most probable first."""
    probabilities: tuple[float, ...] = ()
    """The probability of each of the labels, in [0, 1]."""
    error: str | None = None
    """Why there is no prediction, in one line; the other fields are then empty."""
    all_probabilities: Float[Tensor, " classes"] | None = None
    """The probabilities of all classes, in the model's order, if requested."""
    embedding: Float[Tensor, " pooled"] | None = None
    """The input of the classification head, if requested; then there are no labels."""
    attention: Float[Tensor, "heads height width"] | None = None
    """The attention of each head of the last layer that has heads, on the patch grid, if requested: that of the class
    token, or without one the mean over the patches."""


class Classifier:
    """Classifies images with a model.

    Several threads may use one classifier at the same time.

    Args:
        model: A model, the `LitViT` that holds it, anything `load_model` accepts, or a directory that `vitmha export`
            wrote for OpenVINO, which implies engine "openvino".
        device: Where the model runs; "auto" is CUDA if it is available.
        batch_size: Images per batch; predictions do not depend on it.
        num_workers: Threads that read images; by default the number of CPUs, at most 8.
        engine: PyTorch, PyTorch with `torch.compile`, or OpenVINO on the CPU (`pip install 'vitmha[openvino]'`).
        precision: Of the arithmetic. int8 needs OpenVINO; it is calibrated on the first `CALIBRATION_IMAGES` readable
            images that are classified.
        tta: Test-time augmentation: "hflip" averages over the image and its mirror image.
        full_decode: Decode large JPEGs at full size, not at the 1/2, 1/4 or 1/8 of it that is still at least 2.75
            times the model's input.
        max_pixels: Images with more pixels get an error; see `read_image`.
        class_names: Replace those of the model; all different.

    Raises:
        UserError: An encoder-decoder, a model without preprocessing, a wrong number of class names, or an engine that
            is not installed or does not support the precision.

    Example:
        >>> classifier = Classifier("cifar10")
        >>> [prediction] = classifier("cat.jpg")  # doctest: +SKIP
        >>> for prediction in classifier.classify(["cat.jpg", "dog.jpg"]):  # doctest: +SKIP
        ...     print(prediction.path, prediction.labels, prediction.probabilities, prediction.error)
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str | torch.device = "auto",
        batch_size: int = 32,
        num_workers: int | None = None,
        engine: Engine = "torch",
        precision: Precision = "float32",
        tta: Literal["hflip"] | None = None,
        full_decode: bool = False,
        max_pixels: int = MAX_PIXELS,
        class_names: Sequence[str] | None = None,
    ) -> None:
        is_exported = is_openvino_dir(model)
        if is_exported and (engine == "compile" or precision == "int8"):
            raise UserError(f"{model} was exported to OpenVINO: remove engine 'compile' and precision 'int8'.")
        engine = "openvino" if is_exported else engine
        check_engine(engine, precision, device)
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}.")
        if num_workers is not None and num_workers < 1:
            raise UserError(f"num_workers must be at least 1, got {num_workers}.")
        if max_pixels < 1:
            raise UserError(f"max_pixels must be at least 1, got {max_pixels}.")
        if tta not in (None, "hflip"):
            raise UserError(f"tta must be 'hflip' or None, got {tta!r}.")
        # Compiled or converted when the first images arrive, on which int8 is calibrated.
        self.network: InferenceFn | None = None
        loaded: VisionTransformer | EncoderDecoder
        if is_exported:
            loaded, self.network = load_openvino(cast(str | Path, model), precision)
        else:
            model = unwrapped(model) if isinstance(model, nn.Module) else model
            loaded = model if isinstance(model, VisionTransformer | EncoderDecoder) else load_model(model)
        if not isinstance(loaded, VisionTransformer):
            raise UserError("The model is an encoder-decoder (a sequence model); expected a VisionTransformer.")
        names = class_names
        if names is None:
            names = loaded.class_names or [str(index) for index in range(loaded.config.num_classes)]
        if len(names) != loaded.config.num_classes:
            raise UserError(f"class_names has {len(names)} names, the model has {loaded.config.num_classes} classes.")
        if class_names is not None:
            _check_class_names(class_names)
        self.class_names, self.preprocessing = tuple(names), get_preprocessing(loaded)
        self.batch_size, self.num_workers = batch_size, num_workers or min(8, os.cpu_count() or 1)
        self.engine, self.precision, self.tta = engine, precision, tta
        self.full_decode, self.max_pixels = full_decode, max_pixels
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and engine != "openvino" else "cpu"
        self.device = torch.device(device)
        self.model = loaded.to(self.device).eval()
        self.lock = threading.Lock()  # recording attention changes the model, and the network is built once

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which gets a lock of its own: locks cannot be copied or pickled."""
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock())

    def predict_proba(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the class probabilities.

        Args:
            images: Normalized, as `preprocessing` returns them, on the classifier's device.
        """
        network: Callable[[Tensor], Tensor] = self.model
        if self.engine != "torch":
            network = self.network = self.network or self._build(images)
        with self._autocast():
            return torch.stack([network(view).float().softmax(-1) for view in self._views(images)]).mean(0)

    def __call__(self, images: ImageSource | Iterable[ImageSource], top_k: int = 5, **options: Any) -> list[Prediction]:
        """Returns what `classify` yields, as a list; also for a single image."""
        return list(self.classify(images, top_k, **options))

    def classify(
        self,
        images: ImageSource | Iterable[ImageSource],
        top_k: int = 5,
        *,
        threshold: float = 0.0,
        all_probabilities: bool = False,
        embeddings: bool = False,
        attention: bool = False,
        _num_done: int = 0,
    ) -> Iterator[Prediction]:
        """Returns an iterator over one prediction per image, in their order, each as soon as it is known.

        At most three batches are held in memory. If images arrive slowly, their predictions do not wait for a full
        batch.

        Args:
            images: An image or an iterable of images, which may be endless. An image is a path, a PIL image, or an
                array or tensor of pixels as `read_image` accepts it: uint8, or floats in [0, 1], not normalized. A
                directory or an archive stands for the images directly in it, and an array or tensor of four axes for a
                batch of images. An `ImageReadError` becomes a prediction with that error.
            top_k: Labels per image.
            threshold: Omit labels with a lower probability, in [0, 1].
            all_probabilities: Also return the probabilities of all classes.
            embeddings: Return the input of the classification head instead of labels.
            attention: Also return the attention maps of the last layer.

        Raises:
            TypeError: Something that is not an image.
            UserError: top_k or threshold out of range, or as `check_outputs` does.
        """
        self.check_outputs(embeddings=embeddings, attention=attention)
        if top_k < 1:
            raise UserError(f"top_k must be at least 1, got {top_k}.")
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold must be in [0, 1], got {threshold}.")
        return self._classify(
            each_image(images), _num_done, (top_k, threshold, all_probabilities, embeddings, attention)
        )

    def _classify(
        self, images: Iterator[ImageSource], num_done: int, outputs_of: tuple[int, float, bool, bool, bool]
    ) -> Iterator[Prediction]:
        # num_done, for `vitmha classify --resume` and the server: images classified before. Batches then continue as
        # if there had been no interruption, so that the probabilities are equal to the last bit.
        self.model.eval()
        reader = BatchReader(
            self.read, batch_size=self.batch_size, num_workers=self.num_workers, ramp_up=self.engine != "compile"
        )
        batches = reader.batches(images, num_done)
        if self.engine != "torch" and self.network is None:
            batches = self._calibrated(batches)
        for batch in batches:
            pixels = [image for _, image in batch if isinstance(image, Tensor)]
            outputs: Iterator[dict[str, Any]] = iter(())
            if pixels:
                outputs = iter(self._predict(pixels, *outputs_of))
            for source, image in batch:
                if isinstance(image, ImageReadError):
                    yield Prediction(path=image.path, error=image.reason)
                else:
                    yield Prediction(path=source_name(cast(Source, source)), **next(outputs))

    def check_outputs(self, *, embeddings: bool, attention: bool) -> None:
        """Checks that `classify` can return what is requested.

        Raises:
            UserError: Embeddings or attention from another engine than PyTorch; labels of a model without a head.
        """
        if self.engine != "torch" and (embeddings or attention):
            raise UserError(f"Embeddings and attention maps require engine 'torch', got {self.engine!r}.")
        if not embeddings and self.model.config.num_classes == 0:
            raise UserError("The model has no classification head: it returns embeddings only.")

    def read(self, source: ImageSource) -> Pixels | ImageReadError:
        """Returns the pixels of the model's input, or why the image cannot be read."""
        if isinstance(source, ImageReadError):
            return source
        try:
            return self.preprocessing.read_pixels(source, max_pixels=self.max_pixels, full_decode=self.full_decode)
        except ImageReadError as error:
            return error

    @property
    def embedding_dim(self) -> int:
        """Width of the input of the classification head."""
        config = self.model.config
        return config.embed_dim * (2 if config.pool == "cls_mean" else 1)

    def _views(self, images: Tensor) -> list[Tensor]:
        """The test-time augmentations; the images themselves come last, since the last pass's attention is recorded."""
        return [images.flip(-1), images] if self.tta == "hflip" else [images]

    def _predict(
        self,
        pixels: list[Pixels],
        top_k: int,
        threshold: float,
        all_probabilities: bool,
        embeddings: bool,
        attention: bool,
    ) -> list[dict[str, Any]]:
        """Runs one batch; returns the fields of each prediction."""
        with torch.inference_mode(), self.lock, self._recording() if attention else nullcontext() as recorded:
            images = self._normalized(pixels)
            if embeddings:
                with self._autocast():
                    passes = [self.model.features(view).float() for view in self._views(images)]
                vectors = torch.stack(passes).mean(0).cpu()
                return _errors_if_not_finite([{"embedding": vector} for vector in vectors], vectors)
            probabilities = self.predict_proba(images).cpu()
        outputs = self._top_labels(probabilities, top_k, threshold)
        if all_probabilities:
            outputs = [{**fields, "all_probabilities": p} for fields, p in zip(outputs, probabilities, strict=True)]
        if recorded is not None:
            maps = self.model.layout.to_grid(recorded.maps[0][:, :, 0]).cpu()
            outputs = [{**fields, "attention": map_} for fields, map_ in zip(outputs, maps, strict=True)]
        return _errors_if_not_finite(outputs, probabilities)

    def _top_labels(self, probabilities: Tensor, top_k: int, threshold: float) -> list[dict[str, Any]]:
        values, indices = probabilities.topk(min(top_k, probabilities.shape[1]))
        outputs: list[dict[str, Any]] = []
        for row_indices, row in zip(indices.tolist(), values.tolist(), strict=True):
            kept = [(self.class_names[i], p) for i, p in zip(row_indices, row, strict=True) if p >= threshold]
            outputs.append({"labels": tuple(name for name, _ in kept), "probabilities": tuple(p for _, p in kept)})
        return outputs

    def _normalized(self, pixels: list[Pixels]) -> Tensor:
        return self.preprocessing.normalize(torch.stack(pixels).to(self.device))

    def _recording(self) -> AbstractContextManager[Any]:
        queries: Literal["cls", "pooled"] = "cls" if self.model.layout.num_class_tokens else "pooled"
        last = max(layer for layer, attention in enumerate(self.model.attentions) if attention.num_heads)
        return record_attention(self.model, layers=[last], queries=queries)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = HALF_DTYPES.get(self.precision) if self.engine != "openvino" else None
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def _calibrated(self, batches: Iterator[list[Decoded]]) -> Iterator[list[Decoded]]:
        """Yields the same batches, after the network was built on the first of them."""
        first: list[list[Decoded]] = []
        pixels: list[Pixels] = []
        for batch in batches:
            first.append(batch)
            pixels += [image for _, image in batch if isinstance(image, Tensor)]
            if len(pixels) >= (CALIBRATION_IMAGES if self.precision == "int8" else 1):
                break
        with self.lock:
            if pixels and self.network is None:
                pixels = pixels[:CALIBRATION_IMAGES]  # the same images for every batch size
                self.network = self._build(self._normalized(pixels))
        yield from chain(first, batches)

    def _build(self, images: Tensor) -> InferenceFn:
        if self.engine == "compile":
            return with_fixed_batch_size(torch.compile(self.model, dynamic=False), self.batch_size)
        return to_openvino(self.model, self.precision, images)


def _errors_if_not_finite(
    outputs: list[dict[str, Any]], values: Float[Tensor, "batch outputs"]
) -> list[dict[str, Any]]:
    """Replaces predictions by an error where the model's output is NaN or inf."""
    error = {"error": "the model's output is NaN or inf: its weights are broken or the precision is too low"}
    return [fields if finite else error for fields, finite in zip(outputs, values.isfinite().all(1), strict=True)]


def _check_class_names(names: Sequence[str]) -> None:
    """Two classes of one name could not be told apart in the results."""
    first: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise UserError(f"class_names: name {number} is empty; give each class a name of its own.")
        if name in first:
            raise UserError(
                f"class_names: names {first[name]} and {number} are both {printable(name)}; give each class a name of "
                "its own."
            )
        first[name] = number
