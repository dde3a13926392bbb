"""Models of vitmha, timm, Hugging Face and torchvision, recorded and compared with the explicit softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from builders import FAMILIES, built, of_timm
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.vision_transformer import ConvStemConfig

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


def dynamic_timm(**changes: Any) -> nn.Module:
    model, _ = of_timm("vit_base_patch16_224", (32, 32), dynamic_img_size=True, **changes)
    return model.eval()


def recorded_grid(model: nn.Module, run: Callable[[Any], object]) -> tuple[int, int]:
    """The recorded grid, after a check that the first map is on it, prefix tokens apart."""
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        run(model)
    assert recorded.layout.to_grid(recorded.maps[0]).shape[-2:] == recorded.layout.grid_size
    return recorded.layout.grid_size


TALL = torch.randn(2, 3, 64, 16)  # as many patches of 8 pixels as 32 x 32 has


@pytest.mark.parametrize("method", ["forward_features", "get_intermediate_layers", "forward_intermediates", "forward"])
@pytest.mark.parametrize("size", [(64, 16), (40, 64)])
def test_the_grid_of_timm_models_is_right_whichever_method_runs(method: str, size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size)
    grid = recorded_grid(dynamic_timm(), lambda model: getattr(model, method)(images))
    assert grid == (size[0] // 8, size[1] // 8)


@pytest.mark.parametrize("method", ["forward", "forward_features"])
def test_the_grid_of_a_padding_model_covers_the_padded_image(method: str) -> None:
    model, images = dynamic_timm(dynamic_img_pad=True), torch.randn(2, 3, 36, 60)
    assert recorded_grid(model, lambda model: getattr(model, method)(images)) == (5, 8)


def test_the_grid_of_an_image_that_the_patches_do_not_divide_is_without_the_rest() -> None:
    model, _, _ = built("HF DINOv2")
    assert recorded_grid(model, lambda model: model(torch.randn(2, 3, 36, 60))) == (4, 7)


def test_the_grid_is_right_when_another_part_of_a_hugging_face_model_runs_than_was_passed() -> None:
    model, _, _ = built("HF DINOv2")
    assert recorded_grid(model, lambda model: model.dinov2(TALL)) == (8, 2)
    assert recorded_grid(model.dinov2, lambda _: model(TALL)) == (8, 2)
    model, _, _ = built("HF ViT")
    assert recorded_grid(model, lambda model: model.vit(TALL, interpolate_pos_encoding=True)) == (8, 2)


def test_the_grid_of_rotary_models_follows_the_images() -> None:
    model, _ = of_timm("vit_small_patch16_dinov3", (32, 32), dynamic_img_size=True)
    assert recorded_grid(model.eval(), lambda model: model.forward_features(TALL)) == (8, 2)
    model, _, _ = built("HF DINOv3")
    assert recorded_grid(model, lambda model: model(TALL)) == (8, 2)


def test_patches_after_a_convolutional_stem_have_their_size_in_pixels() -> None:
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("vit_tiny_r_s16_p8_224", pretrained=False, img_size=64, **sizes).eval()
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        model(torch.randn(1, 3, 64, 64))
    assert (recorded.layout.grid_size, recorded.layout.image_size) == ((2, 2), (64, 64))
    stem = [ConvStemConfig(out_channels=8, kernel_size=3, stride=2)] * 3
    model = torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 31, num_classes=5, conv_stem_configs=stem).eval()
    assert recorded_grid(model, lambda model: model(torch.randn(1, 3, 32, 32))) == (4, 4)


@pytest.mark.parametrize("family", ["timm ViT", "HF ViT", "torchvision ViT"])
def test_tokens_without_their_patches_are_refused_since_their_grid_is_unknown(family: str) -> None:
    model, images, _ = built(family)
    attention = get_attention_spec(model).attentions[0]
    tokens: list[Any] = []
    handle = attention.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(images)
        handle.remove()
        args, kwargs = tokens[0]
        with pytest.raises(ValueError, match="The patch grid is unknown"), record_attention(model):
            attention(*args, **kwargs)


def test_a_pass_through_some_layers_is_not_mixed_with_an_earlier_pass() -> None:
    model = dynamic_timm()

    def run(layers: list[int] | None) -> list[Tensor]:
        with torch.no_grad(), record_attention(model, layers) as recorded:
            model(torch.randn(2, 3, 32, 32))
            model.forward_intermediates(TALL, indices=[0], stop_early=True)
        return recorded.maps

    with pytest.raises(RuntimeError, match=r"No attention was recorded in layers \[1\].*pass these as `layers`"):
        run(None)
    assert len(run([0])) == 1


def test_query_rows_are_checked_against_the_tokens_of_the_images() -> None:
    model = dynamic_timm()
    with torch.no_grad(), record_attention(model, queries=[60]) as recorded:
        model(torch.randn(1, 3, 64, 64))
    assert recorded.maps[0].shape == (1, 3, 1, 65)
    with (
        pytest.raises(ValueError, match=r"queries must lie in \[-5, 5\), got \[16\]"),
        torch.no_grad(),
        record_attention(model, queries=[16]),
    ):
        model(torch.randn(1, 3, 16, 16))


@pytest.mark.parametrize(
    ("training", "reason"),
    [(True, "patch dropout removes tokens in training; record in eval mode"), (False, "adds or removes tokens")],
)
def test_a_model_that_adds_or_removes_tokens_is_refused_with_the_reason(training: bool, reason: str) -> None:
    model = dynamic_timm(patch_drop_rate=0.5).train(training)
    model.patch_drop.train()
    with (
        pytest.raises(
            ValueError, match=rf"Expected 17 tokens in layer 0 \(1 and those of 4 x 4 patches\), got 9: .*{reason}"
        ),
        record_attention(model),
    ):
        model(torch.randn(1, 3, 32, 32))
