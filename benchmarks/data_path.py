"""Pictures a second into training: ours in memory against torchvision's transforms, one picture at a time.

    python benchmarks/data_path.py --root DIR

Both crop (padding 4), mirror and normalise CIFAR-10 in batches of 128. The peer runs in a DataLoader with 0 and with 2
workers, and its better figure counts; ours has one thread, as each worker has. Rounds alternate in one process; the
ratio is the median over the rounds. Without --root the pictures are random bytes.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from vitmha.data import CIFAR10
from vitmha.data.augmentation import RandomCropFlip
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.images import Preprocessing

BATCH_SIZE = 128


class OneByOne(Dataset[tuple[Tensor, int]]):
    """The usual pipeline: one PIL picture through torchvision's transforms."""

    def __init__(self, images: Tensor, labels: Tensor, preprocessing: Preprocessing) -> None:
        self.pictures, self.labels = [to_pil_image(image) for image in images], labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(preprocessing.mean, preprocessing.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.pictures[index]), self.labels[index]


def speed(loader: Iterable[tuple[Tensor, Tensor]], batches: int) -> float:
    """Pictures a second, the first batch (start of the workers) not counted."""
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in islice(iterator, batches))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="holds cifar-10-batches-bin/")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    data = CIFAR10(arguments.root or "data", batch_size=BATCH_SIZE)
    if arguments.root:
        images, labels = data.read(train=True)
    else:
        images, labels = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (50_000,))
    ours = InMemoryLoader(
        images,
        labels,
        preprocessing=data.preprocessing,
        batch_sampler=GlobalBatchSampler(len(images), BATCH_SIZE, training=True),
        changes=[RandomCropFlip(padding=4, hflip=0.5)],
    )
    one_by_one = OneByOne(images, labels, data.preprocessing)
    peers = [DataLoader(one_by_one, BATCH_SIZE, shuffle=True, num_workers=workers) for workers in (0, 2)]

    rounds = []
    for _ in range(arguments.rounds):
        rounds.append((speed(ours, 389), *(speed(peer, 50) for peer in peers)))
    in_memory, *one_process = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    ratio = statistics.median(ours / max(others) for ours, *others in rounds)
    print(f"{'in memory, whole batches':<40}{in_memory:>12,.0f} pictures/s")
    for workers, figure in zip((0, 2), one_process, strict=True):
        print(f"{f'torchvision, one by one, {workers} workers':<40}{figure:>12,.0f} pictures/s")
    print(f"{'ratio to the better peer':<40}{ratio:>12.1f}")


if __name__ == "__main__":
    main()
