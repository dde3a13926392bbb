"""What the prediction becomes when one head is switched off, for every head."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.adapters import anatomy_of, watching
from vitmha.vit import VisionTransformer

Replacement = Literal["zero", "mean"]


def switched_off(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    replacement: Replacement = "zero",
    means: Sequence[Float[Tensor, "_heads _head_dim"]] | None = None,
) -> list[Float[Tensor, "_heads batch classes"]]:
    """The logits with one head of one layer replaced, for each in turn; what lies before the layer is computed once.

    Args:
        model: In eval mode.
        images: Normalised.
        replacement: What stands for the head's output at every token: zeros, or its mean, which leaves the other layers
            nearer to what they know.
        means: As `mean_outputs` gives them, of these pictures or better of many.

    Returns:
        For each layer, the logits of each of its heads.

    Raises:
        ValueError: The mean without means.
    """
    if replacement == "mean" and means is None:
        raise ValueError("replacement 'mean' needs means: mean_outputs gives them.")
    found: list[Tensor] = []
    with torch.no_grad():
        x, rotary = model.embed(images)
        for layer, block in enumerate(model.blocks):
            attention: Any = block.attn
            heads, width = attention.num_heads, attention.head_dim
            values = x.new_zeros(heads, width) if means is None else means[layer].to(x)
            if replacement == "zero":
                values = torch.zeros_like(values)
            if heads:
                with _one_head_each(attention, values):
                    tokens = model.through_blocks(x.repeat(heads, 1, 1), rotary, layer, model.read_tokens)
                found.append(model.scores(tokens).unflatten(0, (heads, len(images))))
            else:
                found.append(x.new_zeros(0, len(images), model.config.num_classes))
            x = block(x, rotary)
    return found


@contextmanager
def _one_head_each(attention: Any, values: Float[Tensor, "heads head_dim"]) -> Any:
    """In a batch that holds the pictures once for each head, that head's output is replaced by its value."""
    heads = torch.arange(len(values), device=values.device)

    def replace(_: Any, args: tuple[Tensor]) -> Tensor:
        y = args[0].unflatten(-1, (len(values), -1)).unflatten(0, (len(values), -1)).clone()
        y[heads, :, :, heads] = values[:, None, None].to(y.dtype)
        return y.flatten(0, 1).flatten(-2)

    handle = attention.out_proj.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def mean_outputs(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> list[Float[Tensor, "_heads _head_dim"]]:
    """What each head gives on average over all tokens of all pictures, before `out_proj`."""
    anatomy = anatomy_of(model)
    attentions: Any = anatomy.attentions
    found = [torch.zeros(0, attention.head_dim, device=images.device) for attention in attentions]

    def keep(layer: int, _q: Tensor, _k: Tensor, _v: Tensor, y: Tensor | None, *_: object) -> None:
        assert y is not None  # our models always show it
        found[layer] = y.detach().float().mean((0, 2))

    present = [layer for layer, count in enumerate(anatomy.num_heads) if count]
    with torch.no_grad(), watching(model, present, keep):
        model.forward(images)
    return found
