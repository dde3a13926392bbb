"""Data sets in memory and in folders: which pictures, which labels, in which order, on how many processes."""

import logging
import pickle
import shutil
import traceback
from importlib.resources import files
from itertools import chain
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import LightningDataModule, LightningModule, Trainer
from make_fashion_mnist_mini import embed
from PIL import Image
from torch import Tensor
from torch.testing import assert_close
from torchvision import datasets
from torchvision.transforms.v2 import functional as transforms
from torchvision.transforms.v2.functional import to_pil_image

from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini, FashionMNISTSequences, ImageFolder
from vitmha.data.augmentation import RandomCropFlip
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.data.sequences import compose_sequences
from vitmha.images import ImageReadError, Preprocessing

# Lightning asks PyTorch's pytrees in a way that PyTorch has since deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")


def equal(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


# Sampling


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_counts_each_sample_once(world_size: int) -> None:
    parts = [GlobalBatchSampler(21, 4, training=False, rank=rank, world_size=world_size) for rank in range(world_size)]
    read = [list(part) for part in parts]
    assert {len(part) for part in parts} == {len(batches) for batches in read} == {-(-21 // (4 * world_size))}
    steps = zip(*read, strict=True)
    assert list(chain.from_iterable(chain(*steps))) == list(range(21))
    assert max(len(share) for batches in read for share in batches) <= 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_global_batches_of_one(world_size: int) -> None:
    alone = GlobalBatchSampler(53, 6, training=True, seed=5)
    parts = [
        GlobalBatchSampler(53, 6 // world_size, training=True, seed=5, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for epoch in (0, 4):
        for sampler in (alone, *parts):
            sampler.set_epoch(epoch)
        together = [list(chain(*shares)) for shares in zip(*parts, strict=True)]
        assert together == list(alone)
        assert len(together) == 8
        assert len({index for batch in together for index in batch}) == 48


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = GlobalBatchSampler(40, 4, training=True, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(3)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 21 pictures, but one step takes 24 \(--data.batch_size 12 on 2 proc"):
        GlobalBatchSampler(21, 12, training=True, world_size=2)
    with pytest.raises(ValueError, match=r"--data.batch_size must be at least 1, got 0"):
        GlobalBatchSampler(21, 0, training=False)


# Augmentation


@pytest.mark.parametrize(("padding", "flip"), [(3, True), (0, True), (4, False)])
def test_crop_and_flip_equal_torchvision(padding: int, flip: bool) -> None:
    images = torch.randint(256, (211, 3, 7, 11), dtype=torch.uint8)
    augmentation = RandomCropFlip(padding=padding, hflip=0.5 if flip else 0)
    draws = augmentation.draw(211, torch.Generator().manual_seed(3))
    for image, result, (mirrored, top, left) in zip(
        images, augmentation.apply(images, draws), draws.tolist(), strict=True
    ):
        expected = transforms.horizontal_flip(image) if mirrored else image
        equal(result, transforms.crop(transforms.pad(expected, [padding]), top, left, 7, 11))
    assert {*draws[:, 0].tolist()} == ({0, 1} if flip else {0})
    assert {*draws[:, 1].tolist()} == {*draws[:, 2].tolist()} == set(range(2 * padding + 1))


# In memory


def batches(rank: int = 0, world_size: int = 1, batch_size: int = 6, seed: int = 0) -> InMemoryLoader:
    generator = torch.Generator().manual_seed(1)
    return InMemoryLoader(
        torch.randint(256, (53, 3, 7, 11), dtype=torch.uint8, generator=generator),
        torch.arange(53),
        preprocessing=Preprocessing(image_size=(7, 11), mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4)),
        batch_sampler=GlobalBatchSampler(53, batch_size, training=True, seed=seed, rank=rank, world_size=world_size),
        changes=[RandomCropFlip(padding=2, hflip=0.5)],
    )


def test_two_processes_see_the_pictures_of_one() -> None:
    alone, *pair = batches(), batches(0, 2, 3), batches(1, 2, 3)
    for loader in (alone, *pair):
        loader.batch_sampler.set_epoch(3)
    steps = list(zip(alone, *pair, strict=True))
    assert len(steps) == len(alone) == len(pair[0]) == 8
    for (images, labels), (first, first_labels), (second, second_labels) in steps:
        equal(torch.cat([first, second]), images)
        equal(torch.cat([first_labels, second_labels]), labels)


def test_a_step_can_be_made_from_seed_epoch_and_number() -> None:
    loader = batches(seed=11)
    loader.batch_sampler.set_epoch(2)
    before = torch.get_rng_state()
    step, (images, labels) = list(enumerate(loader))[5]
    equal(torch.get_rng_state(), before)

    sampler = GlobalBatchSampler(53, 6, training=True, seed=11)
    sampler.set_epoch(2)
    [change] = loader.changes
    draws = change.draw(6, sampler.generator(step))
    equal(labels, torch.randperm(53, generator=sampler.generator())[30:36])
    equal(images, loader.preprocessing.normalize(change.apply(loader.images[labels], draws)))

    assert not torch.equal(draws, change.draw(6, sampler.generator(step - 1)))
    loader.batch_sampler.set_epoch(3)
    assert not torch.equal(list(loader)[5][1], labels)


class Watcher(LightningModule):
    """Keeps what it is given; one parameter, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.trained: list[tuple[int, Tensor]] = []
        self.validated: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trained.append((self.current_epoch, batch[0]))
        return self.scale * batch[0].mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(folder: Path, max_epochs: int) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )


def test_lightning_sets_the_epoch_also_after_a_resume(tmp_path: Path) -> None:
    whole, first, resumed = Watcher(), Watcher(), Watcher()
    trainer(tmp_path, 3).fit(whole, datamodule=FashionMNISTMini(batch_size=4096))
    stopped = trainer(tmp_path, 2)
    stopped.fit(first, datamodule=FashionMNISTMini(batch_size=4096))
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    trainer(tmp_path, 3).fit(
        resumed, datamodule=FashionMNISTMini(batch_size=4096), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )
    together = first.trained + resumed.trained
    assert [epoch for epoch, _ in together] == [epoch for epoch, _ in whole.trained] == [0, 0, 1, 1, 2, 2]
    for (_, images), (_, expected) in zip(together, whole.trained, strict=True):
        equal(images, expected)
    assert sum(whole.validated) == 3 * 2000

    expected = FashionMNISTMini(batch_size=4096)
    expected.setup("fit")
    loader = expected.train_dataloader()
    loader.batch_sampler.set_epoch(2)
    equal(list(loader)[1][0], together[-1][1])


def test_the_seed_of_the_run_orders_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    data = FashionMNISTMini(batch_size=50)
    data.setup("fit")
    labels = []
    for seed in ("3", "3", "4"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        labels.append(next(iter(data.train_dataloader()))[1])
    equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])


def test_fashion_mnist_mini_is_the_official_data(real_data: Path) -> None:
    mini, whole = FashionMNISTMini(), FashionMNIST(real_data)
    for train, count in ((True, 1000), (False, 200)):
        images, labels = mini.read(train)
        official, official_labels = whole.read(train)
        assert images.shape == (10 * count, 1, 28, 28)
        for label in range(10):
            equal(images[labels == label], official[official_labels == label][:count])


def test_the_sheet_can_be_made_again(real_data: Path, tmp_path: Path) -> None:
    embed(real_data, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as again, (files("vitmha.data") / "fashion_mnist_mini.png").open("rb") as f:
        assert again.tobytes() == Image.open(f).tobytes()


@pytest.mark.parametrize("dataset", [FashionMNIST, CIFAR10])
def test_mean_and_std_are_those_of_the_training_set(dataset: type[FashionMNIST | CIFAR10], real_data: Path) -> None:
    data = dataset(real_data)
    images, _ = data.read(train=True)
    pixels = images.transpose(0, 1).flatten(1).float() / 255
    assert_close(torch.tensor(data.preprocessing.mean), pixels.mean(1), rtol=0, atol=5e-5)
    assert_close(torch.tensor(data.preprocessing.std), pixels.std(1), rtol=0, atol=1e-4)
    assert data.in_channels == images.shape[1]
    assert data.image_size == images.shape[2:]


def test_evaluation_pictures_are_those_of_a_file(real_data: Path) -> None:
    data = CIFAR10(real_data, batch_size=7)
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    raw, expected = data.read(train=False)
    equal(labels, expected[:7])
    equal(images, torch.stack([data.preprocessing(to_pil_image(image)) for image in raw[:7]]))


def test_official_binary_files_hold_what_they_should(real_data: Path) -> None:
    images, labels = CIFAR10(real_data).read(train=False)
    assert [CIFAR10(real_data).class_names[label] for label in labels[:4]] == ["cat", "ship", "ship", "airplane"]
    equal(labels.bincount(), torch.full((10,), 1000))
    equal(images[0, :, 0, 0], torch.tensor([158, 112, 49], dtype=torch.uint8))


def write_python_version(
    dataset: type[datasets.CIFAR10], folder: Path, records: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR as torchvision reads it, of records of one label and the pixels; the checksums are left out."""
    folder.mkdir()
    coarse = {"coarse_labels": [0] * len(records)} if dataset is datasets.CIFAR100 else {}
    labels = "fine_labels" if coarse else "labels"
    batch = pickle.dumps({"data": records[:, 1:], labels: records[:, 0].tolist(), **coarse})
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(dataset, attribute)]
        for name in names:
            (folder / name).write_bytes(batch)
        monkeypatch.setattr(dataset, attribute, [[name, None] for name in names])
    (folder / dataset.meta["filename"]).write_bytes(pickle.dumps({dataset.meta["key"]: []}))
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": None})


def test_cifar10_python_version_equals_binary(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_data / "cifar-10-batches-bin/test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    write_python_version(datasets.CIFAR10, tmp_path / "cifar-10-batches-py", records, monkeypatch)
    binary, python = CIFAR10(real_data), CIFAR10(tmp_path)
    python.prepare_data()
    for actual, expected in zip(python.read(train=False), binary.read(train=False), strict=True):
        equal(actual, expected)
    equal(python.read(train=True)[1], binary.read(train=False)[1].repeat(5))


def test_cifar100_binary_version_equals_python(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = real_data / "cifar-10-batches-bin/test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    records[:, 0] = np.arange(len(records)) % 100
    write_python_version(datasets.CIFAR100, tmp_path / "cifar-100-python", records, monkeypatch)
    python = CIFAR100(tmp_path).read(train=False)

    (tmp_path / "cifar-100-binary").mkdir()
    coarse = np.full((len(records), 1), 19, dtype=np.uint8)
    np.hstack([coarse, records]).tofile(tmp_path / "cifar-100-binary/test.bin")
    data = CIFAR100(tmp_path)
    data.prepare_data()
    data.setup("test")
    for actual, expected in zip(data.read(train=False), python, strict=True):
        equal(actual, expected)
    equal(data.test_dataloader().images, python[0])
    assert data.test_dataloader().images.is_contiguous()
    assert (len(data.class_names), *data.class_names[::33]) == (100, "apple", "forest", "raccoon", "worm")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(3073 * 5000))
    with pytest.raises(ValueError, match=r"test_batch.bin has 15365000 bytes instead of 30730000: delete the folder"):
        CIFAR10(tmp_path).setup("test")
    with pytest.raises(ValueError, match=r"data_batch_1.bin has 0 bytes"):
        CIFAR10(tmp_path).setup("fit")


@pytest.mark.parametrize("dataset", [FashionMNIST, CIFAR10, CIFAR100])
def test_absent_data_says_what_to_put_where(
    dataset: type[FashionMNIST | CIFAR10 | CIFAR100], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: object, **options: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    data = dataset(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/.* is absent .*no network.*--data.root") as caught:
        data.prepare_data()
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"{tmp_path}/.* does not hold the official files .*--data.root"):
        data.setup("fit")


def test_what_the_model_needs_is_known_before_reading() -> None:
    described = [
        (data.num_classes, len(data.class_names), data.in_channels, data.image_size, data.preprocessing.image_size)
        for data in (FashionMNISTMini(), FashionMNIST("/absent"), CIFAR10("/absent"), CIFAR100("/absent"))
    ]
    gray, colour = (1, (28, 28), (28, 28)), (3, (32, 32), (32, 32))
    assert described == [(10, 10, *gray), (10, 10, *gray), (10, 10, *colour), (100, 100, *colour)]


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"--data.batch_size must be at least 1, got 0"):
        FashionMNISTMini(batch_size=0)
    with pytest.raises(ValueError, match=r"--data.random_crop_padding must be 0 \(no crop\) or more, got -1"):
        CIFAR10(padding=-1)


# Folders


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def make(root: Path, *names: str) -> Path:
    """Pictures of one colour each, all different: the colour is the position in `names`."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        suffix = Path(name).suffix.lower()
        if suffix in (".png", ".webp", ".jpeg", ".jpg"):
            format_ = {".png": "png", ".webp": "webp"}.get(suffix, "jpeg")
            Image.new("RGB", (9, 13), (10 * number, 0, 0)).save(root / name, format=format_)
        else:
            (root / name).write_text("no picture")
    return root


def test_hidden_and_foreign_files_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside = ("a/1.JPEG", "a/.DS_Store", "a/._1.jpg", "a/deep/2.png", "a/notes.txt", "b/x.webp")
    outside = (".ipynb_checkpoints/z.png", "labels.csv")
    for part in ("train", "val"):
        make(tmp_path / part, *inside, *outside)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        data = ImageFolder(tmp_path)
    assert data.class_names == ("a", "b")
    expected = [("a/1.JPEG", 0), ("a/deep/2.png", 0), ("b/x.webp", 1)]
    assert data.train_files == [(str(tmp_path / "train" / name), label) for name, label in expected]
    assert data.val_files == [(str(tmp_path / "val" / name), label) for name, label in expected]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / part}: 5 hidden or unknown files and folders skipped" for part in ("train", "val")
    ]


def test_validation_keeps_the_numbers_of_training(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.png", "train/dog/1.png", "train/owl/1.png", "val/cat/1.png", "val/owl/1.png")
    data = ImageFolder(tmp_path, batch_size=2, num_workers=0)
    assert (data.class_names, data.num_classes) == (("cat", "dog", "owl"), 3)
    equal(next(iter(data.val_dataloader()))[1], torch.tensor([0, 2]))
    make(tmp_path, "val/emu/1.png", "val/ant/1.png")
    with pytest.raises(ValueError, match=r"val has classes that .*train lacks: ant, emu"):
        ImageFolder(tmp_path)


def test_folders_that_are_not_as_described(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data.root: there is no folder .*/absent"):
        ImageFolder(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"--data.root: .* has no folders of pictures"):
        ImageFolder(tmp_path)
    make(tmp_path / "gap", "a/1.png", "c/1.png")
    (tmp_path / "gap/b_empty").mkdir()
    with pytest.raises(ValueError, match=r"gap has class folders without a picture, .*: b_empty$"):
        ImageFolder(tmp_path / "gap")
    with pytest.raises(ValueError, match=r"--data.root .*/half has train/ alone"):
        ImageFolder(make(tmp_path / "half", "train/a/1.png"))
    with pytest.raises(ValueError, match=r"--data.val_fraction 0.1 leaves no picture of .*/few"):
        ImageFolder(make(tmp_path / "few", "a/1.png", "a/2.png"))


def test_a_split_is_by_class_and_by_seed(tmp_path: Path) -> None:
    make(tmp_path, *(f"a/{i}.png" for i in range(20)), *(f"b/{i}.png" for i in range(10)), "c/only.png")
    data = ImageFolder(tmp_path, val_fraction=0.3)
    assert [label for _, label in data.val_files] == [0] * 6 + [1] * 3
    assert [label for _, label in data.train_files] == [0] * 14 + [1] * 7 + [2]
    assert len({path for path, _ in data.train_files + data.val_files}) == 31
    assert ImageFolder(tmp_path, val_fraction=0.3).val_files == data.val_files
    assert ImageFolder(tmp_path, val_fraction=0.3, split_seed=1).val_files != data.val_files
    make(tmp_path, "b/another.png")
    assert ImageFolder(tmp_path, val_fraction=0.3).val_files[:6] == data.val_files[:6]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_picture_is_named(tmp_path: Path, workers: int) -> None:
    make(tmp_path, *(f"{part}/a/{i}.jpg" for part in ("train", "val") for i in range(10)))
    for part in ("train", "val"):
        path = tmp_path / part / "a/3.jpg"
        path.write_bytes(path.read_bytes()[:-40])
    data = ImageFolder(tmp_path, image_size=8, batch_size=2, num_workers=workers)
    for part, make_loader in (("train", data.train_dataloader), ("val", data.val_dataloader)):
        with pytest.raises(ImageReadError, match=rf"^{tmp_path}/{part}/a/3.jpg: (?i:[^\n]*truncated[^\n]*)$") as caught:
            list(make_loader())
        traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_folders_are_shared_between_processes(tmp_path: Path, world_size: int) -> None:
    make(tmp_path, *(f"{part}/{i:02}/1.png" for part in ("train", "val") for i in range(7)))
    read = []
    for rank in range(world_size):
        data = ImageFolder(tmp_path, image_size=8, batch_size=2, num_workers=0)
        data.trainer = type("Run", (), {"global_rank": rank, "world_size": world_size, "num_devices": world_size})()
        read.append(list(data.val_dataloader()))
        train = data.train_dataloader()
        assert len(list(train)) == len(train) == 7 // (2 * world_size)
    assert len({len(batches) for batches in read}) == 1
    labels = [label for step in zip(*read, strict=True) for _, share in step for label in share.tolist()]
    assert labels == list(range(7))
    assert {images.shape[1:] for batches in read for images, _ in batches} == {(3, 8, 8)}


def test_folder_pictures_go_through_the_stored_transform(real_data: Path) -> None:
    data = ImageFolder(real_data / "tiny-imagenet-20", image_size=(40, 56), batch_size=5, num_workers=0, crop_pct=0.9)
    images, labels = next(iter(data.val_dataloader()))
    reference = datasets.ImageFolder(real_data / "tiny-imagenet-20/val")
    equal(labels, torch.tensor([label for _, label in reference.samples[:5]]))
    equal(images, torch.stack([data.preprocessing(reference[i][0]) for i in range(5)]))
    assert data.class_names == tuple(reference.classes)
    assert data.image_size == data.preprocessing.image_size == (40, 56)
    assert len(data.train_files) == len(datasets.ImageFolder(real_data / "tiny-imagenet-20/train"))


def test_training_pictures_are_augmented_and_normalised(tmp_path: Path) -> None:
    make(tmp_path, "train/a/0.png", "train/a/1.png", "val/a/0.png")
    options = {"image_size": (8, 5), "batch_size": 2, "num_workers": 0, "mean": (0.5,), "std": (0.25,)}
    data = ImageFolder(tmp_path, **options, rand_augment=9)
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (2, 1, 8, 5)
    assert data.in_channels == 1

    # Of a picture of one colour every crop is the same.
    images, _ = next(iter(ImageFolder(tmp_path, **options).train_dataloader()))
    levels = sorted(images.mean((1, 2, 3)).tolist())
    assert levels == pytest.approx([-2.0, (3 / 255 - 0.5) / 0.25])  # luma of red 10 is 2.99


def test_without_randomness_a_training_picture_is_the_whole_resized(tmp_path: Path) -> None:
    make(tmp_path, "train/a/0.png", "val/a/0.png")
    noise = to_pil_image(torch.randint(256, (3, 13, 13), dtype=torch.uint8))
    noise.save(tmp_path / "train/a/0.png")
    data = ImageFolder(tmp_path, image_size=8, batch_size=1, num_workers=0, crop_scale=(1.0, 1.0), hflip=0.0)
    images, _ = next(iter(data.train_dataloader()))
    expected = Preprocessing(image_size=(8, 8), mean=data.preprocessing.mean, std=data.preprocessing.std)
    equal(images[0], expected(noise))


def test_every_folder_sample_is_read_once_in_an_epoch(tmp_path: Path) -> None:
    make(tmp_path, *(f"train/{i:02}/1.png" for i in range(12)), "val/00/1.png")
    loader = ImageFolder(tmp_path, image_size=8, batch_size=4, num_workers=0).train_dataloader()
    epochs = [torch.cat([labels for _, labels in loader]).tolist()]
    loader.batch_sampler.set_epoch(1)
    epochs.append(torch.cat([labels for _, labels in loader]).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


class MixWatcher(Watcher):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trained.append((self.current_epoch, batch[1]))
        return self.scale * batch[0].mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert batch[1].dtype == torch.int64
        self.validated.append(len(batch[1]))


@pytest.mark.filterwarnings("ignore:The .* does not have many workers")  # none are wanted for seven pictures
def test_mixup_blends_labels_in_training_only(tmp_path: Path) -> None:
    make(tmp_path, *(f"{part}/{i}/1.png" for part in ("train", "val") for i in range(7)))
    model, data = MixWatcher(), ImageFolder(tmp_path, image_size=8, batch_size=3, num_workers=0, mixup=0.8)
    trainer(tmp_path, 2).fit(model, datamodule=data)
    assert len(model.trained) == 4
    for _, labels in model.trained:
        assert labels.shape == (3, 7)
        assert_close(labels.sum(1), torch.ones(3))
        assert ((labels > 0) & (labels < 1)).any()
    assert model.validated == [3, 3, 1] * 2


def test_too_few_pictures_for_a_batch(tmp_path: Path) -> None:
    data = ImageFolder(make(tmp_path, "train/a/1.png", "val/a/1.png"), num_workers=0)
    with pytest.raises(
        ValueError, match=r"training set has 1 pictures, but one step takes 128 .*--data.batch_size 128"
    ):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("batch_size", 0),
        ("num_workers", -1),
        ("val_fraction", 1.0),
        ("crop_scale", (0.0, 1.0)),
        ("rand_augment", 31),
        ("mixup", -0.1),
        ("cutmix", -0.1),
        ("random_erasing", 1.1),
        ("repeated_aug", 0),
    ],
)
def test_folder_values_out_of_range_are_named(tmp_path: Path, flag: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"--data.{flag} must be .*, got {value}"):
        ImageFolder(tmp_path, **{flag: value})


def test_one_policy_of_changes_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data.rand_augment, .* and --data.three_augment exclude each other"):
        ImageFolder(tmp_path, rand_augment=9, three_augment=True)


def test_the_command_line_builds_every_data_module(tmp_path: Path) -> None:
    root = make(tmp_path, "train/a/1.png", "val/a/1.png")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")

    def build(*arguments: str) -> object:
        return parser.instantiate(parser.parse_args(list(arguments))).data

    assert build("--data=FashionMNISTMini", "--data.batch_size=5").batch_size == 5
    assert build("--data=CIFAR100", f"--data.root={root}", "--data.hflip=0").changes[0].padding == 4
    folder = f"--data.root={root}"
    assert build("--data=ImageFolder", folder, "--data.image_size=64").image_size == (64, 64)
    assert build("--data=ImageFolder", folder, "--data.image_size=[64,32]").image_size == (64, 32)
    assert build("--data=ImageFolder", folder, "--data.mean=[0.5]", "--data.std=[0.5]").in_channels == 1
    shutil.rmtree(root / "val")
    with pytest.raises(ValueError, match="alone"):
        build("--data=ImageFolder", folder)


# Rows


def test_rows_show_the_pictures_of_their_sequence_from_left_to_right() -> None:
    images = torch.arange(1, 8, dtype=torch.uint8)[:, None, None, None].expand(7, 1, 2, 3)
    labels = torch.tensor([0, 1, 2, 3, 2, 1, 0])
    rows, sequences = compose_sequences(images, labels, 500, 4, torch.Generator().manual_seed(0))
    assert rows.shape == (500, 1, 2, 15)
    assert sequences.shape == (500, 6)
    lengths = []
    for row, sequence in zip(rows[:, 0], sequences.tolist(), strict=True):
        slots = [slot.unique().tolist() for slot in row.split(3, dim=1)]
        assert all(len(values) == 1 for values in slots)
        classes = [labels[value - 1].item() for [value] in slots if value]
        assert sequence == [*classes, 4, *[-100] * (5 - len(classes))]
        lengths.append(len(classes))
    counts = torch.tensor(lengths).bincount()
    assert counts[0] == 0
    assert counts[1:].min() > 70
    empty = (rows[:, 0, 0, ::3] == 0).float().mean(0)
    assert empty.min() > 0.3  # every slot is empty as often: 2 of 5 on average
    assert empty.max() < 0.5


def test_the_same_seed_composes_the_same_rows() -> None:
    images, labels = torch.randint(256, (9, 1, 2, 2), dtype=torch.uint8), torch.arange(9)
    one, two, other = (
        compose_sequences(images, labels, 5, 9, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    equal(one[0], two[0])
    equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])


def test_rows_of_clothes_are_normalised_and_those_of_the_test_unseen() -> None:
    data = FashionMNISTSequences(batch_size=7, num_sequences=70)
    data.setup("fit")
    assert (data.num_classes, data.image_size, data.in_channels) == (10, (28, 140), 1)
    batches = list(data.train_dataloader())
    assert len(batches) == 10
    images, sequences = batches[0]
    assert images.shape == (7, 1, 28, 140)
    assert sequences.shape == (7, 6)
    pictures = {train: set(map(bytes, FashionMNISTMini().read(train)[0].numpy())) for train in (True, False)}
    for train in (True, False):
        rows, _ = data.read(train)
        assert len(rows) == (70 if train else 7)
        slots = {bytes(slot.numpy()) for row in rows for slot in row.split(28, dim=2) if slot.any()}
        assert slots <= pictures[train]
    rows, sequences = data.read(train=False)
    validated, labels = next(iter(data.val_dataloader()))
    equal(validated, data.preprocessing.normalize(rows))
    equal(labels, sequences)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--data\.num_rows must be at least 10, got 9"):
        FashionMNISTSequences(num_sequences=9)
