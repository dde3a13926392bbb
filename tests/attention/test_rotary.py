"""Rotary position embeddings against rotations computed by hand."""

import pytest
import torch
from attention_cases import assert_equal
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention, apply_rope
from vitmha.models.config import TokenLayout
from vitmha.models.positions import build_rope2d


def test_selected_rows_are_rotated_as_in_the_full_map() -> None:
    layout = TokenLayout(num_class_tokens=1, num_registers=2, grid_size=(3, 5), patch_size=(7, 11))
    attention, x, rope = (
        MultiHeadAttention(24, 3, num_kv_heads=1),
        torch.randn(2, 18, 24),
        build_rope2d(layout, 8),
    )
    for rotation in (rope, rope[:, None, None].expand(2, 2, 1, 18, 8)):
        rows = attention.attention_weights(x, rope=rotation, queries=[17, 0])
        assert_equal(rows, attention.attention_weights(x, rope=rotation)[:, :, [17, 0]])
    assert not torch.allclose(attention(x, rope=rope), attention(x), atol=1e-3)


def test_rope_rotates_adjacent_channels_by_their_angle() -> None:
    angles = torch.tensor([torch.pi / 2, torch.pi]).repeat_interleave(2)
    x = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4)
    rotated = apply_rope(x, torch.stack([angles.cos(), angles.sin()])[:, None])
    assert_close(rotated, torch.tensor([-2.0, 1, -3, -4]).view(1, 1, 1, 4))


def test_rope_equals_its_form_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    expected = apply_rope(x, rope)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(apply_rope(x, rope), expected)


def test_rope_in_bfloat16_rounds_once() -> None:
    x, angles = torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(5, 4).repeat_interleave(2, 1)
    rope = torch.stack([angles.cos(), angles.sin()])
    assert_equal(apply_rope(x, rope), apply_rope(x.float(), rope).bfloat16())
