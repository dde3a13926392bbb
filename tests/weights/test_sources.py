"""Files, directories and hubs of other packages: valid, corrupt and hostile ones."""

import argparse
import json
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import config_from_pretrained, load_model, load_weights
from vitmha.weights.save import save_model, to_config_dict

exactly = partial(assert_close, rtol=0, atol=0)
NOT_IN_SHAPES: dict[str, Any] = {"num_heads": 3, "norm_eps": 1e-6, "mlp": "gelu", "pool": "cls"}


def timm_model(name: str = "vit_tiny_patch16_224", **changes: Any) -> nn.Module:
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 5}
    return timm.create_model(name, **{**sizes, **changes}).eval()


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return timm_model()


def test_float16_weights_are_loaded_as_float32(tmp_path: Path) -> None:
    model = VisionTransformer(ViTConfig(image_size=32, embed_dim=48, depth=1, num_classes=5)).half()
    save_model(model, tmp_path)
    exactly(load_model(tmp_path).state_dict(), {k: v.float() for k, v in model.state_dict().items()})


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "model._orig_mod.", "backbone."],
)
def test_the_prefixes_of_wrapped_models_are_removed(prefix: str, reference: nn.Module, tmp_path: Path) -> None:
    tensors = {prefix + name: tensor for name, tensor in reference.state_dict().items()}
    torch.save(tensors, tmp_path / "x.pth")
    exactly(load_model(tmp_path / "x.pth", **NOT_IN_SHAPES).state_dict(), load_model(reference).state_dict())


def test_the_prefix_of_a_compiled_submodule_is_removed(reference: nn.Module, tmp_path: Path) -> None:
    tensors = {name.replace("blocks.1.", "blocks.1._orig_mod."): each for name, each in reference.state_dict().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    exactly(load_model(tmp_path / "x.safetensors", **NOT_IN_SHAPES).state_dict(), load_model(reference).state_dict())


def test_a_checkpoint_of_a_compiled_model_is_loaded(tmp_path: Path) -> None:
    model = VisionTransformer(ViTConfig(image_size=32, embed_dim=48, depth=1, num_classes=5))
    weights = {f"model._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"vitmha": to_config_dict(model), "state_dict": weights}, tmp_path / "x.ckpt")
    exactly(load_model(tmp_path / "x.ckpt").state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensors: {"model": tensors, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda tensors: {"state_dict": {k: torch.zeros_like(v) for k, v in tensors.items()}, "state_dict_ema": tensors},
        lambda tensors: {"teacher": {f"module.backbone.{k}": v for k, v in tensors.items()}, "student": {}},
    ],
    ids=["DeiT", "timm with averaged weights", "DINO"],
)
def test_the_nested_checkpoints_of_other_packages_are_loaded(
    wrap: Callable[[dict[str, Tensor]], dict[str, Any]], reference: nn.Module, tmp_path: Path
) -> None:
    torch.save(wrap(reference.state_dict()), tmp_path / "x.pth")
    exactly(load_model(tmp_path / "x.pth", **NOT_IN_SHAPES).state_dict(), load_model(reference).state_dict())


def test_the_names_of_dinov2_are_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = timm_model("vit_small_patch14_reg4_dinov2", num_classes=0)
    tensors = reference.state_dict()
    tensors["register_tokens"] = tensors.pop("reg_token")
    tensors["mask_token"] = torch.zeros(1, 48)
    tensors["pos_embed"] = torch.cat([torch.zeros(1, 1, 48), tensors["pos_embed"]], dim=1)
    tensors = {re.sub(r"^blocks\.", "blocks.0.", name): tensor for name, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "x.pth")
    with caplog.at_level("INFO"):
        model = load_model(tmp_path / "x.pth", **NOT_IN_SHAPES)
    exactly(model.state_dict(), load_model(reference).state_dict())
    assert "unexpected: mask_token; assumed: a square grid of 4 x 4 patches" in caplog.messages[-1]


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"fc_norm": False}], ids=["norm after the mean", "norm before it"])
def test_a_file_determines_whether_the_norm_follows_the_mean(fields: dict[str, Any], tmp_path: Path) -> None:
    reference, images = timm_model("vit_tiny_patch16_224", global_pool="avg", **fields), torch.randn(2, 3, 32, 32)
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    model = load_model(tmp_path / "x.pth", **{**NOT_IN_SHAPES, "pool": "mean"})
    torch.testing.assert_close(model(images), reference(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("missing", sorted(NOT_IN_SHAPES))
def test_a_field_that_is_not_in_the_shapes_must_be_given(missing: str, reference: nn.Module, tmp_path: Path) -> None:
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    hints = {name: value for name, value in NOT_IN_SHAPES.items() if name != missing}
    with pytest.raises(ValueError, match=rf"x\.pth: A bare file does not contain .* architecture: give {missing}="):
        load_model(tmp_path / "x.pth", **hints)


@torch.no_grad()
def test_the_given_fields_determine_the_output(reference: nn.Module, tmp_path: Path) -> None:
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    images, right = torch.randn(2, 3, 32, 32), load_model(reference)
    for field, other in {"num_heads": 4, "norm_eps": 0.1, "mlp": "quick_gelu"}.items():
        wrong = load_model(tmp_path / "x.pth", **{**NOT_IN_SHAPES, field: other})
        assert (wrong(images) - right(images)).abs().max() > 1e-4, field


def test_a_grid_that_is_not_square_must_be_given(tmp_path: Path) -> None:
    reference = timm_model(img_size=(32, 48))
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    with pytest.raises(ValueError, match="25 positions are not a square grid: give the image_size"):
        load_model(tmp_path / "x.pth", **NOT_IN_SHAPES)
    exactly(
        load_model(tmp_path / "x.pth", **NOT_IN_SHAPES, image_size=(32, 48)).state_dict(),
        load_model(reference).state_dict(),
    )


def test_another_grid_with_as_many_patches_is_interpolated_to(reference: nn.Module, tmp_path: Path) -> None:
    """Sixteen patches in a square, asked for as 2 x 8."""
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    found = load_model(tmp_path / "x.pth", **NOT_IN_SHAPES, image_size=(16, 64))
    exactly(found.pos_embed, load_model(reference, image_size=(16, 64)).pos_embed)
    assert not torch.equal(found.pos_embed, load_model(reference).pos_embed)


@torch.no_grad()
def test_position_embeddings_of_the_patches_only_are_loaded(tmp_path: Path) -> None:
    """As in DeiT III's files."""
    reference, images = timm_model(no_embed_class=True, init_values=0.1), torch.randn(2, 3, 32, 32)
    nn.init.normal_(reference.pos_embed)
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    assert_close(load_model(tmp_path / "x.pth", **NOT_IN_SHAPES)(images), reference(images), rtol=0, atol=1e-5)


def test_fine_tuning_from_a_bare_file_takes_missing_fields_from_the_config(
    reference: nn.Module, tmp_path: Path
) -> None:
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    adopted = config_from_pretrained(tmp_path / "x.pth", ViTConfig(num_heads=4, image_size=32, num_classes=2))
    assert (adopted.num_heads, adopted.embed_dim, adopted.num_classes) == (4, 48, 2)
    report = load_weights(VisionTransformer(adopted), tmp_path / "x.pth")
    assert {"num_heads 4", "pool cls"} < {*report.assumed}
    assert not report.is_plain
    with pytest.raises(ValueError, match="give num_heads="):  # the default belongs to another width
        config_from_pretrained(tmp_path / "x.pth", ViTConfig(image_size=32, num_classes=2))


def test_unexpected_and_missing_tensors_are_named(reference: nn.Module, tmp_path: Path) -> None:
    tensors = {**reference.state_dict(), "pooler.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"do not fit the model: .*pooler\.weight is unexpected"):
        load_model(tmp_path / "x.safetensors", **NOT_IN_SHAPES)
    load_model(tmp_path / "x.safetensors", **NOT_IN_SHAPES, ignore_keys=("pooler.",))
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"do not fit the model: .*norm\.weight is missing"):
        load_model(tmp_path / "x.safetensors", **NOT_IN_SHAPES, ignore_keys=("pooler.",))


@pytest.mark.parametrize("name", ["norm.bias", "blocks.1.mlp.fc1.bias", "patch_embed.proj.bias", "head.bias"])
def test_a_missing_bias_is_an_error(name: str, reference: nn.Module, tmp_path: Path) -> None:
    tensors = dict(reference.state_dict())
    del tensors[name]
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=rf"do not fit the model: .*{re.escape(name)} is missing"):
        load_model(tmp_path / "x.safetensors", **NOT_IN_SHAPES)


def test_a_directory_without_a_tensor_is_refused_in_one_sentence(reference: nn.Module, tmp_path: Path) -> None:
    for format_, missing, message in (
        ("timm", "norm.weight", r'timm: Error.* Missing key\(s\) in state_dict: "norm.weight"'),
        ("hf", "vit.embeddings.patch_embeddings.projection.weight", "patch_embed.proj.weight is missing"),
    ):
        save_model(load_model(reference), tmp_path / format_, format_)
        tensors = load_file(tmp_path / format_ / "model.safetensors")
        del tensors[missing]
        save_file(tensors, tmp_path / format_ / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / format_)


def test_tensors_of_vitmha_need_their_config_json(reference: nn.Module, tmp_path: Path) -> None:
    save_model(load_model(reference), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"tensors of vitmha without their config\.json: give the model directory"):
        load_model(tmp_path / "model.safetensors")


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_hostile_pickle_is_refused_and_does_not_run(suffix: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    torch.save({"model": {"x": torch.zeros(2)}, "args": Hostile(proof)}, tmp_path / f"x{suffix}")
    with pytest.raises(
        ValueError, match=rf"x\{suffix} contains getattr, which could run code: only tensors, numbers and strings"
    ):
        load_model(tmp_path / f"x{suffix}", **NOT_IN_SHAPES)
    assert not proof.exists()
    torch.load(tmp_path / f"x{suffix}", weights_only=False)
    assert proof.exists()  # the pickle does run code if it is trusted


def test_hostile_arrays_are_refused_and_do_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    np.savez(tmp_path / "x.npz", a=np.array([Hostile(proof)], dtype=object))
    with pytest.raises(ValueError, match=r"x\.npz contains Python objects, which could run code: only tensors"):
        load_model(tmp_path / "x.npz")
    assert not proof.exists()
    (tmp_path / "y.npz").write_bytes(pickle.dumps(Hostile(proof)))
    with pytest.raises(ValueError, match=r"y\.npz (contains Python objects|is not a \.npz file of NumPy)"):
        load_model(tmp_path / "y.npz")
    assert not proof.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
def test_a_truncated_file_is_refused(suffix: str, reference: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    if suffix == ".pth":
        torch.save(reference.state_dict(), path)
    elif suffix == ".npz":
        np.savez(path, a=np.zeros(1000))
    else:
        save_file(reference.state_dict(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"x\{suffix} is corrupt"):
        load_model(path, **NOT_IN_SHAPES)


def test_an_unknown_timm_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"timm:vit_smal_patch16_224: .*\(did you mean vit_small_patch16_224"):
        load_model("timm:vit_smal_patch16_224")


def test_an_unknown_torchvision_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"vit_b_61: unknown model \(did you mean vit_b_16"):
        load_model("torchvision:vit_b_61")


@pytest.mark.parametrize(
    "name", ["timm:vit_tiny_patch16_224", "hf:google/vit-base-patch16-224", "torchvision:vit_b_16"]
)
def test_without_a_network_the_source_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(sys.modules["torch.hub"], "urlopen", refuse)
    with pytest.raises(ValueError, match=rf"{name} could not be downloaded \(.*\): check the name and the network"):
        load_model(name)


def test_timm_and_hugging_face_directories_are_recognized_by_their_config(reference: nn.Module, tmp_path: Path) -> None:
    model = load_model(reference)
    for format_ in ("timm", "hf"):
        save_model(model, tmp_path / format_, format_)
        exactly(load_model(tmp_path / format_).state_dict(), model.state_dict())
        exactly(load_model(tmp_path / format_ / "model.safetensors").state_dict(), model.state_dict())


@pytest.fixture
def only_safe_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read by vitmha alone, which has its own name of safetensors' `load_file`."""
    load = torch.load

    def load_weights_only(*args: Any, weights_only: bool, **kwargs: Any) -> Any:
        assert weights_only
        return load(*args, weights_only=True, **kwargs)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("another package reads the weights")

    monkeypatch.setattr(torch, "load", load_weights_only)
    monkeypatch.setattr(safetensors.torch, "load_file", refuse)
    monkeypatch.setattr(safetensors, "safe_open", refuse)


def timm_config(**changes: Any) -> dict[str, Any]:
    return {"architecture": "vit_tiny_patch16_224", "num_classes": 1000, "pretrained_cfg": {}, **changes}


@pytest.mark.parametrize("source", ["{}", "local-dir:{}", "timm:local-dir:{}", "hf:me/model", "timm:hf-hub:me/model"])
@pytest.mark.parametrize(
    "config", [timm_config(), {"model_type": "vit"}, {"architecture": {}}], ids=["timm", "hf", "own"]
)
def test_no_directory_or_repository_runs_code(
    source: str, config: dict[str, Any], only_safe_reads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pickle next to an empty safetensors file, which is read in its place, and alone."""
    proof = tmp_path / "proof"
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"x": Hostile(proof)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin contains getattr, which could run code"):
        load_model(source.format(tmp_path))
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors: the file has no state dict"):
        load_model(source.format(tmp_path))
    assert not proof.exists()


@pytest.mark.parametrize(
    "arguments", [{"checkpoint_path": "x.pth"}, {"pretrained": True}, {"device": "cpu"}, {"cache_dir": "x"}, ["depth"]]
)
def test_a_timm_directory_chooses_no_file(arguments: Any, reference: nn.Module, tmp_path: Path) -> None:
    save_model(load_model(reference), tmp_path, "timm")
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {**config["model_args"], **arguments} if isinstance(arguments, dict) else arguments
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_args": changed}))
    with pytest.raises(ValueError, match=f"model_args of config.json must be an object .*{next(iter(arguments))}"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("source", ["{}", "local-dir:{}", "timm:local-dir:{}", "hf-hub:me/model"])
def test_a_directory_of_timms_save_for_hf_is_loaded(
    name: str, source: str, only_safe_reads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=5, **arguments)
    is_safe = name.endswith("safetensors")
    timm.models.save_for_hf(reference, tmp_path, model_args=arguments, safe_serialization=is_safe)
    assert (tmp_path / name).is_file()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    exactly(load_model(source.format(tmp_path)).state_dict(), load_model(reference).state_dict())


def test_a_hub_model_of_timm_is_loaded(only_safe_reads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reference = timm.create_model("test_vit").eval()
    timm.models.save_for_hf(reference, tmp_path)
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **__: asked.append(repo) or str(tmp_path))
    exactly(load_model("timm:test_vit.r160_in1k").state_dict(), load_model(reference).state_dict())
    assert asked == ["timm/test_vit.r160_in1k"]


def test_a_file_of_torchvision_is_read_with_weights_only(
    only_safe_reads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / "vit_b_16-c867db91.pth"
    file.parent.mkdir(parents=True)
    torch.save({"x": Hostile(tmp_path / "proof")}, file)
    with pytest.raises(
        ValueError, match=r"vit_b_16: the .* file is corrupt, or contains objects that could run code\.$"
    ):
        load_model("torchvision:vit_b_16")
    assert not (tmp_path / "proof").exists()
