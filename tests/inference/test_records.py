"""Records are complete, keep their file names, and resume after an interruption."""

import csv
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from builders import classify, read_records

from vitmha.inference.records import table_rows


def test_the_table_has_a_line_per_label(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    args = [str(image_dir / "03.png"), str(image_dir / "05 cut.jpg"), "--model", str(model_dir), "--top-k", "2"]
    out, _ = classify(args, capfdbinary, expected=1)
    text = out.decode()
    assert f"{image_dir / '03.png'} " in text  # never broken, however long
    assert f"{image_dir / '05 cut.jpg'} " in text
    assert "Truncated File Read" in text
    assert text.count("%") == 2


@pytest.mark.parametrize("width", [20, 80, 200, None])
@pytest.mark.parametrize("length", range(1, 130, 7))
def test_a_table_never_breaks_a_path(width: int | None, length: int) -> None:
    path = "d/" * (length // 2) + "x" * (length % 2 or 2)
    record = {"path": path, "labels": ["a long label " * 5, "cat"], "probabilities": [0.7, 0.2]}
    lines = table_rows(record, width=width, with_header=True).splitlines()
    assert any(line.strip() == path or line.startswith(f"{path} ") for line in lines)
    assert "".join(lines).count("%") == 2
    if width and width >= 40:
        assert all(len(line.rstrip()) <= width for line in lines if path not in line)


def test_unusual_file_names_are_written_unchanged(
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        os.fsdecode(name) for name in (b"-x.png", b"\xff\xfe.png", b'a "b",c.png', b"new\nline\r.png", b"\x1b[31m.png")
    ]
    monkeypatch.chdir(tmp_path)
    for name in names:
        shutil.copy(image_dir / "03.png", name)
    args = ["--model", str(model_dir), "--top-k", "1"]
    out, _ = classify([*args, "--format", "jsonl", "--", *names], capfdbinary)
    assert [record["path"] for record in read_records(out)] == names
    out, _ = classify([*args, "--format", "csv", "--", *names], capfdbinary)
    text = io.StringIO(out.decode(errors="surrogateescape"), newline="")
    assert [row["path"] for row in csv.DictReader(text)] == names
    out, _ = classify([*args, "--", *names], capfdbinary)
    assert b"\x1b" not in out
    assert rb"\udcff\udcfe.png" in out
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        out, _ = classify([*args, "--format", "csv", "--", *names], capfdbinary)
    assert b"\x1b" not in out
    assert out.count(b"\n") == 1 + len(names)
    out, _ = classify([*args, "."], capfdbinary)
    for form in ("csv", "jsonl"):
        output = [*args, "--output", f"o.{form}", "--", *names]
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
        ("--top-k 2", "--top-k 2 --all-probs"),
        ("--top-k 2 --all-probs", "--top-k 2"),
        ("--top-k 2", "--embeddings"),
        ("--embeddings", "--top-k 2"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_records_of_two_kinds_are_not_mixed(
    form: str,
    before: str,
    now: str,
    model_dir: Path,
    image_dir: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    output = tmp_path / f"a.{form}"
    args = [
        str(image_dir / "05 cut.jpg"),
        str(image_dir / "03.png"),
        "--model",
        str(model_dir),
        "--output",
        str(output),
    ]
    classify([*args, *before.split()], capfdbinary, expected=1)
    standing = output.read_bytes()
    _, err = classify([*args, "--resume", *now.split()], capfdbinary, expected=2)
    assert "has other records or columns than this call would write" in err
    assert output.read_bytes() == standing
    _, err = classify([*args, "--resume", *before.split()], capfdbinary, expected=1)
    assert err.startswith("0 files after 2 before")


def test_above_a_threshold_records_may_have_fewer_labels(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    args = [str(image_dir / "03.png"), "--model", str(model_dir), "--output", str(tmp_path / "a.jsonl"), "--top-k", "7"]
    classify([*args, "--threshold", "0.3"], capfdbinary)
    assert len(read_records((tmp_path / "a.jsonl").read_bytes())[0]["labels"]) < 7
    _, err = classify([*args, "--threshold", "0.3", "--resume"], capfdbinary)
    assert err.startswith("0 files after 1 before")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("package.json", '{"name": "x", "version": "1.0"}'),  # one line without an end
        ("a.jsonl", '{"path": "a.png", "labels": [], "probabilities": []}\n'),
        ("a.jsonl", '{"path": "a.png", "error": "x"}\n{"path": "b\n{"path": "c.png", "error": "x"}\n'),
        ("a.csv", "a,b,c"),
        ("a.csv", "a\rb\n"),
        ("a.csv", "{header}{row}some args\n{row}"),
        ("a.csv", "{header}{row}some args"),
    ],
)
def test_a_file_of_another_program_is_not_overwritten(
    name: str, content: str, model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    args = [str(image_dir / "03.png"), "--model", str(model_dir), "--top-k", "2", "--output"]
    if "{header}" in content:
        classify([*args, str(tmp_path / "b.csv")], capfdbinary)
        header, row = (tmp_path / "b.csv").read_text().splitlines(keepends=True)
        content = content.format(header=header, row=row)
    (tmp_path / name).write_text(content)
    _, err = classify([*args, str(tmp_path / name), "--resume"], capfdbinary, expected=2)
    assert "has other records or columns than this call would write" in err
    assert (tmp_path / name).read_bytes() == content.encode()


def test_labels_and_errors_are_shown_as_text_in_a_table() -> None:
    record = {"path": "a.png", "labels": ["\x1b]0;title\x07cat", "\u3000"], "probabilities": [0.75, 0.25]}
    table = table_rows(record, width=None, with_header=False)
    assert r"\x1b]0;title\x07cat" in table
    assert "\u3000" in table  # a space of Japanese, as in its file names
    error = {"path": "a.tar/b.png", "error": "a link to \x1b[2J; links in archives are not followed"}
    for row in (table, table_rows(error, width=80, with_header=True)):
        assert "\x1b" not in row
