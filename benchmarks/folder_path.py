"""Images per second of CPU time from JPEG files to the model's input in training, with one process and one thread.

    python benchmarks/folder_path.py DIR [--image-size 224]

Random crop, flip and normalization of the same files in three ways: vitmha, which decodes a JPEG at a fraction of its
size if the crop allows it; vitmha without that; and torchvision's usual pipeline. Rounds alternate in one process, with
the same random crops for the first two; ratios are medians over the rounds. The difference is the mean over the pixels
of the first two, in levels of 255, of the images that were decoded at a smaller size.
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

import vitmha.data.transforms
from vitmha.data.transforms import TrainTransform
from vitmha.images import Preprocessing, Source, read_reduced


def read_at_full_size(
    source: Source, min_size: Callable[[int, int], tuple[int, int]] | None
) -> tuple[Image.Image, tuple[float, float, float, float]]:
    """`read_reduced` without decoding at a smaller size; `min_size` is still called, since it draws the crop."""

    def full_size(height: int, width: int) -> tuple[int, int]:
        if min_size is not None:
            min_size(height, width)
        return height, width

    return read_reduced(source, full_size)


def torchvision_pipeline(preprocessing: Preprocessing) -> Callable[[str], Tensor]:
    """What training scripts usually do with torchvision."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(preprocessing.image_size, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )

    def read(path: str) -> Tensor:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))

    return read


def measure(transform: Callable[[str], Tensor], paths: list[str]) -> tuple[float, list[Tensor]]:
    """Images per second of CPU time, and the images."""
    start = time.process_time()
    images = []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        images.append(transform(path))
    return len(paths) / (time.process_time() - start), images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="is searched for JPEG files")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-images", type=int, default=200, help="number of files, evenly spaced")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    torch.set_num_threads(1)
    paths = sorted(str(path) for path in args.directory.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    paths = paths[:: max(1, len(paths) // args.num_images)][: args.num_images]
    size = (args.image_size, args.image_size)
    preprocessing = Preprocessing(image_size=size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    transform = TrainTransform(
        preprocessing, crop_scale=(0.08, 1.0), transforms=[v2.RandomHorizontalFlip()], random_erasing=0.0
    )
    reference = torchvision_pipeline(preprocessing)
    speeds = []
    for _ in range(args.rounds):
        speed, images = measure(transform, paths)
        vitmha.data.transforms.read_reduced = read_at_full_size  # type: ignore[assignment]
        full_size_speed, full_size_images = measure(transform, paths)
        vitmha.data.transforms.read_reduced = read_reduced
        speeds.append((speed, full_size_speed, measure(reference, paths)[0]))
    for i, name in enumerate(("vitmha", "vitmha, decoded at full size", "torchvision")):
        speed, ratio = (
            statistics.median(figures) for figures in zip(*((s[i], s[0] / s[i]) for s in speeds), strict=True)
        )
        print(f"{name:<40}{speed:>8,.0f} images/s   vitmha is {ratio:.2f}x as fast")
    pairs = [preprocessing.denormalize(torch.stack(pair)) * 255 for pair in zip(images, full_size_images, strict=True)]
    differences = [(a - b).abs().mean().item() for a, b in pairs if not torch.equal(a, b)]
    mean = statistics.fmean(differences) if differences else 0.0
    print(f"{len(differences)} of {len(paths)} images decoded at a smaller size; mean difference {mean:.2f} of 255")


if __name__ == "__main__":
    main()
