"""`vitmha classify`: records equal the library's predictions, and wrong calls are refused in one line."""

import csv
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from builders import (
    CLASS_NAMES,
    CLASSIFY,
    ENVIRONMENT,
    assert_same_records,
    classifier_model,
    classify,
    expected_probabilities,
    files_in,
    read_records,
    write_links,
)
from PIL import Image
from rich.progress import Progress
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.cli.classify
import vitmha.images.find
import vitmha.inference.classifier
import vitmha.inference.engines
from vitmha import Classifier, save_model
from vitmha.cli.arguments import ENGINES, MAX_PIXELS, PRECISIONS, classifier_options
from vitmha.cli.export import FORMATS
from vitmha.errors import UserError
from vitmha.images import read_image
from vitmha.inference.engines import Engine, Precision
from vitmha.inference.export import ExportFormat
from vitmha.inference.overlay import draw_attention
from vitmha.models.vit import VisionTransformer


@pytest.mark.parametrize("flags", [["--engine", "openvino"], []], ids=["converted", "exported"])
def test_openvino_runs_on_the_cpu_of_a_machine_with_a_gpu(
    flags: list[str], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "model.xml").touch()
    args = vitmha.cli.classify.parse_args(["x.png", "--model", str(model_dir if flags else tmp_path), *flags])
    assert classifier_options(args)["device"] == "auto"  # which a Classifier resolves to the CPU there


def test_records_equal_the_predictions_of_the_library(
    model: VisionTransformer,
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    args = [str(image_dir), f"{image_dir}/01.jpg", "--model", str(model_dir), "--top-k", "2", "--num-workers", "2"]
    out, err = classify([*args, "--format", "jsonl", "--all-probs", "--batch-size", "7"], capfdbinary, expected=1)
    found = read_records(out)
    expected = list(
        Classifier(model).classify([*files_in(image_dir), f"{image_dir}/01.jpg"], top_k=2, all_probabilities=True)
    )
    assert len(found) == 26
    for record, prediction in zip(found, expected, strict=True):
        assert record["path"] == prediction.path
        if prediction.error is not None:
            assert record == {"path": prediction.path, "error": prediction.error}
            continue
        assert record["labels"] == list(prediction.labels)
        assert record["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)
        assert record["all_probabilities"] == pytest.approx(prediction.all_probabilities.tolist(), abs=1e-5)
    assert err == "26 files: 24 classified, 2 failed\n"

    out, _ = classify([*args, "--format", "csv", "--all-probs"], capfdbinary, expected=1)
    rows = list(csv.DictReader(io.StringIO(out.decode())))
    assert [row["path"] for row in rows] == [record["path"] for record in found]
    for row, record in zip(rows, found, strict=True):
        assert row["error"] == record.get("error", "")
        assert [row["label_1"], row["label_2"]] == record.get("labels", ["", ""])
        if "all_probabilities" in record:
            assert [float(row[f"probability of {name}"]) for name in CLASS_NAMES] == pytest.approx(
                record["all_probabilities"], abs=1e-5
            )

    out, _ = classify([*args, "--format", "jsonl", "--embeddings"], capfdbinary, expected=1)
    assert [len(record.get("embedding", ())) for record in read_records(out)] == [
        24 if "labels" in r else 0 for r in found
    ]
    drawn = tmp_path / "drawn"
    out, _ = classify(
        [str(image_dir / "02.webp"), *args[2:], "--format", "jsonl", "--attention-dir", str(drawn)], capfdbinary
    )
    with Image.open(read_records(out)[0]["attention"]) as image:
        assert image.size == read_image(image_dir / "02.webp").size


def test_the_attention_of_a_rotated_image_is_drawn_upright(
    model: VisionTransformer, model_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: 40 x 24 pixels are to be seen as 24 x 40
    coarse = torch.randint(256, (3, 3, 5), dtype=torch.uint8)
    to_pil_image(coarse).resize((40, 24)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    args = [
        str(tmp_path / "a.jpg"),
        "--model",
        str(model_dir),
        "--format",
        "jsonl",
        "--attention-dir",
        str(tmp_path / "drawn"),
    ]
    out, _ = classify(args, capfdbinary)
    upright = read_image(tmp_path / "a.jpg")
    [prediction] = Classifier(model).classify([upright], attention=True)
    expected = draw_attention(upright, prediction.attention, model.preprocessing)
    with Image.open(read_records(out)[0]["attention"]) as drawn:
        assert drawn.size == (24, 40)
        difference = pil_to_tensor(drawn.convert("RGB")).int() - pil_to_tensor(expected.convert("RGB")).int()
    assert difference.abs().max() <= 1


def test_class_names_threshold_and_compile(
    model: VisionTransformer,
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    (tmp_path / "labels").write_text("\n".join(f"number {i}" for i in range(7)), encoding="utf-8-sig")
    args = [str(image_dir / "03.png"), "--model", str(model_dir), "--format", "jsonl"]
    right = expected_probabilities(model, image_dir / "03.png")
    best = right.argsort(descending=True).tolist()
    out, _ = classify([*args, "--class-names", str(tmp_path / "labels")], capfdbinary)
    assert read_records(out)[0]["labels"] == [f"number {i}" for i in best[:5]]
    middle = (right[best[1]] + right[best[2]]).item() / 2
    out, _ = classify([*args, "--threshold", str(middle)], capfdbinary)
    assert read_records(out)[0]["labels"] == [CLASS_NAMES[i] for i in best[:2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **options: lambda images: model(images).flip(1))
        out, _ = classify([*args, "--compile"], capfdbinary)
    assert read_records(out)[0]["labels"] == [CLASS_NAMES[6 - i] for i in best[:5]]


@pytest.mark.parametrize(("err", "out", "output", "is_shown"), [(1, 0, 0, 1), (1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0)])
def test_progress_appears_on_terminals_only(
    err: int, out: int, output: int, is_shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Mock(isatty=lambda: bool(err)))
    monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda: bool(out)))
    made = vitmha.cli.classify._progress(Namespace(output="x.csv" if output else None))
    assert isinstance(made, Progress) == bool(is_shown)


def test_directories_patterns_lists_and_archives_are_searched(
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = image_dir / "03.png"
    for name in ("b.PNG", "a.png", "[x].png", ".hidden.png", "notes.txt", "in/c.png", "in/.cache/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / name)
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "in" / "round").symlink_to(tmp_path / "in" / "round")  # leads to itself
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name in ("x/1.png", "x/1.cls", "x/._1.png"):
            archive.add(source, name)
    (tmp_path / "z.tar").write_bytes((tmp_path / "shard.tar").read_bytes()[:900])
    monkeypatch.chdir(tmp_path)

    def found(args: list[str], expected: int = 0) -> tuple[list[object], str]:
        out, err = classify([*args, "--model", str(model_dir), "--format", "jsonl"], capfdbinary, expected)
        return [record["path"] + (" failed" if "error" in record else "") for record in read_records(out)], err

    names, err = found(["."], expected=1)
    assert names == ["./[x].png", "./a.png", "./b.PNG", "./shard.tar/x/1.png", "./z.tar failed"]
    # .hidden.png, notes.txt, in, and two in the archive
    assert "5 hidden or unknown files and directories skipped" in err
    names, _ = found([".", "--recursive"], expected=1)
    assert names[2:5] == ["./b.PNG", "./in/c.png", "./shard.tar/x/1.png"]
    assert found(["*.png", "a.png", "[x].png"])[0] == ["[x].png", "a.png", "a.png", "[x].png"]
    assert found(["?.gif"], expected=1)[0] == ["?.gif failed"]
    listed = tmp_path / "list"
    listed.write_bytes(b"a.png\n\nnowhere.png\r\nin\n")
    with listed.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert found(["b.PNG", "-"], expected=1)[0] == ["b.PNG", "a.png", "nowhere.png failed", "in/c.png"]


def test_a_call_that_finds_no_image_is_refused(
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    shutil.copy(image_dir / "03.png", tmp_path / "classes" / "cat")
    (tmp_path / "classes" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    args = ["--model", str(model_dir), "--output", "a.csv"]
    recursive = "no image files found in classes: add --recursive to search its subdirectories"
    skipped = "(2 hidden or unknown files and directories skipped)"
    for paths, message in (
        (["classes"], f"{recursive} {skipped}"),
        (["empty", "--recursive"], "no image files found in empty"),
        (["-"], "the list on standard input is empty"),
        (["-", "classes"], f"the list on standard input is empty; {recursive} {skipped}"),
    ):
        with open(os.devnull) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            out, err = classify([*paths, *args], capfdbinary, expected=2)
        assert (out, err) == (b"", f"error: {message}\n")
        assert not (tmp_path / "a.csv").exists()
    _, err = classify(["classes", "classes/cat", *args], capfdbinary)
    assert err.startswith(f"warning: {recursive}\n1 files: 1 classified, 0 failed, ")
    classify(["classes", "classes/cat", *args, "--resume"], capfdbinary)


def test_names_on_standard_input_may_end_in_nul(
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["new\nline\r.png", os.fsdecode(b"\xff.png"), "end\r"]
    for name in names:
        shutil.copy(image_dir / "03.png", name)
    args = ["-", "--model", str(model_dir), "--format", "jsonl"]
    for end, flags, status in (("", ["--null"], 0), ("\0", ["--null"], 0), ("\0", [], 2)):
        Path("list").write_bytes(os.fsencode("\0".join(names) + end))  # the last name may have no end
        with open("list") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            out, err = classify([*args, *flags], capfdbinary, expected=status)
        assert [record["path"] for record in read_records(out)] == ([] if status else names)
    assert err == "error: the names on standard input end in NUL: add --null.\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model {m}", "nothing to classify: pass files, directories, or - for a list on standard input."),
        ("a.png", "error: --model is required, for example --model cifar10 (bundled models: cifar10, fashion-mnist)"),
        ("a.png --model nowhere", "error: nowhere: no such file or directory (expected a directory"),
        ("a.png --model {m} --topk 3", "unknown option --topk (did you mean --top-k?)"),
        ("a.png --model {m} --truth x", "unknown option --truth"),
        ("a.png --model {m} --report x", "unknown option --report"),
        ("a.png --model {m} --top-k 0", "--top-k: expected an integer of at least 1, got '0'"),
        ("a.png --model {m} --threshold 2", "--threshold: expected a number between 0 and 1, got '2'"),
        ("a.png --model {m} --null", "--null is for a list on standard input: add - to the arguments."),
        ("a.png --model {m} --resume", "--resume continues a file: add --output FILE."),
        ("a.png --model {m} --output x --format table", "--output needs --format csv or jsonl"),
        (
            "a.png --model {m} --output {m}/config.json",
            "already exists: pass --resume to continue it, or remove the file.",
        ),
        ("a.png --model {m} --output {m}/nowhere/x.csv", "cannot be written: No such file or directory"),
        ("a.png --model {m} --output {m}/config.json/x.csv", "cannot be written: Not a directory"),
        ("a.png --model {m} --output {m} --resume", "error: --output {m} is not a regular file"),
        ("a.png --model {m} --output /dev/full --resume", "--output /dev/full is not a regular file"),
        ("a.png --model {m} --output {m}/o.jsonl --engine compile --embeddings", "require engine 'torch', got"),
        ("a.png --model {m} --output {m}/o.jsonl --engine compile --attention-dir {m}/d", "require engine 'torch'"),
        ("a.png --model {m}/headless --output {m}/o.jsonl", "has no classification head: it returns embeddings only"),
        ("a.png --model {m} --output {m}/o.jsonl --cluster ray", "--cluster ray needs Ray: pip install"),
        (
            "a.png --model {m} --output {m}/o.jsonl --resume --engine openvino --precision int8",
            "run vitmha export --format openvino-int8, and pass its directory as --model.",
        ),
        ("a.png --model {m} --cluster ray --engine openvino --precision int8", "export --format openvino-int8, and"),
        ("a.png --model {m} --attention-dir {m}/x.csv/d", "{m}/x.csv/d cannot be created or written to: {m}/x.csv"),
        ("a.png --model {m} --class-names {m}/empty", "--class-names has 0 names, the model has 7 classes"),
        ("a.png --model {m} --class-names {m}/twice", "--class-names: names 2 and 7 are both b; give each class"),
        ("a.png --model {m} --class-names {m}/gap", "--class-names: name 2 is empty; give each class"),
        ("a.png --model {m} --embeddings", "--embeddings and --all-probs are not part of a table: add --format jsonl"),
        ("a.png --model {m} --embeddings --all-probs --format csv", "--embeddings replaces labels: it cannot be"),
        ("a.png --model {m} --class-names nowhere", "nowhere cannot be read"),
        ("a.png --model {m} --class-names {m}/config.json", "names, the model has 7 classes"),
        ("a.png --model {m} --precision int8", "--precision must be one of float32, bfloat16, float16 for engine"),
        ("a.png --model {m} --precision int4", "invalid choice: 'int4'"),
        (
            "a.png --model {m} --resume --output {m}/x.csv --top-k 2",
            "has other records or columns than this call would write",
        ),
        ("a.png --model {m} --resume --output {m}/x.jsonl", "has other records or columns"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    args: str,
    message: str,
    model_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitmha.cli.arguments.find_spec", lambda package: None)
    place = tmp_path / "m"
    shutil.copytree(model_dir, place)
    (place / "x.csv").write_text("path,label_1\n")
    (place / "x.jsonl").write_text('{"a": 1}\n')
    (place / "empty").touch()
    (place / "twice").write_text("\n".join("abcdefb"))
    (place / "gap").write_text("a\n\nc\nd\ne\nf\ng")
    save_model(classifier_model(num_classes=0), place / "headless")
    before = {file: file.is_file() and file.read_bytes() for file in place.rglob("*")}
    out, err = classify([arg.format(m=place) for arg in args.split()], capfdbinary, expected=2)
    assert out == b""
    assert message.format(m=place) in err
    assert err.count("\n") == 1
    assert {file: file.is_file() and file.read_bytes() for file in place.rglob("*")} == before


def test_int8_is_refused_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["a.png", "--model", "m", "--engine", "openvino", "--precision", "int8"]
    assert vitmha.cli.classify.parse_args(args).precision == "int8"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        vitmha.cli.classify.parse_args(args)
    assert "vitmha export --format openvino-int8" in capsys.readouterr().err


@pytest.mark.parametrize(("alias", "precision"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_precision_has_short_names(alias: str, precision: str) -> None:
    assert vitmha.cli.classify.parse_args(["a.png", "--model", "m", "--precision", alias]).precision == precision


def test_the_choices_of_engine_precision_and_format_are_those_of_the_library() -> None:
    assert get_args(Engine) == ENGINES
    assert get_args(Precision) == PRECISIONS
    assert MAX_PIXELS == vitmha.images.MAX_PIXELS
    assert get_args(ExportFormat) == FORMATS


def test_images_with_too_many_pixels_are_errors(
    model: VisionTransformer, model_dir: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for side in (20, 21):
        Image.new("RGB", (side, side)).save(tmp_path / f"{side}.png")
    args = [str(tmp_path), "--model", str(model_dir), "--format", "jsonl", "--max-pixels", "400"]
    fits, too_large = read_records(classify(args, capfdbinary, expected=1)[0])
    assert "labels" in fits
    assert too_large["error"] == "too large: 21 x 21 pixels, at most 400 (max_pixels)"
    assert [p.error for p in Classifier(model).classify([tmp_path / "21.png"])] == [None]
    with pytest.raises(UserError, match=r"^max_pixels must be at least 1, got 0\.$"):
        Classifier(model, max_pixels=0)


def test_nan_outputs_are_errors(
    model_dir: Path,
    image_dir: Path,
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
    args = [
        str(image_dir / "03.png"),
        str(tmp_path / "white.png"),
        str(image_dir / "06.png"),
        "--model",
        str(model_dir),
    ]
    for further in (["--all-probs"], ["--embeddings"], ["--attention-dir", str(tmp_path / "drawn")]):
        out, _ = classify([*args, "--format", "jsonl", *further], capfdbinary, expected=1)
        assert not re.search(rb"[:\[,] *NaN", out)  # JSON has no NaN
        found = read_records(out)
        assert ["error" in record for record in found] == [False, True, False]
        assert "output is NaN or inf: its weights are broken or the precision is too low" in found[1]["error"]


def test_a_closed_pipe_ends_the_command_quietly(model_dir: Path, image_dir: Path, tmp_path: Path) -> None:
    write_links(image_dir / "03.png", tmp_path / "many", 9000)
    args = [*CLASSIFY, str(tmp_path / "many"), "--model", str(model_dir), "--format", "jsonl"]
    with subprocess.Popen(args, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["labels"]  # long before all are done
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_records_come_while_the_list_on_standard_input_waits(model_dir: Path, image_dir: Path) -> None:
    args = [*CLASSIFY, "-", "--model", str(model_dir), "--format", "jsonl"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # The tests ignore SIGINT, and so would this process, where a shell has started them in the background.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(args, env=ENVIRONMENT, preexec_fn=default, **pipes) as process:
        for name in ("03.png", "01.jpg"):
            process.stdin.write(os.fsencode(image_dir / name) + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["path"] == str(image_dir / name)
        process.send_signal(signal.SIGINT)  # while it waits for a line
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


def test_a_full_disk_is_an_error_of_one_line(model_dir: Path, image_dir: Path, tmp_path: Path) -> None:
    images = [str(image_dir / "03.png")] * 99
    args = [*CLASSIFY, *images, "--model", str(model_dir), "--output", str(tmp_path / "a.csv")]
    few = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, 4096))  # torch 2.9 writes a file of 2355 bytes
    ended = subprocess.run(args, env=ENVIRONMENT, preexec_fn=few, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"error: {tmp_path}/a.csv: File too large\n")
    resumed = subprocess.run([*args, "--resume"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert " before: " in resumed.stderr
    assert (tmp_path / "a.csv").read_text().count("\n") == 100


def test_a_killed_call_resumes_to_the_same_output(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    write_links(image_dir / "01.jpg", tmp_path / "many", 900)
    (tmp_path / "many" / "000010.jpg").unlink()
    shutil.copy(image_dir / "05 cut.jpg", tmp_path / "many" / "000010.jpg")
    args = [str(tmp_path / "many"), str(image_dir), "--model", str(model_dir), "--output"]
    output = tmp_path / "a.csv"
    with subprocess.Popen([*CLASSIFY, *args, str(output)], env=ENVIRONMENT) as process:
        while not (output.exists() and output.stat().st_size > 5000):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    standing = output.read_bytes()
    _, err = classify([*args, str(output), "--resume"], capfdbinary, expected=1)
    done = standing.count(b"\n") - 1
    assert 0 < done < 900
    assert err.startswith(f"{925 - done} files after {done} before, 1 of which failed: ")
    classify([*args, str(tmp_path / "b.csv")], capfdbinary, expected=1)
    assert output.read_bytes() == (tmp_path / "b.csv").read_bytes()
    _, err = classify([*args, str(output), "--resume"], capfdbinary, expected=1)
    assert err == "0 files after 925 before, 3 of which failed: 0 classified, 0 failed\n"


def test_the_command_imports_only_what_it_needs() -> None:
    """Half a second to two for each of these."""
    slow = {"lightning", "matplotlib", "timm", "torchvision", "transformers"}
    code = f"import vitmha.cli.classify, vitmha.inference.records, sys; print(*{slow} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


@pytest.mark.slow
def test_a_hundred_thousand_files_take_no_more_memory_than_a_thousand(
    model_dir: Path, image_dir: Path, tmp_path: Path
) -> None:
    peaks = {}
    for number in (1000, 100_000):
        write_links(image_dir / "03.png", tmp_path / str(number), number)
        code = "import resource, sys, vitmha.cli.classify as command\n"
        code += "try: command.main(sys.argv[2:])\nfinally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        args = [
            "classify",
            str(tmp_path / str(number)),
            "--model",
            str(model_dir),
            "--output",
            str(tmp_path / f"{number}.csv"),
        ]
        ended = subprocess.run([sys.executable, "-c", code, *args], env=ENVIRONMENT, capture_output=True, check=True)
        peaks[number] = int(ended.stdout) / 1024
        assert len((tmp_path / f"{number}.csv").read_text().splitlines()) == number + 1
    print(peaks)  # noqa: T201 (the figure of the proof)
    assert peaks[100_000] < peaks[1000] + 100  # MB


def test_hard_files_are_classified_as_their_manifest_says(
    model_dir: Path, hard_images: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    files = [str(file) for file in sorted(hard_images.iterdir()) if file.suffix != ".md"]
    code = "import resource, sys; from vitmha.cli import main\ntry: main()\n"
    code += "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    args = ["classify", *files, "--model", str(model_dir), "--format", "jsonl"]
    ended = subprocess.run([sys.executable, "-c", code, *args], env=ENVIRONMENT, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    broadcast, peak = ended.stderr.splitlines()
    assert broadcast == b"55 files: 43 classified, 12 failed"
    assert int(peak) < 2_000_000  # kB
    found = read_records(ended.stdout)
    assert [record["path"] for record in found] == files
    out, _ = classify(
        [*files[::-1], "--model", str(model_dir), "--format", "jsonl", "--batch-size", "1"], capfdbinary, expected=1
    )
    assert_same_records(read_records(out)[::-1], found)
