"""Writes the PNG of `FashionMNISTMini` from the official files: python scripts/make_fashion_mnist_mini.py ROOT."""

import argparse
from pathlib import Path

import torch
from einops import rearrange
from torchvision import datasets
from torchvision.transforms.v2.functional import to_pil_image


def write_sheet(root: Path | str, sheet: Path | str) -> None:
    """Writes one image that holds all images, 100 in a row: the first of each class, class by class, training first.

    Args:
        root: Directory with the official files in FashionMNIST/raw/.
        sheet: The PNG file to write.
    """
    chosen = []
    for train, count in ((True, 1000), (False, 200)):
        official = datasets.FashionMNIST(root, train=train)
        chosen += [official.data[official.targets == label][:count] for label in range(10)]
    pixels = rearrange(torch.cat(chosen), "(row column) h w -> 1 (row h) (column w)", column=100)
    to_pil_image(pixels).save(sheet, optimize=True, compress_level=9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="directory with the official files in FashionMNIST/raw/")
    write_sheet(parser.parse_args().root, Path(__file__).parents[1] / "vitmha" / "data" / "fashion_mnist_mini.png")
