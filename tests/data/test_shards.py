"""Shards give the same images as their source, once each, on any number of processes, after a resume too."""

import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from builders import assert_equal, set_rank
from torchvision.transforms.v2.functional import to_pil_image

import vitmha.data.shards
from vitmha.data import ImageFolder
from vitmha.data.image_folder import find_files
from vitmha.data.shards import write_shards
from vitmha.images import ImageReadError

pytest.importorskip("litdata")


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """21 training and 7 validation images of noise in two classes."""
    for split, count in (("train", 21), ("val", 7)):
        for index in range(count):
            path = tmp_path / "images" / split / "ab"[index % 2] / f"{index:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(torch.randint(256, (3, 23, 19), dtype=torch.uint8)).save(path)
    return tmp_path / "images"


@pytest.fixture
def shards(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same images in several shards."""
    monkeypatch.setattr(vitmha.data.shards, "SHARD_BYTES", 4000)
    write_shards(image_root, *find_files(image_root, 0.1, 0), image_root.parent / "shards")
    assert len(list(image_root.parent.glob("shards/train/*.bin"))) > 3
    return image_root.parent / "shards"


def module(root: Path | str, rank: int = 0, world_size: int = 1, **options: object) -> ImageFolder:
    options = {"image_size": 8, "batch_size": 8 // world_size, "num_workers": 0, **options}
    data = ImageFolder(root, mixup=0.5, rand_augment=9, **options)
    set_rank(data, rank, world_size)
    return data


def test_images_in_shards_equal_those_of_the_source(image_root: Path, shards: Path) -> None:
    expected, data = module(image_root), module(shards, num_workers=2)
    assert (data.class_names, data.num_classes, len(data.train_files), len(data.val_files)) == (("a", "b"), 2, 21, 7)
    for method in ("train_dataloader", "val_dataloader"):
        assert_equal(list(getattr(data, method)()), list(getattr(expected, method)()))
    for files, sources in ((data.train_files, expected.train_files), (data.val_files, expected.val_files)):
        for index, (path, label) in enumerate(sources):
            file, index_of_class = files[index]
            assert (file.read(), index_of_class) == (Path(path).read_bytes(), label)
            assert file.name == f"{Path(path).relative_to(image_root)} in {shards}"


def test_two_processes_read_the_images_of_one(shards: Path) -> None:
    single, pair = module(shards), [module(shards, rank, 2) for rank in (0, 1)]
    for method in ("train_dataloader", "val_dataloader"):
        steps = zip(*(getattr(data, method)() for data in pair), strict=True)
        batches = [tuple(map(torch.cat, zip(*step, strict=True))) for step in steps]
        assert_equal(list(getattr(single, method)()), batches)
    assert sum(len(labels) for data in pair for _, labels in data.val_dataloader()) == 7


def test_a_resume_continues_in_the_middle_of_an_epoch(shards: Path) -> None:
    uninterrupted, stopped, resumed = (module(shards, num_workers=1).train_dataloader() for _ in range(3))
    begun = iter(stopped)
    first = [next(begun)]
    resumed.load_state_dict(stopped.state_dict())
    assert_equal(list(uninterrupted), first + list(resumed))


def test_shards_are_read_from_an_address(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("litdata.utilities.dataset_utilities.get_default_cache_dir", lambda: str(cache))
    assert_equal(list(module(f"local://{shards}").train_dataloader()), list(module(shards).train_dataloader()))


def test_a_corrupt_file_is_named_with_its_shards(image_root: Path) -> None:
    path = image_root / "val/a/04.jpg"
    path.write_bytes(path.read_bytes()[:-100])
    shards = image_root.parent / "shards"
    write_shards(image_root, *find_files(image_root, 0.1, 0), shards)
    root = re.escape(str(shards))
    with pytest.raises(ImageReadError, match=rf"^val/a/04.jpg in {root}: [^\n]*truncated[^\n]*$") as caught:
        list(module(shards, num_workers=1).val_dataloader())
    traceback.clear_frames(caught.tb)  # or the worker waits for the garbage collector
    assert sum(len(labels) for _, labels in module(shards, skip_corrupt=True).val_dataloader()) == 6


def test_the_output_is_complete_or_does_not_exist(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, shards = find_files(image_root, 0.1, 0), image_root.parent / "shards"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="division"):
            write_shards(image_root, *contents, shards)
    incomplete = (contents[0], [*contents[1], (str(image_root / "missing.jpg"), 0)], contents[2])
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg"):
        write_shards(image_root, *incomplete, shards)
    assert [path.name for path in image_root.parent.iterdir()] == ["images"]
    write_shards(image_root, *contents, shards)
    with pytest.raises(ValueError, match=r"^output .*/shards already exists: choose another directory"):
        write_shards(image_root, *contents, shards)


def test_without_litdata_the_error_says_what_to_install(
    image_root: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    for call in (
        lambda: ImageFolder(shards),
        lambda: write_shards(image_root, *find_files(image_root, 0.1, 0), image_root / "b"),
    ):
        with pytest.raises(ValueError, match=r"^shards need the package litdata: pip install 'vitmha\[shards\]'$"):
            call()
    assert not (image_root / "b").exists()
