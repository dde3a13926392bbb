"""reconstruction.py: the fitted weights against torch.linalg.lstsq."""

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
def test_the_remaining_weights_are_fitted_by_least_squares(fields: dict[str, Any]) -> None:
    original, pruned = (small_model(**fields) for _ in range(2))
    pruned.load_state_dict(original.state_dict())
    prune(pruned, {0: [1, 3], 1: range(6)})
    weights = pruned.blocks[0].attn.out_proj.weight.clone()
    parameters = [block.attn.out_proj.weight for block in pruned.blocks]
    before = distance(original, pruned)
    reconstruct(pruned, original, batches(), ridge=1e-12)
    assert distance(original, pruned) < before / 3
    assert [block.attn.out_proj.weight for block in pruned.blocks] == parameters  # an optimizer may hold them
    # The first layer equals the solution of the same problem by torch.linalg.lstsq.
    images = torch.cat(images_of(batches()))
    x, rope = original.embed(images)
    attention, inputs = pruned.blocks[0].attn, []
    with attention.out_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0])), torch.no_grad():
        attention(original.blocks[0].norm1(x), rope=rope)
        target = original.blocks[0].attn(original.blocks[0].norm1(x), rope=rope)
    z = F.pad(inputs[0], (0, 1), value=1).flatten(0, 1).double()
    solved = torch.linalg.lstsq(z, target.flatten(0, 1).double()).solution.float()
    assert_close(attention.out_proj.weight, solved[:-1].mT, rtol=1e-3, atol=1e-3)
    assert_close(attention.out_proj.bias, solved[-1], rtol=1e-3, atol=1e-3)
    assert (attention.out_proj.weight - weights).abs().max() > 0.05


@torch.no_grad()
def distance(a: VisionTransformer, b: VisionTransformer) -> float:
    """The mean squared difference of the logits, summed over batches."""
    return float(sum((a(images) - b(images)).square().mean() for images, _ in batches()))


def test_pruning_a_duplicate_of_another_head_is_undone_by_reconstruction() -> None:
    original, pruned = small_model(), small_model()
    for block in original.blocks:
        for projection in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj):
            for tensor in (projection.weight.data, projection.bias.data):
                tensor[4:8] = tensor[:4]  # head 1 equals head 0
    pruned.load_state_dict(original.state_dict())
    prune(pruned, {layer: [1] for layer in range(3)})
    assert distance(original, pruned) > 0.01
    reconstruct(pruned, original, batches(), ridge=1e-12)
    assert distance(original, pruned) < 1e-6


def test_the_curve_evaluates_reconstructed_models() -> None:
    model, pruned = small_model(), small_model()
    pruned.load_state_dict(model.state_dict())
    means = mean_outputs(model, images_of(batches()))
    results = reconstruction_curve(model, batches(), [(0, 3), (2, 1), (0, 0)], [0, 2], means, batches()[:2])
    assert results[0].loss == pytest.approx(evaluate(model, batches()).loss, abs=1e-4)
    prune(pruned, {0: [3], 2: [1]}, means)
    reconstruct(pruned, model, batches()[:2])
    assert results[1].loss == pytest.approx(evaluate(pruned, batches()).loss, rel=1e-5)
    assert [attention.num_heads for attention in model.attentions] == [6, 6, 6]


def test_reconstruct_without_images_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="batches holds no images: at least one is needed"):
        reconstruct(model, model, [])
