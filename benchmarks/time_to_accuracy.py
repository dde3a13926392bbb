"""Seconds of training until CIFAR-10's test pictures are classified with a given accuracy, ours against a plain loop.

    python benchmarks/time_to_accuracy.py --root DATA [--device cpu] [--ours 4 10] [--plain 5 12]

The plain loop is what its writers would write: timm's VisionTransformer, AdamW with warm-up and cosine, torchvision's
crop, flip and normalisation picture by picture in two workers. Ours is `LitViT` under Lightning with Muon, in bfloat16,
the data in memory, with a quarter of the patches in most steps. Both have the same architecture (0.8 M parameters,
patch 4, width 128, depth 6, 4 heads, learned positions, mean pooling) and batch. Each is trained with schedules of
several lengths, in epochs, and of these the fastest to an accuracy counts, since the accuracy within a schedule depends
on its length. Testing, four times an epoch, is off the clock.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator

import timm
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from vitmha import ViTConfig
from vitmha.data import CIFAR10
from vitmha.training.module import LitViT

TARGETS = (0.55, 0.60, 0.65, 0.70)
BATCH = 128
SIZES = {"embed_dim": 128, "depth": 6, "num_heads": 4}
TESTS_PER_EPOCH = 4


class Clock:
    """Seconds and accuracy at every test; the clock stands while testing."""

    def __init__(self, name: str, epochs: int) -> None:
        self.name, self.seconds, self.reached = f"{name}, {epochs} epochs", 0.0, {}
        self.start()

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started

    def note(self, accuracy: float) -> None:
        print(f"{self.name:<22}{self.seconds:>8.0f} s{accuracy:>9.2%}", flush=True)
        for target in TARGETS:
            if accuracy >= target:
                self.reached.setdefault(target, self.seconds)


class PictureByPicture(Dataset):
    """As torchvision's own data sets give pictures: one PIL image after the other through a transform."""

    def __init__(self, images: Tensor, labels: Tensor, transform: transforms.Compose) -> None:
        self.images, self.labels, self.transform = images.permute(0, 2, 3, 1).numpy(), labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def plain_loop(data: CIFAR10, device: str, epochs: int) -> Clock:
    seed_everything(0, verbose=False)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=4, num_classes=10, mlp_ratio=2, class_token=False, global_pool="avg", **SIZES
    ).to(device)
    normalise = transforms.Normalize(data.preprocessing.mean, data.preprocessing.std)
    augment = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalise]
    )
    train = DataLoader(
        PictureByPicture(*data.read(train=True), augment),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    total = epochs * len(train)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * total), 0.5 * (1 + math.cos(math.pi * step / total)))
    )
    tests, clock = set(places(len(train))), Clock("plain loop", epochs)
    for _ in range(epochs):
        for step, (images, labels) in enumerate(train):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step in tests:
                synchronize(device)
                clock.stop()
                clock.note(accuracy(model, data, device))
                clock.start()
    return clock


class Watch(Callback):
    """Stops the clock for a test of the model."""

    def __init__(self, data: CIFAR10, device: str) -> None:
        self.data, self.device = data, device

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.tests, self.clock = set(places(int(trainer.num_training_batches))), Clock("ours", int(trainer.max_epochs))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.fit_loop.batch_idx in self.tests:
            synchronize(self.device)
            self.clock.stop()
            self.clock.note(accuracy(pl_module.model, self.data, self.device))
            self.clock.start()


def ours(data: CIFAR10, device: str, epochs: int) -> Clock:
    seed_everything(0, verbose=False)
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        num_classes=10,
        mlp_dim=256,
        pool="mean",
        patch_dropout=0.75,
        backend="auto" if device == "cuda" else "explicit",
        **SIZES,
    )
    watch = Watch(data, device)
    trainer = Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-mixed",
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
        use_distributed_sampler=False,
    )
    module = LitViT(
        config, optimizer="muon", learning_rate=2e-3, betas=(0.9, 0.95), warmup_fraction=0.1, patch_dropout_until=0.65
    )
    trainer.fit(module, datamodule=data)
    return watch.clock


def places(steps: int) -> Iterator[int]:
    """The steps of an epoch behind which the model is tested."""
    return (steps * (i + 1) // TESTS_PER_EPOCH - 1 for i in range(TESTS_PER_EPOCH))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def accuracy(model: nn.Module, data: CIFAR10, device: str) -> float:
    was_training = model.training
    model.eval()
    right = total = 0
    for images, labels in data.test_dataloader():
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
        total += len(labels)
    model.train(was_training)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="holds CIFAR-10, see `vitmha fit --data.help CIFAR10`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ours", type=int, nargs="+", default=(4, 10), help="epochs of our schedules")
    parser.add_argument("--plain", type=int, nargs="+", default=(5, 12), help="epochs of the plain loop's schedules")
    parser.add_argument("--short", action="store_true", help="one epoch of 640 pictures")
    options = parser.parse_args()
    data = CIFAR10(options.root, batch_size=BATCH)
    if options.short:
        options.ours, options.plain, read = (1,), (1,), data.read
        data.read = lambda train: tuple(each[:640] for each in read(train))
    data.setup("fit")
    print(f"torch {torch.__version__}, timm {timm.__version__}, {options.device}, {torch.get_num_threads()} threads")
    our_clocks = [ours(data, options.device, epochs) for epochs in options.ours]
    plain_clocks = [plain_loop(data, options.device, epochs) for epochs in options.plain]
    print(f"{'accuracy':>8}{'ours [s]':>10}{'plain loop [s]':>16}{'share':>8}")
    for target in TARGETS:
        our, plain = (
            min(clock.reached.get(target, math.inf) for clock in clocks) for clocks in (our_clocks, plain_clocks)
        )
        share = f"{our / plain:.0%}" if max(our, plain) < math.inf else "-"
        print(f"{target:>8.0%}{our:>10.0f}{plain:>16.0f}{share:>8}")


if __name__ == "__main__":
    main()
