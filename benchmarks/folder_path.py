"""Pictures a second of processor time from JPEG files to the input of a model in training, one process, one thread.

    python benchmarks/folder_path.py FOLDER [--image-size 224]

Random crop, mirror and normalisation of the same files: ours, which decodes a JPEG at a part of its size where the crop
allows it; ours without that; and torchvision's usual pipeline. Rounds alternate in one process, each with the same
random crops for the first two; ratios are medians over the rounds. The difference is the mean over pixels of the two
first, in steps of 1 to 255, where a picture was decoded smaller.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2

from vitmha.data import pictures
from vitmha.data.transforms import TrainTransform
from vitmha.images import Preprocessing, Source, read_image


def in_full(source: Source, min_size: Callable[[int, int], tuple[int, int]] | None = None) -> Image.Image:
    """`read_image`, which learns the size of the picture but makes no use of what will do."""

    def whole(height: int, width: int) -> tuple[int, int]:
        if min_size is not None:
            min_size(height, width)
        return height, width

    return read_image(source, whole)


def usual(preprocessing: Preprocessing) -> Callable[[str], Tensor]:
    """What training scripts do with torchvision."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(preprocessing.image_size, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )

    def read(path: str) -> Tensor:
        with Image.open(path) as picture:
            return transform(picture.convert("RGB"))

    return read


def timed(transform: Callable[[str], Tensor], paths: list[str]) -> tuple[float, list[Tensor]]:
    """Pictures a second of processor time, and the pictures."""
    start = time.process_time()
    results = []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        results.append(transform(path))
    return len(paths) / (time.process_time() - start), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is searched for JPEG files")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--pictures", type=int, default=200, help="how many files, spread over the folder")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()

    torch.set_num_threads(1)
    paths = sorted(str(path) for path in given.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    paths = paths[:: max(1, len(paths) // given.pictures)][: given.pictures]
    size = (given.image_size, given.image_size)
    preprocessing = Preprocessing(image_size=size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    ours = TrainTransform(
        preprocessing, crop_scale=(0.08, 1.0), changes=[v2.RandomHorizontalFlip()], random_erasing=0.0
    )
    peer = usual(preprocessing)
    speeds = []
    for _ in range(given.rounds):
        fast, scaled = timed(ours, paths)
        pictures.read_image = in_full  # type: ignore[assignment]
        slow, whole = timed(ours, paths)
        pictures.read_image = read_image
        speeds.append((fast, slow, timed(peer, paths)[0]))
    names = ("decoded at a part of its size", "decoded in full", "torchvision")
    for i, name in enumerate(names):
        speed, ratio = (
            statistics.median(figures) for figures in zip(*((s[i], s[0] / s[i]) for s in speeds), strict=True)
        )
        print(f"{name:<40}{speed:>8,.0f} pictures/s   ours {ratio:.2f}x as fast")
    apart = [preprocessing.denormalize(torch.stack(pair)) * 255 for pair in zip(scaled, whole, strict=True)]
    differences = [(one - other).abs().mean().item() for one, other in apart if not torch.equal(one, other)]
    mean = statistics.fmean(differences) if differences else 0.0
    print(f"{len(differences)} of {len(paths)} pictures decoded smaller; mean difference {mean:.2f} of 255")


if __name__ == "__main__":
    main()
