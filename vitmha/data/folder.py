"""Pictures in folders, one folder for each class."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, final

import torch
from jaxtyping import Float, Int64
from lightning import LightningDataModule
from lightning.fabric.utilities.data import suggested_max_num_workers
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from vitmha.data.sampling import GlobalBatches, processes
from vitmha.images import Preprocessing, read_image

SUFFIXES = {".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}

Batch = tuple[Float[Tensor, "batch channels height width"], Tensor]


@final
class PictureFiles(Dataset[tuple[Tensor, int]]):
    """Files read one by one, with the number of their class.

    Args:
        files: (path, label) of each sample.
        transform: From a picture to the model's input.
        preprocessing: Gives an empty batch its shape.
    """

    def __init__(
        self,
        files: list[tuple[str, int]],
        transform: Callable[[Image.Image], Tensor],
        preprocessing: Preprocessing,
    ) -> None:
        self.files, self.transform = files, transform
        self.empty = torch.empty(0, len(preprocessing.mean), *preprocessing.image_size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "channels height width"], int]:
        path, label = self.files[index]
        return self.transform(read_image(path)), label

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Int64[Tensor, "batch"]]:
        """A batch of samples, none included: the last step of an evaluation may leave a process without any."""
        images = torch.stack([image for image, _ in samples]) if samples else self.empty
        return images, torch.tensor([label for _, label in samples], dtype=torch.int64)


@final
class ImageFolder(LightningDataModule):
    """Pictures in `root/train/CLASS/` and `root/val/CLASS/`, or in `root/CLASS/` with a part set aside for validation.

    Classes are numbered in the order of their names in training, whatever validation holds; validation also serves as
    the test. Hidden files and folders, and files without a picture's suffix, are skipped. Batches are (images, labels):
    float32, normalised, (batch, channels, height, width), and int64, (batch), or with mixup in training
    probabilities, (batch, classes).

    Args:
        root: The folder.
        image_size: Of the model's input, in pixels: one side, or height and width.
        batch_size: Pictures for each process and step.
        num_workers: Processes that read pictures for each training process; by default what the CPUs allow, at most 8.
        val_fraction: Share of each class set aside where `root` has no `train` folder, between 0 and 1.
        split_seed: Chooses which.
        min_scale: Smallest share of a picture's area that the random crop of training may keep, above 0 and up to 1.
        flip: Mirror half of the pictures in training.
        rand_augment: Magnitude of two random changes of colour or geometry in training, up to 30; 0 for none.
        mixup: How strongly pairs of training pictures are blended, the parameter of a Beta distribution; 0 for not.
        mean: Of each channel, on a scale of 0 to 1.
        std: Likewise.
        interpolation: How pictures are resized.
        crop: Share of the resized picture's tight side that is kept at evaluation.

    Raises:
        ValueError: A value is out of its range, or the folders are not as described.

    Source: RandomResizedCrop: Szegedy et al., arXiv:1409.4842; RandAugment: Cubuk et al., arXiv:1909.13719; mixup:
        Zhang et al., arXiv:1710.09412.
    """

    def __init__(
        self,
        root: Path | str,
        image_size: int | tuple[int, int] = 224,
        batch_size: int = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        min_scale: float = 0.08,
        flip: bool = True,
        rand_augment: int = 0,
        mixup: float = 0.0,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic",
        crop: float = 0.875,
    ) -> None:
        super().__init__()
        for flag, value, valid, expected in (
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
            ("num_workers", num_workers, num_workers is None or num_workers >= 0, "0 (no processes) or more"),
            ("val_fraction", val_fraction, 0 < val_fraction < 1, "between 0 and 1"),
            ("min_scale", min_scale, 0 < min_scale <= 1, "above 0 and up to 1"),
            ("rand_augment", rand_augment, 0 <= rand_augment <= 30, "from 0 (off) to 30"),
            ("mixup", mixup, mixup >= 0, "0 (off) or more"),
        ):
            if not valid:
                raise ValueError(f"--data.{flag} must be {expected}, got {value}")
        self.batch_size, self.num_workers = batch_size, num_workers
        self.image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.preprocessing = Preprocessing(
            image_size=self.image_size, mean=mean, std=std, interpolation=interpolation, crop=crop
        )
        self.in_channels = len(mean)
        self.class_names, self.train_files, self.val_files = find_files(Path(root), val_fraction, split_seed)
        self.num_classes = len(self.class_names)

        resampling = InterpolationMode(interpolation)
        self.augmentation = v2.Compose(
            [
                v2.RandomResizedCrop(self.image_size, scale=(min_scale, 1.0), interpolation=resampling),
                *([v2.RandomHorizontalFlip()] if flip else []),
                *([v2.RandAugment(num_ops=2, magnitude=rand_augment)] if rand_augment else []),
                # The crop of evaluation is off: the picture already has its size.
                replace(self.preprocessing, crop=1.0),
            ]
        )
        self.mixup = v2.MixUp(alpha=mixup, num_classes=self.num_classes) if mixup else None

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_files, self.augmentation, training=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_files, self.preprocessing, training=False)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:  # noqa: ARG002 (Lightning's hook)
        return self.mixup(*batch) if self.mixup and self.trainer and self.trainer.training else batch

    def _loader(
        self, files: list[tuple[str, int]], transform: Callable[[Image.Image], Tensor], *, training: bool
    ) -> DataLoader:
        dataset = PictureFiles(files, transform, self.preprocessing)
        sampler = GlobalBatches(len(files), self.batch_size, training=training, **processes(self))
        workers = self.num_workers
        if workers is None:
            workers = min(8, suggested_max_num_workers(self.trainer.num_devices if self.trainer else 1))
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=dataset.collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            # Seeds the workers, each process's differently, without a draw from the global random stream.
            generator=sampler.generator(sampler.rank),
        )


def find_files(
    root: Path, val_fraction: float, split_seed: int
) -> tuple[tuple[str, ...], list[tuple[str, int]], list[tuple[str, int]]]:
    """The classes of a folder and its samples.

    Args:
        root: Holds train/ and val/, or class folders.
        val_fraction: Share of each class for validation where there is no train/; a class keeps at least one picture
            for training.
        split_seed: Chooses which; another class's pictures do not change the choice.

    Returns:
        Class names in the order of their numbers; (path, label) of the training and of the validation samples.

    Raises:
        ValueError: The folders are not as described.
    """
    parts = [part for part in ("train", "val") if (root / part).is_dir()]
    if len(parts) == 1:
        raise ValueError(f"--data.root {root} has {parts[0]}/ alone: expected train/ and val/, or only class folders")
    if parts:
        train, val = (_scan(root / part) for part in parts)
        if unknown := sorted(set(val) - set(train)):
            raise ValueError(f"{root / 'val'} has classes that {root / 'train'} lacks: {', '.join(unknown)}")
    else:
        classes = _scan(root)
        val = {}
        for name, paths in classes.items():
            count = min(round(len(paths) * val_fraction), len(paths) - 1)
            val[name] = sorted(random.Random(f"{split_seed} {name}").sample(paths, count))
        train = {name: sorted(set(paths) - set(val[name])) for name, paths in classes.items()}
        if not any(val.values()):
            raise ValueError(f"--data.val_fraction {val_fraction} leaves no picture of {root} for validation: raise it")
    numbers = {name: number for number, name in enumerate(train)}
    train_files, val_files = (
        [(path, numbers[name]) for name, paths in part.items() for path in paths] for part in (train, val)
    )
    return tuple(train), train_files, val_files


def _scan(folder: Path) -> dict[str, list[str]]:
    """The picture files below each class folder, all sorted by name."""
    if not folder.is_dir():
        raise ValueError(f"--data.root: there is no folder {folder}")
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    classes: dict[str, list[str]] = {name: [] for name in names}
    if not classes:
        raise ValueError(f"--data.root: {folder} has no folders of pictures, one for each class")
    skipped = len(entries) - len(classes)
    for name, paths in classes.items():
        for place, folders, files in os.walk(folder / name, followlinks=True):
            visible = [inner for inner in folders if not inner.startswith(".")]
            pictures = [file for file in files if file[0] != "." and Path(file).suffix.lower() in SUFFIXES]
            skipped += len(folders) - len(visible) + len(files) - len(pictures)
            folders[:] = visible
            paths += [os.path.join(place, picture) for picture in pictures]
        paths.sort()
    if empty := [name for name, paths in classes.items() if not paths]:
        raise ValueError(f"{folder} has class folders without a picture, remove or fill them: {', '.join(empty)}")
    if skipped:
        rank_zero_info(f"{folder}: {skipped} hidden or unknown files and folders skipped")
    return classes
