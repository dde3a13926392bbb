"""Datasets small enough to be held on the device, as bytes: no file reads, workers or copies during training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from lightning import LightningDataModule
from torch import Tensor

from vitmha.data.augmentation import Augmentation, BatchRandAugment, MixupCutmix, RandomCropFlip, RandomErasing
from vitmha.data.sampling import GlobalBatchSampler, process_info
from vitmha.errors import check_argument
from vitmha.images import Preprocessing

# A label is a class index or a sequence of them.
Tensors = tuple[UInt8[Tensor, "samples channels height width"], Int64[Tensor, "samples ..."]]
Batch = tuple[Float[Tensor, "batch channels height width"], Shaped[Tensor, "batch ..."]]


class InMemoryLoader:
    """The batches of one process, made on the device of the images; takes the place of a DataLoader in Lightning.

    Args:
        images: All images, pixels 0 to 255.
        labels: Their labels, on the same device.
        preprocessing: Normalizes the images.
        batch_sampler: Chooses the samples of each batch; all random parameters come from its generator.
        augmentations: Applied to the pixels in this order.
        mix: Applied to the normalized images and their labels.
    """

    def __init__(
        self,
        images: UInt8[Tensor, "samples channels height width"],
        labels: Int64[Tensor, "samples ..."],
        *,
        preprocessing: Preprocessing,
        batch_sampler: GlobalBatchSampler,
        augmentations: Sequence[Augmentation] = (),
        mix: MixupCutmix | None = None,
    ) -> None:
        self.images, self.labels = images, labels
        self.preprocessing, self.batch_sampler = preprocessing, batch_sampler
        self.augmentations, self.mix = augmentations, mix

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        sampler = self.batch_sampler
        # A generator, so that the epoch and its start are read with the first batch, not when the loop is built.
        for step, indices in enumerate(sampler, start=sampler.start):
            sampler.step = step + 1
            # Blocking copies would make the host wait for all work queued on the device.
            chosen = torch.tensor(indices, dtype=torch.int64).to(self.images.device, non_blocking=True)
            images = self.images.index_select(0, chosen)
            labels = self.labels.index_select(0, chosen)
            generator = sampler.generator(step)
            for augmentation in self.augmentations:
                images = augmentation.apply(images, self._params(augmentation, generator))
            normalized = self.preprocessing.normalize(images)
            if self.mix:
                yield self.mix.apply(normalized, labels, self._params(self.mix, generator))
            else:
                yield normalized, labels

    def _params(self, augmentation: Augmentation | MixupCutmix, generator: torch.Generator) -> Tensor:
        """This process's slice of the parameters of the global batch."""
        count = self.batch_sampler.global_batch_size
        params = augmentation.sample_params(count, generator)[self.batch_sampler.rank_slice(count)]
        return params.to(self.images.device, non_blocking=True)

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves with every checkpoint."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the last batch of another loader. Must be called before the first batch is read."""
        self.batch_sampler.load_state_dict(state_dict)


class InMemoryData(LightningDataModule, ABC):
    """A dataset that is read once and stays on the device; its test set is also the validation set.

    Batches are (images, labels): float32, normalized, (batch, channels, height, width), and int64, (batch), or with
    mixup or cutmix in training the fraction of each class, (batch, classes). The same seed gives the same images in the
    same order on any number of processes with the same global batch.

    Args:
        class_names: In the order of the labels.
        preprocessing: Image size, mean and standard deviation of the training set.
        batch_size: Images per process and step.
        random_crop_padding: Pixels added on each side before the random crop; 0 for no crop.
        hflip: Probability of a horizontal flip, in [0, 1]; 0 for none.
        rand_augment: Magnitude of two random operations on geometry or color, up to 30; 0 for none. Unlike in
            ImageFolder, the strength is drawn between 0 and the magnitude, geometry comes before color, and
            AutoContrast and Equalize are missing: see `BatchRandAugment`.
        random_erasing: Probability that a rectangle is filled with the mean color, in [0, 1]; ImageFolder fills it with
            noise.
        mixup: Parameter of the Beta distribution by which pairs of images are blended; 0 for none.
        cutmix: Parameter of the Beta distribution of the area that a pasted rectangle leaves; 0 for none. With mixup
            too, each image gets one of the two.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(
        self,
        *,
        class_names: tuple[str, ...],
        preprocessing: Preprocessing,
        batch_size: int = 128,
        random_crop_padding: int = 0,
        hflip: float = 0.5,
        rand_augment: float = 0.0,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        check_argument("batch_size", batch_size, batch_size >= 1, "at least 1")
        check_argument("random_crop_padding", random_crop_padding, random_crop_padding >= 0, "0 (no crop) or more")
        check_argument("hflip", hflip, 0 <= hflip <= 1, "from 0 (off) to 1")
        check_argument("rand_augment", rand_augment, 0 <= rand_augment <= 30, "from 0 (off) to 30")
        check_argument("random_erasing", random_erasing, 0 <= random_erasing <= 1, "from 0 (off) to 1")
        check_argument("mixup", mixup, 0 <= mixup < math.inf, "0 (off) or more")
        check_argument("cutmix", cutmix, 0 <= cutmix < math.inf, "0 (off) or more")
        self.class_names, self.num_classes = class_names, len(class_names)
        self.preprocessing, self.image_size = preprocessing, preprocessing.image_size
        self.in_channels = len(preprocessing.mean)
        self.batch_size = batch_size
        self.augmentations: list[Augmentation] = []
        if random_crop_padding or hflip:
            self.augmentations.append(RandomCropFlip(padding=random_crop_padding, hflip=hflip))
        if rand_augment:
            self.augmentations.append(BatchRandAugment(magnitude=rand_augment))
        if random_erasing:
            mean_color = tuple(255 * mean for mean in preprocessing.mean)
            self.augmentations.append(RandomErasing(p=random_erasing, color=mean_color))
        self.mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=self.num_classes) if mixup or cutmix else None
        self._samples: dict[bool, Tensors] = {}

    @abstractmethod
    def read(self, train: bool) -> Tensors:
        """Reads the training or the test set.

        Args:
            train: The training set if true, else the test set.

        Returns:
            Images (pixels, 0 to 255) and labels, on the CPU.

        Raises:
            UserError: Files are missing or corrupt.
        """

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        for train in (True, False) if stage == "fit" else (False,):
            images, labels = self._samples.get(train) or self.read(train)
            self._samples[train] = images.to(device).contiguous(), labels.to(device)

    def class_counts(self, split: Literal["train", "val", "test"]) -> list[int] | None:
        """The number of images of each class after `setup`; None if the labels are sequences."""
        _, labels = self._samples[split == "train"]
        return None if labels.ndim > 1 else labels.bincount(minlength=self.num_classes).tolist()

    def train_dataloader(self) -> InMemoryLoader:
        return self._loader(train=True)

    def val_dataloader(self) -> InMemoryLoader:
        return self._loader(train=False)

    def test_dataloader(self) -> InMemoryLoader:
        return self._loader(train=False)

    def _loader(self, *, train: bool) -> InMemoryLoader:
        images, labels = self._samples[train]
        return InMemoryLoader(
            images,
            labels,
            preprocessing=self.preprocessing,
            batch_sampler=GlobalBatchSampler(len(images), self.batch_size, training=train, **process_info(self)),
            augmentations=self.augmentations if train else (),
            mix=self.mix if train else None,
        )
