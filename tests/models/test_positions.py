"""Fixed position embeddings against timm and the formula of big_vision."""

import pytest
import timm.layers
import timm.models.deit
import timm.models.vision_transformer
import torch
from torch import Tensor
from torch.testing import assert_close
from vit_cases import SMALL, assert_equal

from vitmha.attention import apply_rope
from vitmha.models.config import TokenLayout, ViTConfig
from vitmha.models.positions import build_rope2d, build_sincos2d


def test_sincos_equals_the_formula_of_big_vision() -> None:
    positions = build_sincos2d(ViTConfig(**SMALL).layout, 12)
    row, column = 2, 4
    omega = torch.tensor([1.0, 1 / 100, 1 / 10_000])
    expected = torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    assert_close(positions[0, 5 * row + column], expected)


def test_sincos_distinguishes_rows_from_columns() -> None:
    grid = build_sincos2d(ViTConfig(**SMALL).layout, 12)[0].unflatten(0, (3, 5))
    assert_equal(grid[..., :6], grid[:1, :, :6].expand(3, 5, 6))
    assert_equal(grid[..., 6:], grid[:, :1, 6:].expand(3, 5, 6))
    assert grid[0, :, 0].unique().numel() == 5
    assert grid[:, 0, 6].unique().numel() == 3


@pytest.mark.parametrize("num_prefix_tokens", [0, 3])
def test_rope_equals_timm(num_prefix_tokens: int) -> None:
    layout = TokenLayout(num_class_tokens=0, num_registers=num_prefix_tokens, grid_size=(3, 5), patch_size=(7, 11))
    cosine, sine = build_rope2d(layout, 8)
    rope = timm.layers.RotaryEmbeddingCat(8, in_pixels=False, feat_shape=(3, 5)).get_embed()
    assert_close(torch.cat([sine, cosine], -1)[num_prefix_tokens:], rope)
    assert_equal(cosine[:num_prefix_tokens], torch.ones(num_prefix_tokens, 8))
    assert_equal(sine[:num_prefix_tokens], torch.zeros(num_prefix_tokens, 8))


def test_rope_scores_depend_only_on_the_displacement() -> None:
    layout = TokenLayout(num_class_tokens=1, num_registers=0, grid_size=(3, 5), patch_size=(7, 11))
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rope = build_rope2d(layout, 8).double()
    rotated_q, rotated_k = (apply_rope(vector.expand(1, 1, 16, 8), rope)[0, 0] for vector in (q, k))
    scores = rotated_q @ rotated_k.T
    by_displacement: dict[tuple[int, int], list[Tensor]] = {}
    for a in range(15):
        for b in range(15):
            displacement = (b // 5 - a // 5, b % 5 - a % 5)
            by_displacement.setdefault(displacement, []).append(scores[1 + a, 1 + b])
    for same in by_displacement.values():
        assert_close(torch.stack(same), same[0].expand(len(same)), rtol=0, atol=1e-6)
    means = torch.stack([same[0] for same in by_displacement.values()])
    assert torch.pdist(means[:, None]).min() > 1e-6
    assert_close(scores[0, 0], q @ k)
