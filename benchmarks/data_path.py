"""Training images per second: batches in memory compared with torchvision's transforms of one image at a time.

    python benchmarks/data_path.py --root DIR

Both crop (padding 4), flip and normalize CIFAR-10 in batches of 128. torchvision runs in a DataLoader with 0 and with 2
workers, and the faster of the two counts; vitmha has one thread, as each worker has. Rounds alternate in one process;
the ratio is the median over the rounds. Without --root the images are random bytes.
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


class TorchvisionDataset(Dataset[tuple[Tensor, int]]):
    """The usual pipeline: one PIL image at a time through torchvision's transforms."""

    def __init__(self, images: Tensor, labels: Tensor, preprocessing: Preprocessing) -> None:
        self.images, self.labels = [to_pil_image(image) for image in images], labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(preprocessing.mean, preprocessing.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def images_per_second(loader: Iterable[tuple[Tensor, Tensor]], batches: int) -> float:
    """Images per second, without the first batch (the start of the workers)."""
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in islice(iterator, batches))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="directory with cifar-10-batches-bin/")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    data = CIFAR10(args.root or "data", batch_size=BATCH_SIZE)
    if args.root:
        images, labels = data.read(train=True)
    else:
        images, labels = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (50_000,))
    in_memory = InMemoryLoader(
        images,
        labels,
        preprocessing=data.preprocessing,
        batch_sampler=GlobalBatchSampler(len(images), BATCH_SIZE, training=True),
        augmentations=[RandomCropFlip(padding=4, hflip=0.5)],
    )
    dataset = TorchvisionDataset(images, labels, data.preprocessing)
    num_workers = (0, 2)
    references = [DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers) for workers in num_workers]

    rounds = []
    for _ in range(args.rounds):
        rounds.append(
            (images_per_second(in_memory, 389), *(images_per_second(reference, 50) for reference in references))
        )
    speed, *reference_speeds = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    ratio = statistics.median(first / max(others) for first, *others in rounds)
    print(f"{'vitmha, batches in memory':<40}{speed:>12,.0f} images/s")
    for workers, reference_speed in zip(num_workers, reference_speeds, strict=True):
        print(f"{f'torchvision, {workers} workers':<40}{reference_speed:>12,.0f} images/s")
    print(f"{'ratio to the faster torchvision':<40}{ratio:>12.1f}")


if __name__ == "__main__":
    main()
