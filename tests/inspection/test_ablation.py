"""Heads switched off one by one, against weights set to zero by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.inspection.ablation import ablate_each_head, mean_outputs
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer


def random_model(**fields: Any) -> VisionTransformer:
    defaults = {"num_classes": 5, "embed_dim": 12, "depth": 3, "num_heads": 3, "mlp_dim": 17, "patch_size": 4}
    model = VisionTransformer(ViTConfig(image_size=(8, 12), **{**defaults, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


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
def test_a_head_switched_off_is_one_whose_output_weights_are_zero(fields: dict[str, Any]) -> None:
    model, images = random_model(**fields), torch.randn(2, 3, 8, 12)
    found = ablate_each_head(model, images)
    assert [tuple(each.shape) for each in found] == [(3, 2, 5)] * 3
    for layer in range(3):
        for head in range(3):
            slim = copy.deepcopy(model)
            slim.blocks[layer].attn.out_proj.weight.data[:, 4 * head : 4 * head + 4] = 0
            with torch.no_grad():
                assert_close(found[layer][head], slim(images), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(found[0][0], model(images), atol=1e-2)
        assert_close(ablate_each_head(model, images), found)  # nothing of the model was changed


def test_a_head_can_be_replaced_by_its_mean() -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 12)
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


def test_pruned_layers_have_their_heads_and_no_others() -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 12)
    model.blocks[0].attn.prune_heads([1])
    model.blocks[2].attn.prune_heads([0, 1, 2])
    found = ablate_each_head(model, images, mean_outputs(model, [images]))
    assert [len(each) for each in found] == [2, 3, 0]
