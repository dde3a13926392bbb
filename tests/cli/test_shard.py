"""The command `vitmha shard`."""

from pathlib import Path

import pytest
from builders import assert_equal, write_images
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
    assert capsys.readouterr().out == f"{tmp_path}/new/out: 2 classes; 6 training, 6 validation and 0 test images\n"
    expected = ImageFolder(tmp_path / "in", val_fraction=0.5)
    files = ImageFolder(tmp_path / "new/out").val_files
    assert [files[index][0].name.split()[0] for index in range(len(files))] == [
        str(Path(path).relative_to(tmp_path / "in")) for path, _ in expected.val_files
    ]


def test_the_test_split_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_images(tmp_path / "in", "train/a/1.png", "train/b/2.png", "val/a/3.png", "Test/b/4.png")
    main(["shard", str(root), "--output", str(tmp_path / "out")])
    assert capsys.readouterr().out.endswith(": 2 classes; 2 training, 1 validation and 1 test images\n")
    data = ImageFolder(tmp_path / "out", image_size=8, batch_size=1, num_workers=0)
    assert_equal(list(data.test_dataloader()), list(ImageFolder(root, image_size=8, num_workers=0).test_dataloader()))


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
