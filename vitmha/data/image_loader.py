"""Batches of pictures that are read one by one, by worker processes, with the random changes of training.

What is random about a picture depends on the seed, the epoch, the step and its place in the global batch alone, so the
same pictures come from any number of workers and processes, and after a resume in the middle of an epoch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitmha.data.augmentation import MixupCutmix
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.images import ImageReadError, Preprocessing, Source

logger = logging.getLogger(__name__)
# Pictures and their classes, int64, (batch); or where pictures are mixed shares of the classes, (batch, classes).
Batch = tuple[Float[Tensor, "batch channels height width"], Tensor]


@runtime_checkable
class LabeledFiles(Protocol):
    """Files and their classes, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Source, int]: ...


class Step(NamedTuple):
    """One process's share of a global batch: which samples, and in training their random numbers."""

    indices: list[int]
    seeds: list[int]
    mixing: Float[Tensor, "batch 4"] | None = None


@final
class ImageLoader:
    """The batches of one process, read by workers; what Lightning takes for a DataLoader.

    Nothing is read before the first batch is asked for, when Lightning has set the epoch. In evaluation all processes
    make the same number of steps, and the last may leave one of them without a picture.

    Args:
        samples: All files.
        transform: From a file to the model's input; in training it may draw from PyTorch's global stream.
        preprocessing: Gives a batch of no pictures its shape.
        batch_sampler: Which samples come when.
        num_workers: Processes that read.
        mix: Mixes pictures of a batch.
        damaged: Where given, a file that is no picture is left out; its error is said once and kept here.

    Raises:
        ImageReadError: From the iterator, with the path, for a file that is no picture, unless `damaged` is given.
    """

    def __init__(
        self,
        samples: LabeledFiles,
        transform: Callable[[Source], Tensor],
        preprocessing: Preprocessing,
        batch_sampler: GlobalBatchSampler,
        *,
        num_workers: int,
        mix: MixupCutmix | None = None,
        damaged: set[str] | None = None,
    ) -> None:
        self.batch_sampler, self.damaged = batch_sampler, damaged
        self.step = 0
        empty = torch.empty(0, len(preprocessing.mean), *preprocessing.image_size)
        self._loader = DataLoader(
            _Batches(samples, transform, empty, mix, damaged is not None),
            batch_size=None,
            sampler=_Steps(batch_sampler, mix),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            # Seeds the workers without a draw from the global random stream.
            generator=batch_sampler.generator(),
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        self.step = self.batch_sampler.start
        for images, labels, damaged in self._loader:
            self.step += 1
            if self.damaged is not None:
                self._report(damaged, self.damaged)
            yield images, labels

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves with every checkpoint: all that the batches to come depend on."""
        return {"epoch": self.batch_sampler.epoch, "start": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on behind the last batch of another; to be called before the first batch is read."""
        self.batch_sampler.resume(**state_dict)
        self.step = self.batch_sampler.start

    @property
    def _iterator(self) -> Any:
        """Under this name, which is DataLoader's, Lightning looks for the workers when it ends them."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        self._loader._iterator = iterator

    @staticmethod
    def _report(errors: Sequence[str], known: set[str]) -> None:
        for error in errors:
            if error not in known:
                known.add(error)
                logger.warning(f"Left out, damaged picture number {len(known)}: {error}")


@final
class _Steps:
    """What is still to be read in this epoch, and all that is random about it."""

    # No reference to the loader: in a circle of references its workers would end too late, one after the other.
    def __init__(self, batch_sampler: GlobalBatchSampler, mix: MixupCutmix | None) -> None:
        self.batch_sampler, self.mix = batch_sampler, mix

    def __iter__(self) -> Iterator[Step]:
        sampler = self.batch_sampler
        count = sampler.global_batch_size
        for number, indices in enumerate(sampler, start=sampler.start):
            if sampler.training:
                generator, share = sampler.generator(number), sampler.share(count)
                seeds = torch.randint(2**62, (count,), generator=generator)[share].tolist()
                yield Step(indices, seeds, self.mix.draw(count, generator)[share] if self.mix else None)
            else:
                yield Step(indices, [])


@final
class _Batches(Dataset[tuple[Tensor, Tensor, list[str]]]):
    """What runs in a worker: a step becomes pictures, labels, and the errors of files left out."""

    def __init__(
        self,
        samples: LabeledFiles,
        transform: Callable[[Source], Tensor],
        empty: Tensor,
        mix: MixupCutmix | None,
        skip_corrupt: bool,
    ) -> None:
        self.samples, self.transform, self.empty = samples, transform, empty
        self.mix, self.skip_corrupt = mix, skip_corrupt

    def __getitem__(self, step: Step) -> tuple[Tensor, Tensor, list[str]]:
        images, labels, kept, damaged = [], [], [], []
        for place, index in enumerate(step.indices):
            source, label = self.samples[index]
            try:
                with _seeded(step.seeds[place] if step.seeds else None):
                    images.append(self.transform(source))
            except ImageReadError as error:
                if not self.skip_corrupt:
                    raise
                damaged.append(str(error))
                continue
            labels.append(label)
            kept.append(place)
        batch = torch.stack(images) if images else self.empty
        classes = torch.tensor(labels, dtype=torch.int64)
        if self.mix and step.mixing is not None:
            batch, classes = self.mix.apply(batch, classes, step.mixing[kept])
        return batch, classes, damaged


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Inside, PyTorch's global stream on the CPU begins at the seed; outside, nothing of it is seen."""
    if seed is None:
        yield
        return
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
