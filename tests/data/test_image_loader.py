"""Images read by workers: the same with any number of workers and processes, and what happens to corrupt files."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
import torch
from builders import BatchRecorder, assert_equal, quiet_trainer, set_rank
from torch.testing import assert_close
from torchvision.transforms.v2.functional import to_pil_image

from vitmha.data import ImageFolder
from vitmha.data.image_loader import ImageLoader
from vitmha.images import ImageReadError
from vitmha.models.config import ViTConfig
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model

EVERYTHING = {"three_augment": True, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "repeated_aug": 3}


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """23 training and 7 validation images of noise, JPEG, in three classes."""
    generator = torch.Generator().manual_seed(1)
    for split, count in (("train", 23), ("val", 7)):
        for index in range(count):
            path = tmp_path / split / "abc"[index % 3] / f"{index:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = torch.randint(256, (3, 5, 7), dtype=torch.uint8, generator=generator)
            to_pil_image(noise).resize((53, 37)).save(path)
    return tmp_path


def corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def loader(
    root: Path, batch_size: int, *, rank: int = 0, world_size: int = 1, num_workers: int = 0, **options: object
) -> ImageLoader:
    data = ImageFolder(root, image_size=(13, 11), batch_size=batch_size, num_workers=num_workers, **options)
    set_rank(data, rank, world_size)
    return data.train_dataloader()


def test_a_worker_reads_on_after_a_signal_to_all_processes_and_ends_after_a_second_sigterm(image_root: Path) -> None:
    reading = loader(image_root, 4, num_workers=1)
    batches = iter(reading)
    next(batches)
    [worker] = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    assert len(list(batches)) == len(reading) - 1
    worker.terminate()
    with suppress(RuntimeError):  # DataLoader's, if it sees the end of the worker first
        worker.join(10)
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.ci
def test_python_exits_in_the_middle_of_an_epoch(image_root: Path) -> None:
    code = (
        "from vitmha.data import ImageFolder\n"
        f"data = ImageFolder({str(image_root)!r}, image_size=8, batch_size=4, num_workers=1)\n"
        "batches = iter(data.train_dataloader())\n"
        "next(batches)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_batches_do_not_depend_on_workers_and_processes(image_root: Path) -> None:
    single = loader(image_root, 8, **EVERYTHING)
    parts = [loader(image_root, 4, rank=rank, world_size=2, num_workers=2 * rank, **EVERYTHING) for rank in (0, 1)]
    for epoch in (0, 3):
        for one in (single, *parts):
            one.batch_sampler.set_epoch(epoch)
        rng_state = torch.get_rng_state()
        batches = list(single)
        assert torch.equal(torch.get_rng_state(), rng_state)
        torch.rand(5)
        pairs = zip(*parts, strict=True)
        assert_equal(batches, [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs])
    assert len(batches) == len(single) == len(parts[1]) == 2


def test_augmentation_differs_between_epochs_steps_and_positions(image_root: Path) -> None:
    paths = sorted(image_root.glob("train/*/*.jpg"))
    for path in paths[1:]:
        path.write_bytes(paths[0].read_bytes())
    repeated = loader(image_root, 6, repeated_aug=3, three_augment=True)
    images = []
    for epoch in (0, 1):
        repeated.batch_sampler.set_epoch(epoch)
        images += [bytes(image.numpy()) for batch, _ in repeated for image in batch]
    assert len(set(images)) == len(images) == 2 * 3 * 6


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_continues_in_the_middle_of_an_epoch(image_root: Path, workers: int) -> None:
    uninterrupted, stopped, resumed = (loader(image_root, 5, num_workers=workers, mixup=0.2) for _ in range(3))
    for one in (uninterrupted, stopped):
        one.batch_sampler.set_epoch(2)
    batches, begun = list(uninterrupted), iter(stopped)
    first = [next(begun), next(begun)]
    del begun
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict() == {"epoch": 2, "start": 2}
    waiting = iter(resumed)  # Lightning does this before it sets the epoch
    resumed.batch_sampler.set_epoch(2)
    assert_equal(batches, first + list(waiting))
    for one in (uninterrupted, resumed):
        one.batch_sampler.set_epoch(3)
    assert_equal(list(uninterrupted), list(resumed))


class SavingRecorder(BatchRecorder):
    """Saves a checkpoint after the sixth step."""

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == 6:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "six.ckpt")


def test_lightning_resumes_in_the_middle_of_an_epoch(image_root: Path) -> None:
    data = {"image_size": 8, "batch_size": 5, "num_workers": 1, "rand_augment": 9}
    uninterrupted, resumed = SavingRecorder(), SavingRecorder()
    quiet_trainer(image_root, max_epochs=2).fit(uninterrupted, datamodule=ImageFolder(image_root, **data))
    trainer = quiet_trainer(image_root, max_epochs=2)
    trainer.fit(
        resumed, datamodule=ImageFolder(image_root, **data), ckpt_path=image_root / "six.ckpt", weights_only=True
    )
    assert (len(uninterrupted.trained), len(resumed.trained)) == (8, 2)
    assert_equal(uninterrupted.trained[6:], resumed.trained)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_labels_sum_to_one(image_root: Path, batch_size: int, options: dict[str, float]) -> None:
    labels = torch.cat([labels for _, labels in loader(image_root, batch_size, **options)])
    assert labels.shape == (23 // batch_size * batch_size, 3)
    assert_close(labels.sum(1), torch.ones(len(labels)))
    is_mixed = ((labels > 0) & (labels < 1)).any()
    assert is_mixed == (batch_size > 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_an_unreadable_file_is_the_same_from_a_worker(image_root: Path, workers: int) -> None:
    paths = sorted(image_root.glob("train/*/*.jpg"))
    for path in paths:
        corrupt(path)
    unreadable = loader(image_root, 5, num_workers=workers)
    position = unreadable.state_dict()
    first = paths[next(iter(unreadable.batch_sampler))[0]]
    with pytest.raises(ImageReadError, match="truncated") as caught:
        next(iter(unreadable))
    traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector
    assert (type(caught.value), caught.value.path) == (ImageReadError, str(first))
    assert str(caught.value) == f"{first}: {caught.value.reason}"
    assert "\n" not in str(caught.value)
    assert unreadable.state_dict() == position


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_file_is_skipped_and_named_once(
    image_root: Path, workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {path: "abc".index(path.parent.name) for path in sorted(image_root.glob("train/*/*.jpg"))}
    paths = list(labels)
    monkeypatch.chdir(image_root.parent)
    for path in (paths[4], paths[9]):
        corrupt(path)
    skipping = loader(Path(image_root.name), 7, num_workers=workers, skip_corrupt=True)
    batches = [*skipping, *skipping]
    order = [[index for index in batch if index not in (4, 9)] for batch in skipping.batch_sampler] * 2
    assert [batch.tolist() for _, batch in batches] == [[labels[paths[i]] for i in batch] for batch in order]
    assert [len(images) for images, _ in batches] == [len(batch) for batch in order]
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    is_read = [index in chain.from_iterable(skipping.batch_sampler) for index in (4, 9)]
    assert len(messages) == sum(is_read)
    for number, message in enumerate(sorted(messages), start=1):
        assert message.startswith(f"Skipping corrupt image {number}: {image_root}/train/")
        assert "truncated" in message

    mixed = list(loader(image_root, 7, num_workers=workers, skip_corrupt=True, mixup=0.8, cutmix=1.0))
    assert [targets.shape for _, targets in mixed] == [(len(batch), 3) for batch in order[:3]]

    root = re.escape(str(image_root))
    with pytest.raises(ImageReadError, match=rf"^{root}/train/./..\.jpg: [^\n]*truncated[^\n]*$") as caught:
        list(loader(image_root, 7, num_workers=workers))
    traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector


def test_corrupt_files_are_skipped_in_validation(image_root: Path) -> None:
    for path in image_root.glob("val/a/*.jpg"):
        corrupt(path)
    data = ImageFolder(image_root, image_size=8, batch_size=1, num_workers=0, skip_corrupt=True)
    data.setup("fit")
    batches = list(data.val_dataloader())
    assert [len(images) for images, _ in batches] == [0] * 3 + [1] * 4
    assert batches[0][0].shape == (0, 3, 8, 8)
    assert torch.cat([labels for _, labels in batches]).tolist() == [1, 1, 2, 2]


def test_an_empty_batch_gives_zero_loss_and_gradients(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = ViTConfig(image_size=(8, 8), patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=3)
    module = LitViT(vit)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    loss = module.training_step((torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int64)))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in module.parameters())


@pytest.mark.slow
def test_two_processes_train_even_if_one_has_only_corrupt_files_in_some_steps(image_root: Path) -> None:
    for path in image_root.glob("train/*/*.jpg"):
        if path.stem not in ("00", "01"):
            corrupt(path)
    root = Path(__file__).parents[2]
    args = [
        *("--config", f"{root}/configs/quickstart.yaml", "--config", f"{root}/tests/short.yaml"),
        *("--attention.every_n_epochs", "0", "--data", "ImageFolder", "--data.root", str(image_root)),
        *("--data.image_size", "8", "--data.batch_size", "3", "--data.num_workers", "0", "--data.skip_corrupt", "true"),
        *("--data.mixup", "0.8", "--trainer.accelerator", "cpu", "--trainer.devices", "2"),
    ]
    command = [sys.executable, str(root / "train.py"), *args]
    ended = subprocess.run(command, cwd=image_root, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trained = load_model(image_root / "runs/short/version_0/model")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    assert trained.head.weight.any()  # it was initialized with zeros
