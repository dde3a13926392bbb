"""Fixtures and settings for all tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Lightning 2.6 calls what jsonargparse 4.49 to 4.x deprecates.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
# The tensors in tests are so small that threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real datasets (CIFAR-10, Fashion-MNIST, tiny-imagenet-20): VITMHA_TEST_DATA, or data/ here."""
    root = Path(os.environ.get("VITMHA_TEST_DATA", Path(__file__).parents[1] / "data"))
    if not root.is_dir():
        pytest.skip(f"{root} does not exist: set VITMHA_TEST_DATA to the directory of real datasets")
    return root


@pytest.fixture(scope="session")
def hard_images() -> Path:
    """The directory of hard image files: VITMHA_TEST_IMAGES, or shared/images next to this checkout."""
    root = Path(os.environ.get("VITMHA_TEST_IMAGES", Path(__file__).parents[2] / "shared" / "images"))
    if not root.is_dir():
        pytest.skip(f"{root} does not exist: set VITMHA_TEST_IMAGES to the directory of hard image files")
    return root


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restores the environment variables that Lightning sets, which later processes would read."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for tests of the live page."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()
