"""Where the attention of a model is, and how to watch it: ours, timm's, Hugging Face's and torchvision's."""

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

# Called with the layer, then as an `AttentionHook` of `MultiHeadAttention`; y is None where nobody asked for gradients and
# the model never holds it.
Watcher = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], None]
HUGGING_FACE = ("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A model, as far as its attention goes."""

    layout: TokenLayout
    """Which token is what; of others' models that take pictures of many sizes, for the size they are built for."""
    attentions: Sequence[nn.Module]
    """One for each block."""
    out_projs: Sequence[nn.Linear]
    """The projections behind the heads."""
    num_heads: Sequence[int]
    """Heads in each block."""

    @property
    def is_ours(self) -> bool:
        return isinstance(self.attentions[0], MultiHeadAttention)


def get_attention_spec(model: nn.Module) -> AttentionSpec:
    """Where the attention of a model is.

    Args:
        model: A `VisionTransformer` of ours or of timm, one of Hugging Face's ViT, DeiT, DINOv2 and DINOv3, or
            torchvision's; compiled or not.

    Raises:
        UserError: A model without attention, or of another kind.
    """
    vit: Any = getattr(model, "_orig_mod", model)
    if isinstance(vit, VisionTransformer):
        attentions = vit.attentions
        return AttentionSpec(
            layout=vit.layout,
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
        f"No attention is known in a {type(vit).__name__} of {package}: what can be watched are a VisionTransformer of "
        f"vitmha, timm or torchvision, and Hugging Face's {', '.join(HUGGING_FACE)}."
    )


def _timm(vit: Any) -> AttentionSpec:
    if strange := {type(block).__name__ for block in vit.blocks if not hasattr(block, "attn")}:
        raise UserError(f"No attention is known in timm's {', '.join(strange)}: plain blocks can be watched.")
    registers = getattr(vit, "num_reg_tokens", None)
    has_class_token = vit.cls_token is not None
    if registers is None:  # Eva counts its registers among the prefix alone
        registers = vit.num_prefix_tokens - has_class_token
    return AttentionSpec(
        layout=TokenLayout(
            num_class_tokens=int(has_class_token),
            num_distillation_tokens=int(type(vit).__name__ == "VisionTransformerDistilled"),
            num_registers=registers,
            grid_size=tuple(vit.patch_embed.grid_size),
            patch_size=tuple(vit.patch_embed.patch_size),
        ),
        attentions=[block.attn for block in vit.blocks],
        out_projs=[block.attn.proj for block in vit.blocks],
        num_heads=[block.attn.num_heads for block in vit.blocks],
    )


def _hugging_face(vit: Any) -> AttentionSpec:
    config = vit.config
    sizes = (config.image_size, config.patch_size)
    image, patch = ((size, size) if isinstance(size, int) else tuple(size) for size in sizes)
    attentions = [module for module in vit.modules() if hasattr(module, "q_proj") and hasattr(module, "o_proj")]
    if not attentions:
        raise UserError("No attention was found in Hugging Face's model: transformers 5 or later is needed.")
    return AttentionSpec(
        layout=TokenLayout(
            num_class_tokens=1,
            num_distillation_tokens=int(config.model_type == "deit"),
            num_registers=getattr(config, "num_register_tokens", 0),
            grid_size=(image[0] // patch[0], image[1] // patch[1]),
            patch_size=patch,
        ),
        attentions=attentions,
        out_projs=[attention.o_proj for attention in attentions],
        num_heads=[config.num_attention_heads] * len(attentions),
    )


def _torchvision(vit: Any) -> AttentionSpec:
    grid, patch = vit.image_size // vit.patch_size, vit.patch_size
    attentions = [layer.self_attention for layer in vit.encoder.layers]
    return AttentionSpec(
        layout=TokenLayout(num_class_tokens=1, num_registers=0, grid_size=(grid, grid), patch_size=(patch, patch)),
        attentions=attentions,
        out_projs=[attention.out_proj for attention in attentions],
        num_heads=[attention.num_heads for attention in attentions],
    )


@contextmanager
def observe_attention(
    model: nn.Module,
    layers: Sequence[int],
    watcher: Watcher,
    resized: Callable[[TokenLayout], None] | None = None,
    gradients: bool = False,
) -> Iterator[None]:
    """Shows a watcher what the attention of these layers reads and gives, in every forward pass inside the block.

    The model computes what it computes without, and nothing of it is changed when the block is left. Models of others
    are watched where they call PyTorch's `scaled_dot_product_attention`, which is replaced for the process meanwhile.

    Args:
        model: As `get_attention_spec` takes it.
        layers: Blocks by number.
        watcher: Called for each layer in each pass.
        resized: Called before each pass of others' models with the layout for the size of its pictures.
        gradients: Whether the watcher needs y in the graph.

    Raises:
        RuntimeError: The model is being watched already.
    """
    spec = get_attention_spec(model)
    if not spec.is_ours:
        with _watching_others(model, spec, layers, watcher, resized, gradients):
            yield
        return
    attentions = [cast(MultiHeadAttention, spec.attentions[layer]) for layer in layers]
    if any(attention.attention_hook is not None for attention in attentions):
        raise RuntimeError("This model is being recorded already: ask for all rows and layers in one `with` block.")
    try:
        for layer, attention in zip(layers, attentions, strict=True):
            attention.attention_hook = partial(watcher, layer)
        yield
    finally:
        for attention in attentions:
            attention.attention_hook = None


@contextmanager
def _watching_others(
    model: nn.Module,
    spec: AttentionSpec,
    layers: Sequence[int],
    watcher: Watcher,
    resized: Callable[[TokenLayout], None] | None,
    gradients: bool,
) -> Iterator[None]:
    inside: list[int] = []  # the layer whose attention is running, if one is; twice when its kernel has run

    def enter(layer: int, *_: object) -> None:
        inside[:] = [layer]

    def leave(*_: object) -> None:
        inside.clear()

    def measure(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        images = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 4)
        height, width = (
            pixels // patch for pixels, patch in zip(images.shape[2:], spec.layout.patch_size, strict=True)
        )
        assert resized is not None  # or the hook would not be there
        resized(replace(spec.layout, grid_size=(height, width)))

    with ExitStack() as stack:
        if resized is not None:
            stack.enter_context(model.register_forward_pre_hook(measure, with_kwargs=True))
        for layer in layers:
            attention = spec.attentions[layer]
            if isinstance(attention, nn.MultiheadAttention) and not gradients:
                # Its fast path, which inference takes, calls nothing that could be watched.
                show = partial(_show_projected, layer, watcher)
                stack.enter_context(attention.register_forward_pre_hook(show, with_kwargs=True))
            else:
                stack.enter_context(attention.register_forward_pre_hook(partial(enter, layer)))
                stack.enter_context(attention.register_forward_hook(leave, always_call=True))
        if gradients:
            was_fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, was_fast)
        stack.enter_context(_kernel_watched(inside, watcher))
        yield


@contextmanager
def _kernel_watched(inside: list[int], watcher: Watcher) -> Iterator[None]:
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
        given: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        y = kernel(query, key, value, **given, scale=scale, enable_gqa=enable_gqa)
        if inside:
            if len(inside) > 1:
                raise UserError(
                    f"The attention of layer {inside[0]} calls its kernel more than once, as differential attention "
                    "does: no map of one call is what it computes."
                )
            inside.append(inside[0])
            factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
            watcher(inside[0], query * factor if factor != 1 else query, key, value, y, attn_mask, is_causal)
        return y

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kernel


def _show_projected(
    layer: int, watcher: Watcher, attention: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Queries, keys and values as PyTorch's own module projects them."""
    x = args[0] if args else kwargs["query"]
    with torch.no_grad():
        projected = F.linear(x, cast(Tensor, attention.in_proj_weight), attention.in_proj_bias)
        q, k, v = (t.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for t in projected.chunk(3, dim=-1))
        watcher(layer, q, k, v, None, None, False)
