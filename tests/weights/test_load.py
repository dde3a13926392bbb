"""Models from model directories, for use as they are, at another size and for fine-tuning."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

import vitmha.weights.save
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.load import config_from_pretrained, load_model, load_weights
from vitmha.weights.resize import resample_positions
from vitmha.weights.save import save_model, to_config_dict

exactly = partial(assert_close, rtol=0, atol=0)
PREPROCESSING = Preprocessing(
    image_size=(21, 55), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), interpolation="bilinear", crop_pct=0.875
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


def random_images() -> Tensor:
    return torch.randn(3, 3, 21, 55)


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    description = json.loads((directory / "config.json").read_text())
    edit(description)
    (directory / "config.json").write_text(json.dumps(description))


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
    with pytest.raises(ValueError, match=f"Unknown model size 'vit_giant'; choose from {known}"):
        create_model("vit_giant")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pos_embed": "rope", "num_registers": 2, "qk_norm": True, "layer_scale_init": 0.1, "mlp": "swiglu"},
        {"pos_embed": "sincos2d", "pool": "attention", "qkv_bias": False, "num_kv_heads": 1, "patch_size": 1},
    ],
    ids=["learned", "rope", "sincos2d"],
)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, fields: dict[str, Any]) -> None:
    model, images = small_model(**fields), random_images()
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
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {
        "architecture": {**asdict(model.config), "image_size": [21, 55], "patch_size": [7, 11]},
        "class_names": ["class 0", "class 1", "class 2", "class 3", "class 4"],
        "preprocessing": {
            "image_size": [21, 55],
            "mean": [0.1, 0.2, 0.3],
            "std": [0.5, 0.6, 0.7],
            "interpolation": "bilinear",
            "crop_pct": 0.875,
            "crop_mode": "center",
        },
    }
    exactly(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))


def test_saving_again_takes_the_place_of_the_old_model(saved: Path) -> None:
    model, images = small_model(num_classes=7), random_images()
    save_model(model, saved)
    exactly(load_model(saved)(images), model.eval()(images))


@pytest.mark.parametrize("step", ["save_file", "to_config_dict"])
def test_nothing_half_written_stays_when_saving_fails(
    saved: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        if step == "save_file":
            Path(str(arguments[1])).write_bytes(b"half")
        raise OSError("disk full")

    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    monkeypatch.setattr(vitmha.weights.save, step, fail)
    for directory in (saved, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            save_model(small_model(num_classes=7), directory)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_a_checkpoint_of_a_run_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, images = small_model(), random_images()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    others = {"loss.weight": torch.zeros(3)}
    torch.save({"vitmha": to_config_dict(model), "state_dict": weights | others, "epoch": 7}, tmp_path / "last.ckpt")
    loaded = load_model(tmp_path / "last.ckpt")
    exactly(loaded(images), model.eval()(images))
    assert loaded.class_names == model.class_names
    assert loaded.preprocessing == model.preprocessing


def test_fine_tuning_takes_all_but_the_head(saved: Path) -> None:
    model = small_model(num_classes=3)
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    assert load_weights(model, saved).initialized == ("head.weight", "head.bias")
    given = load_file(saved / "model.safetensors")
    for name, tensor in model.state_dict().items():
        exactly(tensor, head[name.removeprefix("head.")] if name.startswith("head.") else given[name])


def test_fine_tuning_on_the_same_classes_takes_the_head_too(saved: Path) -> None:
    model = small_model()
    assert load_weights(model, saved).initialized == ()
    exactly(dict(model.state_dict()), load_file(saved / "model.safetensors"))


def test_fine_tuning_on_the_same_classes_in_another_order_matches_the_head_by_name(saved: Path) -> None:
    trained, images = load_model(saved), random_images()
    model = small_model()
    assert trained.class_names is not None
    model.class_names = trained.class_names[::-1]
    assert load_weights(model, saved).initialized == ()
    exactly(model.eval()(images), trained(images).flip(-1))


def test_fine_tuning_on_as_many_other_classes_takes_a_new_head(saved: Path) -> None:
    model = small_model()
    model.class_names = ("a", "b", "c", "d", "e")
    head = model.head.weight.clone()
    assert load_weights(model, saved).initialized == ("head.weight", "head.bias")
    exactly(model.head.weight.data, head.data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_registers": 2}, "model has another architecture: num_registers is 0, requested 2"),
        ({"depth": 1, "mlp_dim": 37}, "another architecture: depth is 2, requested 1; mlp_dim is 31, requested 37"),
        ({"num_heads": 2}, "num_heads is 3, requested 2; num_kv_heads is 3, requested 2; head_dim is 8, requested 12"),
        ({"layer_scale_init": 0.1}, "layer_scale_init is False, requested True"),
    ],
    ids=["registers", "depth and width", "heads of the same shapes", "layer scale"],
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
        (lambda weights: weights.update({"extra.bias": torch.zeros(2)}), "extra.bias is unexpected"),
        (lambda weights: weights.update({"cls_token": torch.zeros(1, 1, 5)}), r"cls_token is \(1, 1, 5\)"),
        (lambda weights: weights.update({"head.bias": torch.zeros(7)}), r"head.bias is \(7,\), the model's is \(5,\)"),
    ],
    ids=["missing", "unexpected", "another shape", "another head"],
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
def test_a_directory_without_one_of_the_files_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ValueError, match=r"model: not a model \(expected a directory with config\.json"):
        load_model(saved)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.ckpt", "file.txt"])
def test_what_is_not_a_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)}: (no such file or directory|not a model) \(expected a directory"
    ):
        load_model(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "corrupt", "message"),
    [
        ("config.json", lambda content: content[: len(content) // 2], "is corrupt: Expecting value"),
        ("config.json", lambda content: b"", "is corrupt: Expecting value"),
        ("config.json", lambda content: b"\xff\xfe\x00" + content, "is corrupt: 'utf-8' codec"),
        ("model.safetensors", lambda content: content[: len(content) // 2], r"is corrupt or truncated\.$"),
        ("model.safetensors", lambda content: b"", r"is empty \(0 bytes\)\.$"),
        ("model.safetensors", lambda content: b"<html>" + content, r"is corrupt or truncated\.$"),
    ],
)
def test_a_corrupt_file_is_refused(saved: Path, name: str, corrupt: Callable[[bytes], bytes], message: str) -> None:
    (saved / name).write_bytes(corrupt((saved / name).read_bytes()))
    with pytest.raises(ValueError, match=f"{re.escape(str(saved / name))} {message}"):
        load_model(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("architecture"), "model has no valid vitmha config: 'architecture'"),
        (lambda d: d.pop("class_names"), "model has no valid vitmha config: 'class_names'"),
        (lambda d: d["architecture"].update(color="red"), "has no valid vitmha config.*'color'"),
        (lambda d: d["architecture"].update(depth="two"), "has no valid vitmha config"),
        (lambda d: d["preprocessing"].pop("mean"), "has no valid vitmha config.*'mean'"),
    ],
    ids=["no architecture", "no class names", "unknown field", "string for a number", "half a preprocessing"],
)
def test_a_description_of_something_else_is_refused(
    saved: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_config(saved, edit)
    with pytest.raises(ValueError, match=message):
        load_model(saved)


def test_a_checkpoint_of_another_package_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt: The tensor names are not those of a .*: weight, "):
        load_model(tmp_path / "other.ckpt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        *((content, "is not a .ckpt file of PyTorch") for content in (b"text", b"words", b"h\x01", b"G\x00")),
        (b"PK\x03\x04 half a zip", "is corrupt or truncated"),
        (b"\x80\x02 half a pickle", "is corrupt or truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a Git LFS pointer .*: run `git lfs pull`"),
    ],
)
def test_a_corrupt_checkpoint_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"last\.ckpt {message}\.$"):
        load_model(tmp_path / "last.ckpt")


@torch.no_grad()
def test_another_image_size_resizes_the_positions_alone(saved: Path) -> None:
    given, resized = load_file(saved / "model.safetensors"), load_model(saved, image_size=(28, 44))
    assert resized.layout.grid_size == (4, 4)
    assert resized.preprocessing.image_size == (28, 44)
    grid = rearrange(given["pos_embed"][:, 1:], "1 (h w) d -> 1 d h w", h=3)
    grid = F.interpolate(grid, (4, 4), mode="bicubic", antialias=True)
    exactly(resized.pos_embed[:, 1:], rearrange(grid, "1 d h w -> 1 (h w) d"))
    exactly(resized.pos_embed[:, :1], given["pos_embed"][:, :1])
    others = {name: tensor for name, tensor in resized.state_dict().items() if name != "pos_embed"}
    exactly(others, {name: tensor for name, tensor in given.items() if name != "pos_embed"})


def test_a_load_is_reported(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_model(saved, image_size=(21, 44), in_channels=1, num_classes=2)
    assert caplog.messages == [
        f"{saved}: 36 tensors loaded; resized: patch_embed.proj.weight from 3 channels to 1, pos_embed from a grid of "
        "3 x 5 to 3 x 4; initialized: head.weight, head.bias"
    ]


class TestPositions:
    """CASES A7: 2 x 8 patches, with a class token and four registers before them."""

    @staticmethod
    def positions(patches: Tensor) -> Tensor:
        return torch.cat([torch.randn(1, 5, patches.shape[-1]), patches], dim=1)

    def test_as_many_patches_in_another_grid_change(self) -> None:
        before = self.positions(torch.randn(1, 16, 3))
        after = resample_positions(before, (2, 8), (4, 4))
        assert after.shape == before.shape
        assert (after - before)[:, 5:].abs().max() > 0.1

    @pytest.mark.parametrize("grid", [(4, 4), (2, 8), (16, 1)])
    def test_the_same_grid_stays(self, grid: tuple[int, int]) -> None:
        before = self.positions(torch.randn(1, 16, 3))
        exactly(resample_positions(before, grid, grid), before)

    @pytest.mark.parametrize(("old", "new"), [((2, 8), (4, 4)), ((4, 4), (3, 7)), ((3, 7), (9, 2)), ((4, 4), (8, 8))])
    def test_prefix_ramp_and_constant(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        ramp = torch.arange(float(old[1])).repeat(old[0])
        before = self.positions(torch.stack([ramp, torch.full_like(ramp, 7.0)], dim=1)[None])
        after = resample_positions(before, old, new)
        exactly(after[:, :5], before[:, :5])
        grid = after[0, 5:].unflatten(0, new)
        assert (grid[:, 1:, 0] > grid[:, :-1, 0]).all()
        assert_close(grid[..., 0], grid[:1, :, 0].expand(new), rtol=0, atol=1e-5)
        assert_close(grid[..., 1], torch.full(new, 7.0), rtol=0, atol=1e-5)

    def test_equal_to_timm(self) -> None:
        before = self.positions(torch.randn(1, 15, 3))
        reference = timm.layers.resample_abs_pos_embed(before, [4, 7], [3, 5], num_prefix_tokens=5)
        assert_close(resample_positions(before, (3, 5), (4, 7)), reference, rtol=0, atol=1e-6)


@torch.no_grad()
def test_another_patch_size_gives_the_same_tokens_of_an_enlarged_image(saved: Path) -> None:
    """FlexiViT's pseudo-inverse: exact for images that are the enlarged ones."""
    small, large = load_model(saved), load_model(saved, image_size=(42, 110), patch_size=(14, 22))
    patches = torch.randn(4, 3, 7, 11)
    enlarged = F.interpolate(patches, (14, 22), mode="bicubic", antialias=True)
    assert_close(large.patch_embed(enlarged), small.patch_embed(patches), rtol=0, atol=1e-3)
    exactly(large.pos_embed, small.pos_embed)


@torch.no_grad()
def test_gray_images_see_the_sum_of_the_colors(saved: Path) -> None:
    gray = torch.randn(3, 1, 21, 55)
    assert_close(load_model(saved, in_channels=1)(gray), load_model(saved)(gray.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 2}, "num_heads is 3, requested 2"),
        ({"norm_eps": 1e-5}, "norm_eps is 1e-06, requested 1e-05"),
        ({"color": "red"}, "the architecture has no field 'color'; its fields are"),
        ({"image_size": 30}, "image_size 30 x 30 is not divisible"),
    ],
)
def test_what_the_source_tells_is_not_changed(saved: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(saved, **changes)


def test_what_compiling_wraps_is_not_stored(saved: Path, tmp_path: Path) -> None:
    model = torch.compile(load_model(saved))
    save_model(model, tmp_path / "compiled")
    assert (
        load_file(tmp_path / "compiled" / "model.safetensors").keys() == load_file(saved / "model.safetensors").keys()
    )
    report = load_weights(torch.compile(small_model()), saved)
    assert report.loaded == len(load_file(saved / "model.safetensors"))


def test_fine_tuning_takes_the_architecture_of_the_source(saved: Path) -> None:
    task = ViTConfig(image_size=(28, 44), num_classes=3, patch_size=(7, 11), drop_path=0.1)
    adopted = config_from_pretrained(saved, task)
    assert adopted == replace(small_model().config, image_size=(28, 44), num_classes=3, drop_path=0.1)
    with pytest.raises(ValueError, match="model has another architecture: depth is 2, requested 5"):
        config_from_pretrained(saved, replace(task, depth=5))
