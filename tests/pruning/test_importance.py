"""importance.py: head importance against finite differences of a gate on each head."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import batches, small_model
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.models.vit import VisionTransformer
from vitmha.pruning.importance import accumulate_importance, head_importance, normalize_importance, rank_heads
from vitmha.pruning.remove import group_by_layer, mask_heads

exactly = partial(assert_close, rtol=0, atol=0)


def gated_loss(model: VisionTransformer, layer: int, gates: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of each image with a gate, a factor, on the output of each head of a layer."""
    attention = model.blocks[layer].attn
    factors = gates.repeat_interleave(attention.head_dim)
    hook = attention.out_proj.register_forward_pre_hook(lambda module, args: args[0] * factors)
    losses = F.cross_entropy(model(images), labels, reduction="none")
    hook.remove()
    return losses


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "pos_embed": "rope", "pool": "mean"}])
def test_importance_is_the_mean_absolute_gradient_of_a_gate(fields: dict[str, Any]) -> None:
    model, step = small_model(**fields).double(), 1e-5
    data = [(images.double(), labels) for images, labels in batches()]
    importance = head_importance(model, data)
    for layer in range(3):
        for head in range(6):
            gate = torch.zeros(6, dtype=torch.float64)
            gate[head] = step
            differences = [
                (gated_loss(model, layer, 1 + gate, *batch) - gated_loss(model, layer, 1 - gate, *batch)) / (2 * step)
                for batch in data
            ]
            expected = torch.cat(differences).abs().mean()
            assert_close(importance[layer][head], expected.detach(), rtol=1e-5, atol=1e-9)


def test_importance_does_not_depend_on_the_batch_size_and_does_not_change_the_model() -> None:
    model = small_model()
    expected = head_importance(model, batches(11))
    before = model(batches()[0][0])
    for size in (1, 3, 4):
        assert_close(head_importance(model, batches(size)), expected, rtol=1e-5, atol=1e-7)
    model.requires_grad_(False)
    assert_close(head_importance(model, batches()), expected, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())
    exactly(model(batches()[0][0]), before.detach())


def test_importance_of_a_head_with_linear_effect_is_the_change_of_the_logit_without_it() -> None:
    model = small_model(depth=1, pool="mean").double()
    model.norm = nn.Identity()
    nn.init.zeros_(model.blocks[0].mlp.fc2.weight)
    images = torch.randn(4, 3, 14, 33, dtype=torch.float64)
    with accumulate_importance(model) as sums:
        logit = model(images)[:, 2]
        logit.sum().backward()
    for head in range(6):
        with torch.no_grad(), mask_heads(model, {0: [head]}):
            assert_close(sums[0][head], (logit - model(images)[:, 2]).abs().sum().detach())


def test_a_head_without_influence_has_zero_importance_and_ranks_first() -> None:
    model = small_model()
    with torch.no_grad():
        model.blocks[1].attn.out_proj.weight[:, 8:12] = 0
    importance = head_importance(model, batches())
    assert importance[1][2] == 0
    assert min(values.min() for values in (importance[0], importance[1][[0, 1, 3, 4, 5]], importance[2])) > 0
    assert rank_heads(importance)[0] == (1, 2)
    assert_close(torch.stack(normalize_importance(importance)).norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_rank_heads_by_hand() -> None:
    values = [torch.tensor([0.3, 0.1]), torch.tensor([]), torch.tensor([0.2, 0.1, 0.4])]
    assert rank_heads(values) == [(0, 1), (2, 1), (2, 0), (0, 0), (2, 2)]
    assert group_by_layer([(0, 1), (2, 1), (2, 0)]) == {0: [1], 2: [1, 0]}
    assert normalize_importance([torch.tensor([3.0, 4.0]), torch.zeros(2)])[0].tolist() == pytest.approx([0.6, 0.8])
    assert normalize_importance([torch.zeros(2)])[0].tolist() == [0, 0]
