"""Class directories: which images, which labels, in which order, on how many processes."""

import logging
import os
import re
import shutil
import traceback
from pathlib import Path

import pytest
import torch
from builders import QUIET, BatchRecorder, assert_equal, multichannel_tiff, quiet_trainer, set_rank, write_images
from jsonargparse import ArgumentParser
from lightning import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.testing import assert_close
from torchvision import datasets
from torchvision.transforms.v2.functional import to_pil_image

import vitmha.data
from vitmha.data import ImageFolder
from vitmha.images import ImageReadError, Preprocessing

LAYOUT = r"expected ROOT/train/CLASS/\*\.jpg or ROOT/CLASS/\*\.jpg"


def test_hidden_and_unknown_files_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_classes = ("a/1.JPEG", "a/.DS_Store", "a/._1.jpg", "a/deep/2.png", "a/notes.txt", "b/x.webp")
    in_root = (".ipynb_checkpoints/z.png", "labels.csv")
    for split in ("train", "val"):
        write_images(tmp_path / split, *in_classes, *in_root)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        data = ImageFolder(tmp_path)
    assert data.class_names == ("a", "b")
    expected = [("a/1.JPEG", 0), ("a/deep/2.png", 0), ("b/x.webp", 1)]
    assert data.train_files == [(str(tmp_path / "train" / name), label) for name, label in expected]
    assert data.val_files == [(str(tmp_path / "val" / name), label) for name, label in expected]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / split}: 5 hidden or unknown files and directories skipped" for split in ("train", "val")
    ]


def test_validation_has_the_class_indices_of_training(tmp_path: Path) -> None:
    write_images(tmp_path, "train/cat/1.png", "train/dog/1.png", "train/owl/1.png", "val/cat/1.png", "val/owl/1.png")
    data = ImageFolder(tmp_path, batch_size=2, num_workers=0)
    assert (data.class_names, data.num_classes) == (("cat", "dog", "owl"), 3)
    assert_equal(next(iter(data.val_dataloader()))[1], torch.tensor([0, 2]))
    write_images(tmp_path, "val/emu/1.png", "val/ant/1.png")
    with pytest.raises(ValueError, match=r"root .*: classes in val/ that train/ does not have: ant, emu$"):
        ImageFolder(tmp_path)


def test_other_directory_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^root .*/absent does not exist \({LAYOUT}\)$"):
        ImageFolder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^root .*/file is not a directory \({LAYOUT}\)$"):
        ImageFolder(tmp_path / "file")
    with pytest.raises(ValueError, match=rf"^root .*: no image files found \({LAYOUT}\)$"):
        ImageFolder(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.parquet").touch()
    with pytest.raises(ValueError, match=rf"^root .*: no image files found \({LAYOUT}\); train.parquet is not read: "):
        ImageFolder(tmp_path)
    (tmp_path / "labels.csv").touch()
    with pytest.raises(
        ValueError, match=rf"labels.csv is not a directory \({LAYOUT}\); labels in a table are not read"
    ):
        ImageFolder(tmp_path / "labels.csv")
    (tmp_path / "flat/train").mkdir(parents=True)
    write_images(tmp_path / "flat", "val/1.png", "train/1.png")
    (tmp_path / "flat/train/metadata.csv").touch()
    with pytest.raises(ValueError, match=r"/flat/train: no image files found .*; metadata.csv is not read: labels are"):
        ImageFolder(tmp_path / "flat")
    write_images(tmp_path / "gap", "a/1.png", "c/1.png")
    (tmp_path / "gap/b_empty").mkdir()
    with pytest.raises(ValueError, match=r"/gap: class directories without images: b_empty; remove or fill them$"):
        ImageFolder(tmp_path / "gap")
    with pytest.raises(ValueError, match=r"^root .*/half has train/ but not val/: expected both"):
        ImageFolder(write_images(tmp_path / "half", "train/a/1.png"))
    with pytest.raises(ValueError, match=r"^val_fraction 0.1 leaves no image of .*/few for validation"):
        ImageFolder(write_images(tmp_path / "few", "a/1.png", "a/2.png"))


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("training", "validation", "testing"), ("Train", "Val", "TEST"), ("train", "valid", "test"), ("Train", "dev", "")],
)
def test_split_names_of_other_tools_are_recognized(
    tmp_path: Path, train: str, val: str, test: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{train}/a/1.png", f"{train}/b/2.png", f"{val}/a/3.png", *([f"{test}/b/4.png"] if test else [])]
    data = ImageFolder(write_images(tmp_path, *names), image_size=8, batch_size=1, num_workers=0)
    assert data.class_names == ("a", "b")
    assert [Path(path).name for path, _ in data.train_files] == ["1.png", "2.png"]
    assert [Path(path).name for path, _ in data.val_files] == ["3.png"]
    # The test split is the test set; without one it is the validation set.
    assert [labels.tolist() for _, labels in data.test_dataloader()] == [[1] if test else [0]]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        data.setup("test")
    notice = f"root {tmp_path} has no test split: the validation images are the test set"
    assert (notice in caplog.messages) == (not test)


def test_splits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/1.png", "training/a/1.png", "val/a/1.png")
    with pytest.raises(ValueError, match=r"^root .* has train/ and training/: keep one of them$"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match=r"^root .* has Validation/ but not train/: expected both train/ and val/"):
        ImageFolder(write_images(tmp_path / "alone", "Validation/a/1.png", "other/a/1.png"))
    with pytest.raises(ValueError, match=r"^root .*: classes in Test/ that train/ does not have: b$"):
        ImageFolder(write_images(tmp_path / "more", "train/a/1.png", "val/a/1.png", "Test/b/1.png"))


def test_class_directories_that_hold_only_directories_are_refused_unless_asked_for(tmp_path: Path) -> None:
    root = write_images(tmp_path, *(f"{name}/images/{i}.png" for name in ("a", "b") for i in range(5)))
    with pytest.raises(ValueError, match=r"class directories that hold only directories: a, b; .* nested_classes"):
        ImageFolder(root)
    assert len(ImageFolder(root, val_fraction=0.2, nested_classes=True).train_files) == 8


def test_a_loop_of_links_ends_and_each_image_is_found_once(tmp_path: Path) -> None:
    root = write_images(tmp_path, *(f"{name}/{i}.png" for name in ("a", "b") for i in range(4)))
    write_images(root, "b/more/4.png")
    for name, target in (("a/self", "."), ("a/up", ".."), ("a/b", "../b"), ("a/more", "../b/more"), ("b/up", "..")):
        (root / name).symlink_to(target)
    data = ImageFolder(root, val_fraction=0.25)
    images = [(str(root / name / f"{i}.png"), label) for label, name in enumerate("ab") for i in range(4)]
    assert sorted([*data.train_files, *data.val_files]) == [*images, (str(root / "b/more/4.png"), 1)]
    (root / "c").symlink_to("a")
    with pytest.raises(ValueError, match=r": a and c are the same directory: remove one of the links$"):
        ImageFolder(root)


def test_links_to_nothing_pipes_and_missing_validation_images_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png")
    (tmp_path / "train/a/gone.png").symlink_to("nowhere")
    os.mkfifo(tmp_path / "train/a/pipe.png")
    data = ImageFolder(tmp_path)
    assert [Path(path).name for path, _ in data.train_files] == ["1.png", "1.png"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{tmp_path}/train: 1 images are broken links and are skipped: {tmp_path}/train/a/gone.png",
        f"root {tmp_path}: classes without validation images: b",
    ]
    (tmp_path / "val/b").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"/val: b is a broken link to nowhere: remove or repair it$"):
        ImageFolder(tmp_path)


def test_validation_on_the_training_images_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (write_images(tmp_path, "train/a/1.png") / "valid").symlink_to("train")
    assert len(ImageFolder(tmp_path).val_files) == 1
    assert f"root {tmp_path}: train/ and valid/ are the same directory, so validation measures training images" in (
        caplog.messages
    )


def test_class_names_in_messages_are_escaped(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/1.png", "val/a/1.png", "val/b\x1b[31m/1.png")
    with pytest.raises(ValueError, match=r": b\\x1b\[31m$"):
        ImageFolder(tmp_path)
    os.makedirs(os.fsencode(tmp_path) + b"/other/caf\xe9")
    with pytest.raises(ValueError, match=r"the name of class directory caf\\udce9 is not UTF-8: rename it$"):
        ImageFolder(tmp_path / "other")


def test_an_unsupported_format_is_named_before_training(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/1.png", "train/b/2.png", "val/a/1.png", "val/b/1.png")
    (tmp_path / "train/b/1.tif").write_bytes(multichannel_tiff(channels=6, bits=16))
    with pytest.raises(ImageReadError, match=r"train/b/1.tif: a TIFF of 6 channels of 16 bits is not supported"):
        ImageFolder(tmp_path)


def test_the_run_directory_says_which_images_of_which_classes_were_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_images(tmp_path / "data", *(f"{name}/{i}.png" for name in ("b", "a") for i in range(5)))
    data = ImageFolder(root, image_size=8, batch_size=2, num_workers=0, val_fraction=0.2)
    trainer = Trainer(**{**QUIET, "logger": CSVLogger(tmp_path, name="", version="run")}, max_epochs=1)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(BatchRecorder(), datamodule=data)
    assert "2 classes (a, b); 8 training, 2 validation images" in caplog.messages
    assert (tmp_path / "run/data.csv").read_text() == "index,class,train,val,test\n0,a,4,1,0\n1,b,4,1,0\n"
    assert (tmp_path / "run/held_out.txt").read_text().splitlines() == [path for path, _ in data.val_files]


def test_the_split_depends_on_class_and_seed(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"a/{i}.png" for i in range(20)), *(f"b/{i}.png" for i in range(10)), "c/only.png")
    data = ImageFolder(tmp_path, val_fraction=0.3)
    assert [label for _, label in data.val_files] == [0] * 6 + [1] * 3
    assert [label for _, label in data.train_files] == [0] * 14 + [1] * 7 + [2]
    assert len({path for path, _ in data.train_files + data.val_files}) == 31
    assert ImageFolder(tmp_path, val_fraction=0.3).val_files == data.val_files
    assert ImageFolder(tmp_path, val_fraction=0.3, split_seed=1).val_files != data.val_files
    write_images(tmp_path, "b/another.png")
    assert ImageFolder(tmp_path, val_fraction=0.3).val_files[:6] == data.val_files[:6]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_file_is_named(tmp_path: Path, workers: int) -> None:
    write_images(tmp_path, *(f"{split}/a/{i}.jpg" for split in ("train", "val") for i in range(10)))
    for split in ("train", "val"):
        path = tmp_path / split / "a/3.jpg"
        path.write_bytes(path.read_bytes()[:-40])
    data = ImageFolder(tmp_path, image_size=8, batch_size=2, num_workers=workers)
    for split, make_loader in (("train", data.train_dataloader), ("val", data.val_dataloader)):
        path = re.escape(str(tmp_path / split / "a/3.jpg"))
        with pytest.raises(ImageReadError, match=rf"^{path}: (?i:[^\n]*truncated[^\n]*)$") as caught:
            list(make_loader())
        traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_processes_read_each_image_once(tmp_path: Path, world_size: int) -> None:
    write_images(tmp_path, *(f"{split}/{i:02}/1.png" for split in ("train", "val") for i in range(7)))
    read = []
    for rank in range(world_size):
        data = ImageFolder(tmp_path, image_size=8, batch_size=2, num_workers=0)
        set_rank(data, rank, world_size)
        read.append(list(data.val_dataloader()))
        train = data.train_dataloader()
        assert len(list(train)) == len(train) == 7 // (2 * world_size)
    assert len({len(batches) for batches in read}) == 1
    labels = [label for step in zip(*read, strict=True) for _, batch in step for label in batch.tolist()]
    assert labels == list(range(7))
    assert {images.shape[1:] for batches in read for images, _ in batches} == {(3, 8, 8)}


def test_evaluation_images_equal_the_preprocessing_of_their_files(real_data: Path) -> None:
    data = ImageFolder(real_data / "tiny-imagenet-20", image_size=(40, 56), batch_size=5, num_workers=0, crop_pct=0.9)
    images, labels = next(iter(data.val_dataloader()))
    reference = datasets.ImageFolder(real_data / "tiny-imagenet-20/val")
    assert_equal(labels, torch.tensor([label for _, label in reference.samples[:5]]))
    assert_equal(images, torch.stack([data.preprocessing(reference[i][0]) for i in range(5)]))
    assert data.class_names == tuple(reference.classes)
    assert data.image_size == data.preprocessing.image_size == (40, 56)
    assert len(data.train_files) == len(datasets.ImageFolder(real_data / "tiny-imagenet-20/train"))


def test_training_images_are_augmented_and_normalized(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/0.png", "train/a/1.png", "val/a/0.png")
    options = {"image_size": (8, 5), "batch_size": 2, "num_workers": 0, "mean": (0.5,), "std": (0.25,)}
    data = ImageFolder(tmp_path, **options, rand_augment=9)
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (2, 1, 8, 5)
    assert data.in_channels == 1

    # All crops of an image of one color are the same.
    images, _ = next(iter(ImageFolder(tmp_path, **options).train_dataloader()))
    levels = sorted(images.mean((1, 2, 3)).tolist())
    assert levels == pytest.approx([-2.0, (3 / 255 - 0.5) / 0.25])  # luma of red 10 is 2.99


def test_without_augmentation_a_training_image_is_resized_as_a_whole(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/0.png", "val/a/0.png")
    noise = to_pil_image(torch.randint(256, (3, 13, 13), dtype=torch.uint8))
    noise.save(tmp_path / "train/a/0.png")
    data = ImageFolder(tmp_path, image_size=8, batch_size=1, num_workers=0, crop_scale=(1.0, 1.0), hflip=0.0)
    images, _ = next(iter(data.train_dataloader()))
    expected = Preprocessing(image_size=(8, 8), mean=data.preprocessing.mean, std=data.preprocessing.std)
    assert_equal(images[0], expected(noise))


def test_every_image_is_read_once_per_epoch(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"train/{i:02}/1.png" for i in range(12)), "val/00/1.png")
    loader = ImageFolder(tmp_path, image_size=8, batch_size=4, num_workers=0).train_dataloader()
    epochs = [torch.cat([labels for _, labels in loader]).tolist()]
    loader.batch_sampler.set_epoch(1)
    epochs.append(torch.cat([labels for _, labels in loader]).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_mixup_blends_labels_in_training_only(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"{split}/{i}/1.png" for split in ("train", "val") for i in range(7)))
    model, data = BatchRecorder(), ImageFolder(tmp_path, image_size=8, batch_size=3, num_workers=0, mixup=0.8)
    quiet_trainer(tmp_path, 2).fit(model, datamodule=data)
    assert len(model.trained) == 4
    for _, labels in model.trained:
        assert labels.shape == (3, 7)
        assert_close(labels.sum(1), torch.ones(3))
        assert ((labels > 0) & (labels < 1)).any()
    assert [(len(labels), labels.dtype) for _, labels in model.validated] == [(n, torch.int64) for n in [3, 3, 1] * 2]


def test_a_batch_larger_than_the_training_set_is_refused(tmp_path: Path) -> None:
    data = ImageFolder(write_images(tmp_path, "train/a/1.png", "val/a/1.png"), num_workers=0)
    with pytest.raises(ValueError, match=r"^batch_size 128 takes 128 images per step, but the training set has 1:"):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("num_workers", -1),
        ("val_fraction", 1.0),
        ("crop_scale", (0.0, 1.0)),
        ("rand_augment", 31),
        ("mixup", -0.1),
        ("cutmix", -0.1),
        ("mixup", float("nan")),
        ("cutmix", float("inf")),
        ("random_erasing", 1.1),
        ("repeated_aug", 0),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {re.escape(str(value))}$"):
        ImageFolder(tmp_path, **{name: value})


def test_only_one_augmentation_policy_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^rand_augment, .* and three_augment cannot be combined"):
        ImageFolder(tmp_path, rand_augment=9, three_augment=True)


def test_the_command_line_builds_every_data_module(tmp_path: Path) -> None:
    for name in vitmha.data.__all__:
        getattr(vitmha.data, name)  # imports it
    root = write_images(tmp_path, "train/a/1.png", "val/a/1.png")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")

    def build(*arguments: str) -> object:
        return parser.instantiate_classes(parser.parse_args(list(arguments))).data

    assert build("--data=FashionMNISTMini", "--data.batch_size=5").batch_size == 5
    assert build("--data=CIFAR100", f"--data.root={root}", "--data.hflip=0").augmentations[0].padding == 4
    at_root = f"--data.root={root}"
    assert build("--data=ImageFolder", at_root, "--data.image_size=64").image_size == (64, 64)
    assert build("--data=ImageFolder", at_root, "--data.image_size=[64,32]").image_size == (64, 32)
    assert build("--data=ImageFolder", at_root, "--data.mean=[0.5]", "--data.std=[0.5]").in_channels == 1
    shutil.rmtree(root / "val")
    with pytest.raises(ValueError, match="has train/ but not val/"):
        build("--data=ImageFolder", at_root)
