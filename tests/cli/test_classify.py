"""classify.py and `vitmha classify`: every answer is right, stays with its own file, and gets out."""

import copy
import csv
import gzip
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from rich.progress import Progress
from torch.testing import assert_close
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.cli.classify
import vitmha.images.find
import vitmha.inference.classifier
import vitmha.inference.engines
from vitmha import Classifier, create_model, record_attention, save_model
from vitmha.cli import main
from vitmha.data.labeled import real_labels
from vitmha.images import ImageBytes, ImageReadError, Preprocessing, read_image
from vitmha.images.find import ImageFinder, display_name
from vitmha.inference.classifier import CALIBRATION_PICTURES, Prediction
from vitmha.inference.distributed import TorchrunGroup
from vitmha.inference.overlay import draw_attention
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.remove import prune

ROOT = Path(__file__).parents[2]
NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


def new_model(**fields: object) -> VisionTransformer:
    """A small model for pictures of 24 x 40 whose answers differ from picture to picture."""
    sizes = {"image_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_dim": 20}
    model = create_model("vit_mini", **{**sizes, "num_classes": 7, **fields})
    if model.config.num_classes:
        torch.nn.init.normal_(model.head.weight)
    model.class_names = NAMES if model.config.num_classes == 7 else None
    model.preprocessing = Preprocessing(image_size=(24, 40), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_pct=0.9)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(1)
    return new_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 pictures of many sizes and formats, and two files that are none."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(2)
    for i in range(23):
        coarse = torch.randint(256, (3, 3, 4), generator=generator, dtype=torch.uint8)
        size = (90 - 3 * i, 20 + 7 * i)
        to_pil_image(coarse).resize(size, Image.Resampling.BICUBIC).save(
            folder / f"{i:02d}{('.png', '.jpg', '.webp')[i % 3]}"
        )
    (folder / "05 cut.jpg").write_bytes((folder / "01.jpg").read_bytes()[:400])
    (folder / "11 no picture.png").write_text("words")
    return folder


@pytest.fixture(scope="module")
def saved(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(model, folder)
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.iterdir())


def right_probabilities(model: VisionTransformer, file: str) -> torch.Tensor:
    with torch.no_grad():
        return model(model.preprocessing(read_image(file))[None]).softmax(-1)[0]


def vectors(answers: list[Prediction]) -> torch.Tensor:
    return torch.stack([answer.vector for answer in answers if answer.vector is not None])


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (8, 4), (64, 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_every_answer_is_that_of_its_own_file(
    model: VisionTransformer, folder: Path, batch_size: int, workers: int, turned: bool
) -> None:
    files = files_in(folder)
    files = files[::-1] if turned else files
    files = [*files, files[3]]  # named twice
    answers = list(Classifier(model, batch_size=batch_size, workers=workers).classify(files, top_k=3, vector=True))
    assert [answer.path for answer in answers] == files
    for answer in answers:
        if answer.error is not None:
            assert "05 cut" in answer.path or "11 no picture" in answer.path
            assert answer.labels == answer.probabilities == ()
            continue
        expected = right_probabilities(model, answer.path)
        assert_close(answer.vector, expected, rtol=0, atol=1e-5)
        best = expected.topk(3)
        assert answer.labels == tuple(NAMES[i] for i in best.indices)
        assert answer.probabilities == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sum(answer.error is not None for answer in answers) == 2


def test_labels_below_the_threshold_are_left_out(model: VisionTransformer, folder: Path) -> None:
    files = files_in(folder)[:4]
    whole = list(Classifier(model).classify(files, top_k=7))
    limit = sorted(p for answer in whole for p in answer.probabilities)[14]
    for answer, before in zip(Classifier(model).classify(files, top_k=7, threshold=limit), whole, strict=True):
        kept = sum(p >= limit for p in before.probabilities)
        assert answer.labels == before.labels[:kept]
        assert len(answer.probabilities) == kept
    [none] = Classifier(model).classify(files[:1], threshold=1.0)
    assert (none.labels, none.probabilities, none.error) == ((), (), None)


def test_pictures_arrays_and_bytes_are_answered_like_files(model: VisionTransformer, folder: Path) -> None:
    file = folder / "03.png"
    picture = Image.open(file)
    pixels = pil_to_tensor(read_image(file)).permute(1, 2, 0).numpy()
    content = ImageBytes(file.read_bytes(), "x.tar/a.png")
    wrong = torch.zeros(2, 3, 5).numpy()
    answers = list(Classifier(model).classify([file, str(file), picture, pixels, content, wrong], vector=True))
    for answer in answers[1:5]:
        assert_close(answer.vector, answers[0].vector, rtol=0, atol=1e-6)
    assert [answer.path for answer in answers] == [file, str(file), str(file), "ndarray", "x.tar/a.png", "ndarray"]
    assert answers[5].error
    assert picture.resize((2, 3)).size == (2, 3)  # still open


def test_flip_is_the_mean_over_picture_and_mirror(model: VisionTransformer, folder: Path) -> None:
    file = files_in(folder)[0]
    [answer] = Classifier(model, flip=True).classify([file], vector=True, attention=True)
    images = model.preprocessing(read_image(file))[None]
    with torch.no_grad():
        expected = (model(images).softmax(-1) + model(images.flip(-1)).softmax(-1)) / 2
    assert_close(answer.vector, expected[0], rtol=0, atol=1e-6)
    [plain] = Classifier(model).classify([file], attention=True)
    assert_close(answer.attention, plain.attention, rtol=0, atol=1e-6)  # of the picture, not of the mirror image


def test_a_classifier_is_a_module(model: VisionTransformer) -> None:
    classifier = torch.nn.Sequential(Classifier(model))
    images = torch.randn(3, 3, 24, 40, requires_grad=True)
    probabilities = classifier(images)
    assert_close(probabilities, model(images).softmax(-1))
    probabilities[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0
    assert len(classifier.state_dict()) == len(model.state_dict())
    assert torch.equal(copy.deepcopy(classifier)(images), probabilities)


def test_a_model_left_in_training_is_evaluated(folder: Path) -> None:
    model = new_model(attention_dropout=0.5, drop_path=0.5)
    classifier = Classifier(model)
    model.train()
    first, second = (vectors(list(classifier.classify(files_in(folder)[:4], vector=True))) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)


def large_jpeg(file: Path) -> None:
    """Blobs and fine grain, 400 x 300: more than eight times, but not sixteen times what the model sees."""
    coarse = to_pil_image(torch.randint(256, (3, 9, 12), dtype=torch.uint8)).resize(
        (400, 300), Image.Resampling.BICUBIC
    )
    grain = torch.randint(-20, 21, (3, 300, 400))
    to_pil_image((pil_to_tensor(coarse).int() + grain).clamp(0, 255).byte()).save(file, quality=95)


def test_large_jpegs_are_decoded_small_unless_exact(model: VisionTransformer, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    large_jpeg(file)
    [exact] = Classifier(model, exact=True).classify([file], vector=True)
    assert_close(exact.vector, right_probabilities(model, str(file)), rtol=0, atol=1e-6)
    classifier = Classifier(model)
    scaled, full = classifier.read(file), Classifier(model, exact=True).read(file)
    difference = (scaled.int() - full.int()).abs().float()
    assert 0 < difference.mean() < 1  # of 255
    assert difference.max() < 8
    [answer] = classifier.classify([file], vector=True)
    assert_close(answer.vector, exact.vector, rtol=0, atol=0.02)


@pytest.mark.parametrize("flags", [["--engine", "openvino"], []], ids=["converted", "exported"])
def test_openvino_runs_on_the_cpu_of_a_machine_with_a_gpu(
    flags: list[str], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "model.xml").touch()
    given: list[Any] = []
    monkeypatch.setattr("vitmha.cli.classify.Classifier", lambda *_, device, **__: given.append(device) or sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    with pytest.raises(SystemExit, match="0"):
        main(["classify", "x.png", "--model", str(saved if flags else tmp_path), *flags])
    assert given == ["auto"]  # which a Classifier takes for the CPU there


def test_features_and_attention_equal_the_models(model: VisionTransformer, folder: Path) -> None:
    files = files_in(folder)[:5]
    images = torch.stack([model.preprocessing(read_image(file)) for file in files])
    with torch.no_grad(), record_attention(model, layers=[1]) as recorded:
        expected = model.features(images)
        maps = model.layout.to_grid(recorded.maps[0][:, :, 0])
    features = [answer.features for answer in Classifier(model).classify(files, features=True)]
    assert_close(torch.stack(features), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        both = (expected + model.features(images.flip(-1))) / 2
    features = [answer.features for answer in Classifier(model, flip=True).classify(files, features=True)]
    assert_close(torch.stack(features), both, rtol=0, atol=1e-5)
    attention = [answer.attention for answer in Classifier(model, batch_size=2).classify(files, attention=True)]
    assert attention[0].shape == (3, 3, 5)
    assert_close(torch.stack(attention), maps, rtol=0, atol=1e-5)
    pooled = new_model(pool="mean")
    [answer] = Classifier(pooled).classify(files[:1], attention=True)
    assert_close(answer.attention.sum((1, 2)), torch.ones(3))
    prune(pooled, {1: range(3)})
    with torch.no_grad(), record_attention(pooled, layers=[0], queries="pooled") as recorded:
        pooled(images[:1])
    [answer] = Classifier(pooled).classify(files[:1], attention=True)  # the last layer has lost all of its heads
    assert_close(answer.attention, pooled.layout.to_grid(recorded.maps[0][0, :, 0]), rtol=0, atol=1e-6)


def test_attention_is_drawn_where_the_model_has_looked() -> None:
    white = Image.new("RGB", (300, 100), "white")
    attention = torch.zeros(2, 2, 2)
    attention[:, 1, 0] = 1  # lower left
    drawn = draw_attention(white, attention, Preprocessing(image_size=(20, 20), mean=(0.5,), std=(0.5,), crop_pct=0.5))
    # The model sees the middle of the picture: 50 pixels of 100, from column 125 and row 25.
    light = pil_to_tensor(drawn)[0]
    assert drawn.size == (300, 100)
    assert light[:, :124].max() == light[:, 176:].max() == 255 // 4
    assert light[60:75, 125:140].min() > 200
    assert light[25:40, 160:175].max() < 70


def test_a_model_without_a_head_gives_features(folder: Path) -> None:
    classifier = Classifier(new_model(num_classes=0))
    [answer] = classifier.classify(files_in(folder)[:1], features=True)
    assert answer.features.shape == (24,)
    with pytest.raises(ValueError, match="has no head"):
        list(classifier.classify(files_in(folder)[:1]))


def test_pictures_without_end_are_read_a_few_batches_ahead(model: VisionTransformer, folder: Path) -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        for _ in count():
            taken += 1
            yield folder / "03.png"

    answers = Classifier(model, batch_size=4, workers=2).classify(endless())
    assert len(list(islice(answers, 50))) == 50
    assert taken <= 50 + 3 * 4 + 2
    answers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


def test_the_first_answers_do_not_wait_for_a_whole_batch(model: VisionTransformer, folder: Path) -> None:
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    files = [folder / "03.png"] * 41
    list(Classifier(model, batch_size=16).classify(files))
    assert sizes == [1, 2, 4, 8, 16, 10]
    sizes.clear()
    list(Classifier(model, batch_size=16).classify(files[7:], done=7))  # as without the interruption
    hook.remove()
    assert sizes == [8, 16, 10]


def test_answers_come_while_a_slow_source_gives_nothing_more(model: VisionTransformer, folder: Path) -> None:
    goes_on = threading.Event()

    def slow() -> Iterator[Path]:
        yield from [folder / "00.png", folder / "03.png", folder / "06.png"]
        goes_on.wait(60)
        yield folder / "09.png"

    classifier = Classifier(model, batch_size=8)
    answers = classifier.classify(slow())
    began = time.monotonic()
    assert [next(answers).path.name for _ in range(3)] == ["00.png", "03.png", "06.png"]
    goes_on.set()
    assert [answer.path.name for answer in answers] == ["09.png"]
    goes_on.clear()
    answers = classifier.classify(slow())
    next(answers)
    answers.close()  # ends though the source does not
    assert time.monotonic() - began < 30
    goes_on.set()


def test_what_goes_wrong_in_a_source_comes_behind_its_pictures(model: VisionTransformer, folder: Path) -> None:
    def broken() -> Iterator[Path]:
        yield from [folder / "03.png"] * 5
        raise LookupError("no more disk")

    answers = Classifier(model, batch_size=4).classify(broken())
    assert len(list(islice(answers, 5))) == 5
    with pytest.raises(LookupError, match="no more disk"):
        next(answers)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.parametrize("batch_size", [3, 8, 32])
def test_int8_is_calibrated_on_the_same_pictures_whatever_the_batches(
    batch_size: int, model: VisionTransformer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(folder) * 3
    readable = [file for file in files if " " not in file][:CALIBRATION_PICTURES]
    given: list[torch.Tensor] = []
    monkeypatch.setattr(vitmha.inference.engines, "find_spec", lambda package: package)
    monkeypatch.setattr(
        vitmha.inference.classifier, "to_openvino", lambda model, _, images: given.append(images) or model
    )
    classifier = Classifier(model, engine="openvino", precision="int8", batch_size=batch_size)
    assert len(list(classifier.classify(files))) == 75
    [images] = given
    assert_close(images, torch.stack([model.preprocessing(read_image(file)) for file in readable]), rtol=0, atol=1e-6)


def test_threads_share_a_classifier(model: VisionTransformer, folder: Path) -> None:
    files = files_in(folder)
    classifier = Classifier(model, batch_size=3)
    expected = vectors(list(classifier.classify(files, vector=True)))
    found: dict[int, list[Prediction]] = {}

    def classify(number: int) -> None:
        found[number] = list(classifier.classify(files, vector=True, attention=number % 2 == 0))

    threads = [threading.Thread(target=classify, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for number, answers in found.items():
        assert_close(vectors(answers), expected, rtol=0, atol=1e-6)
        assert (answers[0].attention is not None) == (number % 2 == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_names": ["a", "b"]}, "has 7 classes and was given 2 names"),
        ({"batch_size": 0}, "must be at least 1, got 0"),
        ({"precision": "int8"}, "engine 'torch' computes in float32, bfloat16, float16; got precision 'int8'"),
        ({"engine": "openvino", "device": "cuda"}, "runs on the CPU, not on cuda"),
    ],
)
def test_wrong_options_are_named(model: VisionTransformer, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(model, **options)


def test_models_that_cannot_classify_are_refused(model: VisionTransformer) -> None:
    bare = create_model("vit_mini", image_size=8, embed_dim=8, num_heads=2)
    with pytest.raises(ValueError, match="The model has no preprocessing"):
        Classifier(bare)
    config = ViTConfig(image_size=8, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    with pytest.raises(ValueError, match="reads sequences"):
        Classifier(EncoderDecoder(config, DecoderConfig(max_length=3, depth=1, num_heads=2)))
    with pytest.raises(ValueError, match="come from engine 'torch', not from 'compile'"):
        list(Classifier(model, engine="compile").classify([], features=True))
    with pytest.raises(ValueError, match="nowhere must be a folder"):
        Classifier("nowhere")


def test_half_precision_is_close(model: VisionTransformer, folder: Path) -> None:
    files = files_in(folder)
    expected = vectors(list(Classifier(model).classify(files, vector=True)))
    halves = vectors(list(Classifier(model, precision="bfloat16").classify(files, vector=True)))
    assert_close(halves, expected, rtol=0, atol=0.05)
    assert not torch.equal(halves, expected)


COMMAND = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def classify(words: list[str], capfdbinary: pytest.CaptureFixture[bytes], expected: int = 0) -> tuple[bytes, str]:
    """`vitmha classify WORDS` here: both its streams, after its exit status was the expected one."""
    with pytest.raises(SystemExit) as exit_:
        main(["classify", *words])
    out, err = capfdbinary.readouterr()
    assert exit_.value.code == expected, err
    assert b"Traceback" not in err
    return out, os.fsdecode(err)


def records(out: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def test_records_say_what_the_library_says(
    model: VisionTransformer, saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = [str(folder), f"{folder}/01.jpg", "--model", str(saved), "--top-k", "2", "--workers", "2"]
    out, err = classify([*words, "--format", "jsonl", "--probabilities", "--batch-size", "7"], capfdbinary, expected=1)
    found = records(out)
    expected = list(Classifier(model).classify([*files_in(folder), f"{folder}/01.jpg"], top_k=2, vector=True))
    assert len(found) == 26
    for record, answer in zip(found, expected, strict=True):
        assert record["path"] == answer.path
        if answer.error is not None:
            assert record == {"path": answer.path, "error": answer.error}
            continue
        assert record["labels"] == list(answer.labels)
        assert record["probabilities"] == pytest.approx(answer.probabilities, abs=1e-5)
        assert record["vector"] == pytest.approx(answer.vector.tolist(), abs=1e-5)
    assert err == "26 files: 24 classified, 2 failed\n"

    out, _ = classify([*words, "--format", "csv", "--probabilities"], capfdbinary, expected=1)
    rows = list(csv.DictReader(io.StringIO(out.decode())))
    assert [row["path"] for row in rows] == [record["path"] for record in found]
    for row, record in zip(rows, found, strict=True):
        assert row["error"] == record.get("error", "")
        assert [row["label_1"], row["label_2"]] == record.get("labels", ["", ""])
        if "vector" in record:
            assert [float(row[f"probability of {name}"]) for name in NAMES] == pytest.approx(record["vector"], abs=1e-5)

    out, _ = classify([*words, "--format", "jsonl", "--embed"], capfdbinary, expected=1)
    assert [len(record.get("features", ())) for record in records(out)] == [24 if "labels" in r else 0 for r in found]
    drawn = tmp_path / "drawn"
    out, _ = classify(
        [str(folder / "02.webp"), *words[2:], "--format", "jsonl", "--attention", str(drawn)], capfdbinary
    )
    with Image.open(records(out)[0]["attention"]) as picture:
        assert picture.size == read_image(folder / "02.webp").size


def test_the_attention_of_a_turned_picture_is_drawn_upright(
    model: VisionTransformer, saved: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: 40 x 24 pixels are to be seen as 24 x 40
    coarse = torch.randint(256, (3, 3, 5), dtype=torch.uint8)
    to_pil_image(coarse).resize((40, 24)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    words = [
        str(tmp_path / "a.jpg"),
        "--model",
        str(saved),
        "--format",
        "jsonl",
        "--attention",
        str(tmp_path / "drawn"),
    ]
    out, _ = classify(words, capfdbinary)
    upright = read_image(tmp_path / "a.jpg")
    [answer] = Classifier(model).classify([upright], attention=True)
    expected = draw_attention(upright, answer.attention, model.preprocessing)
    with Image.open(records(out)[0]["attention"]) as drawn:
        assert drawn.size == (24, 40)
        difference = pil_to_tensor(drawn.convert("RGB")).int() - pil_to_tensor(expected.convert("RGB")).int()
    assert difference.abs().max() <= 1


def test_labels_thresholds_and_compiling_do_what_they_say(
    model: VisionTransformer, saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    (tmp_path / "labels").write_text("\n".join(f"number {i}" for i in range(7)), encoding="utf-8-sig")
    words = [str(folder / "03.png"), "--model", str(saved), "--format", "jsonl"]
    right = right_probabilities(model, folder / "03.png")
    best = right.argsort(descending=True).tolist()
    out, _ = classify([*words, "--labels", str(tmp_path / "labels")], capfdbinary)
    assert records(out)[0]["labels"] == [f"number {i}" for i in best[:5]]
    middle = (right[best[1]] + right[best[2]]).item() / 2
    out, _ = classify([*words, "--threshold", str(middle)], capfdbinary)
    assert records(out)[0]["labels"] == [NAMES[i] for i in best[:2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **options: lambda images: model(images).flip(1))
        out, _ = classify([*words, "--compile"], capfdbinary)
    assert records(out)[0]["labels"] == [NAMES[6 - i] for i in best[:5]]


@pytest.mark.parametrize(("err", "out", "output", "is_shown"), [(1, 0, 0, 1), (1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0)])
def test_progress_is_for_terminals_alone(
    err: int, out: int, output: int, is_shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Mock(isatty=lambda: bool(err)))
    monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda: bool(out)))
    made = vitmha.cli.classify._progress(Namespace(output="x.csv" if output else None))
    assert isinstance(made, Progress) == bool(is_shown)


def test_the_table_is_for_people(saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    words = [str(folder / "03.png"), str(folder / "05 cut.jpg"), "--model", str(saved), "--top-k", "2"]
    out, _ = classify(words, capfdbinary, expected=1)
    text = "".join(out.decode().split())
    assert "/03.png" in text
    assert "TruncatedFileRead" in text
    assert text.count("%") == 2


def test_folders_patterns_lists_and_archives_are_searched(
    saved: Path,
    folder: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = folder / "03.png"
    for name in ("b.PNG", "a.png", "[x].png", ".hidden.png", "words.txt", "in/c.png", "in/.cache/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / name)
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "in" / "round").symlink_to(tmp_path / "in" / "round")  # leads to itself
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name in ("x/1.png", "x/1.cls", "x/._1.png"):
            archive.add(source, name)
    (tmp_path / "z.tar").write_bytes((tmp_path / "shard.tar").read_bytes()[:900])
    monkeypatch.chdir(tmp_path)

    def found(words: list[str], expected: int = 0) -> tuple[list[object], str]:
        out, err = classify([*words, "--model", str(saved), "--format", "jsonl"], capfdbinary, expected)
        return [record["path"] + (" failed" if "error" in record else "") for record in records(out)], err

    names, err = found(["."], expected=1)
    assert names == ["./[x].png", "./a.png", "./b.PNG", "./shard.tar/x/1.png", "./z.tar failed"]
    assert "5 hidden or unknown files and folders skipped" in err  # .hidden.png, words.txt, in, and two in the archive
    names, _ = found([".", "--recursive"], expected=1)
    assert names[2:5] == ["./b.PNG", "./in/c.png", "./shard.tar/x/1.png"]
    assert found(["*.png", "a.png", "[x].png"])[0] == ["[x].png", "a.png", "a.png", "[x].png"]
    assert found(["?.gif"], expected=1)[0] == ["?.gif failed"]
    listed = tmp_path / "list"
    listed.write_bytes(b"a.png\n\nnowhere.png\r\nin\n")
    with listed.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert found(["b.PNG", "-"], expected=1)[0] == ["b.PNG", "a.png", "nowhere.png failed", "in/c.png"]


def archived(archive: Path) -> list[str]:
    """The names of what a search finds in an archive, with the reason of those that cannot be read."""
    items = list(ImageFinder(recursive=False).below([str(archive)], ()))
    names = [display_name(item).removeprefix(f"{archive}/") for item in items]
    return [
        f"{n}: {item.reason}" if isinstance(item, ImageReadError) else n for n, item in zip(names, items, strict=True)
    ]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_of_a_damaged_archive_nothing_is_lost_in_silence(folder: Path, tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "whole.tar", mode, format=tarfile.GNU_FORMAT) as archive:
        for name in ("1.png", "2.png", "3.png"):
            archive.add(folder / "03.png", name)
    with tarfile.open(tmp_path / "whole.tar") as archive:
        second = archive.getmember("2.png").offset
    content = (tmp_path / "whole.tar").read_bytes()
    if mode == "w:gz":
        content = gzip.decompress(content)
    turned = bytearray(content)
    turned[second + 3] ^= 1
    place = tmp_path / "a.tar"
    for damaged, reason in (
        (bytes(turned), "bad checksum"),
        (content[:second], "empty header"),
        (content[: second + 100], "truncated header"),
        (content[: second + 600], "unexpected end of data"),
    ):
        place.write_bytes(gzip.compress(damaged) if mode == "w:gz" else damaged)
        assert archived(place) == ["1.png", f"{place}: the archive is corrupt: {reason}"]
    place.write_bytes(content)
    assert archived(place) == ["1.png", "2.png", "3.png"]


def test_links_and_large_files_in_archives_are_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1.png", "4.png"):
        shutil.copy(folder / "03.png", tmp_path / name)
    (tmp_path / "2.png").hardlink_to(tmp_path / "1.png")
    (tmp_path / "3.png").symlink_to("1.png")
    (tmp_path / "5.png").write_bytes(bytes(9999))
    monkeypatch.setattr(vitmha.images.find, "MAX_MEMBER_BYTES", 9998)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(1, 6):
            archive.add(tmp_path / f"{i}.png", f"{i}.png")
    assert archived(tmp_path / "a.tar") == [
        "1.png",
        "2.png: a link to 1.png; links in archives are not followed",
        "3.png: a link to 1.png; links in archives are not followed",
        "4.png",
        "5.png: 9999 bytes; files in archives may have at most 9998",
    ]


def test_odd_names_come_out_as_they_are(
    saved: Path,
    folder: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        os.fsdecode(name) for name in (b"-x.png", b"\xff\xfe.png", b'a "b",c.png', b"new\nline\r.png", b"\x1b[31m.png")
    ]
    monkeypatch.chdir(tmp_path)
    for name in names:
        shutil.copy(folder / "03.png", name)
    words = ["--model", str(saved), "--top-k", "1"]
    out, _ = classify([*words, "--format", "jsonl", "--", *names], capfdbinary)
    assert [record["path"] for record in records(out)] == names
    out, _ = classify([*words, "--format", "csv", "--", *names], capfdbinary)
    text = io.StringIO(out.decode(errors="surrogateescape"), newline="")
    assert [row["path"] for row in csv.DictReader(text)] == names
    out, _ = classify([*words, "--", *names], capfdbinary)
    assert b"\x1b" not in out
    out, _ = classify([*words, "."], capfdbinary)
    for form in ("csv", "jsonl"):
        output = [*words, "--output", f"o.{form}", "--", *names]
        classify(output, capfdbinary)
        whole = Path(f"o.{form}").read_bytes()
        for length in range(0, len(whole), 7):  # cut off anywhere
            Path(f"o.{form}").write_bytes(whole[:length])
            classify(["--resume", *output], capfdbinary)
            assert Path(f"o.{form}").read_bytes() == whole


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--top-k 3", "--top-k 2"),
        ("--top-k 2", "--top-k 3"),
        ("--top-k 2", "--top-k 2 --probabilities"),
        ("--top-k 2 --probabilities", "--top-k 2"),
        ("--top-k 2", "--embed"),
        ("--embed", "--top-k 2"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_records_of_two_kinds_are_not_mixed(
    form: str,
    before: str,
    now: str,
    saved: Path,
    folder: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    output = tmp_path / f"a.{form}"
    words = [str(folder / "05 cut.jpg"), str(folder / "03.png"), "--model", str(saved), "--output", str(output)]
    classify([*words, *before.split()], capfdbinary, expected=1)
    standing = output.read_bytes()
    _, err = classify([*words, "--resume", *now.split()], capfdbinary, expected=2)
    assert "has other records or columns than this call would write" in err
    assert output.read_bytes() == standing
    _, err = classify([*words, "--resume", *before.split()], capfdbinary, expected=1)
    assert err.startswith("0 files after 2 before")


def test_above_a_threshold_records_may_have_fewer_labels(
    saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = [str(folder / "03.png"), "--model", str(saved), "--output", str(tmp_path / "a.jsonl"), "--top-k", "7"]
    classify([*words, "--threshold", "0.3"], capfdbinary)
    assert len(records((tmp_path / "a.jsonl").read_bytes())[0]["labels"]) < 7
    _, err = classify([*words, "--threshold", "0.3", "--resume"], capfdbinary)
    assert err.startswith("0 files after 1 before")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("package.json", '{"name": "x", "version": "1.0"}'),  # one line without an end
        ("a.jsonl", '{"path": "a.png", "labels": [], "probabilities": []}\n'),
        ("a.jsonl", '{"path": "a.png", "error": "x"}\n{"path": "b\n{"path": "c.png", "error": "x"}\n'),
        ("a.csv", "a,b,c"),
        ("a.csv", "a\rb\n"),
        ("a.csv", "{header}{row}some words\n{row}"),
        ("a.csv", "{header}{row}some words"),
    ],
)
def test_what_another_program_has_written_stays(
    name: str, content: str, saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = [str(folder / "03.png"), "--model", str(saved), "--top-k", "2", "--output"]
    if "{header}" in content:
        classify([*words, str(tmp_path / "b.csv")], capfdbinary)
        header, row = (tmp_path / "b.csv").read_text().splitlines(keepends=True)
        content = content.format(header=header, row=row)
    (tmp_path / name).write_text(content)
    _, err = classify([*words, str(tmp_path / name), "--resume"], capfdbinary, expected=2)
    assert "has other records or columns than this call would write" in err
    assert (tmp_path / name).read_bytes() == content.encode()


def test_answers_are_measured_against_find_class_dirs(
    model: VisionTransformer, saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    files = [file for file in files_in(folder) if " " not in file]
    answers = [NAMES[int(right_probabilities(model, file).argmax())] for file in files]
    for i, (file, name) in enumerate(zip(files, answers, strict=True)):
        place = tmp_path / "truth" / (name if i >= 4 else NAMES[(NAMES.index(name) + 1) % 7])  # four are put wrongly
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    shutil.copy(folder / "05 cut.jpg", place)
    words = ["--truth", str(tmp_path / "truth"), "--model", str(saved), "--format", "jsonl", "--top-k", "1"]
    out, err = classify([*words, "--report", str(tmp_path / "report")], capfdbinary, expected=1)
    right = [record["labels"] == [record["truth"]] for record in records(out) if "labels" in record]
    assert (len(right), sum(right)) == (23, 19)
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert metrics["top1"] == pytest.approx(19 / 23, abs=1e-6)
    assert metrics["pictures"] == 23
    assert re.search(r"top 1 +0.826087\n", err)
    with (tmp_path / "report" / "confusion.csv").open() as file:
        table = {row["truth"]: row for row in csv.DictReader(file)}
    for i, name in enumerate(answers[:4]):
        wrong = NAMES[(NAMES.index(name) + 1) % 7]
        assert int(table[wrong][name]) >= 1, i
    (tmp_path / "none").mkdir()
    _, err = classify(["--truth", str(tmp_path / "none"), "--model", str(saved)], capfdbinary, expected=2)
    assert "none holds no folder for each class, FOLDER/CLASS/x.jpg." in err
    (tmp_path / "truth" / "yak").mkdir()
    _, err = classify(words, capfdbinary, expected=2)
    assert "The model has no class 'yak': its 7 classes are ant, bee" in err


def test_imagenets_validation_files_are_known_by_name(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    (tmp_path / "val").mkdir()
    model = new_model(num_classes=1000)
    model.class_names = None
    files = [tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.png" for number in range(1, 9)]
    for file in files:
        shutil.copy(folder / "03.png", file)
    first = next(real for file in files if (real := real_labels(file)))  # of some, people saw no class
    torch.nn.init.constant_(model.head.bias[first[0]], 50.0)
    save_model(model, tmp_path / "m")
    answer = int(right_probabilities(model, files[0]).argmax())
    seen = [real for file in files if (real := real_labels(file))]
    words = ["--truth", str(tmp_path / "val"), "--model", str(tmp_path / "m"), "--report", str(tmp_path / "report")]
    classify(words, capfdbinary)
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert metrics == {"pictures": 0, "top1_real": sum(answer in real for real in seen) / len(seen)}
    assert 0 < metrics["top1_real"] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model {m} --truth nowhere", "--truth: there is no folder nowhere."),
        ("a.png --model {m} --truth {m}", "--truth names the files itself: leave PATH out."),
        ("{m} --model {m} --truth {m}", "--truth names the files itself: leave PATH out."),
        ("a.png --model {m} --report x", "--report is about how right the labels are: it needs --truth."),
        ("--model {m}", "nothing to classify: give files, folders, or - for a list on standard input."),
        ("a.png", "the following arguments are required: --model"),
        ("a.png --model nowhere", "nowhere must be a folder"),
        ("a.png --model {m} --topk 3", "there is no option 'topk'; the nearest is 'top-k'"),
        ("a.png --model {m} --top-k 0", "--top-k: expected a whole number of at least 1, got '0'"),
        ("a.png --model {m} --threshold 2", "--threshold: expected a number between 0 and 1, got '2'"),
        ("a.png --model {m} --resume", "--resume goes on with a file: it needs --output."),
        ("a.png --model {m} --output x --format table", "--output takes --format csv or jsonl"),
        ("a.png --model {m} --output {m}/config.json", "exists: go on with --resume, or remove it."),
        ("a.png --model {m} --output {m}/nowhere/x.csv", "cannot be written: No such file or directory"),
        ("a.png --model {m} --output {m}/config.json/x.csv", "cannot be written: Not a directory"),
        ("a.png --model {m} --output {m} --resume", "error: --output {m} is no file: give a new one"),
        ("a.png --model {m} --output /dev/full --resume", "--output /dev/full is no file: give a new one"),
        ("a.png --model {m} --output {m}/o.jsonl --engine compile --embed", "come from engine 'torch', not from"),
        ("a.png --model {m} --output {m}/o.jsonl --engine compile --attention {m}/d", "come from engine 'torch', not"),
        ("a.png --model {m}/headless --output {m}/o.jsonl", "has no head and so no classes: it gives features alone"),
        ("a.png --model {m} --output {m}/o.jsonl --cluster ray", "--cluster ray needs Ray: pip install"),
        (
            "a.png --model {m} --output {m}/o.jsonl --resume --engine openvino --precision int8",
            "classify with what vitmha export --format openvino-int8 makes of the model.",
        ),
        ("a.png --model {m} --cluster ray --engine openvino --precision int8", "export --format openvino-int8 makes"),
        ("a.png --model {m} --attention {m}/x.csv/d", "{m}/x.csv/d cannot be made or written to, for {m}/x.csv"),
        ("--truth {m} --model {m} --report {m}/x.csv", "{m}/x.csv cannot be made or written to, for {m}/x.csv"),
        ("a.png --model {m} --labels {m}/empty", "has 7 classes and was given 0 names"),
        ("a.png --model {m} --embed", "--embed and --probabilities are for programs: add --format jsonl or csv."),
        ("a.png --model {m} --labels nowhere", "--labels nowhere cannot be read"),
        ("a.png --model {m} --labels {m}/config.json", "classes and was given"),
        ("a.png --model {m} --precision int8", "engine 'torch' computes in"),
        (
            "a.png --model {m} --resume --output {m}/x.csv --top-k 2",
            "has other records or columns than this call would write",
        ),
        ("a.png --model {m} --resume --output {m}/x.jsonl", "has other records or columns"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    words: str,
    message: str,
    saved: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitmha.cli.classify.find_spec", lambda package: None)
    place = tmp_path / "m"
    shutil.copytree(saved, place)
    (place / "x.csv").write_text("path,label_1\n")
    (place / "x.jsonl").write_text('{"a": 1}\n')
    (place / "empty").touch()
    save_model(new_model(num_classes=0), place / "headless")
    before = {file: file.is_file() and file.read_bytes() for file in place.rglob("*")}
    out, err = classify(words.format(m=place).split(), capfdbinary, expected=2)
    assert out == b""
    assert message.format(m=place) in err
    assert err.count("\n") == 1
    assert {file: file.is_file() and file.read_bytes() for file in place.rglob("*")} == before


def test_int8_is_not_shared_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["classify", "a.png", "--model", "m", "--engine", "openvino", "--precision", "int8"]
    monkeypatch.setattr(sys, "argv", ["vitmha", *words])
    processes = TorchrunGroup()
    assert vitmha.cli.classify._arguments(processes).precision == "int8"
    processes.count = 2
    with pytest.raises(ValueError, match="vitmha export --format openvino-int8"):
        vitmha.cli.classify._arguments(processes)


def test_a_worker_of_a_cluster_reads_paths_from_where_the_call_was_made(
    saved: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    shutil.copy(folder / "03.png", tmp_path / "a.png")
    monkeypatch.setattr(sys, "argv", ["vitmha", "classify", "a.png", "--model", "m", "--device", "cpu"])
    given = vitmha.cli.classify._arguments(TorchrunGroup())
    monkeypatch.chdir(folder)  # which a worker may have begun in; and taken back after the test
    worker = vitmha.cli.classify.RayWorker(given, str(tmp_path))
    [made] = worker({"item": [pickle.dumps((0, "a.png"))]})["made"]
    record, _ = pickle.loads(made)
    assert (record["path"], len(record["labels"])) == ("a.png", 5)


def test_a_cluster_without_what_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Mock(cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="no worker of it has a GPU; take another --device"):
        next(vitmha.cli.classify._on_ray(Namespace(device="auto"), iter([(0, "a.png")])))
    ray.shutdown.assert_called_once()


def test_a_picture_for_which_the_model_gives_no_numbers_is_an_error(
    saved: Path,
    folder: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Image.new("RGB", (40, 24), "white").save(tmp_path / "white.png")
    forward, features = VisionTransformer.forward, VisionTransformer.features

    def breaking(made: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return torch.where(images.std((2, 3)).sum(1, keepdim=True) < 1e-3, torch.nan, made)

    monkeypatch.setattr(VisionTransformer, "forward", lambda self, images: breaking(forward(self, images), images))
    monkeypatch.setattr(VisionTransformer, "features", lambda self, images: breaking(features(self, images), images))
    words = [str(folder / "03.png"), str(tmp_path / "white.png"), str(folder / "06.png"), "--model", str(saved)]
    for further in (["--probabilities"], ["--embed"], ["--attention", str(tmp_path / "drawn")]):
        out, _ = classify([*words, "--format", "jsonl", *further], capfdbinary, expected=1)
        assert b"NaN" not in out
        found = records(out)
        assert ["error" in record for record in found] == [False, True, False]
        assert "is no number: its weights are broken or the precision too low" in found[1]["error"]


def links_to(file: Path, folder: Path, number: int) -> None:
    folder.mkdir()
    for i in range(number):
        (folder / f"{i:06d}{file.suffix}").symlink_to(file)


def test_a_reader_that_leaves_early_ends_it_quietly(saved: Path, folder: Path, tmp_path: Path) -> None:
    links_to(folder / "03.png", tmp_path / "many", 9000)
    words = [*COMMAND, str(tmp_path / "many"), "--model", str(saved), "--format", "jsonl"]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["labels"]  # long before all are done
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_records_come_while_the_list_on_standard_input_waits(saved: Path, folder: Path) -> None:
    words = [*COMMAND, "-", "--model", str(saved), "--format", "jsonl"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=ENVIRONMENT, **pipes) as process:
        for name in ("03.png", "01.jpg"):
            process.stdin.write(os.fsencode(folder / name) + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["path"] == str(folder / name)
        process.send_signal(signal.SIGINT)  # while it waits for a line
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


def test_a_full_disk_ends_it_in_one_line(saved: Path, folder: Path, tmp_path: Path) -> None:
    words = [*COMMAND, *[str(folder / "03.png")] * 9, "--model", str(saved), "--output", str(tmp_path / "a.csv")]
    few = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (999, 999))
    ended = subprocess.run(words, env=ENVIRONMENT, preexec_fn=few, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"error: {tmp_path}/a.csv: File too large\n")
    resumed = subprocess.run([*words, "--resume"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert " before: " in resumed.stderr
    assert (tmp_path / "a.csv").read_text().count("\n") == 10


def test_a_killed_call_goes_on_to_the_same_output(
    saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    links_to(folder / "01.jpg", tmp_path / "many", 900)
    (tmp_path / "many" / "000010.jpg").unlink()
    shutil.copy(folder / "05 cut.jpg", tmp_path / "many" / "000010.jpg")
    words = [str(tmp_path / "many"), str(folder), "--model", str(saved), "--output"]
    output = tmp_path / "a.csv"
    with subprocess.Popen([*COMMAND, *words, str(output)], env=ENVIRONMENT) as process:
        while not (output.exists() and output.stat().st_size > 5000):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    standing = output.read_bytes()
    _, err = classify([*words, str(output), "--resume"], capfdbinary, expected=1)
    done = standing.count(b"\n") - 1
    assert 0 < done < 900
    assert err.startswith(f"{925 - done} files after {done} before, 1 of which failed: ")
    classify([*words, str(tmp_path / "b.csv")], capfdbinary, expected=1)
    assert output.read_bytes() == (tmp_path / "b.csv").read_bytes()
    _, err = classify([*words, str(output), "--resume"], capfdbinary, expected=1)
    assert err == "0 files after 925 before, 3 of which failed: 0 classified, 0 failed\n"


def test_the_start_waits_for_nothing_it_does_not_need() -> None:
    """Half a second to two for each of these."""
    slow = {"lightning", "matplotlib", "timm", "torchvision", "transformers"}
    code = f"import vitmha.cli.classify, sys; print(*{slow} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_processes_share_the_files(
    saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, number: int
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, "x")
    words = [str(folder), "-", str(tmp_path / "a.tar"), "--model", str(saved), "--batch-size", "4", "--output"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    call = [*torchrun, "--no-python", *COMMAND, *words, str(tmp_path / "many.jsonl")]
    listed = "\n".join([*files_in(folder), str(folder)])
    ended = subprocess.run(call, env=ENVIRONMENT, input=listed, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    with (tmp_path / "list").open("w+") as stdin, pytest.MonkeyPatch.context() as patch:
        stdin.write(listed)
        stdin.seek(0)
        patch.setattr(sys, "stdin", stdin)
        classify([*words, str(tmp_path / "one.jsonl")], capfdbinary, expected=1)
    many, one = (records((tmp_path / f"{name}.jsonl").read_bytes()) for name in ("many", "one"))
    assert len(one) == 100
    assert_same_records(many, one)
    lines = (tmp_path / "many.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "many.jsonl").write_bytes(b"".join(lines[: 6 * number + 1]) + b"{")  # interrupted
    call.append("--resume")
    ended = subprocess.run(call, env=ENVIRONMENT, input=listed, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert_same_records(records((tmp_path / "many.jsonl").read_bytes()), one)


@pytest.mark.slow
def test_a_ray_cluster_of_two_workers_writes_the_same_records(
    saved: Path, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    shutil.copy(folder / "03.png", tmp_path / os.fsdecode(b"\xff.png"))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, "x")
    words = [str(folder), str(tmp_path), str(folder), "--model", str(saved), "--batch-size", "5", "--output"]
    code = "import ray; given = ray.init; ray.init = lambda **options: given(num_cpus=2, **options)\n"
    code += "import vitmha.cli.classify; vitmha.cli.classify.RAY_BLOCK = 40\n"
    call = [
        sys.executable,
        "-c",
        code + COMMAND[2],
        "classify",
        *words,
        str(tmp_path / "ray.jsonl"),
        "--cluster",
        "ray",
    ]
    ended = subprocess.run(call, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    (tmp_path / "ray.jsonl").rename(tmp_path.parent / "ray.jsonl")
    classify([*words, str(tmp_path / "one.jsonl")], capfdbinary, expected=1)
    one, many = (records(file.read_bytes()) for file in (tmp_path / "one.jsonl", tmp_path.parent / "ray.jsonl"))
    assert len(one) == 76
    assert_same_records(many, one)


def assert_same_records(found: list[dict[str, object]], expected: list[dict[str, object]]) -> None:
    assert [(record["path"], record.get("labels"), record.get("error")) for record in found] == [
        (record["path"], record.get("labels"), record.get("error")) for record in expected
    ]
    for record, other in zip(found, expected, strict=True):
        assert record.get("probabilities", []) == pytest.approx(other.get("probabilities", []), abs=1e-5)


@pytest.mark.slow
def test_a_hundred_thousand_files_take_no_more_memory_than_a_thousand(
    saved: Path, folder: Path, tmp_path: Path
) -> None:
    peaks = {}
    for number in (1000, 100_000):
        links_to(folder / "03.png", tmp_path / str(number), number)
        code = "import resource, vitmha.cli.classify as word\n"
        code += "try: word.main()\nfinally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        words = [
            "classify",
            str(tmp_path / str(number)),
            "--model",
            str(saved),
            "--output",
            str(tmp_path / f"{number}.csv"),
        ]
        ended = subprocess.run([sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, check=True)
        peaks[number] = int(ended.stdout) / 1024
        assert len((tmp_path / f"{number}.csv").read_text().splitlines()) == number + 1
    print(peaks)  # noqa: T201 (the figure of the proof)
    assert peaks[100_000] < peaks[1000] + 100  # MB


def test_the_hard_files_come_out_as_the_manifest_says(saved: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    place = ROOT.parent / "shared" / "images"
    if not place.is_dir():
        pytest.skip(f"there is no folder {place} of hard files")
    files = [str(file) for file in sorted(place.iterdir()) if file.suffix != ".md"]
    code = "import resource, sys; from vitmha.cli import main\ntry: main()\n"
    code += "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    words = ["classify", *files, "--model", str(saved), "--format", "jsonl"]
    ended = subprocess.run([sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    broadcast, peak = ended.stderr.splitlines()
    assert broadcast == b"55 files: 43 classified, 12 failed"
    assert int(peak) < 2_000_000  # kB
    found = records(ended.stdout)
    assert [record["path"] for record in found] == files
    out, _ = classify(
        [*files[::-1], "--model", str(saved), "--format", "jsonl", "--batch-size", "1"], capfdbinary, expected=1
    )
    assert_same_records(records(out)[::-1], found)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("openvino", "float32"), ("openvino", "int8"), ("compile", "float32")],
    ids=["openvino", "int8", "compiled"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_engines_agree(model: VisionTransformer, folder: Path, engine: str, precision: str) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
        pytest.importorskip("nncf")
    files = files_in(folder)
    expected = vectors(list(Classifier(model).classify(files, vector=True)))
    classifier = Classifier(model, engine=engine, precision=precision, batch_size=8)
    if precision == "int8":  # the batches change nothing, not even what it is calibrated on
        files, expected = files * 3, expected.repeat(3, 1)
        other = Classifier(model, engine=engine, precision=precision, batch_size=3)
        one, two = (vectors(list(each.classify(files, vector=True))) for each in (classifier, other))
        assert_close(one, two, rtol=0, atol=1e-5)
    for _ in range(2):
        answers = list(classifier.classify(files, vector=True))
        assert [answer.path for answer in answers] == files
        found = vectors(answers)
        if precision == "int8":
            assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.8  # so small a model has no room to spare
        else:
            assert_close(found, expected, rtol=0, atol=1e-5)
