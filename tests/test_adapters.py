"""Our models and those of timm, Hugging Face and torchvision recorded as they are, against the explicit softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention
from vitmha.inspection import record_attention
from vitmha.inspection.adapters import anatomy_of
from vitmha.vit import VisionTransformer, ViTConfig

SIZES = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "num_classes": 7}
HF_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 31,
    "patch_size": 8,
    "num_labels": 7,
}


def of_timm(name: str, size: tuple[int, int] = (32, 48), **changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    model = timm.create_model(name, pretrained=False, img_size=size, **{**SIZES, **changes})
    return model, size


def of_hugging_face(name: str, size: tuple[int, int], **changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    kind = getattr(transformers, name)
    return kind(kind.config_class(image_size=32, **{**HF_SIZES, **changes})), size


def of_torchvision() -> tuple[nn.Module, tuple[int, int]]:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 31}
    return torchvision.models.VisionTransformer(**sizes, num_classes=7), (32, 32)


def of_ours(**changes: Any) -> tuple[nn.Module, tuple[int, int]]:
    size = (32, 48)
    return VisionTransformer(ViTConfig(image_size=size, mlp_dim=31, **SIZES, **changes)), size


FAMILIES: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[int, int]]], int]] = {
    "ours": (of_ours, 1),
    "ours, registers, mean-pooled": (lambda: of_ours(num_registers=4, pool="mean"), 4),
    "timm ViT": (lambda: of_timm("vit_base_patch16_224"), 1),
    "timm DeiT distilled": (lambda: of_timm("deit_tiny_distilled_patch16_224"), 2),
    "timm DINOv2 registers": (lambda: of_timm("vit_small_patch14_reg4_dinov2"), 5),
    "timm mean-pooled": (lambda: of_timm("vit_base_patch16_224", class_token=False, global_pool="avg"), 0),
    "timm map-pooled": (lambda: of_timm("vit_base_patch16_siglip_224"), 0),
    "timm DINOv3": (lambda: of_timm("vit_small_patch16_dinov3"), 5),
    "HF ViT": (lambda: of_hugging_face("ViTForImageClassification", (32, 32)), 1),
    "HF DeiT distilled": (lambda: of_hugging_face("DeiTForImageClassificationWithTeacher", (32, 32)), 2),
    "HF DINOv2": (lambda: of_hugging_face("Dinov2ForImageClassification", (32, 48)), 1),
    "HF DINOv2 registers": (lambda: of_hugging_face("Dinov2WithRegistersForImageClassification", (32, 48)), 5),
    "HF DINOv3": (lambda: of_hugging_face("DINOv3ViTModel", (32, 48), num_register_tokens=3), 4),
    "torchvision ViT": (of_torchvision, 1),
}


def built(family: str) -> tuple[nn.Module, Tensor, int]:
    make, prefix = FAMILIES[family]
    model, size = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.eval(), torch.randn(2, 3, *size), prefix


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output[0]


def explicit_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The softmaxed matrices as the package itself gives them, its fused kernel off; of ours written out here."""
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
        try:
            return list(model(images, output_attentions=True).attentions)
        finally:
            model.set_attn_implementation("sdpa")
    maps: list[Tensor] = []
    attentions = anatomy_of(model).attentions
    if isinstance(attentions[0], nn.MultiheadAttention):
        for attention in attentions:

            def weigh(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                maps.append(nn.MultiheadAttention.forward(module, *args, average_attn_weights=False)[1])

            attention.register_forward_hook(weigh, with_kwargs=True)
    elif isinstance(attentions[0], MultiHeadAttention):
        for attention in attentions:

            def softmax(module: nn.Module, args: Any, _: Any) -> None:
                q, k = (
                    each(args[0]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
                    for each in (module.q_proj, module.k_proj)
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


def test_a_kernel_that_is_off_is_an_error_with_the_remedy() -> None:
    model, images, _ = built("HF ViT")
    model.set_attn_implementation("eager")
    with (
        pytest.raises(RuntimeError, match=r'ran no scaled_dot_product_attention.*attn_implementation="sdpa"'),
        record_attention(model),
    ):
        model(images)


def test_the_layout_follows_the_size_of_the_pictures() -> None:
    model, _, _ = built("HF DINOv2")
    images = torch.randn(1, 3, 40, 24)
    with torch.no_grad(), record_attention(model, queries="patches") as recorded:
        model(images)
    assert recorded.layout.grid_size == (5, 3)
    assert recorded.maps[0].shape == (1, 3, 15, 16)


def test_a_compiled_model_of_another_package_is_refused() -> None:
    model, _, _ = built("timm ViT")
    with (
        pytest.raises(ValueError, match="A compiled model of another package is not seen into"),
        record_attention(torch.compile(model)),
    ):
        pass


def test_attention_that_is_no_single_map_is_refused() -> None:
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
    with pytest.raises(ValueError, match=r"No attention is known in a (ResNet of timm|Linear of torch)"):
        anatomy_of(make())
