"""What the prediction becomes when one head is switched off, for every head."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection.adapters import get_attention_spec, observe_attention
from vitmha.models.vit import VisionTransformer


def ablate_each_head(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    means: Sequence[Float[Tensor, "_heads _head_dim"]] | None = None,
) -> list[Float[Tensor, "_heads batch classes"]]:
    """The logits with one head of one layer replaced, for each in turn; what lies before the layer is computed once.

    Args:
        model: In eval mode.
        images: Normalised.
        means: What stands for the head's output at every token, as `mean_outputs` gives it; zeros where not given,
            which are further from what the other layers know.

    Returns:
        For each layer, the logits of each of its heads.
    """
    found: list[Tensor] = []
    with torch.no_grad():
        x, rope = model.embed(images)
        for layer, block in enumerate(model.blocks):
            attention: Any = block.attn
            heads, width = attention.num_heads, attention.head_dim
            values = x.new_zeros(heads, width) if means is None else means[layer].to(x)
            if heads:
                with _one_head_each(attention, values):
                    tokens = model.forward_blocks(x.repeat(heads, 1, 1), rope, layer, model.pooled_tokens)
                found.append(model.forward_head(tokens).unflatten(0, (heads, len(images))))
            else:
                found.append(x.new_zeros(0, len(images), model.config.num_classes))
            x = block(x, rope)
    return found


@contextmanager
def _one_head_each(attention: Any, values: Float[Tensor, "heads head_dim"]) -> Iterator[None]:
    """In a batch that holds the pictures once for each head, that head's output is replaced by its value."""
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
    """What each head gives (before `out_proj`), the mean over pictures and tokens.

    Args:
        model: In eval mode.
        batches: Normalised pictures.

    Raises:
        UserError: There is no picture.
    """
    spec, count, device = get_attention_spec(model), 0, next(model.parameters()).device
    attentions: Any = spec.attentions
    sums = [torch.zeros(attention.num_heads, attention.head_dim, device=device) for attention in attentions]

    def add(layer: int, _q: Tensor, _k: Tensor, _v: Tensor, y: Tensor | None, *_: object) -> None:
        assert y is not None  # our models always show it
        sums[layer] += y.float().mean(2).sum(0)

    present = [layer for layer, heads in enumerate(spec.num_heads) if heads]
    with observe_attention(model, present, add):
        for images in batches:
            model.forward(images.to(device))
            count += len(images)
    if not count:
        raise UserError("There is no picture to take the mean over.")
    return [each / count for each in sums]
