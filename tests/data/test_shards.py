"""Packed folders: the same pictures as in the folder, once each, on any number of processes, also after a resume."""

import sys
import traceback
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close
from torchvision.transforms.v2.functional import to_pil_image

import vitmha.data.shards
from vitmha.cli import main
from vitmha.data import ImageFolder
from vitmha.data.image_folder import find_files
from vitmha.data.image_loader import ImageLoader
from vitmha.data.shards import pack
from vitmha.images import ImageReadError

pytest.importorskip("litdata")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """21 training and 7 validation pictures of noise in two classes."""
    for part, count in (("train", 21), ("val", 7)):
        for number in range(count):
            path = tmp_path / "folder" / part / "ab"[number % 2] / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(torch.randint(256, (3, 23, 19), dtype=torch.uint8)).save(path)
    return tmp_path / "folder"


@pytest.fixture
def packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, packed into several shards."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(vitmha.data.shards, "SHARD_BYTES", 4000)
    pack(folder, *find_files(folder, 0.1, 0), folder.parent / "packed")
    assert len(list(folder.parent.glob("packed/train/*.bin"))) > 3
    return folder.parent / "packed"


def module(root: Path | str, rank: int = 0, world_size: int = 1, **options: object) -> ImageFolder:
    options = {"image_size": 8, "batch_size": 8 // world_size, "num_workers": 0, **options}
    data = ImageFolder(root, mixup=0.5, rand_augment=9, **options)
    data.trainer = type("Run", (), {"global_rank": rank, "world_size": world_size, "num_devices": world_size})()
    return data


def equal(ones: ImageLoader | list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_close(tuple(one), tuple(other), rtol=0, atol=0)


def test_packed_pictures_are_those_of_the_folder(folder: Path, packed: Path) -> None:
    expected, data = module(folder), module(packed, num_workers=2)
    assert (data.class_names, data.num_classes, len(data.train_files), len(data.val_files)) == (("a", "b"), 2, 21, 7)
    for part in ("train_dataloader", "val_dataloader"):
        equal(getattr(data, part)(), list(getattr(expected, part)()))
    for ours, theirs in ((data.train_files, expected.train_files), (data.val_files, expected.val_files)):
        for number, (path, label) in enumerate(theirs):
            file, its_label = ours[number]
            assert (file.read(), its_label) == (Path(path).read_bytes(), label)
            assert file.name == f"{Path(path).relative_to(folder)} in {packed}"


def test_two_processes_share_the_pictures_of_one(packed: Path) -> None:
    alone, pair = module(packed), [module(packed, rank, 2) for rank in (0, 1)]
    for part in ("train_dataloader", "val_dataloader"):
        shares = zip(*(getattr(each, part)() for each in pair), strict=True)
        equal(getattr(alone, part)(), [tuple(map(torch.cat, zip(*share, strict=True))) for share in shares])
    assert sum(len(labels) for each in pair for _, labels in each.val_dataloader()) == 7


def test_a_packed_folder_is_resumed_in_the_middle_of_an_epoch(packed: Path) -> None:
    whole, stopped, resumed = (module(packed, num_workers=1).train_dataloader() for _ in range(3))
    begun = iter(stopped)
    first = [next(begun)]
    resumed.load_state_dict(stopped.state_dict())
    equal(whole, first + list(resumed))


def test_a_packed_folder_is_read_from_afar(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("litdata.utilities.dataset_utilities.get_default_cache_dir", lambda: str(cache))
    equal(module(f"local://{packed}").train_dataloader(), list(module(packed).train_dataloader()))


def test_a_damaged_picture_is_named_with_its_place(folder: Path) -> None:
    path = folder / "val/a/04.jpg"
    path.write_bytes(path.read_bytes()[:-100])
    packed = folder.parent / "packed"
    pack(folder, *find_files(folder, 0.1, 0), packed)
    with pytest.raises(ImageReadError, match=rf"^val/a/04.jpg in {packed}: [^\n]*truncated[^\n]*$") as caught:
        list(module(packed, num_workers=1).val_dataloader())
    traceback.clear_frames(caught.tb)  # or the worker waits for the garbage collector
    assert sum(len(labels) for _, labels in module(packed, skip_corrupt=True).val_dataloader()) == 6


def test_what_is_packed_is_whole_or_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, packed = find_files(folder, 0.1, 0), folder.parent / "packed"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="division"):
            pack(folder, *contents, packed)
    missing = (contents[0], [*contents[1], (str(folder / "gone.jpg"), 0)], contents[2])
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        pack(folder, *missing, packed)
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    pack(folder, *contents, packed)
    with pytest.raises(ValueError, match=r"packed exists: name a folder that does not"):
        pack(folder, *contents, packed)


def test_without_the_engine_one_line_says_what_to_install(
    folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    for needs in (lambda: ImageFolder(packed), lambda: pack(folder, *find_files(folder, 0.1, 0), folder / "b")):
        with pytest.raises(ValueError, match=r"^packed folders need litdata: pip install 'vitmha\[shards\]'$"):
            needs()
    assert not (folder / "b").exists()


def test_the_word_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        path = tmp_path / "in" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    main(["pack", str(tmp_path / "in"), str(tmp_path / "new/out"), "--val-fraction", "0.5"])
    assert capsys.readouterr().out == f"{tmp_path}/new/out: 2 classes, 6 training and 6 validation pictures\n"
    expected = ImageFolder(tmp_path / "in", val_fraction=0.5)
    files = ImageFolder(tmp_path / "new/out").val_files
    assert [files[number][0].name.split()[0] for number in range(len(files))] == [
        str(Path(path).relative_to(tmp_path / "in")) for path, _ in expected.val_files
    ]
    for words, message in (
        (("in", "new/out"), "exists: name a folder"),
        (("nowhere", "other"), "there is no folder"),
        (("in", "other", "--val-fraction", "2"), "--val-fraction"),
    ):
        paths = [str(tmp_path / word) for word in words[:2]]
        with pytest.raises(SystemExit, match="2"):
            main(["pack", *paths, *words[2:]])
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
