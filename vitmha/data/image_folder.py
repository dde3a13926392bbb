"""Images in class folders."""

import os
import random
from pathlib import Path
from typing import Literal, final

from lightning import LightningDataModule
from lightning.fabric.utilities.data import suggested_max_num_workers
from lightning.pytorch.utilities import rank_zero_info
from torchvision.transforms import v2

from vitmha.data.augmentation import MixupCutmix
from vitmha.data.image_loader import ImageLoader, LabeledFiles
from vitmha.data.sampling import GlobalBatchSampler, processes
from vitmha.data.shards import is_packed, open_packed
from vitmha.data.transforms import EvalTransform, TrainTransform, three_augment_changes
from vitmha.errors import UserError
from vitmha.images import SUFFIXES, Preprocessing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@final
class ImageFolder(LightningDataModule):
    """Pictures in `root/train/CLASS/` and `root/val/CLASS/`, or in `root/CLASS/` with a part set aside for validation.

    Classes are numbered in the order of their names in training, whatever validation holds; validation also serves as
    the test. Hidden files and folders, and files without a picture's suffix, are skipped. Batches are (images, labels):
    float32, normalised, (batch, channels, height, width), and int64, (batch), or with mixup or cutmix in training
    shares, (batch, classes). The same seed gives the same pictures in the same order with any number of workers, and on
    any number of processes with the same global batch (where pictures are mixed, with an even one for each process).

    Args:
        root: The folder, or where `vitmha pack` has put it: a folder, or an address such as s3://BUCKET/NAME.
        image_size: Of the model's input, in pixels: one side, or height and width.
        batch_size: Pictures for each process and step.
        num_workers: Processes that read pictures for each training process; by default what the CPUs allow, at most 8.
        val_fraction: Share of each class set aside where `root` has no `train` folder, between 0 and 1.
        split_seed: Chooses which.
        crop_scale: Smallest and largest fraction of an image's area that the random crop of training keeps, in (0, 1].
        hflip: Probability of a horizontal flip in training; 0 for none.
        rand_augment: Magnitude of two random changes of colour or geometry in training, up to 30; 0 for none.
        auto_augment: In training, two changes after the policy that was learned on ImageNet.
        three_augment: In training, gray, inverted or blurred, and changed in colour, as DeiT III.
        random_erasing: Chance that noise is painted over a part of a picture in training, from 0 to 1.
        mixup: How strongly pairs of training pictures are blended, the parameter of a Beta distribution; 0 for not.
        cutmix: Likewise for a rectangle of one pasted into the other. With both, each picture has one of the two.
        repeated_aug: How often a picture stands in a step of training, each time changed anew; an epoch has as many steps.
        skip_corrupt: Leave damaged pictures out, named once by each process, instead of stopping at the first.
        mean: Of each channel, on a scale of 0 to 1; this and the next four are by default those of --model.pretrained,
            or as usual for ImageNet: its mean and std, bicubic, 0.875 and not squashed.
        std: Likewise.
        interpolation: How pictures are resized.
        crop_pct: Share of the resized picture's tight side that is kept at evaluation.
        crop_mode: "center" cuts out the center at evaluation, "squash" resizes both sides whatever the aspect ratio.

    Raises:
        UserError: A value is out of its range, or the folders are not as described.

    Source: RandomResizedCrop: Szegedy et al., arXiv:1409.4842; RandAugment: Cubuk et al., arXiv:1909.13719;
        AutoAugment: Cubuk et al., arXiv:1805.09501; 3-Augment: Touvron et al., arXiv:2204.07118; random erasing: Zhong
        et al., arXiv:1708.04896; mixup: Zhang et al., arXiv:1710.09412; cutmix: Yun et al., arXiv:1905.04899; repeated
        augmentation: Hoffer et al., arXiv:1901.09335.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int | tuple[int, int] = 224,
        batch_size: int = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        hflip: float = 0.5,
        rand_augment: int = 0,
        auto_augment: bool = False,
        three_augment: bool = False,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        repeated_aug: int = 1,
        skip_corrupt: bool = False,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None,
        crop_pct: float | None = None,
        crop_mode: Literal["center", "squash"] | None = None,
    ) -> None:
        super().__init__()
        for flag, value, valid, expected in (
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
            ("num_workers", num_workers, num_workers is None or num_workers >= 0, "0 (no processes) or more"),
            ("val_fraction", val_fraction, 0 < val_fraction < 1, "between 0 and 1"),
            (
                "crop_scale",
                list(crop_scale),
                0 < crop_scale[0] <= crop_scale[1] <= 1,
                "two fractions, in increasing order, above 0 and up to 1",
            ),
            ("hflip", hflip, 0 <= hflip <= 1, "a probability from 0 to 1"),
            ("rand_augment", rand_augment, 0 <= rand_augment <= 30, "from 0 (off) to 30"),
            ("random_erasing", random_erasing, 0 <= random_erasing <= 1, "from 0 (off) to 1"),
            ("mixup", mixup, mixup >= 0, "0 (off) or more"),
            ("cutmix", cutmix, cutmix >= 0, "0 (off) or more"),
            ("repeated_aug", repeated_aug, repeated_aug >= 1, "at least 1"),
        ):
            if not valid:
                raise UserError(f"--data.{flag} must be {expected}, got {value}")
        if bool(rand_augment) + auto_augment + three_augment > 1:
            raise UserError("--data.rand_augment, --data.auto_augment and --data.three_augment exclude each other")
        self.batch_size, self.num_workers = batch_size, num_workers
        self.repeated_aug = repeated_aug
        self.damaged: set[str] | None = set() if skip_corrupt else None
        self.image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.preprocessing = Preprocessing(
            image_size=self.image_size,
            mean=IMAGENET_MEAN if mean is None else mean,
            std=IMAGENET_STD if std is None else std,
            interpolation=interpolation or "bicubic",
            crop_pct=0.875 if crop_pct is None else crop_pct,
            crop_mode=crop_mode or "center",
        )
        self.in_channels = len(self.preprocessing.mean)
        self.train_files: LabeledFiles
        self.val_files: LabeledFiles
        self.class_names, self.train_files, self.val_files = (
            open_packed(str(root)) if is_packed(str(root)) else find_files(Path(root), val_fraction, split_seed)
        )
        self.num_classes = len(self.class_names)
        self.augmentation = TrainTransform(
            self.preprocessing,
            crop_scale=crop_scale,
            changes=[
                *([v2.RandomHorizontalFlip(hflip)] if hflip else []),
                *([v2.RandAugment(num_ops=2, magnitude=rand_augment)] if rand_augment else []),
                *([v2.AutoAugment()] if auto_augment else []),
                *(three_augment_changes() if three_augment else []),
            ],
            random_erasing=random_erasing,
        )
        is_mixed = mixup > 0 or cutmix > 0
        self.mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=self.num_classes) if is_mixed else None

    def train_dataloader(self) -> ImageLoader:
        return self._loader(training=True)

    def val_dataloader(self) -> ImageLoader:
        return self._loader(training=False)

    def test_dataloader(self) -> ImageLoader:
        return self.val_dataloader()

    def _loader(self, *, training: bool) -> ImageLoader:
        files = self.train_files if training else self.val_files
        repeated_aug = self.repeated_aug if training else 1
        workers = self.num_workers
        if workers is None:
            workers = min(8, suggested_max_num_workers(self.trainer.num_devices if self.trainer else 1))
        return ImageLoader(
            files,
            self.augmentation if training else EvalTransform(self.preprocessing),
            self.preprocessing,
            GlobalBatchSampler(
                len(files), self.batch_size, training=training, repeated_aug=repeated_aug, **processes(self)
            ),
            num_workers=workers,
            mix=self.mix if training else None,
            damaged=self.damaged,
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
        UserError: The folders are not as described.
    """
    parts = [part for part in ("train", "val") if (root / part).is_dir()]
    if len(parts) == 1:
        raise UserError(f"--data.root {root} has {parts[0]}/ alone: expected train/ and val/, or only class folders")
    if parts:
        train, val = (_scan(root / part) for part in parts)
        if unknown := sorted(set(val) - set(train)):
            raise UserError(f"{root / 'val'} has classes that {root / 'train'} lacks: {', '.join(unknown)}")
    else:
        classes = _scan(root)
        val = {}
        for name, paths in classes.items():
            count = min(round(len(paths) * val_fraction), len(paths) - 1)
            val[name] = sorted(random.Random(f"{split_seed} {name}").sample(paths, count))
        train = {name: sorted(set(paths) - set(val[name])) for name, paths in classes.items()}
        if not any(val.values()):
            raise UserError(f"--data.val_fraction {val_fraction} leaves no picture of {root} for validation: raise it")
    numbers = {name: number for number, name in enumerate(train)}
    train_files, val_files = (
        [(path, numbers[name]) for name, paths in part.items() for path in paths] for part in (train, val)
    )
    return tuple(train), train_files, val_files


def _scan(folder: Path) -> dict[str, list[str]]:
    """The picture files below each class folder, all sorted by name."""
    if not folder.is_dir():
        raise UserError(f"--data.root: there is no folder {folder}")
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    classes: dict[str, list[str]] = {name: [] for name in names}
    if not classes:
        raise UserError(f"--data.root: {folder} has no folders of pictures, one for each class")
    skipped = len(entries) - len(classes)
    for name, paths in classes.items():
        for place, folders, files in os.walk((folder / name).absolute(), followlinks=True):
            visible = [inner for inner in folders if not inner.startswith(".")]
            pictures = [file for file in files if file[0] != "." and Path(file).suffix.lower() in SUFFIXES]
            skipped += len(folders) - len(visible) + len(files) - len(pictures)
            folders[:] = visible
            paths += [os.path.join(place, picture) for picture in pictures]
        paths.sort()
    if empty := [name for name, paths in classes.items() if not paths]:
        raise UserError(f"{folder} has class folders without a picture, remove or fill them: {', '.join(empty)}")
    if skipped:
        rank_zero_info(f"{folder}: {skipped} hidden or unknown files and folders skipped")
    return classes
