"""Rotary position embeddings."""

import torch
from jaxtyping import Float
from torch import Tensor


def apply_rope(
    x: Float[Tensor, "batch heads tokens head_dim"], rope: Float[Tensor, "2 ... tokens head_dim"]
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Turns each pair of neighbouring channels (2i, 2i + 1) of each token by its angle.

    Args:
        x: Queries or keys.
        rope: Cosines and sines of the angles, each angle twice, once per channel of its pair; for all pictures
            (2, tokens, head_dim), or apart (2, batch, 1, tokens, head_dim). Cosine 1 and sine 0 leave a token as it is.

    Returns:
        The turned vectors, of the same length as before.

    Source:
        Su et al. 2021 (arXiv 2104.09864), equation 34.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    cosine, sine = rope[..., ::2].to(pairs.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses this into one kernel, and knows no complex numbers
        even, odd = pairs.unbind(-1)
        turned = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cosine, sine))
    return turned.flatten(-2).type_as(x)
