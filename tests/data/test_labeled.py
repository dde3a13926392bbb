"""Sources of labeled images: class directories, splits, built-in datasets and ImageNet's validation set."""

import re
from pathlib import Path

import pytest
from PIL import Image
from rich.progress import Progress

from vitmha.data.fashion_mnist import FASHION_MNIST_CLASSES
from vitmha.data.labeled import class_to_idx, read_labeled, real_labels, selection_split
from vitmha.errors import UserError
from vitmha.images import Preprocessing

CLASSES = ["ant", "bee"]


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)


def test_class_directories_without_splits_are_all_validation_images(tmp_path: Path) -> None:
    write(tmp_path, "ant/1.png", "ant/more/2.png", "bee/3.png", ".hidden/4.png")
    train, val = read_labeled(str(tmp_path), CLASSES)
    assert train == []
    assert [(Path(path).relative_to(tmp_path).as_posix(), label) for path, label in val] == [
        ("ant/1.png", 0),
        ("ant/more/2.png", 0),
        ("bee/3.png", 1),
    ]


def test_splits_are_read_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, "train/ant/1.png", "train/bee/2.png", "val/bee/3.png")
    train, val = read_labeled(str(tmp_path), CLASSES)
    assert ([label for _, label in train], [label for _, label in val]) == ([0, 1], [1])


@pytest.mark.parametrize(("train", "val"), [("Training", "valid"), ("train", "test"), (None, "Validation")])
def test_splits_of_other_tools_are_recognized(tmp_path: Path, train: str | None, val: str) -> None:
    write(tmp_path, *([f"{train}/ant/1.png"] if train else []), f"{val}/bee/3.png")
    images = read_labeled(str(tmp_path), CLASSES)
    assert [[label for _, label in split] for split in images] == [[0] if train else [], [1]]


def test_a_class_name_of_a_model_is_escaped_in_messages() -> None:
    with pytest.raises(UserError, match=re.escape("its 1 classes are ant\\x1b[0m, ...")):
        class_to_idx(["bee"], ["ant\x1b[0m"])


def test_links_between_classes_give_no_image_another_class(tmp_path: Path) -> None:
    write(tmp_path, "ant/1.png", "bee/2.png", "bee/more/3.png")
    for name, target in (("ant/up", ".."), ("ant/bee", "../bee"), ("ant/more", "../bee/more"), ("bee/self", ".")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "bee/gone.png").symlink_to("nowhere")  # is reported when it is read
    bees = ("2.png", "gone.png", "more/3.png")
    expected = [(str(tmp_path / "ant/1.png"), 0), *((str(tmp_path / "bee" / name), 1) for name in bees)]
    assert read_labeled(str(tmp_path), CLASSES).val == expected
    (tmp_path / "cow").symlink_to("nowhere")
    with pytest.raises(UserError, match=r": cow is a broken link to nowhere: remove or repair it$"):
        read_labeled(str(tmp_path), CLASSES)


def test_a_built_in_dataset_has_its_training_and_test_split() -> None:
    train, val = read_labeled("FashionMNISTMini", FASHION_MNIST_CLASSES)
    assert (len(train), len(val)) == (10_000, 2_000)
    assert (train[-1][1], val[0][1], val[0][0].shape) == (9, 0, (28, 28))


def test_flat_imagenet_validation_images_have_no_class_index(tmp_path: Path) -> None:
    write(tmp_path, "ILSVRC2012_val_00000001.JPEG", "other.png")
    _, val = read_labeled(str(tmp_path), [str(i) for i in range(1000)])
    assert val == [(str(tmp_path / "ILSVRC2012_val_00000001.JPEG"), None)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "data nowhere is not a directory of class directories, nor a built-in dataset (CIFAR10, CIFAR100,"),
        ("empty", "data empty: no image files found (expected ROOT/CLASS/*.jpg or ROOT/val/CLASS/*.jpg)"),
        ("partly", "data partly: class directories without images: bee; remove or fill them."),
        ("others", "The model has no class 'cow': its 2 classes are ant, bee, ..."),
        ("FashionMNISTMini", "data FashionMNISTMini has the classes T-shirt/top, Trouser, Pullover, ...,"),
    ],
)
def test_other_sources_are_refused(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty/ant").mkdir(parents=True)
    Path("partly/bee").mkdir(parents=True)
    write(Path("partly"), "ant/1.png")
    Path("others/cow").mkdir(parents=True)
    with pytest.raises(UserError, match=re.escape(message)):
        read_labeled(source, CLASSES)


def test_every_second_image_is_for_selection_if_there_is_no_training_split(tmp_path: Path) -> None:
    write(tmp_path, *(f"{name}/{i}.png" for name in CLASSES for i in range(3)))
    preprocessing = Preprocessing(image_size=(8, 8), mean=(0.5,), std=(0.5,))
    images = read_labeled(str(tmp_path), CLASSES)
    with Progress(disable=True) as progress:
        split = selection_split(images, 10, preprocessing, 2, progress)
        assert (split.eval.labels.tolist(), split.select.labels.tolist()) == ([0, 0, 1], [0, 1, 1])
        assert [len(labels) for _, labels in split.eval] == [2, 1]
        with pytest.raises(UserError, match=re.escape("one to select heads on and one to evaluate on, got 1.")):
            selection_split(images._replace(val=images.val[:1]), 10, preprocessing, 2, progress)


def test_class_indices_are_found_by_class_name_or_by_imagenet_synset() -> None:
    assert class_to_idx(["dog", "ant"], ["ant", "bee", "dog"]) == {"dog": 2, "ant": 0}
    class_names = [f"class {i}" for i in range(1000)]
    assert class_to_idx(["n15075141", "n01440764"], class_names) == {"n15075141": 999, "n01440764": 0}
    with pytest.raises(ValueError, match="no class 'n01440764': its 3 classes are ant, bee, dog"):
        class_to_idx(["n01440764"], ["ant", "bee", "dog"])
    with pytest.raises(ValueError, match="no class 'n0'"):
        class_to_idx(["n0"], class_names)


def test_real_labels_are_found_by_file_name() -> None:
    assert real_labels("x/ILSVRC2012_val_00000002.JPEG") == [970, 795]  # a skier in the Alps
    assert real_labels("ILSVRC2012_val_00050001.JPEG") is None
    assert real_labels("a.jpg") is None
