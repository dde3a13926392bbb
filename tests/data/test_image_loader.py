"""Pictures read one by one: the same with any number of workers and processes, and what happens to them in training."""

import logging
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from lightning import LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.data.transforms
from vitmha.data import ImageFolder
from vitmha.data.image_loader import ImageLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.data.transforms import TrainTransform, three_augment_changes
from vitmha.images import ImageReadError, Preprocessing, read_image
from vitmha.models.config import ViTConfig
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model

EVERYTHING = {"three_augment": True, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "repeated_aug": 3}


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 training and 7 validation pictures of noise, JPEG, in three classes."""
    generator = torch.Generator().manual_seed(1)
    for part, count in (("train", 23), ("val", 7)):
        for number in range(count):
            path = tmp_path / part / "abc"[number % 3] / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = torch.randint(256, (3, 5, 7), dtype=torch.uint8, generator=generator)
            to_pil_image(noise).resize((53, 37)).save(path)
    return tmp_path


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def loader(
    root: Path, batch_size: int, *, rank: int = 0, world_size: int = 1, num_workers: int = 0, **options: object
) -> ImageLoader:
    data = ImageFolder(root, image_size=(13, 11), batch_size=batch_size, num_workers=num_workers, **options)
    data.trainer = type("Run", (), {"global_rank": rank, "world_size": world_size, "num_devices": world_size})()
    return data.train_dataloader()


def equal(ones: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_close(one, other, rtol=0, atol=0)


def test_workers_and_processes_change_nothing(folder: Path) -> None:
    alone = loader(folder, 8, **EVERYTHING)
    parts = [loader(folder, 4, rank=rank, world_size=2, num_workers=2 * rank, **EVERYTHING) for rank in (0, 1)]
    for epoch in (0, 3):
        for each in (alone, *parts):
            each.batch_sampler.set_epoch(epoch)
        stream = torch.get_rng_state()
        batches = list(alone)
        assert torch.equal(torch.get_rng_state(), stream)
        torch.rand(5)
        shares = zip(*parts, strict=True)
        equal(batches, [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in shares])
    assert len(batches) == len(alone) == len(parts[1]) == 2


def test_changes_differ_between_epochs_steps_and_places(folder: Path) -> None:
    one, seeds = loader(folder, 6, repeated_aug=6), []
    for epoch in (0, 1):
        one.batch_sampler.set_epoch(epoch)
        seeds += chain.from_iterable(step.seeds for step in one._loader.sampler)
        for images, _ in one:  # six times the same file
            assert len({bytes(image.numpy()) for image in images}) == 6
    assert len(set(seeds)) == len(seeds) == 36


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_goes_on_in_the_middle_of_an_epoch(folder: Path, workers: int) -> None:
    whole, stopped, resumed = (loader(folder, 5, num_workers=workers, mixup=0.2) for _ in range(3))
    for each in (whole, stopped):
        each.batch_sampler.set_epoch(2)
    batches, begun = list(whole), iter(stopped)
    first = [next(begun), next(begun)]
    del begun
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict() == {"epoch": 2, "start": 2}
    waiting = iter(resumed)  # Lightning does this before it sets the epoch
    resumed.batch_sampler.set_epoch(2)
    equal(batches, first + list(waiting))
    for each in (whole, resumed):
        each.batch_sampler.set_epoch(3)
    equal(list(whole), list(resumed))


class Keeper(LightningModule):
    """Keeps what it is given, and saves after the sixth step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batches = nn.Linear(1, 1), []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.batches.append(tuple(batch))
        return self.layer.weight.sum()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        pass

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == 6:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "six.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(folder: Path, **options: object) -> Trainer:
    return Trainer(
        **{"default_root_dir": folder, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def test_lightning_resumes_a_folder_in_the_middle_of_an_epoch(folder: Path) -> None:
    data = {"image_size": 8, "batch_size": 5, "num_workers": 1, "rand_augment": 9}
    whole, resumed = Keeper(), Keeper()
    quiet_trainer(folder, max_epochs=2).fit(whole, datamodule=ImageFolder(folder, **data))
    again = quiet_trainer(folder, max_epochs=2)
    again.fit(resumed, datamodule=ImageFolder(folder, **data), ckpt_path=folder / "six.ckpt", weights_only=True)
    assert (len(whole.batches), len(resumed.batches)) == (8, 2)
    equal(whole.batches[6:], resumed.batches)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("batch_size", "repeated_aug", "distinct"), [(12, 3, 4), (8, 3, 3), (5, 1, 5), (4, 9, 1)])
def test_repeated_samples_stand_in_one_global_batch(batch_size: int, repeated_aug: int, distinct: int) -> None:
    alone = list(GlobalBatchSampler(53, batch_size, training=True, repeated_aug=repeated_aug))
    assert len(alone) == 53 // batch_size
    for batch in alone:
        assert len(batch) == batch_size
        assert len(set(batch)) == distinct
        assert batch == (batch[:distinct] * repeated_aug)[:batch_size]
    assert len(set(chain.from_iterable(alone))) == distinct * len(alone)
    if batch_size % 2 == 0:
        parts = [
            GlobalBatchSampler(53, batch_size // 2, training=True, rank=rank, world_size=2, repeated_aug=repeated_aug)
            for rank in (0, 1)
        ]
        assert [one + other for one, other in zip(*parts, strict=True)] == alone


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_labels_sum_to_one(folder: Path, batch_size: int, options: dict[str, float]) -> None:
    labels = torch.cat([labels for _, labels in loader(folder, batch_size, **options)])
    assert labels.shape == (23 // batch_size * batch_size, 3)
    assert_close(labels.sum(1), torch.ones(len(labels)))
    is_mixed = ((labels > 0) & (labels < 1)).any()
    assert is_mixed == (batch_size > 1)


CHANGES: dict[str, Callable[[], list[v2.Transform]]] = {
    **{f"rand {level}": lambda level=level: [v2.RandAugment(2, level)] for level in range(1, 31)},
    "auto": lambda: [v2.AutoAugment()],
    "three": three_augment_changes,
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_runs_on_every_picture(name: str) -> None:
    change = v2.Compose(CHANGES[name]())
    for picture in (Image.new("RGB", (5, 7)), Image.new("RGB", (1, 1), "white"), Image.effect_noise((9, 8), 99)):
        for seed in range(25):
            torch.manual_seed(seed)
            result = change(picture.convert("RGB"))
            assert (result.mode, result.size) == ("RGB", picture.size)


def test_three_augment_takes_one_of_three() -> None:
    choice, _ = three_augment_changes()
    picture = to_pil_image(torch.randint(256, (3, 9, 9), dtype=torch.uint8))
    before, counts = pil_to_tensor(picture).int(), {"gray": 0, "solarised": 0, "blurred": 0}
    for _ in range(300):
        after = pil_to_tensor(choice(picture)).int()
        if (after == after[:1]).all():
            counts["gray"] += 1
        elif torch.equal(after, torch.where(before < 128, before, 255 - before)):
            counts["solarised"] += 1
        else:
            assert after.float().std() < before.float().std()
            counts["blurred"] += 1
    assert min(counts.values()) > 60


def training_picture(size: tuple[int, int], min_scale: float = 0.08, random_erasing: float = 0.0) -> TrainTransform:
    preprocessing = Preprocessing(image_size=size, mean=(0.5,) * 3, std=(0.5,) * 3)
    return TrainTransform(preprocessing, crop_scale=(min_scale, 1.0), changes=[], random_erasing=random_erasing)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_picture_decoded_smaller_shows_the_same(
    tmp_path: Path, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    blocks = to_pil_image(torch.randint(256, (3, 6, 9), dtype=torch.uint8))
    blocks.resize((900, 600)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    sizes, ours, transform = [], [], training_picture((181, 131))
    crops: list[dict[str, int]] = []
    draw = transform.window.make_params
    monkeypatch.setattr(transform.window, "make_params", lambda inputs: crops.append(draw(inputs)) or crops[-1])

    def watched(source: Path, min_size: Callable[[int, int], tuple[int, int]] | None) -> Image.Image:
        picture = read_image(source, min_size)
        scale = max(picture.size) / 900
        assert crops[-1]["height"] * scale >= 181 or scale == 1
        assert crops[-1]["width"] * scale >= 131 or scale == 1
        sizes.append(max(picture.size))
        return picture

    def in_full(source: Path, min_size: Callable[[int, int], tuple[int, int]] | None) -> Image.Image:
        return read_image(source, lambda *size: min_size(*size) and size)

    for read in (watched, in_full):
        monkeypatch.setattr(vitmha.data.transforms, "read_image", read)
        torch.manual_seed(0)
        ours.append(torch.stack([transform(tmp_path / "a.jpg") for _ in range(30)]))
    assert {450, 900} <= set(sizes) <= {225, 450, 900}
    assert (ours[0] - ours[1]).abs().mean() < 0.02  # on a scale of -1 to 1
    assert not torch.equal(*ours)


def test_the_crop_is_torchvisions(tmp_path: Path) -> None:
    to_pil_image(torch.randint(256, (3, 6, 9), dtype=torch.uint8)).resize((90, 60)).save(tmp_path / "a.png")
    transform, reference = training_picture((17, 19)), v2.RandomResizedCrop((17, 19), interpolation=3)
    for seed in range(20):
        torch.manual_seed(seed)
        ours = transform(tmp_path / "a.png")
        torch.manual_seed(seed)
        expected = pil_to_tensor(reference(read_image(tmp_path / "a.png"))) / 127.5 - 1
        # Ours looks beyond the edge of the crop, theirs does not.
        assert (ours - expected)[:, 2:-2, 2:-2].abs().max() < 0.03


def test_random_erasing_paints_noise(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    erased = [
        training_picture((20, 20), random_erasing=0.5)(tmp_path / "a.png").unique().numel() > 10 for _ in range(100)
    ]
    assert 30 < sum(erased) < 70


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_picture_is_left_out_and_named_once(
    folder: Path, workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {path: "abc".index(path.parent.name) for path in sorted(folder.glob("train/*/*.jpg"))}
    paths = list(labels)
    monkeypatch.chdir(folder.parent)
    for path in (paths[4], paths[9]):
        damage(path)
    whole = loader(Path(folder.name), 7, num_workers=workers, skip_corrupt=True)
    batches = [*whole, *whole]
    order = [[index for index in batch if index not in (4, 9)] for batch in whole.batch_sampler] * 2
    assert [given.tolist() for _, given in batches] == [[labels[paths[i]] for i in batch] for batch in order]
    assert [len(images) for images, _ in batches] == [len(batch) for batch in order]
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    is_read = [index in chain.from_iterable(whole.batch_sampler) for index in (4, 9)]
    assert len(messages) == sum(is_read)
    for number, message in enumerate(sorted(messages), start=1):
        assert message.startswith(f"Left out, damaged picture number {number}: {folder}/train/")
        assert "truncated" in message

    mixed = list(loader(folder, 7, num_workers=workers, skip_corrupt=True, mixup=0.8, cutmix=1.0))
    assert [given.shape for _, given in mixed] == [(len(batch), 3) for batch in order[:3]]

    with pytest.raises(ImageReadError, match=rf"^{folder}/train/./..\.jpg: [^\n]*truncated[^\n]*$") as caught:
        list(loader(folder, 7, num_workers=workers))
    traceback.clear_frames(caught.tb)  # or the workers wait for the garbage collector


def test_damaged_pictures_are_left_out_of_validation(folder: Path) -> None:
    for path in folder.glob("val/a/*.jpg"):
        damage(path)
    data = ImageFolder(folder, image_size=8, batch_size=1, num_workers=0, skip_corrupt=True)
    data.setup("fit")
    batches = list(data.val_dataloader())
    assert [len(images) for images, _ in batches] == [0] * 3 + [1] * 4
    assert batches[0][0].shape == (0, 3, 8, 8)
    assert torch.cat([labels for _, labels in batches]).tolist() == [1, 1, 2, 2]


def test_a_process_without_pictures_still_takes_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = ViTConfig(image_size=(8, 8), patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=3)
    alone = LitViT(vit)
    monkeypatch.setattr(alone, "log", lambda *_, **__: None)
    loss = alone.training_step((torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int64)))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in alone.parameters())


@pytest.mark.slow
def test_two_processes_train_though_one_has_only_damaged_pictures_in_some_steps(folder: Path) -> None:
    for path in folder.glob("train/*/*.jpg"):
        if path.stem not in ("00", "01"):
            damage(path)
    root = Path(__file__).parents[2]
    words = f"""--config {root}/configs/quickstart.yaml --config {root}/tests/short.yaml --attention.every_n_epochs 0
        --data ImageFolder --data.root {folder} --data.image_size 8 --data.batch_size 3 --data.num_workers 0
        --data.skip_corrupt true --data.mixup 0.8 --trainer.accelerator cpu --trainer.devices 2"""
    command = [sys.executable, str(root / "train.py"), *words.split()]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trained = load_model(folder / "runs/short/version_0/model")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    assert trained.head.weight.any()  # it began with zeros
