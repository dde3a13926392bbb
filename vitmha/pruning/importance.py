"""How important each attention head is: gradients of a gate, and ablation of single heads.

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
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, EvalResult, to_model_device


def head_importance(model: VisionTransformer, batches: Batches) -> list[Float[Tensor, " _heads"]]:
    """How much the loss hangs on each head: the mean over pictures of |dL/dg|, with g = 1 a gate on the head's output.

    For head outputs O (before `out_proj`) that is |<O, dL/dO>|, so that no gate and no map is needed. The absolute
    value is taken for each picture: the result is the same for all batch sizes. Divide by the norm of each layer
    (`normalized`) to compare layers, as the paper does.

    Args:
        model: In eval mode; its parameters may be frozen and keep their gradients as they are.
        batches: Pictures and classes.

    Returns:
        For each layer the importance of the heads that it has, at least 0, in nats.

    Raises:
        UserError: There is no picture.

    Source:
        Michel et al. 2019 (arXiv 1905.10650), equation 2.
    """
    count = 0
    with accumulate_importance(model) as sums:
        for images, labels in to_model_device(model, batches):
            pixels = images.detach().requires_grad_()  # what leads there passes all heads, frozen ones too
            with torch.enable_grad():
                loss = F.cross_entropy(model(pixels), labels, reduction="sum")
            torch.autograd.grad(loss, pixels)
            count += len(labels)
    if not count:
        raise UserError("There is no picture to measure the heads on.")
    return [each / count for each in sums]


@contextmanager
def accumulate_importance(model: VisionTransformer) -> Iterator[list[Float[Tensor, " _heads"]]]:
    """Inside, every backward pass of a loss that is a sum over pictures adds to the importance of each head.

    Yields:
        For each layer the sums over the pictures, as `head_importance` has them before it divides.
    """
    attentions = model.attentions
    sums = [each.out_proj.weight.new_zeros(each.num_heads, dtype=torch.float64) for each in attentions]

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


def normalized(importance: Sequence[Tensor]) -> list[Tensor]:
    """Each layer divided by its norm (l2); a layer of zeros stays."""
    return [F.normalize(each, dim=0) for each in importance]


def ablation_scores(
    model: VisionTransformer, batches: Batches, means: Sequence[Float[Tensor, "_heads head_dim"]] | None = None
) -> list[list[EvalResult]]:
    """The scores without one head, for each head of each layer.

    Args:
        model: In eval mode.
        batches: Pictures and classes.
        means: As for `mask_heads`.

    Raises:
        UserError: There is no picture.
    """
    counts = [attention.num_heads for attention in model.attentions]
    right, loss, count = torch.zeros(sum(counts)), torch.zeros(sum(counts), dtype=torch.float64), 0
    for images, labels in to_model_device(model, batches):
        logits = torch.cat(ablate_each_head(model, images, means)).float()
        right += (logits.argmax(2) == labels).sum(1).cpu()
        losses = F.cross_entropy(logits.mT, labels.expand(len(logits), -1), reduction="none")
        loss += losses.sum(1, dtype=torch.float64).cpu()
        count += len(labels)
    if not count:
        raise UserError("There is no picture to measure the model on.")
    each = iter(zip((right / count).tolist(), (loss / count).tolist(), strict=True))
    return [[EvalResult(accuracy=a, loss=b) for a, b in islice(each, heads)] for heads in counts]


def rank_heads(values: Sequence[Float[Tensor, " _heads"]]) -> list[tuple[int, int]]:
    """All heads as (layer, head), from the smallest value to the largest; the first of equal ones first."""
    heads = [(layer, head) for layer, each in enumerate(values) for head in range(len(each))]
    return sorted(heads, key=lambda place: values[place[0]][place[1]].item())


def random_order(model: VisionTransformer, seed: int) -> list[tuple[int, int]]:
    """All heads as (layer, head), shuffled: the baseline for any other order."""
    heads = [(layer, head) for layer, each in enumerate(model.attentions) for head in range(each.num_heads)]
    random.Random(seed).shuffle(heads)
    return heads
