"""Which samples each process reads at each step, in training and in evaluation."""

import os
import random
from collections.abc import Iterator

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from vitmha.errors import UserError


class GlobalBatchSampler:
    """The indices one process reads, batch by batch; a `batch_sampler` for a DataLoader.

    The samples are cut into global batches of `batch_size` times `world_size`, and each process reads its contiguous
    share of every one. In training the order is a new permutation in each epoch, and an incomplete last batch is
    dropped. In evaluation the order is the data set's, and nothing is dropped or doubled: all processes make the same
    number of steps, so at the last one some may read less than the others, or nothing (an empty list).

    The order and every `generator` depend on the seed, the epoch and the step alone, neither on the number of processes
    nor on PyTorch's global random stream, so any step can be made again.

    Args:
        samples: How many the data set has.
        batch_size: Samples for each process and step.
        training: Shuffle, and whole batches only.
        seed: Of the order.
        rank: Which of the processes this is, from 0.
        world_size: How many processes there are.
        repeated_aug: How often each sample stands in its global batch in training; an epoch then takes as many steps, and
            so fewer of the samples (Hoffer et al., arXiv:1901.09335).

    Raises:
        UserError: The batch is empty, or in training larger than the data set.
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
        if batch_size < 1:
            raise UserError(f"--data.batch_size must be at least 1, got {batch_size}")
        self.global_batch_size = batch_size * world_size
        if training and samples < self.global_batch_size:
            raise UserError(
                f"the training set has {samples} pictures, but one step takes {self.global_batch_size} "
                f"(--data.batch_size {batch_size} on {world_size} processes): lower --data.batch_size"
            )
        if training and repeated_aug == 1 and (rest := samples % self.global_batch_size):
            steps = samples // self.global_batch_size
            rank_zero_info(f"{steps} steps an epoch; of {samples} pictures {rest}, others each time, are left over.")
        self.samples, self.training = samples, training
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.repeated_aug = repeated_aug
        self.epoch, self.start = 0, 0

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """Itself, since Lightning looks for `set_epoch` on the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls this before every epoch, also when it resumes."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        """Read an epoch from its step `start` on, as after an interruption; the next epoch is read as a whole."""
        self.epoch, self.start = epoch, start

    def share(self, count: int) -> slice:
        """This process's part of a global batch of `count` samples."""
        return slice(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    def generator(self, *step: int) -> torch.Generator:
        """The random numbers of this epoch, or of one step in it; the same on every process."""
        key = random.Random(f"{self.seed} {self.epoch} {step}")  # hashes the text, so near seeds are unrelated
        return torch.Generator().manual_seed(key.getrandbits(63))

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch_size)
        return whole if self.training else whole + (rest > 0)

    def __iter__(self) -> Iterator[list[int]]:
        order = (
            torch.randperm(self.samples, generator=self.generator()) if self.training else torch.arange(self.samples)
        )
        # One round of all behind the other keeps the copies of a sample apart.
        for distinct in order.split(-(-self.global_batch_size // self.repeated_aug))[self.start : len(self)]:
            batch = distinct.repeat(self.repeated_aug)[: self.global_batch_size]
            yield batch[self.share(len(batch))].tolist()


def processes(data: LightningDataModule) -> dict[str, int]:
    """What `GlobalBatchSampler` must know about this run: its seed and processes; one process without a trainer."""
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    if data.trainer is None:
        return {"seed": seed}
    return {"seed": seed, "rank": data.trainer.global_rank, "world_size": data.trainer.world_size}
