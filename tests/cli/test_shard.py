"""The command `vitmha shard`."""

from pathlib import Path

import pytest
from builders import write_images
from PIL import Image

from vitmha.cli import main
from vitmha.data import ImageFolder

pytest.importorskip("litdata")


def test_shard_writes_what_data_root_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(12):
        path = tmp_path / "in" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (index, 0, 0)).save(path)
    main(["shard", str(tmp_path / "in"), "--output", str(tmp_path / "new/out"), "--val-fraction", "0.5"])
    assert capsys.readouterr().out == f"{tmp_path}/new/out: 2 classes, 6 training and 6 validation images\n"
    expected = ImageFolder(tmp_path / "in", val_fraction=0.5)
    files = ImageFolder(tmp_path / "new/out").val_files
    assert [files[index][0].name.split()[0] for index in range(len(files))] == [
        str(Path(path).relative_to(tmp_path / "in")) for path, _ in expected.val_files
    ]


@pytest.mark.parametrize(
    ("source", "output", "options", "message"),
    [
        ("in", "in", [], "already exists: choose another directory"),
        ("nowhere", "other", [], "does not exist (expected ROOT/train/CLASS/*.jpg or ROOT/CLASS/*.jpg)"),
        ("in", "other", ["--val-fraction", "2"], "--val-fraction"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    source: str, output: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "in", *(f"a/{index}.png" for index in range(10)))
    with pytest.raises(SystemExit, match="2"):
        main(["shard", str(tmp_path / source), "--output", str(tmp_path / output), *options])
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
