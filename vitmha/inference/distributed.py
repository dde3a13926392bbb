"""Distributes the images of one call over the processes of torchrun or the workers of a Ray cluster."""

import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

from vitmha.errors import UserError
from vitmha.images.find import ImageSource, display_name
from vitmha.inference.classifier import Classifier

# An image and its position among all images of the call.
Numbered = tuple[int, ImageSource]
# The name of an image, and what was computed for it; it must be possible to pickle it.
Result = tuple[str, Any]
# Computes the results of some of the images; the last argument is the number of images before them.
Task = Callable[[Classifier, Iterable[Numbered], int], Iterator[Result]]

RAY_BLOCK = 16_384  # images that a cluster holds at a time


class TorchrunGroup:
    """The processes of torchrun, or this one alone: rank r takes every world_size-th image, and rank 0 writes.

    Example:
        >>> group = TorchrunGroup()
        >>> list(group.gather(((name, None) for _, name in group.shard(enumerate(["a.png"]))), batch_size=8))
        [('a.png', None)]
        >>> group.close()
    """

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.names: deque[str] = deque()  # of the images whose results rank 0 still expects, in order
        if self.world_size > 1:
            import torch.distributed

            torch.distributed.init_process_group("gloo")  # only results are sent, wherever the models run

    def close(self) -> None:
        """Leaves the process group."""
        if self.world_size > 1:
            import torch.distributed

            torch.distributed.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value in all processes."""
        if self.world_size == 1:
            return value
        import torch.distributed

        values = [value]
        torch.distributed.broadcast_object_list(values)
        return values[0]

    def shard(self, numbered: Iterable[Numbered]) -> Iterator[Numbered]:
        """Yields this process's images; rank 0 notes the names of all."""
        numbered = iter(numbered)
        while row := list(islice(numbered, self.world_size)):
            if self.is_main and self.world_size > 1:
                self.names.extend(display_name(source) for _, source in row)
            yield from row[self.rank : self.rank + 1]

    def gather(self, results: Iterator[Result], batch_size: int) -> Iterator[Result]:
        """In rank 0 the results of all processes, in the order of the images; nothing in the others.

        Args:
            results: Of this process.
            batch_size: Number of results that each process sends at a time.

        Raises:
            UserError: The processes found different images.
        """
        if self.world_size == 1:
            yield from results
            return
        import torch.distributed

        has_more = True
        while has_more:
            part = list(islice(results, batch_size))
            parts: list[Any] | None = [None] * self.world_size if self.is_main else None
            torch.distributed.gather_object(part, parts)
            for result in (result for row in zip_longest(*parts or ()) for result in row if result is not None):
                expected = self.names.popleft()
                if result[0] != expected:
                    raise UserError(f"The processes found different images: {result[0]} and {expected}.")
                yield result
            has_more = self.broadcast(parts and max(map(len, parts)) == batch_size)


def map_on_ray(
    task: Task, numbered: Iterator[Numbered], options: Mapping[str, Any], *, device_type: str
) -> Iterator[Result]:
    """Yields the results of all images, computed by the workers of a Ray cluster, one per GPU or CPU.

    Args:
        task: Must be possible to pickle.
        numbered: The images.
        options: Arguments of `Classifier`.
        device_type: cpu or cuda.

    Raises:
        UserError: A cluster without such a device.
    """
    import ray.data

    ray.init(log_to_driver=False, logging_level=logging.ERROR)  # the cluster of RAY_ADDRESS, or one on this machine
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    resource = "GPU" if device_type == "cuda" else "CPU"
    per_worker: dict[str, Any] = {f"num_{resource.lower()}s": 1}
    try:
        num_workers = int(ray.cluster_resources().get(resource, 0))
        if not num_workers:
            raise UserError(f"device {device_type}: no worker of the Ray cluster has a {resource}.")
        while block := list(islice(numbered, RAY_BLOCK)):  # images from archives are held in memory
            # Pickled, since names that are not UTF-8 cannot be sent as text.
            rows = ray.data.from_items([{"image": pickle.dumps(row)} for row in block])
            results = rows.map_batches(
                RayWorker,
                fn_constructor_args=(task, options, os.getcwd()),
                batch_size=options["batch_size"],
                concurrency=num_workers,
                **per_worker,
            )
            for row in results.iter_rows():
                yield pickle.loads(row["result"])
    finally:
        ray.shutdown()


class RayWorker:
    """A classifier on a worker of a Ray cluster.

    Args:
        task: Computes the results.
        options: Arguments of `Classifier`.
        directory: The working directory of the call, to which paths are relative.
    """

    def __init__(self, task: Task, options: Mapping[str, Any], directory: str) -> None:
        os.chdir(directory)
        self.task, self.classifier = task, Classifier(**options)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[bytes]]:
        numbered = [pickle.loads(image) for image in rows["image"]]
        # A batch of the cluster is one batch of the model, not a series of small ones.
        results = self.task(self.classifier, numbered, self.classifier.batch_size)
        return {"result": [pickle.dumps(result) for result in results]}
