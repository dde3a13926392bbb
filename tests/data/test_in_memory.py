"""Datasets in memory: which images in which order, on how many processes."""

from pathlib import Path

import pytest
import torch
from builders import BatchRecorder, assert_equal, quiet_trainer

from vitmha.data import CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini
from vitmha.data.augmentation import RandomCropFlip
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.errors import UserError
from vitmha.images import Preprocessing


def loader(rank: int = 0, world_size: int = 1, batch_size: int = 6, seed: int = 0) -> InMemoryLoader:
    generator = torch.Generator().manual_seed(1)
    return InMemoryLoader(
        torch.randint(256, (53, 3, 7, 11), dtype=torch.uint8, generator=generator),
        torch.arange(53),
        preprocessing=Preprocessing(image_size=(7, 11), mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4)),
        batch_sampler=GlobalBatchSampler(53, batch_size, training=True, seed=seed, rank=rank, world_size=world_size),
        augmentations=[RandomCropFlip(padding=2, hflip=0.5)],
    )


def test_two_processes_read_the_images_of_one() -> None:
    single, *pair = loader(), loader(0, 2, 3), loader(1, 2, 3)
    for one in (single, *pair):
        one.batch_sampler.set_epoch(3)
    steps = list(zip(single, *pair, strict=True))
    assert len(steps) == len(single) == len(pair[0]) == 8
    for (images, labels), (first, first_labels), (second, second_labels) in steps:
        assert_equal(torch.cat([first, second]), images)
        assert_equal(torch.cat([first_labels, second_labels]), labels)


def test_a_step_can_be_reproduced_from_seed_epoch_and_index() -> None:
    seeded = loader(seed=11)
    seeded.batch_sampler.set_epoch(2)
    before = torch.get_rng_state()
    step, (images, labels) = list(enumerate(seeded))[5]
    assert_equal(torch.get_rng_state(), before)

    sampler = GlobalBatchSampler(53, 6, training=True, seed=11)
    sampler.set_epoch(2)
    [augmentation] = seeded.augmentations
    params = augmentation.sample_params(6, sampler.generator(step))
    assert_equal(labels, torch.randperm(53, generator=sampler.generator())[30:36])
    assert_equal(images, seeded.preprocessing.normalize(augmentation.apply(seeded.images[labels], params)))

    assert not torch.equal(params, augmentation.sample_params(6, sampler.generator(step - 1)))
    seeded.batch_sampler.set_epoch(3)
    assert not torch.equal(list(seeded)[5][1], labels)


def test_lightning_sets_the_epoch_after_a_resume_too(tmp_path: Path) -> None:
    uninterrupted, first, resumed = BatchRecorder(), BatchRecorder(), BatchRecorder()
    quiet_trainer(tmp_path, 3).fit(uninterrupted, datamodule=FashionMNISTMini(batch_size=4096))
    stopped = quiet_trainer(tmp_path, 2)
    stopped.fit(first, datamodule=FashionMNISTMini(batch_size=4096))
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    quiet_trainer(tmp_path, 3).fit(
        resumed, datamodule=FashionMNISTMini(batch_size=4096), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )
    assert first.epochs + resumed.epochs == uninterrupted.epochs == [0, 0, 1, 1, 2, 2]
    assert_equal(first.trained + resumed.trained, uninterrupted.trained)
    assert sum(len(labels) for _, labels in uninterrupted.validated) == 3 * 2000

    expected = FashionMNISTMini(batch_size=4096)
    expected.setup("fit")
    last_epoch = expected.train_dataloader()
    last_epoch.batch_sampler.set_epoch(2)
    assert_equal(list(last_epoch)[1], resumed.trained[-1])


def test_the_order_of_training_depends_on_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    data = FashionMNISTMini(batch_size=50)
    data.setup("fit")
    labels = []
    for seed in ("3", "3", "4"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        labels.append(next(iter(data.train_dataloader()))[1])
    assert_equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])


def test_the_arguments_of_the_model_are_known_before_files_are_read() -> None:
    described = [
        (data.num_classes, len(data.class_names), data.in_channels, data.image_size, data.preprocessing.image_size)
        for data in (FashionMNISTMini(), FashionMNIST("/absent"), CIFAR10("/absent"), CIFAR100("/absent"))
    ]
    grayscale, rgb = (1, (28, 28), (28, 28)), (3, (32, 32), (32, 32))
    assert described == [(10, 10, *grayscale), (10, 10, *grayscale), (10, 10, *rgb), (100, 100, *rgb)]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("batch_size", 0, "at least 1"),
        ("random_crop_padding", -1, r"0 \(no crop\) or more"),
        ("hflip", 1.5, r"from 0 \(off\) to 1"),
        ("rand_augment", 31.0, r"from 0 \(off\) to 30"),
        ("random_erasing", -0.1, r"from 0 \(off\) to 1"),
        ("mixup", -0.1, r"0 \(off\) or more"),
        ("cutmix", -0.1, r"0 \(off\) or more"),
        ("mixup", float("inf"), r"0 \(off\) or more"),
        ("cutmix", float("inf"), r"0 \(off\) or more"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} must be {expected}, got {value}$"):
        CIFAR10(**{name: value})
