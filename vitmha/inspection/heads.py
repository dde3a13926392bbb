"""Numbers that say what a head does."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.vit import TokenLayout


def attention_entropy(weights: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Entropy of each attention row in nats: -sum_j w_j ln w_j.

    Args:
        weights: Attention weights; rows sum to 1.

    Returns:
        0 where one key takes everything, ln(keys) where all keys share equally.
    """
    return torch.special.entr(weights).sum(-1)


def attention_distance(
    weights: Float[Tensor, "*axes tokens tokens"], layout: TokenLayout, *, renormalize: bool = True
) -> Float[Tensor, "*axes"]:
    """Mean attention distance: how far, in pixels, the patches look on average.

    The distance from a patch to every patch, weighted by attention, averaged over the patches. Mass on prefix tokens
    has no place in the picture.

    Args:
        weights: Attention weights of all tokens to all tokens.
        layout: Which token is what, and the patch size.
        renormalize: Whether a patch's mass on the other patches counts as 1. Without, mass c on the prefix tokens
            shrinks the distance by 1 - c, as the usual public code has it.

    Returns:
        Pixels between the centres of patches; 0 where each patch looks at itself, or only at prefix tokens.

    Source:
        Dosovitskiy et al. 2021 (arXiv 2010.11929), appendix D.7; Raghu et al. 2021 (arXiv 2108.08810), section 3.
    """
    rows, columns = torch.meshgrid(
        *(
            torch.arange(n, device=weights.device) * size
            for n, size in zip(layout.grid_size, layout.patch_size, strict=True)
        ),
        indexing="ij",
    )
    centres = torch.stack([rows, columns], -1).flatten(0, 1).to(weights.dtype)
    among = weights[..., layout.patches, layout.patches]
    if renormalize:
        among = among / among.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return (among * torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")).sum(-1).mean(-1)
