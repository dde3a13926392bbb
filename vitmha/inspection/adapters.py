"""Finds and observes the attention modules of a ViT: vitmha's, timm's, Hugging Face's or torchvision's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmha.attention import MultiHeadAttention
from vitmha.errors import UserError
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

# The arguments of `MultiHeadAttention`'s `AttentionHook`, preceded by the layer index. y is None if gradients were not
# requested and the model does not expose it.
LayerHook = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], None]
HUGGING_FACE = ("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention modules of a model and its tokens."""

    layout: TokenLayout
    """The order of the tokens. For a model of another package, at the image size it was built for."""
    patch_projection: nn.Module
    """The module whose output is the patch grid, (batch, channels, height, width)."""
    attentions: Sequence[nn.Module]
    """The attention module of each block."""
    out_projs: Sequence[nn.Linear]
    """The output projection of each block."""
    num_heads: Sequence[int]
    """Number of heads of each block."""

    @property
    def is_vitmha(self) -> bool:
        """Whether the model is vitmha's own."""
        return isinstance(self.attentions[0], MultiHeadAttention)


def get_attention_spec(model: nn.Module) -> AttentionSpec:
    """Finds the attention modules of a model.

    Args:
        model: A `VisionTransformer` of vitmha, timm or torchvision, or Hugging Face's ViT, DeiT, DINOv2 or DINOv3;
            compiled or not.

    Raises:
        UserError: A model without attention, or one that is not supported.

    Example:
        >>> from vitmha import create_model
        >>> get_attention_spec(create_model("vit_tiny", num_classes=10)).num_heads[:3]
        [3, 3, 3]
    """
    vit: Any = getattr(model, "_orig_mod", model)
    if isinstance(vit, VisionTransformer):
        attentions = vit.attentions
        return AttentionSpec(
            layout=vit.layout,
            patch_projection=vit.patch_embed.proj,
            attentions=attentions,
            out_projs=[attention.out_proj for attention in attentions],
            num_heads=[attention.num_heads for attention in attentions],
        )
    package = type(vit).__module__.partition(".")[0]
    if package == "timm" and type(vit).__name__ in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
        return _timm(vit)
    if package == "transformers" and vit.config.model_type in HUGGING_FACE:
        return _hugging_face(vit)
    if package == "torchvision" and type(vit).__name__ == "VisionTransformer":
        return _torchvision(vit)
    raise UserError(
        f"Cannot inspect a {type(vit).__name__} of {package}: supported are VisionTransformer of vitmha, timm or "
        f"torchvision, and Hugging Face's {', '.join(HUGGING_FACE)}."
    )


def _timm(vit: Any) -> AttentionSpec:
    if unsupported := {type(block).__name__ for block in vit.blocks if not hasattr(block, "attn")}:
        raise UserError(f"Cannot inspect timm's {', '.join(unsupported)}: blocks with an `attn` module are supported.")
    registers = getattr(vit, "num_reg_tokens", None)
    has_class_token = vit.cls_token is not None
    if registers is None:  # Eva counts its registers only as prefix tokens
        registers = vit.num_prefix_tokens - has_class_token
    return AttentionSpec(
        layout=TokenLayout(
            num_class_tokens=int(has_class_token),
            num_distillation_tokens=int(type(vit).__name__ == "VisionTransformerDistilled"),
            num_registers=registers,
            grid_size=tuple(vit.patch_embed.grid_size),
            patch_size=tuple(vit.patch_embed.feat_ratio(as_scalar=False)),  # in pixels, also after a stem
        ),
        patch_projection=vit.patch_embed.proj,
        attentions=[block.attn for block in vit.blocks],
        out_projs=[block.attn.proj for block in vit.blocks],
        num_heads=[block.attn.num_heads for block in vit.blocks],
    )


def _hugging_face(vit: Any) -> AttentionSpec:
    config = vit.config
    sizes = (config.image_size, config.patch_size)
    image, patch = ((size, size) if isinstance(size, int) else tuple(size) for size in sizes)
    out_projs = {module: out_proj for module in vit.modules() if (out_proj := _hugging_face_out_proj(module))}
    if not out_projs:
        raise UserError("No attention was found in the Hugging Face model: install transformers 5 or later.")
    embedding = next(module for name, module in vit.named_modules() if name.endswith("patch_embeddings"))
    return AttentionSpec(
        layout=TokenLayout(
            num_class_tokens=1,
            num_distillation_tokens=int(config.model_type == "deit"),
            num_registers=getattr(config, "num_register_tokens", 0),
            grid_size=(image[0] // patch[0], image[1] // patch[1]),
            patch_size=patch,
        ),
        patch_projection=getattr(embedding, "projection", embedding),
        attentions=list(out_projs),
        out_projs=list(out_projs.values()),
        num_heads=[config.num_attention_heads] * len(out_projs),
    )


def _hugging_face_out_proj(module: Any) -> nn.Linear | None:
    """The output projection of an attention; None for other modules."""
    if hasattr(module, "q_proj"):
        return module.o_proj
    if hasattr(getattr(module, "attention", None), "query"):  # before transformers 5.18, for ViT and DeiT 5.9
        return module.output.dense
    return None


def _torchvision(vit: Any) -> AttentionSpec:
    grid, patch = vit.image_size // vit.patch_size, vit.patch_size
    attentions = [layer.self_attention for layer in vit.encoder.layers]
    return AttentionSpec(
        layout=TokenLayout(num_class_tokens=1, num_registers=0, grid_size=(grid, grid), patch_size=(patch, patch)),
        patch_projection=vit.conv_proj,
        attentions=attentions,
        out_projs=[attention.out_proj for attention in attentions],
        num_heads=[attention.num_heads for attention in attentions],
    )


@contextmanager
def observe_attention(
    model: nn.Module,
    layers: Sequence[int],
    hook: LayerHook,
    on_resize: Callable[[TokenLayout], None] | None = None,
    gradients: bool = False,
) -> Iterator[None]:
    """Calls a hook with the inputs and outputs of the attention kernel, in every forward pass of the `with` block.

    The model computes the same as without the hook, and is left unchanged. In models of other packages, the calls of
    PyTorch's `scaled_dot_product_attention` are observed; it is replaced for the process inside the block.

    Args:
        model: As in `get_attention_spec`.
        layers: Block indices.
        hook: Called once per layer and pass.
        on_resize: For models of other packages, called with the layout of each pass when its patches are embedded.
        gradients: Whether the hook needs y in the graph.

    Raises:
        RuntimeError: The model is already being observed.
        UserError: In the block, with on_resize: tokens whose patches were not embedded in the block.
    """
    spec = get_attention_spec(model)
    if not spec.is_vitmha:
        with _observe_other_package(spec, layers, hook, on_resize, gradients):
            yield
        return
    attentions = [cast(MultiHeadAttention, spec.attentions[layer]) for layer in layers]
    if any(attention.attention_hook is not None for attention in attentions):
        raise RuntimeError("This model is already being recorded: record all rows and layers in one `with` block.")
    try:
        for layer, attention in zip(layers, attentions, strict=True):
            attention.attention_hook = partial(hook, layer)
        yield
    finally:
        for attention in attentions:
            attention.attention_hook = None


@contextmanager
def _observe_other_package(
    spec: AttentionSpec,
    layers: Sequence[int],
    hook: LayerHook,
    on_resize: Callable[[TokenLayout], None] | None,
    gradients: bool,
) -> Iterator[None]:
    inside: list[int] = []  # the index of the running layer, if any; a second time once its kernel has been called

    def enter(layer: int, *_: object) -> None:
        inside[:] = [layer]

    def leave(*_: object) -> None:
        inside.clear()

    is_measured = on_resize is None

    def measure(_module: nn.Module, _args: object, patches: Tensor) -> None:
        nonlocal is_measured
        assert on_resize is not None  # otherwise the hook is not registered
        is_measured = True
        height, width = patches.shape[2:]
        on_resize(replace(spec.layout, grid_size=(height, width)))

    def observed(layer: int, *tensors: Any) -> None:
        if not is_measured:
            raise UserError(
                "The patch grid is unknown, since only tokens were passed to the model: embed the patches inside the "
                "`with` block too, for example by running the whole model on images."
            )
        hook(layer, *tensors)

    with ExitStack() as stack:
        if on_resize is not None:
            stack.enter_context(spec.patch_projection.register_forward_hook(measure))
        for layer in layers:
            attention = spec.attentions[layer]
            if isinstance(attention, nn.MultiheadAttention) and not gradients:
                # Its fast path, used at inference, makes no call that could be observed.
                project = partial(_observe_projections, layer, observed)
                stack.enter_context(attention.register_forward_pre_hook(project, with_kwargs=True))
            else:
                stack.enter_context(attention.register_forward_pre_hook(partial(enter, layer)))
                stack.enter_context(attention.register_forward_hook(leave, always_call=True))
        if gradients:
            was_fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, was_fast)
        stack.enter_context(_observe_kernel(inside, observed))
        yield


@contextmanager
def _observe_kernel(inside: list[int], hook: LayerHook) -> Iterator[None]:
    # Replaced for the process. torch.overrides.TorchFunctionMode would be local to the thread, but under it
    # nn.MultiheadAttention calls F.multi_head_attention_forward through the mode, which then does not receive the calls
    # made inside; and its fast path is off.
    kernel = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        y = kernel(query, key, value, **options, scale=scale, enable_gqa=enable_gqa)
        if inside:
            if len(inside) > 1:
                raise UserError(
                    f"The attention of layer {inside[0]} calls its kernel more than once, as differential attention "
                    "does: the map of one call is not the attention of the layer."
                )
            inside.append(inside[0])
            factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
            hook(inside[0], query * factor if factor != 1 else query, key, value, y, attn_mask, is_causal)
        return y

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kernel


def _observe_projections(
    layer: int, hook: LayerHook, attention: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Calls the hook with queries, keys and values projected as `nn.MultiheadAttention` projects them."""
    x = args[0] if args else kwargs["query"]
    with torch.no_grad():
        projected = F.linear(x, cast(Tensor, attention.in_proj_weight), attention.in_proj_bias)
        q, k, v = (t.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for t in projected.chunk(3, dim=-1))
        hook(layer, q, k, v, None, None, False)
