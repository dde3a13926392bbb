"""refitting.py: least squares against a solver's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import batches, images_of, small_model
from torch.testing import assert_close

from vitmha.inspection.ablation import mean_outputs
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.curves import reconstruction_curve
from vitmha.pruning.evaluation import evaluate
from vitmha.pruning.reconstruction import reconstruct
from vitmha.pruning.remove import prune


@pytest.mark.parametrize(
    "fields", [{}, {"layer_scale_init": 0.5, "num_kv_heads": 2}, {"pos_embed": "rope", "mlp": "swiglu"}], ids=str
)
def test_what_remains_is_refitted_by_least_squares(fields: dict[str, Any]) -> None:
    whole, slim = (small_model(**fields) for _ in range(2))
    slim.load_state_dict(whole.state_dict())
    prune(slim, {0: [1, 3], 1: range(6)})
    weights = slim.blocks[0].attn.out_proj.weight.clone()
    pruned = [block.attn.out_proj.weight for block in slim.blocks]
    before = far_from(whole, slim)
    reconstruct(slim, whole, batches(), ridge=1e-12)
    assert far_from(whole, slim) < before / 3
    assert [block.attn.out_proj.weight for block in slim.blocks] == pruned  # an optimiser may hold them
    # The first map is what a solver of the same problem finds.
    images = torch.cat(images_of(batches()))
    x, rope = whole.embed(images)
    attention, read = slim.blocks[0].attn, []
    with attention.out_proj.register_forward_pre_hook(lambda _, args: read.append(args[0])), torch.no_grad():
        attention(whole.blocks[0].norm1(x), rope=rope)
        wanted = whole.blocks[0].attn(whole.blocks[0].norm1(x), rope=rope)
    z = F.pad(read[0], (0, 1), value=1).flatten(0, 1).double()
    solved = torch.linalg.lstsq(z, wanted.flatten(0, 1).double()).solution.float()
    assert_close(attention.out_proj.weight, solved[:-1].mT, rtol=1e-3, atol=1e-3)
    assert_close(attention.out_proj.bias, solved[-1], rtol=1e-3, atol=1e-3)
    assert (attention.out_proj.weight - weights).abs().max() > 0.05


@torch.no_grad()
def far_from(one: VisionTransformer, other: VisionTransformer) -> float:
    """Mean square of what differs in the logits."""
    return float(sum((one(images) - other(images)).square().mean() for images, _ in batches()))


def test_heads_that_others_repeat_are_no_loss_when_these_are_refitted() -> None:
    whole, slim = small_model(), small_model()
    for block in whole.blocks:
        for projection in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj):
            for tensor in (projection.weight.data, projection.bias.data):
                tensor[4:8] = tensor[:4]  # head 1 is head 0
    slim.load_state_dict(whole.state_dict())
    prune(slim, {layer: [1] for layer in range(3)})
    assert far_from(whole, slim) > 0.01
    reconstruct(slim, whole, batches(), ridge=1e-12)
    assert far_from(whole, slim) < 1e-6


def test_the_curve_is_of_refitted_models() -> None:
    model, slim = small_model(), small_model()
    slim.load_state_dict(model.state_dict())
    means = mean_outputs(model, images_of(batches()))
    scores = reconstruction_curve(model, batches(), [(0, 3), (2, 1), (0, 0)], [0, 2], means, batches()[:2])
    assert scores[0].loss == pytest.approx(evaluate(model, batches()).loss, abs=1e-4)
    prune(slim, {0: [3], 2: [1]}, means)
    reconstruct(slim, model, batches()[:2])
    assert scores[1].loss == pytest.approx(evaluate(slim, batches()).loss, rel=1e-5)
    assert [attention.num_heads for attention in model.attentions] == [6, 6, 6]


def test_no_picture_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="reconstruct needs at least one image"):
        reconstruct(model, model, [])
