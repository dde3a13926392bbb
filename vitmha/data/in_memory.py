"""Data sets small enough to lie on the device as a whole, as bytes: no files, workers or copies during training."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from lightning import LightningDataModule
from torch import Tensor

from vitmha.data.augmentation import Augmentation, BatchRandAugment, MixupCutmix, RandomCropFlip, RandomErasing
from vitmha.data.sampling import GlobalBatchSampler, processes
from vitmha.errors import UserError
from vitmha.images import Preprocessing

# A label is a class, or a sequence of them.
Tensors = tuple[UInt8[Tensor, "samples channels height width"], Int64[Tensor, "samples ..."]]
Batch = tuple[Float[Tensor, "batch channels height width"], Shaped[Tensor, "batch ..."]]


class InMemoryLoader:
    """The batches of one process, made on the device where the pictures lie; what Lightning takes for a DataLoader.

    Args:
        images: All pictures, pixels 0 to 255.
        labels: Their classes, on the same device.
        preprocessing: Normalises the pictures.
        batch_sampler: Which of them come when.
        changes: What happens to the pixels in training, one after the other.
        mix: What happens to the normalised pictures and their labels then. All draws come from the batch sampler's
            generator.
    """

    def __init__(
        self,
        images: UInt8[Tensor, "samples channels height width"],
        labels: Int64[Tensor, "samples ..."],
        *,
        preprocessing: Preprocessing,
        batch_sampler: GlobalBatchSampler,
        changes: Sequence[Augmentation] = (),
        mix: MixupCutmix | None = None,
    ) -> None:
        self.images, self.labels = images, labels
        self.preprocessing, self.batch_sampler = preprocessing, batch_sampler
        self.changes, self.mix = changes, mix
        self.step = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        device = self.images.device
        count, share = self.batch_sampler.global_batch_size, self.batch_sampler.share
        # A generator, so that the epoch and its start are read when the first batch is, not when the loop is built.
        for step, indices in enumerate(self.batch_sampler, start=self.batch_sampler.start):
            self.step = step + 1
            # Blocking copies would make the host wait for all work queued on the device.
            chosen = torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True)
            images = self.images.index_select(0, chosen)
            labels = self.labels.index_select(0, chosen)
            generator = self.batch_sampler.generator(step)

            def drawn(change: Augmentation | MixupCutmix, generator: torch.Generator = generator) -> Tensor:
                return change.draw(count, generator)[share(count)].to(device, non_blocking=True)

            for change in self.changes:
                images = change.apply(images, drawn(change))
            normalised = self.preprocessing.normalize(images)
            yield self.mix.apply(normalised, labels, drawn(self.mix)) if self.mix else (normalised, labels)

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves with every checkpoint: all that the batches to come depend on."""
        return {"epoch": self.batch_sampler.epoch, "start": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on behind the last batch of another; to be called before the first batch is read."""
        self.batch_sampler.resume(**state_dict)
        self.step = self.batch_sampler.start


class InMemoryData(LightningDataModule, ABC):
    """A data set that is read once and stays on the device; its test set also serves for validation.

    Batches are (images, labels): float32, normalised, (batch, channels, height, width), and int64, (batch). The same
    seed gives the same pictures in the same order on any number of processes with the same global batch.

    Args:
        class_names: In the order of the labels.
        preprocessing: Image size, mean and standard deviation of the training set.
        batch_size: Pictures for each process and step.
        random_crop_padding: Of the random crop, in pixels; 0 switches it off.
        hflip: Probability of a horizontal flip, in [0, 1]; 0 for none.
        rand_augment: Magnitude of two random changes of geometry or colour, up to 30; 0 for none.
        random_erasing: Share of the pictures over which a rectangle is painted.
        mixup: How strongly pairs of pictures are blended, the parameter of a Beta distribution; 0 for not.
        cutmix: Likewise for a rectangle of the one pasted into the other.
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
        if batch_size < 1:
            raise UserError(f"--data.batch_size must be at least 1, got {batch_size}")
        if not 0 <= hflip <= 1:
            raise UserError(f"--data.hflip must lie in [0, 1], got {hflip}")
        if random_crop_padding < 0:
            raise UserError(f"--data.random_crop_padding must be 0 (no crop) or more, got {random_crop_padding}")
        if not 0 <= rand_augment <= 30:
            raise UserError(f"--data.rand_augment must lie in [0, 30], got {rand_augment}")
        if not 0 <= random_erasing <= 1:
            raise UserError(f"--data.random_erasing must lie in [0, 1], got {random_erasing}")
        if min(mixup, cutmix) < 0:
            raise UserError(f"--data.mixup and --data.cutmix must be 0 (off) or more, got {mixup} and {cutmix}")
        self.class_names, self.num_classes = class_names, len(class_names)
        self.preprocessing, self.image_size = preprocessing, preprocessing.image_size
        self.in_channels = len(preprocessing.mean)
        self.batch_size = batch_size
        self.changes: list[Augmentation] = []
        if random_crop_padding or hflip:
            self.changes.append(RandomCropFlip(padding=random_crop_padding, hflip=hflip))
        if rand_augment:
            self.changes.append(BatchRandAugment(magnitude=rand_augment))
        if random_erasing:
            colour = tuple(255 * mean for mean in preprocessing.mean)
            self.changes.append(RandomErasing(chance=random_erasing, colour=colour))
        self.mix = MixupCutmix(mixup=mixup, cutmix=cutmix, num_classes=self.num_classes) if mixup or cutmix else None
        self._samples: dict[bool, Tensors] = {}

    @abstractmethod
    def read(self, train: bool) -> Tensors:
        """The whole training or test set.

        Args:
            train: Which of the two.

        Returns:
            Images (pixels, 0 to 255) and labels, on the CPU.

        Raises:
            UserError: Files are missing or damaged.
        """

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        for train in (True, False) if stage == "fit" else (False,):
            images, labels = self._samples.get(train) or self.read(train)
            self._samples[train] = images.to(device).contiguous(), labels.to(device)

    def train_dataloader(self) -> InMemoryLoader:
        return self._batches(train=True)

    def val_dataloader(self) -> InMemoryLoader:
        return self._batches(train=False)

    def test_dataloader(self) -> InMemoryLoader:
        return self._batches(train=False)

    def _batches(self, train: bool) -> InMemoryLoader:
        images, labels = self._samples[train]
        sampler = GlobalBatchSampler(len(images), self.batch_size, training=train, **processes(self))
        return InMemoryLoader(
            images,
            labels,
            preprocessing=self.preprocessing,
            batch_sampler=sampler,
            changes=self.changes if train else (),
            mix=self.mix if train else None,
        )
