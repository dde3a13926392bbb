"""The reference models that come with the package: found by name, small, and as right as their recipes' heads say."""

import re
from pathlib import Path

import pytest
import torch

from vitmha.data import CIFAR10, FashionMNIST
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model
from vitmha.weights.sources import MODELS, list_models

ROOT = Path(__file__).parents[2]
SETS = {"cifar10": CIFAR10, "fashion-mnist": FashionMNIST}


def test_together_they_are_small() -> None:
    assert {*list_models()} <= {*SETS}
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) < 8e6


@pytest.mark.parametrize("name", list_models())
def test_they_know_their_classes_and_pictures(name: str) -> None:
    model, data = load_model(name), SETS[name]("nowhere")
    assert model.class_names == tuple(data.class_names)
    assert model.preprocessing == data.preprocessing


def test_a_model_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(list_models()[0]).mkdir()  # a folder of something else
    assert load_model(list_models()[0]).class_names is not None
    save_model(VisionTransformer(ViTConfig(image_size=32, embed_dim=48, depth=1, num_classes=5)), list_models()[0])
    assert load_model(list_models()[0]).config.num_classes == 5


def test_another_name_is_answered_with_theirs() -> None:
    with pytest.raises(ValueError, match=rf"or a model that comes with vitmha \({', '.join(list_models())}\)"):
        load_model("cifar")


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_they_are_as_right_as_their_recipes_say(name: str, real_data: Path) -> None:
    recipe = (ROOT / f"configs/{name.replace('-', '_')}.yaml").read_text()
    said = float(re.search(r"\*?\*?([\d.]+) % top-1", recipe)[1])
    model, data = load_model(name), SETS[name](str(real_data))
    data.setup("test")
    right = total = 0
    with torch.no_grad():
        for images, labels in data.test_dataloader():
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    assert total == 10_000
    assert 100 * right / total == pytest.approx(said, abs=0.1)
