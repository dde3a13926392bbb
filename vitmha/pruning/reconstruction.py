"""What remains of a model fitted to what it was, in closed form: least squares, no training and no labels.

A linear map that reads z gets the weights and the bias with which its output lacks least, summed over all tokens of all
pictures:

    W' = W + (Z^T Z + ridge mean(diag(Z^T Z)) I)^-1 Z^T R

with rows of Z what the map reads, and a 1 for the bias, and rows of R what its output lacks; the ridge keeps the
weights near where they are.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitmha.errors import UserError
from vitmha.models.layers import LayerScale
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.evaluation import Batches, to_model_device


@torch.no_grad()
def reconstruct(model: VisionTransformer, original: VisionTransformer, batches: Batches, ridge: float = 1e-3) -> None:
    """Brings a pruned or regrouped model nearer to what it was made of.

    From the first block to the last, `out_proj` and then the MLP's second map are fitted so that the tokens behind them
    are nearest to the original's; so each map also makes up for what those before it could not.

    Args:
        model: In eval mode; its weights are changed in place.
        original: What it was made of.
        batches: Pictures, whose tokens are held in memory twice; their classes play no part.
        ridge: As above; positive.

    Raises:
        UserError: There is no picture.

    Source:
        Kwon et al. 2022 (arXiv 2204.09656) fit a factor for each head so; here whole maps.
    """
    images = [images for images, _ in to_model_device(model, batches)]
    if not images:
        raise UserError("There is no picture to fit the model to.")
    embedded = [model.embed(batch) for batch in images]
    tokens, rotations = [x for x, _ in embedded], [rope for _, rope in embedded]
    wanted = [original.embed(batch)[0] for batch in images]
    blocks: Iterable[tuple[Any, Any]] = zip(model.blocks, original.blocks, strict=True)
    for block, whole in blocks:
        for branch, linear, scale in ((_attended, block.attn.out_proj, block.ls1), (_mixed, block.mlp.fc2, block.ls2)):
            wanted = [x + branch(whole, x, rope) for x, rope in zip(wanted, rotations, strict=True)]
            gram, moment = torch.zeros(2, 1, 1, dtype=torch.float64, device=images[0].device)
            for x, goal, rope in zip(tokens, wanted, rotations, strict=True):
                z, y = _watched(linear, partial(branch, block, x, rope))
                lack = goal - x - y
                if isinstance(scale, LayerScale):
                    lack = torch.where(scale.gamma == 0, 0, lack / scale.gamma)
                gram, moment = gram + z.mT @ z, moment + z.mT @ lack.flatten(0, 1).double()
            change = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram), moment)
            linear.weight.add_(change[:-1].mT)
            linear.bias.add_(change[-1])
            tokens = [x + branch(block, x, rope) for x, rope in zip(tokens, rotations, strict=True)]


def _attended(block: Any, x: Tensor, rope: Tensor | None) -> Tensor:
    return block.ls1(block.attn(block.norm1(x), rope=rope))


def _mixed(block: Any, x: Tensor, _: Tensor | None) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))


def _watched(linear: nn.Linear, run: Callable[[], Tensor]) -> tuple[Float[Tensor, "tokens read_and_one"], Tensor]:
    """What the map reads, which is nothing where it is not called, with a 1 for its bias; and what runs gives."""
    read: list[Tensor] = []
    with linear.register_forward_pre_hook(lambda _, args: read.append(args[0])):
        y = run()
    return F.pad(read[0] if read else y[..., :0], (0, 1), value=1).flatten(0, 1).double(), y
