"""A config.json is checked, and compared with the tensors of its file, before a model is built."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.weights.convert.canonical import distinct
from vitmha.weights.load import config_from_pretrained, load_model
from vitmha.weights.save import save_model, to_config_dict

HUGE = 10**9


def small_model(**fields: Any) -> VisionTransformer:
    sizes = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_classes": 5, **fields}
    model = VisionTransformer(ViTConfig(**sizes))
    model.class_names = ("a", "b", "c", "d", "e")
    model.preprocessing = Preprocessing(image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    return model


def write(directory: Path, model: VisionTransformer | EncoderDecoder, edit: Callable[[Any], object]) -> None:
    """A model directory whose config.json is edited."""
    save_model(model, directory)
    config = to_config_dict(model)
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def refuse_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(VisionTransformer, "__init__", refuse)


@pytest.mark.parametrize("content", ["[]", "null", "3", '"a"', "[" * 100_000, "1" * 5000, "{", ""])
def test_a_config_that_is_not_an_object_is_refused(content: str, tmp_path: Path) -> None:
    save_model(small_model(), tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}/config\.json is (corrupt|not a config): .*$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("depth", 6.5, "depth must be an integer, got 6.5."),
        ("depth", True, "depth must be an integer, got True."),
        ("depth", HUGE, "depth is 1000000000, that of the tensors 2."),
        ("depth", int("9" * 4000), "depth is 9999.*, that of the tensors 2."),
        ("embed_dim", 3 * HUGE, r"embed_dim is 3000000000, that of the tensors 48; mlp_dim is .*\."),
        ("num_heads", 0, "num_heads and num_kv_heads must be at least 1, got 0 and 0."),
        ("head_dim", HUGE, r"num_heads \* head_dim is 3000000000, that of the tensors 48."),
        ("mlp_dim", HUGE, "mlp_dim is 1000000000, that of the tensors 192."),
        ("num_registers", HUGE, "num_registers is 1000000000, that of the tensors 0."),
        ("num_classes", HUGE, "class_names has 5 names, but num_classes is 1000000000."),
        ("in_channels", HUGE, "in_channels is 1000000000, that of the tensors 3."),
        ("image_size", 10**6, "the number of patches of image_size is 15625000000, that of the tensors 16."),
        ("image_size", [32, 32, 3], r"image_size must be an integer or a list of 2 integers, got \[32, 32, 3\]."),
        ("image_size", "32", "image_size must be an integer or a list of 2 integers, got '32'."),
        ("norm_eps", float("nan"), "norm_eps must be a number, got nan."),
        ("mlp", "__class__", "mlp must be one of gelu, gelu_tanh, quick_gelu, swiglu, got '__class__'."),
        ("mlp", ["gelu"], r"mlp must be one of gelu, gelu_tanh, quick_gelu, swiglu, got \['gelu'\]."),
        ("class_token", 1, "class_token must be true or false, got 1."),
        ("color", 1, "unknown field 'color'."),
    ],
)
def test_a_field_of_another_type_or_size_is_refused(
    field: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, small_model(), lambda config: config["architecture"].update({field: value}))
    refuse_to_build(monkeypatch)
    for read in (load_model, lambda source: config_from_pretrained(source, ViTConfig())):
        with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}.*: {message}$"):
            read(tmp_path)


@pytest.mark.parametrize("pos_embed", ["sincos2d", "rope", "rope_dinov3"])
def test_a_huge_image_without_tensors_of_positions_is_refused(
    pos_embed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(pos_embed=pos_embed)
    write(tmp_path, model, lambda config: config["architecture"].update(image_size=10**6))
    refuse_to_build(monkeypatch)
    with pytest.raises(ValueError, match=r"image_size 1000000 is too large: it has 15625000000 patches\.$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config["decoder"].update(depth=HUGE), "depth of the decoder is 1000000000, that of the .* 2"),
        (lambda config: config["decoder"].update(max_length=HUGE), "max_length of the decoder is 1000000000, .* 6"),
        (lambda config: config["decoder"].update(mlp_dim=HUGE), "mlp_dim of the decoder is 1000000000, .* 192"),
        (
            lambda config: config["decoder"].update(depth="2"),
            "has no valid .* config: depth must be an integer, got '2'",
        ),
        (lambda config: config["decoder"].update(width=2), "has no valid .* config: unknown field 'width'"),
        (
            lambda config: config.update(decoder=[2]),
            r"has no .*: expected an object with the fields of DecoderConfig, got \[2\]",
        ),
        (lambda config: config["architecture"].update(depth=HUGE), "depth is 1000000000, that of the tensors 1"),
        (lambda config: config["architecture"].update(num_classes=6), "num_classes is 6, that of the tensors 5"),
    ],
)
def test_a_decoder_that_the_tensors_contradict_is_refused(
    edit: Callable[[Any], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=1, num_classes=5)
    model = EncoderDecoder(config, DecoderConfig(max_length=6))
    write(tmp_path / "model", model, lambda _: None)
    assert load_model(tmp_path / "model").decoder == model.decoder
    write(tmp_path / "model", model, edit)
    refuse_to_build(monkeypatch)
    with pytest.raises(ValueError, match=f"model:? {message}\\.$"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda config: config.update(class_names="abcde"),
            "class_names must be a list of strings or null, got 'abcde'",
        ),
        (lambda config: config.update(class_names=[0, 1, 2, 3, 4]), "class_names must be a list of strings or null"),
        (lambda config: config.update(class_names=["a", "b", "a", "c", "d"]), "but 'a' is repeated"),
        (lambda config: config.update(class_names=["a"]), "class_names has 1 names, but num_classes is 5"),
        (lambda config: config.update(preprocessing=3), "expected an object with the fields of Preprocessing, got 3"),
        (lambda config: config["preprocessing"].update(mean="abc"), "mean must be a list of numbers, got 'abc'"),
        (
            lambda config: config["preprocessing"].update(std=[0.5, None, 1]),
            r"std must be a list of numbers, got \[0\.5",
        ),
        (
            lambda config: config["preprocessing"].update(image_size=[3, 4, 5]),
            "image_size must be a list of 2 integers",
        ),
        (lambda config: config["preprocessing"].update(interpolation="__class__"), "interpolation must be one of"),
        (lambda config: config["preprocessing"].update(crop_pct="1"), "crop_pct must be a number, got '1'"),
        (lambda config: config["preprocessing"].update(crop_pct=2.0), "crop_pct must be above 0 and up to 1, got 2"),
        (lambda config: config.update(architecture={"depth": "two"}), "depth must be an integer, got 'two'"),
    ],
)
def test_class_names_and_preprocessing_of_another_type_are_refused(
    edit: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    write(tmp_path, small_model(), edit)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))} has no valid vitmha config: .*{message}"):
        load_model(tmp_path)
    torch.save({"vitmha": json.loads((tmp_path / "config.json").read_text()), "state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"x\.ckpt has no valid vitmha config: .*{message}"):
        load_model(tmp_path / "x.ckpt")


def test_a_head_without_tensors_is_refused(tmp_path: Path) -> None:
    model = small_model()
    write(tmp_path, model, lambda _: None)
    save_file({k: v for k, v in model.state_dict().items() if not k.startswith("head")}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head\.weight is missing\.$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("format_", "value"),
    [("timm", HUGE), ("timm", "x"), *(("hf", value) for value in (HUGE, "x", 6.5, None, [], {}))],
)
def test_every_value_of_another_packages_config_is_checked(
    format_: Any, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(small_model(), tmp_path, format_)
    original = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, *_, **__: tensor)
    for section in (original, original.get("model_args", {})):
        for name in section:
            old, section[name] = section[name], value
            (tmp_path / "config.json").write_text(json.dumps(original))
            with suppress(UserError):  # any other exception fails the test
                assert load_model(tmp_path)(torch.zeros(1, 3, 32, 32)).shape == (1, 5), name
            section[name] = old


def test_repeated_class_names_of_other_packages_get_their_index() -> None:
    assert distinct(["crane", "car", "crane"]) == ("crane (0)", "car", "crane (2)")
    model = load_model(timm.create_model("vit_tiny_patch16_224", depth=1))
    assert (model.class_names[134], model.class_names[517]) == ("crane (134)", "crane (517)")


def test_a_model_whose_class_names_are_repeated_is_not_saved(tmp_path: Path) -> None:
    model = small_model()
    model.class_names = ("a", "b", "a", "d", "e")
    with pytest.raises(ValueError, match=r"class_names must differ from each other, but 'a' is repeated\."):
        save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
