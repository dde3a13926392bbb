"""Importance of attention heads: the gradient of a gate on each head, and ablation of single heads.

Letters in the patterns: b batch, h heads, n tokens, d head_dim.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection.ablation import ablate_each_head
from vitmha.metrics import is_correct
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, EvalResult, to_model_device


def head_importance(model: VisionTransformer, batches: Batches) -> list[Float[Tensor, " _heads"]]:
    """Sensitivity of the loss to each head: the mean over images of `|dL/dg|`, with g = 1 a gate on the head's output.

    For head outputs O (before `out_proj`) this equals `|<O, dL/dO>|`, so neither a gate nor an attention map is needed.
    The absolute value is taken per image, so the result does not depend on the batch size. To compare layers, divide
    by the norm of each layer (`normalize_importance`), as the paper does.

    Args:
        model: In eval mode. Its parameters may be frozen; their `.grad` is not changed.
        batches: Images and labels.

    Returns:
        For each layer, the importance of its heads, at least 0, in nats.

    Raises:
        UserError: No images.

    Source:
        Michel et al. 2019 (arXiv 1905.10650), equation 2.
    """
    count = 0
    with accumulate_importance(model) as sums:
        for images, labels in to_model_device(model, batches):
            pixels = images.detach().requires_grad_()  # so that gradients reach all heads, also in a frozen model
            with torch.enable_grad():
                loss = F.cross_entropy(model(pixels), labels, reduction="sum")
            torch.autograd.grad(loss, pixels)
            count += len(labels)
    if not count:
        raise UserError("batches holds no images: at least one is needed.")
    return [layer / count for layer in sums]


@contextmanager
def accumulate_importance(model: VisionTransformer) -> Iterator[list[Float[Tensor, " _heads"]]]:
    """Adds to the importance of each head in every backward pass inside the block.

    The loss must be a sum over images, or the result is scaled by the batch size.

    Yields:
        For each layer the sum over images of what `head_importance` averages.
    """
    attentions = model.attentions
    sums = [attn.out_proj.weight.new_zeros(attn.num_heads, dtype=torch.float64) for attn in attentions]

    def add(layer: int, y: Tensor, gradient: Tensor) -> None:
        gates = reduce(y.float() * gradient.float(), "b n (h d) -> b h", "sum", h=len(sums[layer])).abs()
        sums[layer] += gates.where(gates.isfinite(), 0).sum(0, dtype=torch.float64)

    def observe(layer: int, _: Any, args: tuple[Tensor]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(partial(add, layer, args[0].detach()))

    with ExitStack() as stack:
        for layer, attention in enumerate(attentions):
            stack.enter_context(attention.out_proj.register_forward_pre_hook(partial(observe, layer)))
        yield sums


def normalize_importance(importance: Sequence[Tensor]) -> list[Tensor]:
    """Divides the importance of each layer by its l2 norm; a layer of zeros stays zero."""
    return [F.normalize(layer, dim=0) for layer in importance]


def ablation_scores(
    model: VisionTransformer, batches: Batches, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> list[list[EvalResult]]:
    """Evaluates the model with one head ablated, for each head of each layer.

    Args:
        model: In eval mode.
        batches: Images and labels.
        means: For mean ablation, as `mean_outputs` returns them; zero ablation if not given.

    Raises:
        UserError: No images.
    """
    counts = [attention.num_heads for attention in model.attentions]
    correct, loss, count = torch.zeros(sum(counts)), torch.zeros(sum(counts), dtype=torch.float64), 0
    for images, labels in to_model_device(model, batches):
        logits = torch.cat(ablate_each_head(model, images, means)).float()
        repeated = labels.expand(len(logits), -1)
        correct += is_correct(logits.flatten(0, 1), repeated.flatten()).view_as(repeated).sum(1).cpu()
        losses = F.cross_entropy(logits.mT, repeated, reduction="none")
        loss += losses.sum(1, dtype=torch.float64).cpu()
        count += len(labels)
    if not count:
        raise UserError("batches holds no images: at least one is needed.")
    results = iter(zip((correct / count).tolist(), (loss / count).tolist(), strict=True))
    return [[EvalResult(accuracy=a, loss=b) for a, b in islice(results, heads)] for heads in counts]


def rank_heads(values: Sequence[Float[Tensor, " _heads"]]) -> list[tuple[int, int]]:
    """Ranks all heads, as (layer, head), from the smallest value to the largest; ties in order of layer and head."""
    heads = [(layer, head) for layer, row in enumerate(values) for head in range(len(row))]
    return sorted(heads, key=lambda index: values[index[0]][index[1]].item())


def random_order(model: VisionTransformer, seed: int) -> list[tuple[int, int]]:
    """All heads, as (layer, head), in random order: the baseline for any ranking."""
    heads = [(layer, head) for layer, attn in enumerate(model.attentions) for head in range(attn.num_heads)]
    random.Random(seed).shuffle(heads)
    return heads
