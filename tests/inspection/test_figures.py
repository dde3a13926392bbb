"""Figures of heads: every cell holds the value it stands for."""

from functools import partial
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.axes import Axes
from torch.testing import assert_close

from vitmha.inspection import draw_head_metrics, draw_maps

exactly = partial(assert_close, rtol=0, atol=0)


def tick_labels(axes: Axes) -> tuple[list[str], list[str]]:
    return [t.get_text() for t in axes.get_yticklabels()], [t.get_text() for t in axes.get_xticklabels()]


@pytest.mark.parametrize(("grid", "gap"), [((3, 5), 1), ((5, 29), 2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_drawn_maps_hold_the_values_at_their_layer_and_head(grid: tuple[int, int], gap: int, channels: int) -> None:
    image, maps = torch.rand(channels, 21, 55), torch.rand(2, 3, *grid)
    maps[1, 2, 0, 0] = 97
    figure = draw_maps(image, maps, "epoch 7")
    input_axes, tiles = figure.axes[:2]
    drawn_image = torch.tensor(input_axes.images[0].get_array().tolist())
    assert_close(drawn_image, image.permute(1, 2, 0) if channels == 3 else image[0])
    drawn = tiles.images[0].get_array()
    height, width = grid
    assert drawn.shape == (2 * height + gap, 3 * width + 2 * gap)
    for layer in range(2):
        for head in range(3):
            top, left = layer * (height + gap), head * (width + gap)
            tile = drawn[top : top + height, left : left + width]
            assert not tile.mask.any()
            exactly(torch.tensor(tile.tolist()), maps[layer, head])
            assert abs(tiles.get_yticks()[layer] - (top + (height - 1) / 2)) < 1e-6
            assert abs(tiles.get_xticks()[head] - (left + (width - 1) / 2)) < 1e-6
    assert drawn.count() == maps.numel()
    assert tick_labels(tiles) == (["layer 0", "layer 1"], ["head 0", "head 1", "head 2"])
    assert figure.get_suptitle() == "epoch 7"
    assert figure.axes[2].get_ylabel() == "attention per patch"


def test_one_strong_patch_does_not_darken_the_drawn_maps() -> None:
    maps = torch.linspace(0, 1, 30 * 35).view(2, 3, 5, 35).clone()
    maps[0, 0, 0, 0] = 1000
    assert draw_maps(torch.rand(3, 21, 55), maps, "").axes[1].images[0].get_clim() == pytest.approx((0, 1), abs=0.02)


@pytest.mark.parametrize(("diverging", "low"), [(False, 0), (True, -1)])
def test_maps_that_are_zero_everywhere_are_called_so(diverging: bool, low: int) -> None:
    maps = torch.zeros(2, 3, 3, 5)
    maps[1, 2] = torch.nan  # a pruned head
    figure = draw_maps(torch.rand(3, 21, 55), maps, "", diverging=diverging)
    assert figure.axes[1].images[0].get_clim() == (low, 1)
    assert figure.axes[2].get_ylabel().endswith(" (zero everywhere)")


def test_maps_that_are_zero_almost_everywhere_have_the_scale_of_their_maximum() -> None:
    maps = torch.zeros(2, 3, 5, 35)
    maps[0, 0, 0, 0] = 0.25
    figure = draw_maps(torch.rand(3, 21, 55), maps, "")
    assert figure.axes[1].images[0].get_clim() == (0, 0.25)
    assert figure.axes[2].get_ylabel() == "attention per patch"


def test_drawn_maps_can_be_saved(tmp_path: Any) -> None:
    draw_maps(torch.rand(3, 21, 55), torch.rand(2, 3, 3, 5), "title").savefig(tmp_path / "maps.png", dpi=40)
    assert (tmp_path / "maps.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["\x1b[31mred.png", "\x00\x7f.png", "caf\udce9.png"])
def test_a_title_with_control_characters_gives_a_wellformed_svg(name: str, tmp_path: Any) -> None:
    metrics = {"entropy": torch.rand(2, 3)}
    for figure in (draw_maps(torch.rand(3, 21, 55), torch.rand(2, 3, 3, 5), name), draw_head_metrics(metrics, name)):
        figure.savefig(tmp_path / "maps.svg")
        assert ElementTree.parse(tmp_path / "maps.svg").getroot().tag.endswith("svg")
        assert figure.get_suptitle() == ascii(name)[1:-1]


def test_drawn_head_metrics_hold_each_value_in_its_cell() -> None:
    metrics = {"entropy": torch.rand(2, 3), "distance": 100 * torch.rand(2, 3)}
    figure = draw_head_metrics(metrics, "epoch 7")
    for axes, (name, values) in zip(figure.axes, metrics.items(), strict=False):
        assert axes.get_title() == name
        exactly(torch.tensor(axes.images[0].get_array().tolist()), values)
        written = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts}
        assert written == {(layer, head): f"{values[layer, head]:.3g}" for layer in range(2) for head in range(3)}
        assert tick_labels(axes) == (["layer 0", "layer 1"], ["head 0", "head 1", "head 2"])
    assert figure.get_suptitle() == "epoch 7"


def test_cells_of_pruned_heads_stay_empty() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, torch.nan]])
    figure = draw_head_metrics({str(i): values for i in range(6)}, "")
    written = [[text.get_text() for text in axes.texts] for axes in figure.axes if axes.texts]
    assert written == [["1", "2", "3", "4", "5"]] * 6
    assert len({round(axes.get_position().x0, 3) for axes in figure.axes}) == 2  # two per row
