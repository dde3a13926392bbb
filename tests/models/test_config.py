"""ViTConfig and TokenLayout: layout of the tokens, and validation."""

from typing import Any

import jaxtyping
import pytest
import torch
from vit_cases import SMALL, random_model

from vitmha.models.config import ViTConfig


def test_layout_of_a_wide_image() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, pool="mean").layout
    assert layout.grid_size == (4, 8)
    assert layout.token_of(1, 6) == 14
    assert (layout.num_patches, layout.num_tokens) == (32, 32)


def test_layout_puts_the_class_token_first_then_registers() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4).layout
    assert (layout.num_class_tokens, layout.num_prefix_tokens, layout.num_tokens) == (1, 5, 37)
    assert layout.registers == slice(1, 5)
    assert layout.patches == slice(5, 37)
    assert layout.token_of(1, 6) == 19


def test_layout_puts_the_distillation_token_between_the_class_token_and_the_registers() -> None:
    layout = ViTConfig(image_size=(32, 64), patch_size=8, num_registers=4, distillation_token=True).layout
    assert (layout.distillation, layout.registers, layout.patches) == (slice(1, 2), slice(2, 6), slice(6, 38))
    assert layout.token_of(1, 6) == 20
    assert ViTConfig(num_registers=4).layout.distillation == slice(1, 1)


def test_a_marked_patch_of_the_image_is_found_on_the_grid() -> None:
    model = random_model(num_registers=2)
    for row in range(3):
        for column in range(5):
            images = torch.zeros(1, 3, 21, 55)
            images[..., 7 * row + 3, 11 * column + 8] = 1
            changed = (model.embed(images)[0] - model.embed(torch.zeros_like(images))[0]).abs().sum(-1)
            assert changed.argmax() == model.layout.token_of(row, column)
            grid = model.layout.to_grid(changed)
            assert grid.shape == (1, 3, 5)
            assert grid[0].nonzero().tolist() == [[row, column]]


def test_coordinates_are_the_row_and_the_column_of_each_patch() -> None:
    rows, columns = ViTConfig(**SMALL).layout.coordinates()
    assert rows.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert columns.tolist() == [0, 1, 2, 3, 4] * 3


@pytest.mark.parametrize("patch", [(3, 0), (0, 5), (-1, 0), (0, -1)])
def test_a_patch_outside_the_grid_is_rejected(patch: tuple[int, int]) -> None:
    layout = ViTConfig(**SMALL).layout
    with pytest.raises(ValueError, match=f"row {patch[0]}, column {patch[1]} lies outside the grid of 3 x 5 patches"):
        layout.token_of(*patch)


def test_values_of_another_number_of_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="values must have 16 tokens on the last axis, got 15"):
        ViTConfig(**SMALL).layout.to_grid(torch.zeros(2, 15))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_channels": 0}, "in_channels must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must not be negative, got -1"),
        ({"norm_eps": float("inf")}, "norm_eps must be positive, got inf"),
        ({"layer_scale_init": -1.0}, "layer_scale_init must be 0 or more, got -1.0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"fc_norm": True}, "fc_norm needs pool 'mean', got 'cls'"),
        ({"embed_dim": 0}, "embed_dim must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"mlp_dim": 0}, "mlp_dim must be at least 1, got 0"),
        ({"distillation_token": True, "pool": "mean"}, "distillation_token needs pool 'cls', got 'mean'"),
        ({"num_registers": -1}, "num_registers must not be negative, got -1"),
        ({"attention_dropout": 1.0}, r"attention_dropout must lie in \[0, 1\), got 1.0"),
        ({"drop_path": -0.1}, r"drop_path must lie in \[0, 1\), got -0.1"),
        ({"patch_dropout": 1.0}, r"patch_dropout must lie in \[0, 1\), got 1.0"),
        ({"image_size": 30, "patch_size": 8}, "image_size 30 x 30 is not divisible by patch_size 8 x 8"),
        ({"image_size": (32, 30), "patch_size": 8}, "image_size 32 x 30 is not divisible by patch_size 8 x 8"),
        ({"image_size": 30, "patch_size": (5, 7)}, "image_size 30 x 30 is not divisible by patch_size 5 x 7"),
        ({"patch_size": 0}, "not divisible by patch_size 0 x 0"),
        ({"embed_dim": 24, "num_heads": 5}, "embed_dim 24 is not divisible by num_heads 5"),
        ({"embed_dim": 24, "num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not divisible by num_kv_heads 2"),
        ({"pos_embed": "rope", "embed_dim": 30, "num_heads": 3}, "'rope' needs a head_dim divisible by 4.*got 10"),
        ({"pos_embed": "rope", "head_dim": 6}, "'rope' needs a head_dim divisible by 4.*got 6"),
        (
            {"pos_embed": "sincos2d", "embed_dim": 30, "num_heads": 3},
            "'sincos2d' needs an embed_dim divisible by 4, got 30",
        ),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("mlp", "gelu, gelu_tanh, quick_gelu, swiglu"),
        ("pool", "cls, mean, cls_mean, attention"),
        ("pos_embed", "learned, sincos2d, rope, rope_dinov3"),
    ],
)
def test_an_unknown_choice_is_rejected_with_the_known_ones(
    field: str, choices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run-time checks of types, on in tests only, would raise before the code does.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"{field} must be one of {choices}; got 'other'"):
        ViTConfig(**{field: "other"})
