"""Fixtures that the tests of inference and of the command line share: a small classifier and images."""

from pathlib import Path

import pytest
import torch
from builders import classifier_model, write_mixed_images

from vitmha import save_model
from vitmha.models.vit import VisionTransformer


@pytest.fixture(scope="session")
def model() -> VisionTransformer:
    torch.manual_seed(1)
    return classifier_model()


@pytest.fixture(scope="session")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def model_dir(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(model, directory)
    return directory
