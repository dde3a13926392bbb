"""Ablation of single heads, compared with weights set to zero by hand."""

import copy
from typing import Any

import pytest
import torch
from builders import random_vit
from torch import Tensor
from torch.testing import assert_close

from vitmha.inspection.ablation import ablate_each_head, mean_outputs


@pytest.mark.parametrize(
    "fields",
    [
        {"num_registers": 2},
        {"pos_embed": "rope", "num_kv_heads": 1},
        {"distillation_token": True},
        {"pool": "attention"},
        {"pool": "mean", "fc_norm": True},
        {"pool": "cls_mean", "pre_norm": True},
    ],
    ids=str,
)
def test_zero_ablation_equals_zero_output_weights(fields: dict[str, Any]) -> None:
    model, images = random_vit(**fields), torch.randn(2, 3, 8, 12)
    found = ablate_each_head(model, images)
    assert [tuple(logits.shape) for logits in found] == [(3, 2, 5)] * 3
    for layer in range(3):
        for head in range(3):
            slim = copy.deepcopy(model)
            slim.blocks[layer].attn.out_proj.weight.data[:, 4 * head : 4 * head + 4] = 0
            with torch.no_grad():
                assert_close(found[layer][head], slim(images), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(found[0][0], model(images), atol=1e-2)
        assert_close(ablate_each_head(model, images), found)  # the model is unchanged


def test_mean_ablation_equals_a_bias_of_the_mean_output() -> None:
    model, images = random_vit(), torch.randn(2, 3, 8, 12)
    means = mean_outputs(model, [images])
    found = ablate_each_head(model, images, means)
    kept: list[Tensor] = []
    hook = model.blocks[1].attn.out_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(images)
        hook.remove()
        assert_close(means[1][2], kept[0][..., 8:].mean((0, 1)))
        slim = copy.deepcopy(model)
        projection = slim.blocks[1].attn.out_proj
        projection.bias += projection.weight[:, 8:] @ means[1][2]
        projection.weight[:, 8:] = 0
        assert_close(found[1][2], slim(images), rtol=1e-4, atol=1e-4)
    assert_close(mean_outputs(model, images.split(1)), means)


def test_only_the_remaining_heads_of_pruned_layers_are_ablated() -> None:
    model, images = random_vit(), torch.randn(2, 3, 8, 12)
    model.blocks[0].attn.prune_heads([1])
    model.blocks[2].attn.prune_heads([0, 1, 2])
    found = ablate_each_head(model, images, mean_outputs(model, [images]))
    assert [len(logits) for logits in found] == [2, 3, 0]
