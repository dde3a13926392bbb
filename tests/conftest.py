"""What every test file may use."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets (CIFAR-10, Fashion-MNIST, tiny-imagenet-20) named by VITMHA_TEST_DATA."""
    root = os.environ.get("VITMHA_TEST_DATA")
    if not root:
        pytest.skip("VITMHA_TEST_DATA names no folder of real data sets")
    return Path(root)
