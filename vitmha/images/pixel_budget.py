"""Bounds the memory of the images that the threads of a process decode at the same time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PIXELS = 160_000_000
"""Largest number of pixels that all threads hold at once, and by default of an image to classify. Photos of the largest
common sensors (151 million) and scans of A4 at 1200 dpi (139 million) have fewer; in RGB, this many take 640 MB."""


class PixelBudget:
    """Bounds the number of pixels that the threads of this process hold at the same time.

    Args:
        total: A thread that would exceed it waits. What alone is larger takes all of it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.reset()

    def reset(self) -> None:
        """Frees everything, for a forked process, which has none of the threads that would do so."""
        self.free, self.changed = self.total, threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until so many pixels are free, and holds them until the context ends."""
        pixels = min(pixels, self.total)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= pixels)
            self.free -= pixels
        try:
            yield
        finally:
            with self.changed:
                self.free += pixels
                self.changed.notify_all()


HELD_PIXELS = PixelBudget(MAX_PIXELS)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=HELD_PIXELS.reset)
