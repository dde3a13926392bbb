"""Batches of images that worker processes read one by one, with the random augmentation of training.

What is random about an image depends only on the seed, the epoch, the step and its position in the global batch. So the
images are the same for any number of workers and processes, and after a resume in the middle of an epoch.
"""

import atexit
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final, runtime_checkable
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitmha.data.augmentation import MixupCutmix
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.images import ImageReadError, Preprocessing, Source

logger = logging.getLogger(__name__)
# Images and their labels: int64, (batch), or with mixup or cutmix the fraction of each class, (batch, classes).
Batch = tuple[Float[Tensor, "batch channels height width"], Tensor]


@runtime_checkable
class LabeledFiles(Protocol):
    """A sequence of image files and the indices of their classes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Source, int]: ...


class Step(NamedTuple):
    """One process's slice of a global batch: the samples and, in training, their random numbers."""

    indices: list[int]
    seeds: list[int]
    mix_params: Float[Tensor, "batch 4"] | None = None


@final
class ImageLoader:
    """The batches of one process, read by worker processes; takes the place of a DataLoader in Lightning.

    Nothing is read before the first batch is requested, after Lightning has set the epoch. In evaluation all processes
    make the same number of steps, and the last batch of some processes may be empty.

    Args:
        samples: All files with their labels.
        transform: From a file to the model's input; in training it may draw from PyTorch's global random stream.
        preprocessing: Gives an empty batch its shape.
        batch_sampler: Chooses the samples of each batch.
        num_workers: Number of worker processes; 0 reads in this process.
        mix: Applied to each batch.
        corrupt_files: If given, files that cannot be read are skipped; their errors are logged once and added to the
            set. Several loaders may have the same set.

    Raises:
        ImageReadError: While iterating, for a file that cannot be read, unless `corrupt_files` is given.
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
        corrupt_files: set[str] | None = None,
    ) -> None:
        self.batch_sampler, self.corrupt_files = batch_sampler, corrupt_files
        empty = torch.empty(0, len(preprocessing.mean), *preprocessing.image_size)
        self._loader = DataLoader(
            _Batches(samples, transform, empty, mix),
            batch_size=None,
            sampler=_Steps(batch_sampler, mix),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=_leave_signals_to_the_main_process,
            pin_memory=torch.cuda.is_available(),
            # Seeds the workers without drawing from the global random stream.
            generator=batch_sampler.generator(),
        )
        _LOADERS.add(self)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that the epoch and its start are read with the first batch, not when the loop is built.
        self.batch_sampler.step = self.batch_sampler.start
        for images, labels, errors in self._loader:
            if errors:
                self._skip(errors)
            self.batch_sampler.step += 1
            yield images, labels

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves with every checkpoint."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the last batch of another loader. Must be called before the first batch is read."""
        self.batch_sampler.load_state_dict(state_dict)

    @property
    def _iterator(self) -> Any:
        """DataLoader's attribute of this name, where Lightning looks for the workers when it shuts them down."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        self._loader._iterator = iterator

    def _skip(self, errors: Sequence[ImageReadError]) -> None:
        """Logs the errors of a batch, each once; raises the first if corrupt files are not to be skipped."""
        if self.corrupt_files is None:
            raise errors[0]
        for message in map(str, errors):
            if message not in self.corrupt_files:
                self.corrupt_files.add(message)
                logger.warning(f"Skipping corrupt image {len(self.corrupt_files)}: {message}")


@final
class _Steps:
    """The remaining steps of the epoch, with all random numbers that the workers need."""

    # Holds no reference to the loader: in a reference cycle its workers would be shut down late, one after another.
    def __init__(self, batch_sampler: GlobalBatchSampler, mix: MixupCutmix | None) -> None:
        self.batch_sampler, self.mix = batch_sampler, mix

    def __iter__(self) -> Iterator[Step]:
        sampler = self.batch_sampler
        count = sampler.global_batch_size
        for step, indices in enumerate(sampler, start=sampler.start):
            if sampler.training:
                generator, rank_slice = sampler.generator(step), sampler.rank_slice(count)
                seeds = torch.randint(2**62, (count,), generator=generator)[rank_slice].tolist()
                mix_params = self.mix.sample_params(count, generator)[rank_slice] if self.mix else None
                yield Step(indices, seeds, mix_params)
            else:
                yield Step(indices, [])


@final
class _Batches(Dataset[tuple[Tensor, Tensor, list[ImageReadError]]]):
    """What runs in a worker: turns a step into images, labels and the errors of the files that cannot be read.

    Errors are returned and raised in the main process, since DataLoader would rebuild them from the text of a
    traceback.
    """

    def __init__(
        self, samples: LabeledFiles, transform: Callable[[Source], Tensor], empty: Tensor, mix: MixupCutmix | None
    ) -> None:
        self.samples, self.transform, self.empty, self.mix = samples, transform, empty, mix

    def __getitem__(self, step: Step) -> tuple[Tensor, Tensor, list[ImageReadError]]:
        images, labels, kept, errors = [], [], [], []
        for position, index in enumerate(step.indices):
            source, label = self.samples[index]
            try:
                with _seeded(step.seeds[position] if step.seeds else None):
                    images.append(self.transform(source))
            except ImageReadError as error:
                errors.append(error)
                continue
            labels.append(label)
            kept.append(position)
        batch = torch.stack(images) if images else self.empty
        targets = torch.tensor(labels, dtype=torch.int64)
        if self.mix and step.mix_params is not None:
            batch, targets = self.mix.apply(batch, targets, step.mix_params[kept])
        return batch, targets, errors


def _leave_signals_to_the_main_process(worker_id: int) -> None:  # noqa: ARG001 (DataLoader's signature)
    """Keeps a worker reading after a signal to all processes of a run, as Ctrl-C, `timeout` and SLURM send it.

    The main process finishes its step, saves, and ends the workers. The second SIGTERM ends a worker: by it the main
    process ends one that does not stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


_LOADERS: WeakSet[ImageLoader] = WeakSet()


@atexit.register
def _end_workers() -> None:
    """Ends the workers of loaders that are in the middle of an epoch when Python exits.

    Python would send each worker one SIGTERM, which it ignores, and then wait for it forever.
    """
    for loader in _LOADERS:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seeds PyTorch's global random stream on the CPU inside the context and restores it afterwards."""
    if seed is None:
        yield
        return
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
