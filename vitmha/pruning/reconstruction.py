"""Reconstructs the outputs of a pruned or grouped model by least squares in closed form: no training and no labels.

The weights and the bias of a linear layer are changed so that the squared residual of its output, summed over all
tokens of all images, is smallest::

    W' = W + (Z^T Z + ridge mean(diag(Z^T Z)) I)^-1 Z^T R

The rows of Z are the inputs of the layer, with a 1 for the bias, and the rows of R the residuals of its output. The
ridge term keeps the weights close to their old values.
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
    """Fits a pruned or grouped model to the outputs of the original model.

    From the first block to the last, `out_proj` and then the second linear layer of the MLP are fitted so that the
    tokens after them are closest to those of the original. Each layer thus also corrects what earlier layers could not.

    Args:
        model: In eval mode; its weights are changed in place.
        original: The model before pruning or grouping.
        batches: Images, whose tokens are held in memory twice; their labels are not used.
        ridge: Weight of the ridge term, positive.

    Raises:
        UserError: No images.

    Source:
        Kwon et al. 2022 (arXiv 2204.09656) fit one factor per head in this way; here whole linear layers are fitted.
    """
    images = [images for images, _ in to_model_device(model, batches)]
    if not images:
        raise UserError("batches holds no images: at least one is needed.")
    embedded = [model.embed(batch) for batch in images]
    tokens, rotations = [x for x, _ in embedded], [rope for _, rope in embedded]
    targets = [original.embed(batch)[0] for batch in images]
    blocks: Iterable[tuple[Any, Any]] = zip(model.blocks, original.blocks, strict=True)
    for block, reference in blocks:
        for branch, linear, scale in (
            (_attention_branch, block.attn.out_proj, block.ls1),
            (_mlp_branch, block.mlp.fc2, block.ls2),
        ):
            targets = [x + branch(reference, x, rope) for x, rope in zip(targets, rotations, strict=True)]
            gram, moment = torch.zeros(2, 1, 1, dtype=torch.float64, device=images[0].device)
            for x, target, rope in zip(tokens, targets, rotations, strict=True):
                z, y = _input_and_output(linear, partial(branch, block, x, rope))
                residual = target - x - y
                if isinstance(scale, LayerScale):
                    residual = torch.where(scale.gamma == 0, 0, residual / scale.gamma)
                gram, moment = gram + z.mT @ z, moment + z.mT @ residual.flatten(0, 1).double()
            change = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram), moment)
            linear.weight.add_(change[:-1].mT)
            linear.bias.add_(change[-1])
            tokens = [x + branch(block, x, rope) for x, rope in zip(tokens, rotations, strict=True)]


def _attention_branch(block: Any, x: Tensor, rope: Tensor | None) -> Tensor:
    return block.ls1(block.attn(block.norm1(x), rope=rope))


def _mlp_branch(block: Any, x: Tensor, _: Tensor | None) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))


def _input_and_output(
    linear: nn.Linear, run: Callable[[], Tensor]
) -> tuple[Float[Tensor, "tokens in_features_and_one"], Tensor]:
    """The inputs of a linear layer with a 1 for its bias (only the 1 if it is not called), and what `run` returns."""
    inputs: list[Tensor] = []
    with linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        y = run()
    return F.pad(inputs[0] if inputs else y[..., :0], (0, 1), value=1).flatten(0, 1).double(), y
