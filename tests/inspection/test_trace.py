"""One traced pass, compared with the functions that run the model themselves."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import random_vit
from torch.testing import assert_close

from vitmha.inspection import HeadMetrics, record_attention, relevance
from vitmha.inspection.ablation import mean_outputs, traced_mean_outputs
from vitmha.inspection.head_metrics import sample_query_rows, traced_query_rows
from vitmha.inspection.maps import readout_weights, traced_readout_weights, traced_relevance
from vitmha.inspection.page.page import PageImage, write_page
from vitmha.inspection.trace import class_target, trace, traced_value_norms

exactly = partial(assert_close, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fields", [{}, {"num_registers": 2, "num_kv_heads": 1}, {"pool": "mean"}, {"pool": "attention"}]
)
def test_a_trace_gives_what_the_other_functions_compute_with_passes_of_their_own(fields: dict[str, Any]) -> None:
    model, images = random_vit(**fields), torch.randn(2, 3, 8, 12)
    model.blocks[0].attn.prune_heads(range(model.config.num_heads))
    traced = trace(model, images, class_target(model))
    assert traced.layers == [1, 2]
    with record_attention(model, queries="all", gradients=True, value_norms=True) as recorded:
        logits = model(images)
    exactly(traced.logits, logits.detach())
    exactly([block.weights for block in traced.blocks], recorded.maps)
    exactly([traced_value_norms(model, traced, i) for i in range(2)], recorded.value_norms)
    target = class_target(model, logits.argmax(1).tolist())
    exactly(traced_relevance(model, traced), relevance(model, images, target))
    exactly(traced_readout_weights(model, traced), readout_weights(model, images))
    exactly(traced_query_rows(traced), sample_query_rows(model, images))
    means = zip(traced_mean_outputs(model, traced)[1:], mean_outputs(model, [images])[1:], strict=True)
    for found, expected in means:
        assert_close(found, expected)
    metrics, expected_metrics = HeadMetrics(model), HeadMetrics(model)
    metrics.add(traced)
    exactly(expected_metrics.update(images), traced.logits)
    exactly(metrics.values(), expected_metrics.values(), equal_nan=True)
    exactly(metrics.readout_attention, expected_metrics.readout_attention)


def test_a_page_runs_the_model_once_per_image_besides_ablation_and_faithfulness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, num_images = random_vit(), 0
    monkeypatch.setattr("vitmha.inspection.page.page.faithfulness", lambda *_, **__: None)
    monkeypatch.setattr("vitmha.inspection.page.page.ablate_each_head", lambda *_: [torch.randn(3, 1, 5)] * 3)
    embed = type(model).embed

    def counted(self: object, images: torch.Tensor) -> object:
        nonlocal num_images
        num_images += len(images)
        return embed(self, images)

    monkeypatch.setattr(type(model), "embed", counted)
    images = [PageImage(name=str(i), image=torch.randn(3, 8, 12)) for i in range(3)]
    write_page(tmp_path / "page.html", model, images, title="m")
    assert num_images == 3
