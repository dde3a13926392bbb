"""Models of vitmha, timm, Hugging Face and torchvision, recorded and compared with the explicit softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from builders import FAMILIES, built
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention
from vitmha.inspection import record_attention
from vitmha.inspection.adapters import get_attention_spec


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output[0]


def explicit_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention weights that the package itself returns with its fused kernel off; for vitmha, written out here."""
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
        try:
            return list(model(images, output_attentions=True).attentions)
        finally:
            model.set_attn_implementation("sdpa")
    maps: list[Tensor] = []
    attentions = get_attention_spec(model).attentions
    if isinstance(attentions[0], nn.MultiheadAttention):
        for attention in attentions:

            def weigh(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                maps.append(nn.MultiheadAttention.forward(module, *args, average_attn_weights=False)[1])

            attention.register_forward_hook(weigh, with_kwargs=True)
    elif isinstance(attentions[0], MultiHeadAttention):
        for attention in attentions:

            def softmax(module: nn.Module, args: Any, _: Any) -> None:
                q, k = (
                    projection(args[0]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
                    for projection in (module.q_proj, module.k_proj)
                )
                maps.append((q @ k.mT / module.head_dim**0.5).softmax(-1))

            attention.register_forward_hook(softmax)
    else:
        for attention in attentions:
            attention.fused_attn = False
            attention.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    model(images)
    return maps


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_equal_the_explicit_softmax_and_logits_stay_bit_for_bit(family: str) -> None:
    model, images, prefix = built(family)
    kernel = torch.nn.functional.scaled_dot_product_attention
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = logits_of(model, images)
        with record_attention(model, queries="all") as recorded:
            during = logits_of(model, images)
        with record_attention(model, layers=[1], heads=[2, 0], queries="patches") as chosen:
            logits_of(model, images)
        expected = explicit_maps(model, images)
    assert torch.equal(before, during)
    assert recorded.layout.num_prefix_tokens == prefix
    grid = (images.shape[2] // 8, images.shape[3] // 8)
    assert recorded.layout.grid_size == grid
    assert len(expected) == 2
    assert_close(recorded.maps, expected, rtol=1e-5, atol=1e-6)
    assert_close(chosen.maps[0], expected[1][:, [2, 0], prefix:], rtol=1e-5, atol=1e-6)
    assert max(weights.max() for weights in expected) > 0.2  # far from uniform
    assert torch.nn.functional.scaled_dot_product_attention is kernel
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_gradients_equal_those_of_maps_in_the_graph(family: str, is_frozen: bool) -> None:
    model, images, _ = built(family)
    model.requires_grad_(not is_frozen)
    with record_attention(model, queries="all", gradients=True) as recorded:
        target = logits_of(model, images)[:, 3].sum()
    found = recorded.gradients(target)
    for layer, (weights, gradient) in enumerate(zip(recorded.maps, found, strict=True)):
        y, _ = recorded.values[layer]  # y = A v, so that <dA, A> = <dy, y>
        (dy,) = torch.autograd.grad(target, y, retain_graph=True)
        assert_close((weights * gradient).sum((1, 2, 3)), (dy * y).sum((1, 2, 3)), rtol=1e-3, atol=1e-4)
        assert gradient.abs().max() > 0


def test_a_disabled_fused_kernel_is_an_error_with_the_remedy() -> None:
    model, images, _ = built("HF ViT")
    model.set_attn_implementation("eager")
    with (
        pytest.raises(RuntimeError, match=r'No call of scaled_dot_product_attention.*attn_implementation="sdpa"'),
        record_attention(model),
    ):
        model(images)


def test_the_layout_follows_the_size_of_the_images() -> None:
    model, _, _ = built("HF DINOv2")
    images = torch.randn(1, 3, 40, 24)
    with torch.no_grad(), record_attention(model, queries="patches") as recorded:
        model(images)
    assert recorded.layout.grid_size == (5, 3)
    assert recorded.maps[0].shape == (1, 3, 15, 16)


def test_a_compiled_model_of_another_package_is_refused() -> None:
    model, _, _ = built("timm ViT")
    with (
        pytest.raises(ValueError, match="A compiled model of another package cannot be recorded"),
        record_attention(torch.compile(model)),
    ):
        pass


def test_attention_of_more_than_one_kernel_call_is_refused() -> None:
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 5}
    model = timm.create_model("vit_dwee_patch16_reg1_gap_256", **sizes).eval()
    with (
        pytest.raises(ValueError, match=r"layer 0 calls its kernel more than once, as differential attention does"),
        torch.no_grad(),
        record_attention(model, queries="pooled"),
    ):
        model(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("make", [lambda: timm.create_model("resnet18", pretrained=False), lambda: nn.Linear(2, 3)])
def test_a_model_without_attention_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"Cannot inspect a (ResNet of timm|Linear of torch)"):
        get_attention_spec(make())
