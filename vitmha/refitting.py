"""What remains of a model fitted to what it was, in closed form: least squares, no training and no labels.

A linear map that reads z gets the weights and the bias with which its output lacks least, summed over all tokens of all
pictures:

    W' = W + (Z^T Z + ridge mean(diag(Z^T Z)) I)^-1 Z^T R

with rows of Z what the map reads, and a 1 for the bias, and rows of R what its output lacks; the ridge keeps the
weights near where they are.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.slimming import Batches, Score, on_its_device, score
from vitmha.vit import LayerScale, VisionTransformer

RIDGE = 1e-3


@torch.no_grad()
def refit(model: VisionTransformer, original: VisionTransformer, batches: Batches, ridge: float = RIDGE) -> None:
    """Brings a pruned or regrouped model nearer to what it was made of.

    From the first block to the last, `out_proj` and then the MLP's second map are fitted so that the tokens behind them
    are nearest to the original's; so each map also makes up for what those before it could not.

    Args:
        model: In eval mode; its weights are changed in place.
        original: What it was made of.
        batches: Pictures, whose tokens are held in memory twice; their classes play no part.
        ridge: As above; at least 0.

    Raises:
        ValueError: There is no picture.

    Source:
        Kwon et al. 2022 (arXiv 2204.09656), section 4.3, fit a factor for each head so; here whole maps.
    """
    images = _images(model, batches)
    embedded = [model.embed(batch) for batch in images]
    tokens, rotations = [x for x, _ in embedded], [rotary for _, rotary in embedded]
    wanted = [original.embed(batch)[0] for batch in images]
    blocks: Iterable[tuple[Any, Any]] = zip(model.blocks, original.blocks, strict=True)
    for block, whole in blocks:
        for branch, linear, scale in ((_attended, block.attn.out_proj, block.ls1), (_mixed, block.mlp.fc2, block.ls2)):
            wanted = [x + branch(whole, x, rotary) for x, rotary in zip(wanted, rotations, strict=True)]
            gram, moment = torch.zeros(2, 1, 1, dtype=torch.float64, device=images[0].device)
            for x, goal, rotary in zip(tokens, wanted, rotations, strict=True):
                z, y = _watched(linear, partial(branch, block, x, rotary))
                lack = goal - x - y
                if isinstance(scale, LayerScale):
                    lack = torch.where(scale.gamma == 0, 0, lack / scale.gamma)
                gram, moment = gram + z.mT @ z, moment + z.mT @ lack.flatten(0, 1).double()
            change = _solved(gram, moment, ridge)
            linear.weight.add_(change[:-1].mT)
            linear.bias.add_(change[-1])
            tokens = [x + branch(block, x, rotary) for x, rotary in zip(tokens, rotations, strict=True)]


def prune_one_by_one(model: VisionTransformer, batches: Batches, ridge: float = RIDGE) -> Iterator[tuple[int, int]]:
    """Removes heads for good, each time the one that the others of its layer can best make up for.

    For each head `out_proj` is fitted to give what it gave, without that head; the head goes with which the answers are
    then nearest to the first ones, by the mean KL divergence over the pictures, and the fitted weights stay.

    Args:
        model: A classifier in eval mode; changed in place as heads are asked for.
        batches: Pictures; their classes play no part.
        ridge: As above; at least 0.

    Yields:
        Layer of each head that has gone, and the number that it had before the first; in the end all have.

    Raises:
        ValueError: There is no picture.

    Source:
        The removal of whole groups of weights of which Kurtic et al. 2023 (ZipLM, arXiv 2302.04089) judge by the error
        of the layer; here by the answers.
    """
    images = _images(model, batches)
    with torch.no_grad():
        first = [model(batch).log_softmax(-1) for batch in images]
    numbers = [list(range(attention.num_heads)) for attention in model.attentions]
    while any(numbers):
        layer, head = _remove_one(model, images, first, ridge)
        yield layer, numbers[layer].pop(head)


@torch.no_grad()
def _remove_one(
    model: VisionTransformer, images: Sequence[Tensor], first: Sequence[Tensor], ridge: float
) -> tuple[int, int]:
    _, layer, head, weight, bias = min(_candidates(model, images, first, ridge), key=lambda each: each[0])
    attention: Any = model.attentions[layer]
    attention.out_proj.weight.copy_(weight)
    attention.out_proj.bias.copy_(bias)
    attention.prune_heads([head])
    return layer, head


def refitted_scores(
    model: VisionTransformer, batches: Batches, counts: Sequence[int], fitted_to: Batches
) -> list[Score]:
    """The scores without ever more heads, removed one by one, with what remains fitted.

    Args:
        model: A classifier in eval mode; it stays as it is.
        batches: Pictures and classes to be measured on.
        counts: How many heads are gone, for each score, in ascending order.
        fitted_to: Other pictures.
    """
    slim, scores = copy.deepcopy(model), []
    removals = prune_one_by_one(slim, fitted_to)
    for more in (after - before for before, after in zip([0, *counts], counts, strict=False)):
        for _ in range(more):
            next(removals)
        fitted = copy.deepcopy(slim)
        refit(fitted, model, fitted_to)
        scores.append(score(fitted, batches))
    return scores


def _candidates(
    model: VisionTransformer, images: Sequence[Tensor], first: Sequence[Tensor], ridge: float
) -> Iterator[tuple[float, int, int, Tensor, Tensor]]:
    """For each head: the change without it, its layer, its number, and the weight and bias that make up for it."""
    embedded = [model.embed(batch) for batch in images]
    for layer in range(len(model.blocks)):
        block: Any = model.blocks[layer]
        linear, width = block.attn.out_proj, block.attn.head_dim
        read = (_watched(linear, partial(_attended, block, x, rotary))[0] for x, rotary in embedded)
        gram = torch.stack([z.mT @ z for z in read]).sum(0)
        weight, bias = linear.weight.clone(), linear.bias.clone()
        for head in range(block.attn.num_heads):
            fitted = _without(torch.cat([weight.mT, bias[None]]), gram, head * width, (head + 1) * width, ridge)
            linear.weight.copy_(fitted[:-1].mT)
            linear.bias.copy_(fitted[-1])
            change = 0.0
            for (x, rotary), was in zip(embedded, first, strict=True):
                tokens = model.through_blocks(x, rotary, layer, model.read_tokens)
                is_now = model.scores(tokens).log_softmax(-1)
                change += F.kl_div(is_now, was, log_target=True, reduction="sum").item()
            yield change, layer, head, linear.weight.clone(), linear.bias.clone()
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        embedded = [(block(x, rotary), rotary) for x, rotary in embedded]


def _without(
    weights: Float[Tensor, "read_and_one embed"],
    gram: Float[Tensor, "read_and_one read_and_one"],
    start: int,
    stop: int,
    ridge: float,
) -> Float[Tensor, "read_and_one embed"]:
    """Weights of zero for what stands from start to stop, and those of the rest fitted to make up for it."""
    gone, fitted = slice(start, stop), weights.double()
    kept = [place for place in range(len(gram)) if not start <= place < stop]
    fitted[kept] += _solved(gram[kept][:, kept], gram[kept, gone] @ fitted[gone], ridge)
    fitted[gone] = 0
    return fitted


def _solved(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram), moment)


def _images(model: VisionTransformer, batches: Batches) -> list[Tensor]:
    images = [images for images, _ in on_its_device(model, batches)]
    if not images:
        raise ValueError("There is no picture to fit the model to.")
    return images


def _attended(block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
    return block.ls1(block.attn(block.norm1(x), rotary=rotary))


def _mixed(block: Any, x: Tensor, _: Tensor | None) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))


def _watched(linear: nn.Linear, run: Callable[[], Tensor]) -> tuple[Float[Tensor, "tokens read_and_one"], Tensor]:
    """What the map reads, which is nothing where it is not called, with a 1 for its bias; and what runs gives."""
    read: list[Tensor] = []
    with linear.register_forward_pre_hook(lambda _, args: read.append(args[0])):
        y = run()
    return F.pad(read[0] if read else y[..., :0], (0, 1), value=1).flatten(0, 1).double(), y
