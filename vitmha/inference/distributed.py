"""The files of one call shared over the processes that torchrun has started."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from typing import Any

from torch import Tensor

from vitmha.errors import UserError
from vitmha.images.find import ImageSource, display_name
from vitmha.inference.records import Record

# A record, and where the truth is known the probabilities of all classes.
Result = tuple[Record, Tensor | None]


class TorchrunGroup:
    """The processes that torchrun has started, of which each takes every so manieth file and the first writes."""

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.names: deque[str] = deque()
        if self.count > 1:
            import torch.distributed

            torch.distributed.init_process_group("gloo")  # what is sent are records, on whatever the models run

    def close(self) -> None:
        if self.count > 1:
            import torch.distributed

            torch.distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, said: Any) -> Any:
        """What the first process says, in all of them."""
        import torch.distributed

        box = [said]
        torch.distributed.broadcast_object_list(box)
        return box[0]

    def share(self, numbered: Iterable[tuple[int, ImageSource]]) -> Iterator[tuple[int, ImageSource]]:
        """This process's part; the first one knows the names of the others' before it has the next of its own."""
        numbered = iter(numbered)
        while row := list(islice(numbered, self.count)):
            if self.is_first and self.count > 1:
                self.names.extend(display_name(item) for _, item in row)
            yield from row[self.rank : self.rank + 1]

    def gather(self, records: Iterator[Result], size: int) -> Iterator[Result]:
        """In the first process the records of all, in order; the others send theirs, so many at a time.

        Raises:
            UserError: The processes have found different files.
        """
        if self.count == 1:
            yield from records
            return
        import torch.distributed

        is_more = True
        while is_more:
            part = list(islice(records, size))
            parts: list[Any] | None = [None] * self.count if self.is_first else None
            torch.distributed.gather_object(part, parts)
            for made in (made for row in zip_longest(*parts or ()) for made in row if made is not None):
                path, name = made[0]["path"], self.names.popleft()
                if path != name:
                    raise UserError(f"The processes find different files: {path} and {name}.")
                yield made
            is_more = self.broadcast(parts and max(map(len, parts)) == size)
