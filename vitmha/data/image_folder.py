"""Images in class directories."""

import csv
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, cast, final

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.data import suggested_max_num_workers
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_info
from torchvision.transforms import v2

from vitmha.atomic import atomic_path
from vitmha.data import transforms
from vitmha.data.augmentation import MixupCutmix
from vitmha.data.class_dirs import EXPECTED_LAYOUT, TABLES, find_classes, find_splits, warn
from vitmha.data.image_loader import ImageLoader, LabeledFiles
from vitmha.data.sampling import GlobalBatchSampler, process_info
from vitmha.data.shards import is_sharded, open_shards
from vitmha.errors import UserError, check_argument, printable
from vitmha.images import Preprocessing, check_header

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@final
class ImageFolder(LightningDataModule):
    """Images in `root/train/CLASS/` and `root/val/CLASS/`, or in `root/CLASS/` with a fraction held out for validation.

    Class indices follow the sorted names of the training classes, whether or not validation has all of them. Splits may
    also be called training, valid, validation, dev and testing, in any case. The test set is `root/test/CLASS/`, or the
    validation set if there is none. Hidden files and directories, and files without an image suffix, are skipped. The
    first image of each class is opened before training. The run directory holds the number of images of each class in
    `data.csv`, and the images that were held out in `held_out.txt`.

    Batches are (images, labels): float32, normalized, (batch, channels, height, width), and int64, (batch), or with
    mixup or cutmix in training the fraction of each class, (batch, classes). The same seed gives the same images in the
    same order with any number of workers, and on any number of processes with the same global batch (with mixup or
    cutmix, if the batch of each process is even).

    Args:
        root: The directory, or the output of `vitmha shard`: a directory, or an address such as s3://BUCKET/NAME.
        image_size: Of the model's input, in pixels: one side, or (height, width).
        batch_size: Images per process and step.
        num_workers: Worker processes that read images, per training process; by default as many as the CPUs allow, at
            most 8.
        val_fraction: Fraction of each class that is held out if `root` has no train/, between 0 and 1.
        split_seed: Chooses the images that are held out.
        nested_classes: Accept class directories whose images are all in subdirectories, as CLASS/images/ in Tiny
            ImageNet. Without it they are refused, since `root` is then more often the wrong directory.
        crop_scale: Smallest and largest fraction of an image's area that the random crop of training keeps, in (0, 1].
        hflip: Probability of a horizontal flip in training; 0 for none.
        rand_augment: Magnitude of two random operations on color or geometry in training, up to 30; 0 for none. This is
            torchvision's RandAugment; datasets in memory have a version for batches, see `BatchRandAugment`.
        auto_augment: Apply the AutoAugment policy for ImageNet in training.
        three_augment: Apply DeiT III's 3-Augment in training: grayscale, solarization or blur, then color jitter.
        random_erasing: Probability that a rectangle is filled with noise in training, from 0 to 1; datasets in memory
            fill it with the mean color.
        mixup: Parameter of the Beta distribution by which pairs of training images are blended; 0 for none.
        cutmix: Parameter of the Beta distribution of the area that a pasted rectangle leaves; 0 for none. With mixup
            too, each image gets one of the two.
        repeated_aug: Repeated augmentation: copies of each image per step in training, each augmented anew. The number
            of steps per epoch stays the same.
        skip_corrupt: Skip files that cannot be read, each named once by each process, instead of stopping at the first.
        mean: Mean of each channel on a scale of 0 to 1; defaults to the pretrained model's, else to ImageNet's.
        std: Standard deviation of each channel; defaults to the pretrained model's, else to ImageNet's.
        interpolation: How images are resized; defaults to the pretrained model's, else to bicubic.
        crop_pct: Fraction of the resized image that the center crop keeps in evaluation; defaults to the pretrained
            model's, else to 0.875.
        crop_mode: In evaluation "center" cuts out the center, "squash" resizes both sides whatever the aspect ratio;
            defaults to the pretrained model's, else to "center".

    Raises:
        UserError: A value is out of its range, or the directories are not as described.

    Source: RandomResizedCrop: Szegedy et al., arXiv:1409.4842; RandAugment: Cubuk et al., arXiv:1909.13719;
        AutoAugment: Cubuk et al., arXiv:1805.09501; 3-Augment: Touvron et al., arXiv:2204.07118; random erasing: Zhong
        et al., arXiv:1708.04896; mixup: Zhang et al., arXiv:1710.09412; cutmix: Yun et al., arXiv:1905.04899; repeated
        augmentation: Hoffer et al., arXiv:1901.09335.

    Example:
        >>> data = ImageFolder("leaves", image_size=224, rand_augment=9)  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int | tuple[int, int] = 224,
        batch_size: int = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        nested_classes: bool = False,
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
        check_argument("batch_size", batch_size, batch_size >= 1, "at least 1")
        check_argument("num_workers", num_workers, num_workers is None or num_workers >= 0, "0 (no processes) or more")
        check_argument("mixup", mixup, 0 <= mixup < math.inf, "0 (off) or more")
        check_argument("cutmix", cutmix, 0 <= cutmix < math.inf, "0 (off) or more")
        check_argument("repeated_aug", repeated_aug, repeated_aug >= 1, "at least 1")
        self.root = root
        self.batch_size, self.num_workers, self.repeated_aug = batch_size, num_workers, repeated_aug
        self.corrupt_files: set[str] | None = set() if skip_corrupt else None
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
        self.train_transform = _train_transform(
            self.preprocessing, crop_scale, hflip, rand_augment, auto_augment, three_augment, random_erasing
        )
        self.train_files: LabeledFiles
        self.val_files: LabeledFiles
        self.test_files: LabeledFiles
        if is_sharded(str(root)):
            self.class_names, self.train_files, self.val_files, self.test_files = open_shards(str(root))
            self.is_held_out = False
        else:
            self.class_names, train_files, self.val_files = find_files(
                Path(root), val_fraction, split_seed, nested_classes=nested_classes
            )
            self.train_files = train_files
            self.is_held_out = not find_splits(Path(root))
            self.test_files = find_test_files(Path(root), self.class_names, nested_classes=nested_classes)
            if not skip_corrupt:
                _check_first_images(train_files)
        self.num_classes = len(self.class_names)
        self.mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=self.num_classes) if mixup or cutmix else None

    def setup(self, stage: str) -> None:
        """Prints what is read, and writes it to the run directory when training starts."""
        if stage == "test" and not len(self.test_files):
            rank_zero_info(f"root {self.root} has no test split: the validation images are the test set")
        if stage != "fit" or self.trainer is None:
            return
        names = ", ".join(map(printable, self.class_names[:5])) + (", ..." if self.num_classes > 5 else "")
        test = f", {len(self.test_files)} test" if len(self.test_files) else ""
        rank_zero_info(
            f"{self.num_classes} classes ({names}); {len(self.train_files)} training, {len(self.val_files)} validation"
            f"{test} images"
        )
        # Not here: a call whose checkpoint is refused writes nothing.
        self.trainer.callbacks.append(LambdaCallback(on_train_start=self._write_summary))  # type: ignore[attr-defined]

    def class_counts(self, split: Literal["train", "val", "test"]) -> list[int] | None:
        """The number of images of each class; None for shards, since counting would read all of them."""
        files = {"train": self.train_files, "val": self.val_files, "test": self.test_files}[split]
        if not isinstance(files, list):
            return None
        count = Counter(label for _, label in files)
        return [count[label] for label in range(self.num_classes)]

    def _write_summary(self, trainer: Trainer, _: LightningModule) -> None:
        log_dir = trainer.log_dir  # a collective call: all processes make it
        if log_dir is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        directory = Path(log_dir)
        splits: tuple[Literal["train", "val", "test"], ...] = ("train", "val", "test")
        counts = [count for split in splits if (count := self.class_counts(split)) is not None]
        if len(counts) < len(splits):
            return
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_path(directory / "data.csv") as partial, partial.open("w", newline="", encoding="utf-8") as file:
            rows = zip(range(self.num_classes), self.class_names, *counts, strict=True)
            csv.writer(file, lineterminator="\n").writerows([("index", "class", *splits), *rows])
        if self.is_held_out:
            lines = "".join(f"{path}\n" for path, _ in cast(list[tuple[str, int]], self.val_files))
            with atomic_path(directory / "held_out.txt") as partial:
                partial.write_text(lines, encoding="utf-8", errors="surrogateescape")

    def train_dataloader(self) -> ImageLoader:
        return self._loader(self.train_files, training=True)

    def val_dataloader(self) -> ImageLoader:
        return self._loader(self.val_files, training=False)

    def test_dataloader(self) -> ImageLoader:
        return self._loader(self.test_files if len(self.test_files) else self.val_files, training=False)

    def _loader(self, files: LabeledFiles, *, training: bool) -> ImageLoader:
        num_workers = self.num_workers
        if num_workers is None:
            num_workers = min(8, suggested_max_num_workers(self.trainer.num_devices if self.trainer else 1))
        batch_sampler = GlobalBatchSampler(
            len(files),
            self.batch_size,
            training=training,
            repeated_aug=self.repeated_aug if training else 1,
            **process_info(self),
        )
        return ImageLoader(
            files,
            self.train_transform if training else transforms.EvalTransform(self.preprocessing),
            self.preprocessing,
            batch_sampler,
            num_workers=num_workers,
            mix=self.mix if training else None,
            corrupt_files=self.corrupt_files,
        )


def _train_transform(
    preprocessing: Preprocessing,
    crop_scale: tuple[float, float],
    hflip: float,
    rand_augment: int,
    auto_augment: bool,
    three_augment: bool,
    random_erasing: float,
) -> transforms.TrainTransform:
    """The training transform that the arguments of `ImageFolder` describe."""
    check_argument(
        "crop_scale",
        crop_scale,
        0 < crop_scale[0] <= crop_scale[1] <= 1,
        "two fractions in increasing order, above 0 and up to 1",
    )
    check_argument("hflip", hflip, 0 <= hflip <= 1, "from 0 (off) to 1")
    check_argument("rand_augment", rand_augment, 0 <= rand_augment <= 30, "from 0 (off) to 30")
    check_argument("random_erasing", random_erasing, 0 <= random_erasing <= 1, "from 0 (off) to 1")
    if bool(rand_augment) + auto_augment + three_augment > 1:
        raise UserError("rand_augment, auto_augment and three_augment cannot be combined: use one of them")
    return transforms.TrainTransform(
        preprocessing,
        crop_scale=crop_scale,
        transforms=[
            *([v2.RandomHorizontalFlip(hflip)] if hflip else []),
            *([v2.RandAugment(num_ops=2, magnitude=rand_augment)] if rand_augment else []),
            *([v2.AutoAugment()] if auto_augment else []),
            *(transforms.three_augment() if three_augment else []),
        ],
        random_erasing=random_erasing,
    )


def find_files(
    root: Path, val_fraction: float, split_seed: int, *, nested_classes: bool = False
) -> tuple[tuple[str, ...], list[tuple[str, int]], list[tuple[str, int]]]:
    """Finds the classes of a directory and their image files.

    Args:
        root: Directory with train/ and val/, or with class directories.
        val_fraction: Fraction of each class for validation if there is no train/, between 0 and 1; at least one image
            of a class stays in training.
        split_seed: Chooses the images for validation; the choice in one class does not depend on the others.
        nested_classes: Accept class directories whose images are all in subdirectories.

    Returns:
        Class names in the order of their indices; (path, class index) of the training and of the validation images.

    Raises:
        UserError: The directories are not as described.
    """
    check_argument("val_fraction", val_fraction, 0 < val_fraction < 1, "between 0 and 1")
    if not root.is_dir():
        problem = "is not a directory" if root.exists() else "does not exist"
        hint = "; labels in a table are not read" if root.suffix.lower() in TABLES else ""
        raise UserError(f"root {root} {problem} ({EXPECTED_LAYOUT}){hint}")
    splits = find_splits(root)
    if splits and not {"train", "val"} <= splits.keys():
        missing = "val" if "train" in splits else "train"
        found = ", ".join(f"{path.name}/" for path in splits.values())
        raise UserError(
            f"root {root} has {found} but not {missing}/: expected both train/ and val/, or class directories without "
            "either"
        )
    if splits:
        train, val = (find_classes(splits[name], nested_classes=nested_classes) for name in ("train", "val"))
        if splits["train"].samefile(splits["val"]):
            both = f"{splits['train'].name}/ and {splits['val'].name}/"
            warn(f"root {root}: {both} are the same directory, so validation measures training images")
        _check_known(root, splits["val"].name, val, splits["train"].name, train)
        if missing_classes := [printable(name) for name in train if name not in val]:
            warn(f"root {root}: classes without validation images: {', '.join(missing_classes)}")
    else:
        classes = find_classes(root, nested_classes=nested_classes)
        val = {}
        for name, paths in classes.items():
            count = min(round(len(paths) * val_fraction), len(paths) - 1)
            val[name] = sorted(random.Random(f"{split_seed} {name}").sample(paths, count))
        train = {name: sorted(set(paths) - set(val[name])) for name, paths in classes.items()}
        if not any(val.values()):
            raise UserError(f"val_fraction {val_fraction} leaves no image of {root} for validation: use a larger one")
    return tuple(train), _labeled(train, train), _labeled(val, train)


def find_test_files(root: Path, class_names: Sequence[str], *, nested_classes: bool = False) -> list[tuple[str, int]]:
    """Finds (path, class index) of the images in the test split of a directory; none if it has no such split.

    Raises:
        UserError: A class that is not among `class_names`, or directories that are not as described.
    """
    splits = find_splits(root)
    if "test" not in splits:
        return []
    test = find_classes(splits["test"], nested_classes=nested_classes)
    _check_known(root, splits["test"].name, test, splits["train"].name, class_names)
    return _labeled(test, class_names)


def _check_known(root: Path, split: str, found: Iterable[str], train: str, known: Iterable[str]) -> None:
    if unknown := sorted(set(found) - set(known)):
        names = ", ".join(map(printable, unknown))
        raise UserError(f"root {root}: classes in {split}/ that {train}/ does not have: {names}")


def _labeled(classes: dict[str, list[str]], class_names: Iterable[str]) -> list[tuple[str, int]]:
    class_to_idx = {name: index for index, name in enumerate(class_names)}
    return [(path, class_to_idx[name]) for name, paths in classes.items() for path in paths]


def _check_first_images(files: Sequence[tuple[str, int]]) -> None:
    """Opens the first image of each class, without decoding it, so that an unsupported format is named at the start.

    Raises:
        ImageReadError: A header that cannot be read.
    """
    for path in {label: path for path, label in reversed(files)}.values():
        check_header(path)
