"""Rotary position embeddings."""

import torch
from jaxtyping import Float
from torch import Tensor


def apply_rope(
    x: Float[Tensor, "batch heads tokens head_dim"], rope: Float[Tensor, "2 ... tokens head_dim"]
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Rotates each pair of adjacent channels (2i, 2i + 1) of each token by its angle.

    Args:
        x: Queries or keys.
        rope: Cosines and sines of the angles, each angle repeated for both channels of its pair: (2, tokens, head_dim)
            if all images share them, else (2, batch, 1, tokens, head_dim). Cosine 1 and sine 0 leave a token unchanged.

    Returns:
        The rotated vectors in the dtype of x; their lengths do not change.

    Source:
        Su et al. 2021 (arXiv 2104.09864), equation 34.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    cosine, sine = rope[..., ::2].to(pairs.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses this into one kernel, and does not support complex numbers
        even, odd = pairs.unbind(-1)
        rotated = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cosine, sine))
    return rotated.flatten(-2).type_as(x)
