"""The bundled models: loaded by name, small, and as accurate as their configs say."""

import re
from pathlib import Path

import pytest
import torch

from vitmha.data import CIFAR10, FashionMNIST
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.shipped import SHIPPED, list_models

ROOT = Path(__file__).parents[2]
DATASETS = {"cifar10": CIFAR10, "fashion-mnist": FashionMNIST}


def test_the_bundled_models_are_smaller_than_8_mb_together() -> None:
    assert {*list_models()} <= {*DATASETS}
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) < 8e6


@pytest.mark.parametrize("name", list_models())
def test_class_names_and_preprocessing_are_those_of_the_dataset(name: str) -> None:
    model, data = load_model(name), DATASETS[name]("nowhere")
    assert model.class_names == tuple(data.class_names)
    assert model.preprocessing == data.preprocessing


def test_a_model_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(list_models()[0]).mkdir()  # a directory of something else
    assert load_model(list_models()[0]).class_names is not None
    save_model(VisionTransformer(ViTConfig(image_size=32, embed_dim=48, depth=1, num_classes=5)), list_models()[0])
    assert load_model(list_models()[0]).config.num_classes == 5


def test_an_unknown_name_is_answered_with_the_bundled_names() -> None:
    with pytest.raises(ValueError, match=rf"or a bundled model \({', '.join(list_models())}\)"):
        load_model("cifar")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", list_models())
def test_the_accuracy_is_that_of_the_config(name: str, real_data: Path) -> None:
    config = (ROOT / f"configs/{name.replace('-', '_')}.yaml").read_text().replace("\n# ", " ")
    expected = float(re.search(r"([\d.]+) % top-1", config)[1])
    model, data = load_model(name), DATASETS[name](str(real_data))
    data.setup("test")
    right = total = 0
    with torch.no_grad():
        for images, labels in data.test_dataloader():
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    assert total == 10_000
    assert 100 * right / total == pytest.approx(expected, abs=0.1)
