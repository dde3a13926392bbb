"""Small models, images and runs that several test files build."""

import io
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2.functional import to_pil_image

from vitmha.cli import main
from vitmha.images import Preprocessing, read_image
from vitmha.inference.classifier import Prediction
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.training.module import LitViT

ROOT = Path(__file__).parents[1]
SIZES = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "num_classes": 7}
HF_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 31,
    "patch_size": 8,
    "num_labels": 7,
}


def of_timm(name: str, size: tuple[int, int] = (32, 48), **changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    model = timm.create_model(name, pretrained=False, img_size=size, **{**SIZES, **changes})
    return model, size


def of_hugging_face(name: str, size: tuple[int, int], **changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    kind = getattr(transformers, name)
    return kind(kind.config_class(image_size=32, **{**HF_SIZES, **changes})), size


def of_torchvision() -> tuple[nn.Module, tuple[int, int]]:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 31}
    return torchvision.models.VisionTransformer(**sizes, num_classes=7), (32, 32)


def of_ours(**changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    size = (32, 48)
    return VisionTransformer(ViTConfig(image_size=size, mlp_dim=31, **SIZES, **changes)), size


FAMILIES: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[int, int]]], int]] = {
    "ours": (of_ours, 1),
    "ours, registers, mean-pooled": (lambda: of_ours(num_registers=4, pool="mean"), 4),
    "timm ViT": (lambda: of_timm("vit_base_patch16_224"), 1),
    "timm DeiT distilled": (lambda: of_timm("deit_tiny_distilled_patch16_224"), 2),
    "timm DINOv2 registers": (lambda: of_timm("vit_small_patch14_reg4_dinov2"), 5),
    "timm mean-pooled": (lambda: of_timm("vit_base_patch16_224", class_token=False, global_pool="avg"), 0),
    "timm map-pooled": (lambda: of_timm("vit_base_patch16_siglip_224"), 0),
    "timm DINOv3": (lambda: of_timm("vit_small_patch16_dinov3"), 5),
    "HF ViT": (lambda: of_hugging_face("ViTForImageClassification", (32, 32)), 1),
    "HF DeiT distilled": (lambda: of_hugging_face("DeiTForImageClassificationWithTeacher", (32, 32)), 2),
    "HF DINOv2": (lambda: of_hugging_face("Dinov2ForImageClassification", (32, 48)), 1),
    "HF DINOv2 registers": (lambda: of_hugging_face("Dinov2WithRegistersForImageClassification", (32, 48)), 5),
    "HF DINOv3": (lambda: of_hugging_face("DINOv3ViTModel", (32, 48), num_register_tokens=3), 4),
    "torchvision ViT": (of_torchvision, 1),
}


def built(family: str) -> tuple[nn.Module, Tensor, int]:
    make, prefix = FAMILIES[family]
    model, size = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.eval(), torch.randn(2, 3, *size), prefix


def facts_of(page: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found)


CONFIG = ViTConfig(
    image_size=(6, 9),
    patch_size=3,
    num_classes=5,
    embed_dim=12,
    depth=2,
    num_heads=3,
    attention_dropout=0.2,
    drop_path=0.2,
)


NO_DROPOUT_CONFIG = ViTConfig(
    image_size=(6, 9), patch_size=3, in_channels=2, num_classes=5, embed_dim=12, depth=2, num_heads=3, mlp_dim=20
)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def pattern_loader(count: int, batch_size: int, channels: int = 3) -> DataLoader:
    """Noisy copies of one pattern per class, 6 x 9 pixels, five classes."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(5, channels, 6, 9, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    images = 2 * patterns[labels] + torch.randn(count, channels, 6, 9, generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size)


def train(
    directory: Path,
    callbacks: Sequence[Callback] = (),
    *,
    epochs: int = 3,
    vit: ViTConfig = CONFIG,
    model: Mapping[str, Any] | None = None,
    train_loader: DataLoader | None = None,
    val_loader: DataLoader | None = None,
    loggers: tuple[Logger, ...] = (),
    ckpt_path: Path | None = None,
    **trainer_options: Any,
) -> LitViT:
    """Trains `LitViT(vit, **model)` on `pattern_loader`; metrics.csv is in the directory."""
    torch.manual_seed(3)
    module = LitViT(vit, **(model or {}))
    if vit.in_channels == 3:
        module.model.preprocessing = Preprocessing(image_size=(6, 9), mean=(0.5,) * 3, std=(0.5,) * 3)
    logger = [CSVLogger(directory, name="", version=""), *loggers]
    options = {**QUIET, "logger": logger, "max_epochs": epochs, "log_every_n_steps": 1, **trainer_options}
    trainer = Trainer(callbacks=list(callbacks), **options)
    train_loader = train_loader or pattern_loader(20, 5, vit.in_channels)
    val_loader = val_loader or pattern_loader(11, 4, vit.in_channels)
    trainer.fit(module, train_loader, val_loader, ckpt_path=ckpt_path)
    return module


def random_model(**fields: Any) -> VisionTransformer:
    """A model of `NO_DROPOUT_CONFIG` with other fields, no weight at its start value."""
    model = VisionTransformer(replace(NO_DROPOUT_CONFIG, **fields))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def random_vit(std: float = 0.5, **fields: Any) -> VisionTransformer:
    """A small ViT in eval mode with random weights, so large that its attention is far from uniform."""
    sizes = {"image_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3, "mlp_dim": 17}
    model = VisionTransformer(ViTConfig(**{**sizes, "num_classes": 5, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def small_model(**fields: Any) -> VisionTransformer:
    """No weight at its start value."""
    sizes = {"image_size": (14, 33), "patch_size": (7, 11), "embed_dim": 24, "depth": 3, "mlp_dim": 31, "num_heads": 6}
    model = create_model("vit_tiny", **{**sizes, "num_classes": 5, **fields})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def batches(size: int = 4, count: int = 11) -> list[tuple[Tensor, Tensor]]:
    """The same images in batches of any size, the last one smaller."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 14, 33, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    return list(zip(images.split(size), labels.split(size), strict=True))


def images_of(batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [images for images, _ in batches]


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which `vitmha ARGS` is refused, with exit status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "Traceback"))]
    assert len(lines) == 1, lines
    return lines[0]


def assert_equal(actual: Any, expected: Any) -> None:
    """Tensors, or nested lists and tuples of them, are equal bit for bit."""
    assert_close(actual, expected, rtol=0, atol=0)


def write_images(root: Path, *names: str) -> Path:
    """Writes images of one color each, all different: red is ten times the position in `names`."""
    for position, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".png", ".webp", ".jpeg", ".jpg"):
            Image.new("RGB", (9, 13), (10 * position, 0, 0)).save(path)
        else:
            path.write_text("not an image")
    return root


def set_rank(data: LightningDataModule, rank: int, world_size: int) -> None:
    """Sets the rank and world size that a data module finds in its trainer."""
    data.trainer = type("Run", (), {"global_rank": rank, "world_size": world_size, "num_devices": world_size})()


class BatchRecorder(LightningModule):
    """Records the batches it reads; it has one parameter, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.trained: list[tuple[Tensor, Tensor]] = []
        self.epochs: list[int] = []
        self.validated: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trained.append((batch[0], batch[1]))
        self.epochs.append(self.current_epoch)
        return self.scale * batch[0].mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append((batch[0], batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(directory: Path, max_epochs: int) -> Trainer:
    return Trainer(
        default_root_dir=directory,
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow above 4 kB; the error is EFBIG in the place of a full disk's ENOSPC."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


CLASS_NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
# `vitmha classify` in a process of its own, and its environment.
CLASSIFY = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def classifier_model(**fields: object) -> VisionTransformer:
    """A small model for images of 24 x 40 with 7 classes, whose predictions differ from image to image."""
    sizes = {"image_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_dim": 20}
    model = create_model("vit_mini", **{**sizes, "num_classes": 7, **fields})
    if model.config.num_classes:
        torch.nn.init.normal_(model.head.weight)
    model.class_names = CLASS_NAMES if model.config.num_classes == 7 else None
    model.preprocessing = Preprocessing(image_size=(24, 40), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_pct=0.9)
    return model.eval()


def write_mixed_images(image_dir: Path) -> Path:
    """Writes 23 images of many sizes and formats, a truncated one, and a text file with the suffix of an image."""
    generator = torch.Generator().manual_seed(2)
    for i in range(23):
        coarse = torch.randint(256, (3, 3, 4), generator=generator, dtype=torch.uint8)
        size = (90 - 3 * i, 20 + 7 * i)
        to_pil_image(coarse).resize(size, Image.Resampling.BICUBIC).save(
            image_dir / f"{i:02d}{('.png', '.jpg', '.webp')[i % 3]}"
        )
    (image_dir / "05 cut.jpg").write_bytes((image_dir / "01.jpg").read_bytes()[:400])
    (image_dir / "11 not an image.png").write_text("text")
    return image_dir


def files_in(directory: Path) -> list[str]:
    return sorted(str(file) for file in directory.iterdir())


def expected_probabilities(model: VisionTransformer, file: str) -> torch.Tensor:
    with torch.no_grad():
        return model(model.preprocessing(read_image(file))[None]).softmax(-1)[0]


def stack_probabilities(predictions: list[Prediction]) -> Tensor:
    return torch.stack([p.all_probabilities for p in predictions if p.all_probabilities is not None])


def classify(
    args: list[str], capfdbinary: pytest.CaptureFixture[bytes], expected: int = 0, command: str = "classify"
) -> tuple[bytes, str]:
    """Runs `vitmha classify ARGS` in this process; returns both its streams after checking its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main([command, *args])
    out, err = capfdbinary.readouterr()
    assert exit_.value.code == expected, (exit_.value.code, err)
    assert b"Traceback" not in err
    return out, os.fsdecode(err)


def read_records(out: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def assert_same_records(found: list[dict[str, object]], expected: list[dict[str, object]]) -> None:
    assert [(record["path"], record.get("labels"), record.get("error")) for record in found] == [
        (record["path"], record.get("labels"), record.get("error")) for record in expected
    ]
    for record, other in zip(found, expected, strict=True):
        assert record.get("probabilities", []) == pytest.approx(other.get("probabilities", []), abs=1e-5)


def write_links(file: Path, image_dir: Path, number: int) -> None:
    image_dir.mkdir()
    for i in range(number):
        (image_dir / f"{i:06d}{file.suffix}").symlink_to(file)


def multichannel_tiff(channels: int, bits: int) -> bytes:
    """An uncompressed TIFF of 3 x 2 pixels."""
    size = 6 * channels * bits // 8
    tags = {256: 3, 257: 2, 258: (bits,) * channels, 259: 1, 262: 1, 273: 512, 277: channels, 278: 2, 279: size}
    directory = ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[tag] = value
    stream = io.BytesIO()
    directory.save(stream)
    return stream.getvalue().ljust(512, b"\0") + bytes(size)
