"""Models by name, and in and out of model folders."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

import vitmha.pretrained
from vitmha.images import Preprocessing
from vitmha.pretrained import create_model, describe, load_model, load_weights, save_model
from vitmha.vit import VisionTransformer

exactly = partial(assert_close, rtol=0, atol=0)
PREPROCESSING = Preprocessing(
    image_size=(21, 55), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), interpolation="bilinear", crop=0.875
)


def small_model(num_classes: int = 5, **fields: Any) -> VisionTransformer:
    """No weight at its start value; with class names and preprocessing."""
    defaults = {"image_size": (21, 55), "patch_size": (7, 11), "embed_dim": 24, "depth": 2, "mlp_dim": 31}
    model = create_model("vit_tiny", num_classes=num_classes, **{**defaults, **fields})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.class_names = tuple(f"class {i}" for i in range(num_classes))
    model.preprocessing = PREPROCESSING
    return model


def pictures() -> Tensor:
    return torch.randn(3, 3, 21, 55)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    description = json.loads((folder / "config.json").read_text())
    edit(description)
    (folder / "config.json").write_text(json.dumps(description))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(small_model(), tmp_path / "model")
    return tmp_path / "model"


def test_a_name_gives_the_size_and_fields_go_before_it() -> None:
    with torch.device("meta"):
        model = create_model("vit_small", num_classes=10, image_size=(32, 64), patch_size=4, num_kv_heads=2)
    config = model.config
    assert (config.embed_dim, config.depth, config.num_heads, config.num_kv_heads) == (384, 12, 6, 2)
    assert (config.num_classes, config.image_size, config.patch_size) == (10, (32, 64), 4)
    assert model.layout.grid_size == (8, 16)


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    known = "vit_mini, vit_tiny, vit_small, vit_base, vit_large, vit_huge"
    with pytest.raises(ValueError, match=f"There is no size 'vit_giant'; choose from {known}"):
        create_model("vit_giant")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"positions": "rotary", "num_registers": 2, "qk_norm": True, "layer_scale": 0.1, "mlp": "swiglu"},
        {"positions": "sincos", "pool": "attention", "qkv_bias": False, "num_kv_heads": 1, "patch_size": 1},
    ],
    ids=["learned", "rotary", "sincos"],
)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, fields: dict[str, Any]) -> None:
    model, images = small_model(**fields), pictures()
    save_model(model, tmp_path / "a" / "b")
    loaded = load_model(tmp_path / "a" / "b")
    exactly(loaded(images), model.eval()(images))
    assert loaded.config == model.config
    assert loaded.class_names == model.class_names
    assert loaded.preprocessing == model.preprocessing
    assert not loaded.training


def test_a_model_without_names_and_preprocessing_comes_back_without(tmp_path: Path) -> None:
    model = small_model()
    model.class_names = model.preprocessing = None
    save_model(model, tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.class_names is None
    assert loaded.preprocessing is None


def test_the_folder_holds_the_description_and_the_weights(tmp_path: Path) -> None:
    model = small_model()
    save_model(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {
        "architecture": {**asdict(model.config), "image_size": [21, 55], "patch_size": [7, 11]},
        "class_names": ["class 0", "class 1", "class 2", "class 3", "class 4"],
        "preprocessing": {
            "image_size": [21, 55],
            "mean": [0.1, 0.2, 0.3],
            "std": [0.5, 0.6, 0.7],
            "interpolation": "bilinear",
            "crop": 0.875,
        },
    }
    exactly(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))


def test_saving_again_takes_the_place_of_the_old_model(saved: Path) -> None:
    model, images = small_model(num_classes=7), pictures()
    save_model(model, saved)
    exactly(load_model(saved)(images), model.eval()(images))


@pytest.mark.parametrize("step", ["save_file", "describe"])
def test_nothing_half_written_stays_when_saving_fails(
    saved: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        if step == "save_file":
            Path(str(arguments[1])).write_bytes(b"half")
        raise OSError("disk full")

    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    monkeypatch.setattr(vitmha.pretrained, step, fail)
    for folder in (saved, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            save_model(small_model(num_classes=7), folder)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_a_checkpoint_of_a_run_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, images = small_model(), pictures()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    others = {"loss.weight": torch.zeros(3)}
    torch.save({"vitmha": describe(model), "state_dict": weights | others, "epoch": 7}, tmp_path / "last.ckpt")
    loaded = load_model(tmp_path / "last.ckpt")
    exactly(loaded(images), model.eval()(images))
    assert loaded.class_names == model.class_names
    assert loaded.preprocessing == model.preprocessing


def test_fine_tuning_takes_all_but_the_head(saved: Path) -> None:
    model = small_model(num_classes=3)
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    assert sorted(load_weights(model, saved)) == ["head.bias", "head.weight"]
    given = load_file(saved / "model.safetensors")
    for name, tensor in model.state_dict().items():
        exactly(tensor, head[name.removeprefix("head.")] if name.startswith("head.") else given[name])


def test_fine_tuning_on_the_same_classes_takes_the_head_too(saved: Path) -> None:
    model = small_model()
    assert load_weights(model, saved) == []
    exactly(dict(model.state_dict()), load_file(saved / "model.safetensors"))


def test_fine_tuning_on_as_many_other_classes_takes_a_new_head(saved: Path) -> None:
    model = small_model()
    model.class_names = ("a", "b", "c", "d", "e")
    head = model.head.weight.clone()
    assert sorted(load_weights(model, saved)) == ["head.bias", "head.weight"]
    exactly(model.head.weight.data, head.data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_registers": 2}, "model do not fit the model: reg_token is missing"),
        ({"depth": 1}, r"do not fit the model: blocks\.1\.attn\.k_proj\.bias is left over"),
        ({"mlp_dim": 37}, r"blocks\.0\.mlp\.fc1\.bias is \(31,\), the model's is \(37,\)"),
        ({"image_size": (21, 44)}, r"pos_embed is \(1, 16, 24\), the model's is \(1, 13, 24\)"),
    ],
    ids=["missing", "left over", "another width", "another grid"],
)
def test_fine_tuning_another_architecture_is_refused(saved: Path, fields: dict[str, Any], message: str) -> None:
    model = small_model(num_classes=3, **fields)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_weights(model, saved)
    exactly(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("norm.bias"), "model do not fit the model: norm.bias is missing"),
        (lambda weights: weights.update({"extra.bias": torch.zeros(2)}), "extra.bias is left over"),
        (lambda weights: weights.update({"cls_token": torch.zeros(1, 1, 5)}), r"cls_token is \(1, 1, 5\)"),
        (lambda weights: weights.update({"head.bias": torch.zeros(7)}), r"head.bias is \(7,\), the model's is \(5,\)"),
    ],
    ids=["missing", "left over", "another shape", "another head"],
)
def test_weights_that_do_not_fit_their_description_are_refused(
    saved: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    weights = load_file(saved / "model.safetensors")
    change(weights)
    save_file(weights, saved / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_one_of_the_files_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ValueError, match=r"model must be a folder with config\.json and model\.safetensors"):
        load_model(saved)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.ckpt", "file.txt"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("words")
    with pytest.raises(ValueError, match=f"{name} must be a folder with config.json and model.safetensors"):
        load_model(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", lambda content: content[: len(content) // 2]),
        ("config.json", lambda content: b""),
        ("config.json", lambda content: b"\xff\xfe\x00" + content),
        ("model.safetensors", lambda content: content[: len(content) // 2]),
        ("model.safetensors", lambda content: b""),
        ("model.safetensors", lambda content: b"<html>" + content),
    ],
)
def test_a_damaged_file_is_refused(saved: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    (saved / name).write_bytes(damage((saved / name).read_bytes()))
    with pytest.raises(ValueError, match=f"{saved} is damaged: "):
        load_model(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("architecture"), "model does not describe a model of vitmha: 'architecture'"),
        (lambda d: d.pop("class_names"), "model does not describe a model of vitmha: 'class_names'"),
        (lambda d: d["architecture"].update(colour="red"), "does not describe a model of vitmha.*'colour'"),
        (lambda d: d["architecture"].update(depth="two"), "does not describe a model of vitmha"),
        (lambda d: d["preprocessing"].pop("mean"), "does not describe a model of vitmha.*'mean'"),
    ],
    ids=["no architecture", "no class names", "unknown field", "word for a number", "half a preprocessing"],
)
def test_a_description_of_something_else_is_refused(
    saved: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_config(saved, edit)
    with pytest.raises(ValueError, match=message):
        load_model(saved)


def test_a_checkpoint_of_another_package_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt is not a checkpoint of vitmha"):
        load_model(tmp_path / "other.ckpt")


@pytest.mark.parametrize("content", [b"", b"words", b"PK\x03\x04 half a zip"], ids=["empty", "words", "half"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged, or holds other things"):
        load_model(tmp_path / "last.ckpt")
