"""Which samples each process reads at each step, in training and in evaluation."""

import os
import random
from collections.abc import Iterator

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from vitmha.errors import UserError, check_argument


class GlobalBatchSampler:
    """The indices that one process reads, batch by batch; a `batch_sampler` for a DataLoader.

    The samples are cut into global batches of `batch_size` times `world_size`, and each process reads its contiguous
    slice of every global batch. In training the order is a new permutation in each epoch, and an incomplete last batch
    is dropped. In evaluation the order is the dataset's, and nothing is dropped or duplicated: all processes make the
    same number of steps, so at the last step some may read fewer samples than the others, or none (an empty list).

    The order and every `generator` depend only on the seed, the epoch and the step. They depend neither on the number
    of processes nor on PyTorch's global random stream, so any step can be reproduced.

    Args:
        samples: Number of samples in the dataset.
        batch_size: Samples per process and step.
        training: Shuffle, and drop an incomplete last batch.
        seed: Of the order.
        rank: Index of this process, from 0.
        world_size: Number of processes.
        repeated_aug: Repeated augmentation: copies of each sample in its global batch in training. An epoch has as many
            steps as without, and so reads fewer of the samples (Hoffer et al., arXiv:1901.09335).

    Raises:
        UserError: The batch is empty, or in training larger than the dataset.

    Example:
        >>> list(GlobalBatchSampler(5, 2, training=False))
        [[0, 1], [2, 3], [4]]
        >>> list(GlobalBatchSampler(5, 1, training=False, rank=1, world_size=2))
        [[1], [3], [4]]
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        training: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeated_aug: int = 1,
    ) -> None:
        check_argument("batch_size", batch_size, batch_size >= 1, "at least 1")
        self.global_batch_size = batch_size * world_size
        if training and samples < self.global_batch_size:
            processes = f" on {world_size} processes" if world_size > 1 else ""
            raise UserError(
                f"batch_size {batch_size}{processes} takes {self.global_batch_size} images per step, but the training "
                f"set has {samples}: use a smaller batch_size"
            )
        if training and repeated_aug == 1 and (rest := samples % self.global_batch_size):
            steps = samples // self.global_batch_size
            rank_zero_info(
                f"{steps} steps per epoch; {rest} of {samples} images are skipped each epoch (incomplete last batch)."
            )
        self.samples, self.training = samples, training
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.repeated_aug = repeated_aug
        self.epoch, self.start = 0, 0
        # Steps of this epoch whose batches the loader has yielded. The loader counts them: its workers read ahead.
        self.step = 0

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """Itself, since Lightning looks for `set_epoch` on the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation. Lightning calls this before every epoch, also when it resumes."""
        if epoch != self.epoch:
            self.resume(epoch, 0)

    def resume(self, epoch: int, start: int) -> None:
        """Reads an epoch from its step `start` on, as after an interruption; the next epoch is read completely."""
        self.epoch, self.start, self.step = epoch, start, start

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was yielded: all that the following batches depend on."""
        return {"epoch": self.epoch, "start": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the last batch of another sampler. Must be called before the first batch is read."""
        self.resume(**state_dict)

    def rank_slice(self, count: int) -> slice:
        """The slice of a global batch of `count` samples that this process reads."""
        return slice(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    def generator(self, *step: int) -> torch.Generator:
        """A generator for this epoch, or for one of its steps; the same on every process."""
        key = random.Random(f"{self.seed} {self.epoch} {step}")  # hashes the text, so close seeds are unrelated
        return torch.Generator().manual_seed(key.getrandbits(63))

    def __len__(self) -> int:
        complete, rest = divmod(self.samples, self.global_batch_size)
        return complete if self.training else complete + (rest > 0)

    def __iter__(self) -> Iterator[list[int]]:
        order = (
            torch.randperm(self.samples, generator=self.generator()) if self.training else torch.arange(self.samples)
        )
        # Repeated as a whole, so that the copies of a sample are not neighbors, which mixup would blend.
        for distinct in order.split(-(-self.global_batch_size // self.repeated_aug))[self.start : len(self)]:
            batch = distinct.repeat(self.repeated_aug)[: self.global_batch_size]
            yield batch[self.rank_slice(len(batch))].tolist()


def process_info(data: LightningDataModule) -> dict[str, int]:
    """Seed, rank and world size of this run."""
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    if data.trainer is None:
        return {"seed": seed}
    return {"seed": seed, "rank": data.trainer.global_rank, "world_size": data.trainer.world_size}
