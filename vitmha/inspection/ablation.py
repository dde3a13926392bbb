"""Ablation of single heads: the prediction without each head in turn."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection.adapters import get_attention_spec, observe_attention
from vitmha.inspection.trace import Trace
from vitmha.models.vit import VisionTransformer


def ablate_each_head(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    means: Sequence[Float[Tensor, "_heads _head_dim"]] | None = None,
) -> list[Float[Tensor, "_heads batch classes"]]:
    """Returns the logits with each head ablated in turn. The layers before an ablated head are computed once.

    Args:
        model: In eval mode.
        images: Normalized.
        means: What replaces the head's output at every token (mean ablation), as `mean_outputs` returns it. Default:
            zeros (zero ablation), which are further from the outputs that the later layers were trained on.

    Returns:
        For each layer, the logits without each of its heads.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> ablate_each_head(model, torch.randn(2, 3, 32, 32))[0].shape  # (heads, batch, classes)
        torch.Size([3, 2, 10])
    """
    logits: list[Tensor] = []
    with torch.no_grad():
        x, rope = model.embed(images)
        for layer, block in enumerate(model.blocks):
            attention: Any = block.attn
            heads, width = attention.num_heads, attention.head_dim
            values = x.new_zeros(heads, width) if means is None else means[layer].to(x)
            if heads:
                with _ablate_one_head_per_copy(attention, values):
                    tokens = model.forward_blocks(x.repeat(heads, 1, 1), rope, layer, model.pooled_tokens)
                logits.append(model.forward_head(tokens).unflatten(0, (heads, len(images))))
            else:
                logits.append(x.new_zeros(0, len(images), model.config.num_classes))
            x = block(x, rope)
    return logits


@contextmanager
def _ablate_one_head_per_copy(attention: Any, values: Float[Tensor, "heads head_dim"]) -> Iterator[None]:
    """Replaces, in a batch with one copy of the images per head, that head's output by its value."""
    heads = torch.arange(len(values), device=values.device)

    def replace(_: Any, args: tuple[Tensor]) -> Tensor:
        y = args[0].unflatten(-1, (len(values), -1)).unflatten(0, (len(values), -1)).clone()
        y[heads, :, :, heads] = values[:, None, None].to(y.dtype)
        return y.flatten(0, 1).flatten(-2)

    with attention.out_proj.register_forward_pre_hook(replace):
        yield


@torch.no_grad()
def mean_outputs(
    model: VisionTransformer, batches: Iterable[Float[Tensor, "_batch channels height width"]]
) -> list[Float[Tensor, "_heads _head_dim"]]:
    """Returns the mean output of each head (before `out_proj`) over images and tokens.

    Args:
        model: In eval mode.
        batches: Batches of normalized images.

    Raises:
        UserError: No images.
    """
    spec, count, device = get_attention_spec(model), 0, next(model.parameters()).device
    attentions: Any = spec.attentions
    sums = [torch.zeros(attention.num_heads, attention.head_dim, device=device) for attention in attentions]

    def add(layer: int, _q: Tensor, _k: Tensor, _v: Tensor, y: Tensor | None, *_: object) -> None:
        assert y is not None  # vitmha's attention always passes it
        sums[layer] += y.float().mean(2).sum(0)

    with_heads = [layer for layer, heads in enumerate(spec.num_heads) if heads]
    with observe_attention(model, with_heads, add):
        for images in batches:
            model.forward(images.to(device))
            count += len(images)
    if not count:
        raise UserError("batches holds no images: at least one is needed for the mean.")
    return [total / count for total in sums]


def traced_mean_outputs(model: VisionTransformer, traced: Trace) -> list[Float[Tensor, "_heads _head_dim"]]:
    """`mean_outputs` of the images of a trace."""
    means = {layer: block.y.float().mean((0, 2)) for layer, block in zip(traced.layers, traced.blocks, strict=True)}
    empty = next(iter(means.values())).new_zeros(0, 0)
    return [means.get(layer, empty) for layer in range(len(model.attentions))]
