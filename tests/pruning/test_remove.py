"""remove.py: pruned heads against masked heads, and the training of a pruned model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import batches, images_of, small_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from vitmha.inspection.ablation import mean_outputs
from vitmha.models.config import ViTConfig
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.pruning.importance import head_importance
from vitmha.pruning.remove import mask_heads, prune
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model, load_weights
from vitmha.weights.save import save_model

exactly = partial(assert_close, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "ablation"),
    [
        ({}, "zero"),
        ({"num_kv_heads": 2}, "mean"),
        ({"pool": "mean", "pos_embed": "rope", "qk_norm": True}, "mean"),
        ({"pool": "attention", "num_registers": 2, "qkv_bias": False}, "zero"),
        ({"pool": "cls_mean", "layer_scale_init": 0.5}, "mean"),
        ({"distillation_token": True}, "zero"),
    ],
    ids=str,
)
def test_pruned_heads_equal_masked_heads(fields: dict[str, Any], ablation: str, tmp_path: Path) -> None:
    model = small_model(**fields)
    means = mean_outputs(model, images_of(batches())) if ablation == "mean" else None
    heads = {0: [1, 3], 1: range(6), 2: {0, 1, 2, 3, 5}}
    images, logits = batches()[0][0], model(batches()[0][0])
    with mask_heads(model, heads, means):
        masked = model(images).detach()
    exactly(model(images), logits)
    assert (masked - logits).abs().max() > 0.01
    before = total_cost(layer_costs(model))
    prune(model, heads, means)
    assert_close(model(images), masked, rtol=0, atol=1e-5)
    assert [block.attn.num_heads for block in model.blocks] == [4, 0, 1]
    after = total_cost(layer_costs(model))
    assert after.parameters < before.parameters
    # At least q_proj and out_proj of 13 heads, between 4 and 24 channels, on 7 tokens.
    assert before.macs - after.macs > 2 * 13 * 4 * 24 * 7
    save_model(model, tmp_path)
    exactly(load_model(tmp_path)(images), model(images))
    F.cross_entropy(model(images), batches()[0][1]).backward()
    for name, parameter in model.named_parameters():  # DDP waits for the gradient of every parameter
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name
    assert len(head_importance(model, batches())[1]) == 0


def test_pruning_folds_the_means_in_bfloat16_too() -> None:
    model, images = small_model(), batches()[0][0]
    means = mean_outputs(model, [images])
    with torch.no_grad(), mask_heads(model, {0: [1, 3]}, means):
        expected = model(images)
    half = small_model()
    half.load_state_dict(model.state_dict())
    prune(half.bfloat16(), {0: [1, 3]}, means)
    assert_close(half(images.bfloat16()).float(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_mean_outputs_average_over_images_and_tokens() -> None:
    model = small_model()
    inputs = []
    hook = model.blocks[2].attn.out_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for images, _ in batches(11):
        model(images)
    hook.remove()
    expected = inputs[0].detach().mean((0, 1)).view(6, 4)
    for size in (1, 4):
        assert_close(mean_outputs(model, images_of(batches(size)))[2], expected)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({3: [0]}, "layer 3 does not exist: the model has layers 0 to 2."),
        ({0: [0], 1: [6, 2]}, "head 6 of layer 1 does not exist: the layer has heads 0 to 5."),
        (
            {layer: range(6) for layer in range(3)},
            "heads includes every head of every layer: at least one must remain.",
        ),
    ],
)
def test_invalid_heads_are_refused_and_the_model_is_unchanged(heads: dict[int, Any], message: str) -> None:
    model = small_model()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        prune(model, heads)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_pruned_model_can_be_trained(tmp_path: Path) -> None:
    model = small_model()
    model.class_names = tuple("abcde")
    prune(model, {0: [1, 3], 1: range(6)})
    save_model(model, tmp_path)
    module = LitViT(
        ViTConfig(image_size=(14, 33), patch_size=(7, 11), num_classes=5), pretrained=str(tmp_path), optimizer="adamw"
    )
    module.model.class_names = model.class_names
    load_weights(module.model, tmp_path)
    images, labels = batches()[0]
    assert [attention.num_heads for attention in module.model.attentions] == [4, 0, 6]
    assert_close(module.model.eval()(images), model(images))
    optimizer = torch.optim.SGD(module.model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = module.loss_function(module(images, labels), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    # Weights that do not fit leave the model unchanged.
    save_file({**load_file(tmp_path / "model.safetensors"), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = small_model()
    with pytest.raises(ValueError, match="more is unexpected"):
        load_weights(model, tmp_path)
    assert [attention.num_heads for attention in model.attentions] == [6, 6, 6]
