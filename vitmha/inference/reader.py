"""Reads images in threads, ahead of the model."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from jaxtyping import UInt8
from torch import Tensor

from vitmha.images import ImageReadError
from vitmha.images.find import ImageSource

Pixels = UInt8[Tensor, "channels height width"]
MAX_WAIT = 0.1  # seconds that an incomplete batch waits for more images


class BatchReader:
    """Reads images in threads and yields them in batches, in the order of their sources.

    The first batches are small, so that the first prediction comes soon: each holds as many images as all before it
    together, plus one, up to the batch size. What a slow source has already yielded does not wait for a full batch.

    Args:
        read: Reads one image; returns the error if that fails.
        batch_size: Largest number of images per batch.
        num_workers: Number of threads.
        ramp_up: Begin with small batches. A network compiled for one batch size gains nothing from them.
    """

    def __init__(
        self,
        read: Callable[[ImageSource], Pixels | ImageReadError],
        *,
        batch_size: int,
        num_workers: int,
        ramp_up: bool = True,
    ) -> None:
        self.read, self.batch_size, self.num_workers, self.ramp_up = read, batch_size, num_workers, ramp_up

    def batches(
        self, sources: Iterable[ImageSource], num_done: int = 0
    ) -> Iterator[list[tuple[ImageSource, Pixels | ImageReadError]]]:
        """Yields batches of (source, pixels or error); at most three batches are held at once.

        Args:
            sources: Taken by a thread of its own; may be endless.
            num_done: Images read before an interruption: batches continue as if there had been none.
        """
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="read")
        # What was taken from the sources, in order; at the end None, or the exception that the sources raised.
        queue: SimpleQueue[tuple[ImageSource, Future[Pixels | ImageReadError]] | BaseException | None] = SimpleQueue()
        slots = threading.Semaphore(3 * self.batch_size + self.num_workers - 1)  # one more is held while it waits

        def take() -> None:
            try:
                for source in sources:
                    slots.acquire()
                    queue.put((source, pool.submit(self.read, source)))  # raises once the pool is shut down
                queue.put(None)
            except BaseException as error:
                queue.put(error)

        # A daemon: a source that yields nothing more, such as a terminal, must not keep the process alive.
        taker = threading.Thread(target=take, name="read source", daemon=True)
        taker.start()
        try:
            while True:
                size = min(num_done + 1, self.batch_size) if self.ramp_up else self.batch_size
                batch: list[tuple[ImageSource, Pixels | ImageReadError]] = []
                taken = queue.get()
                deadline = time.monotonic() + MAX_WAIT
                while isinstance(taken, tuple):
                    batch.append((taken[0], taken[1].result()))
                    if len(batch) == size:
                        break
                    try:
                        taken = queue.get(timeout=max(0, deadline - time.monotonic()))
                    except Empty:
                        break
                if batch:
                    yield batch
                    num_done += len(batch)
                    slots.release(len(batch))
                if isinstance(taken, BaseException):
                    raise taken
                if taken is None:
                    return
        finally:
            pool.shutdown(cancel_futures=True)
            slots.release()
            taker.join(MAX_WAIT)
