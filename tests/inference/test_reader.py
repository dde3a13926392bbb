"""Images are read ahead, in order, in batches that do not delay the first predictions."""

import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from vitmha import Classifier
from vitmha.models.vit import VisionTransformer


def test_endless_images_are_read_a_few_batches_ahead(model: VisionTransformer, image_dir: Path) -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        for _ in count():
            taken += 1
            yield image_dir / "03.png"

    predictions = Classifier(model, batch_size=4, num_workers=2).classify(endless())
    assert len(list(islice(predictions, 50))) == 50
    assert taken <= 50 + 3 * 4 + 2
    predictions.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


def test_the_first_predictions_do_not_wait_for_a_full_batch(model: VisionTransformer, image_dir: Path) -> None:
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    files = [image_dir / "03.png"] * 41
    list(Classifier(model, batch_size=16).classify(files))
    assert sizes == [1, 2, 4, 8, 16, 10]
    sizes.clear()
    list(Classifier(model, batch_size=16).classify(files[7:], _num_done=7))  # as without the interruption
    hook.remove()
    assert sizes == [8, 16, 10]


def test_predictions_come_while_a_slow_source_waits(model: VisionTransformer, image_dir: Path) -> None:
    goes_on = threading.Event()

    def slow() -> Iterator[Path]:
        yield from [image_dir / "00.png", image_dir / "03.png", image_dir / "06.png"]
        goes_on.wait(60)
        yield image_dir / "09.png"

    classifier = Classifier(model, batch_size=8)
    predictions = classifier.classify(slow())
    began = time.monotonic()
    assert [next(predictions).path.name for _ in range(3)] == ["00.png", "03.png", "06.png"]
    goes_on.set()
    assert [prediction.path.name for prediction in predictions] == ["09.png"]
    goes_on.clear()
    predictions = classifier.classify(slow())
    next(predictions)
    predictions.close()  # ends though the source does not
    assert time.monotonic() - began < 30
    goes_on.set()


def test_an_exception_of_a_source_comes_after_its_images(model: VisionTransformer, image_dir: Path) -> None:
    def broken() -> Iterator[Path]:
        yield from [image_dir / "03.png"] * 5
        raise LookupError("no more disk")

    predictions = Classifier(model, batch_size=4).classify(broken())
    assert len(list(islice(predictions, 5))) == 5
    with pytest.raises(LookupError, match="no more disk"):
        next(predictions)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]
