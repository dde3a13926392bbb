"""Evaluates a classifier on labeled images: accuracy, per-class accuracy, confusion matrix and calibration."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vitmha.data.labeled import real_labels
from vitmha.images.find import ImageSource
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.distributed import Numbered
from vitmha.metrics import Evaluation, write_report


class LabeledEvaluation:
    """Accumulates the predictions of labeled images.

    ImageNet's validation images are also compared with their reassessed ("ReaL") labels, which their file names tell.

    Args:
        class_names: Of the model, in the order of its outputs.

    Example:
        >>> evaluation = LabeledEvaluation(["cat", "dog"])
        >>> prediction = Prediction(path="a.png", labels=("dog",), all_probabilities=torch.tensor([0.25, 0.75]))
        >>> evaluation.update(prediction, label=1)
        >>> evaluation.metrics
        {'num_images': 1, 'top1': 1.0, 'ece': 0.25}
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        self.class_names = tuple(class_names)
        self.evaluation = Evaluation(len(class_names))
        self.errors: list[Prediction] = []
        """Predictions of the images that could not be classified."""
        self.real: list[bool] = []

    def update(self, prediction: Prediction, label: int | None) -> None:
        """Adds the prediction of one image.

        Args:
            prediction: With the probabilities of all classes, or with an error.
            label: Class index; None for an image that has only ReaL labels.
        """
        probabilities = prediction.all_probabilities
        if probabilities is None:
            self.errors.append(prediction)
            return
        if label is not None:
            self.evaluation.update(probabilities[None], torch.tensor([label]))
        real = real_labels(os.fspath(prediction.path)) if len(self.class_names) == 1000 else None
        if real:
            self.real.append(int(probabilities.argmax()) in real)

    @property
    def metrics(self) -> dict[str, Any]:
        """num_images and top1, top5 (of more than five classes), ece and top1_real (of ReaL labels), in [0, 1]."""
        return {**self.evaluation.compute().summary, **self._top1_real()}

    def write(self, directory: str | Path) -> None:
        """Writes metrics.json, per_class.csv, confusion.csv and confusion.png."""
        write_report(self.evaluation.compute(), self.class_names, directory, **self._top1_real())

    def _top1_real(self) -> dict[str, float]:
        return {"top1_real": round(sum(self.real) / len(self.real), 6)} if self.real else {}


def predict(
    classifier: Classifier, numbered: Iterable[Numbered], num_done: int = 0
) -> Iterator[tuple[str, tuple[int, Prediction]]]:
    """Classifies images; yields the name of each with its position and its prediction, all probabilities included.

    Args:
        classifier: The classifier.
        numbered: Images with their positions among all images of the call.
        num_done: Images classified before; see `Classifier.classify`.
    """
    pending: deque[int] = deque()

    def sources() -> Iterator[ImageSource]:
        for position, source in numbered:
            pending.append(position)
            yield source

    for prediction in classifier.classify(sources(), top_k=1, all_probabilities=True, _num_done=num_done):
        yield os.fspath(prediction.path), (pending.popleft(), prediction)


def evaluate(classifier: Classifier, images: Iterable[tuple[ImageSource, int | None]]) -> LabeledEvaluation:
    """Classifies labeled images and returns their metrics.

    Args:
        classifier: Its class names determine the class indices.
        images: Images with their class indices, as `read_labeled` returns them.

    Example:
        >>> classifier = Classifier("cifar10")  # doctest: +SKIP
        >>> images = read_labeled("CIFAR10", classifier.class_names).val  # doctest: +SKIP
        >>> evaluate(classifier, images).metrics["top1"]  # doctest: +SKIP
        0.9
    """
    evaluation, images = LabeledEvaluation(classifier.class_names), list(images)
    for _, (position, prediction) in predict(classifier, enumerate(image for image, _ in images)):
        evaluation.update(prediction, images[position][1])
    return evaluation
