"""Seconds of training until CIFAR-10's test images are classified with a given accuracy: vitmha against a plain loop.

    python benchmarks/time_to_accuracy.py --root DATA [--device cpu] [--vitmha 4 10] [--plain 5 12]

The plain loop is timm's VisionTransformer, AdamW with warmup and cosine, and torchvision's crop, flip and
normalization, one image at a time in two workers. vitmha is `LitViT` under Lightning with Muon, in bfloat16, with the
data in memory and a patch dropout of 0.75 in most steps. Both have the same architecture (0.8 M parameters, patch 4,
width 128, depth 6, 4 heads, learned position embeddings, mean pooling) and batch size. Each is trained with schedules
of several lengths, in epochs, since the accuracy within a schedule depends on its length; the fastest of them to an
accuracy counts. Testing, four times an epoch, is not timed.
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
BATCH_SIZE = 128
SIZES = {"embed_dim": 128, "depth": 6, "num_heads": 4}
TESTS_PER_EPOCH = 4


class Stopwatch:
    """Seconds of training and accuracy at every test."""

    def __init__(self, name: str, epochs: int) -> None:
        self.name, self.seconds, self.reached = f"{name}, {epochs} epochs", 0.0, {}
        self.start()

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started

    def record(self, accuracy: float) -> None:
        print(f"{self.name:<22}{self.seconds:>8.0f} s{accuracy:>9.2%}", flush=True)
        for target in TARGETS:
            if accuracy >= target:
                self.reached.setdefault(target, self.seconds)


class ImageByImage(Dataset):
    """Passes one PIL image at a time through a transform, as torchvision's datasets do."""

    def __init__(self, images: Tensor, labels: Tensor, transform: transforms.Compose) -> None:
        self.images, self.labels, self.transform = images.permute(0, 2, 3, 1).numpy(), labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def train_plain(data: CIFAR10, device: str, epochs: int) -> Stopwatch:
    seed_everything(0, verbose=False)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=4, num_classes=10, mlp_ratio=2, class_token=False, global_pool="avg", **SIZES
    ).to(device)
    normalize = transforms.Normalize(data.preprocessing.mean, data.preprocessing.std)
    augment = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    )
    loader = DataLoader(
        ImageByImage(*data.read(train=True), augment),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    total = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * total), 0.5 * (1 + math.cos(math.pi * step / total)))
    )
    tested, stopwatch = set(tested_steps(len(loader))), Stopwatch("plain loop", epochs)
    for _ in range(epochs):
        for step, (images, labels) in enumerate(loader):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step in tested:
                test(stopwatch, model, data, device)
    return stopwatch


class TestCallback(Callback):
    """Tests the model four times an epoch."""

    def __init__(self, data: CIFAR10, device: str) -> None:
        self.data, self.device = data, device

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.tested = set(tested_steps(int(trainer.num_training_batches)))
        self.stopwatch = Stopwatch("vitmha", int(trainer.max_epochs))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.fit_loop.batch_idx in self.tested:
            test(self.stopwatch, pl_module.model, self.data, self.device)


def train_vitmha(data: CIFAR10, device: str, epochs: int) -> Stopwatch:
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
    callback = TestCallback(data, device)
    trainer = Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-mixed",
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[callback],
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
    return callback.stopwatch


def tested_steps(num_steps: int) -> Iterator[int]:
    """The steps of an epoch after which the model is tested."""
    return (num_steps * (i + 1) // TESTS_PER_EPOCH - 1 for i in range(TESTS_PER_EPOCH))


def test(stopwatch: Stopwatch, model: nn.Module, data: CIFAR10, device: str) -> None:
    """Records the accuracy, with the stopwatch stopped."""
    if device == "cuda":
        torch.cuda.synchronize()
    stopwatch.stop()
    stopwatch.record(accuracy(model, data, device))
    stopwatch.start()


@torch.no_grad()
def accuracy(model: nn.Module, data: CIFAR10, device: str) -> float:
    was_training = model.training
    model.eval()
    correct = total = 0
    for images, labels in data.test_dataloader():
        correct += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
        total += len(labels)
    model.train(was_training)
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="holds CIFAR-10, see `vitmha fit --data.help CIFAR10`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--vitmha", type=int, nargs="+", default=(4, 10), help="epochs of vitmha's schedules")
    parser.add_argument("--plain", type=int, nargs="+", default=(5, 12), help="epochs of the plain loop's schedules")
    parser.add_argument("--short", action="store_true", help="one epoch of 640 images")
    options = parser.parse_args()
    data = CIFAR10(options.root, batch_size=BATCH_SIZE)
    if options.short:
        options.vitmha, options.plain, read = (1,), (1,), data.read
        data.read = lambda train: tuple(tensor[:640] for tensor in read(train))
    data.setup("fit")
    print(f"torch {torch.__version__}, timm {timm.__version__}, {options.device}, {torch.get_num_threads()} threads")
    vitmha_runs = [train_vitmha(data, options.device, epochs) for epochs in options.vitmha]
    plain_runs = [train_plain(data, options.device, epochs) for epochs in options.plain]
    print(f"{'accuracy':>8}{'vitmha [s]':>12}{'plain loop [s]':>16}{'ratio':>8}")
    for target in TARGETS:
        vitmha, plain = (min(run.reached.get(target, math.inf) for run in runs) for runs in (vitmha_runs, plain_runs))
        ratio = f"{vitmha / plain:.2f}" if max(vitmha, plain) < math.inf else "-"
        print(f"{target:>8.0%}{vitmha:>12.0f}{plain:>16.0f}{ratio:>8}")


if __name__ == "__main__":
    main()
