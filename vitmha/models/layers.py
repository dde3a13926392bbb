"""The layers of a Vision Transformer other than attention.

Letters in the patterns: b batch, h w the patch grid, d embed_dim.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Cuts a picture into patches and maps each linearly to a token.

    The map is a convolution whose kernel and stride are the patch, which equals a linear map of the patch flattened in
    the order (channel, row, column).

    Args:
        in_channels: Colour channels.
        patch_size: Pixels of a patch along (height, width).
        embed_dim: Width of a token.
    """

    def __init__(self, in_channels: int, patch_size: tuple[int, int], embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch patches embed"]:
        return rearrange(self.proj(images), "b d h w -> b (h w) d")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": F.silu,
}


class Mlp(nn.Module):
    """Two linear maps of each token with an activation between.

    gelu: W2 gelu(W1 x), with gelu(x) = x Phi(x); gelu_tanh takes the approximation of Phi by a tanh, quick_gelu by the
    logistic function of 1.702 x (Hendrycks and Gimpel 2016, arXiv 1606.08415). swiglu: W2 (silu(g) * u) with (g, u) the
    halves of W1 x (Shazeer 2020, arXiv 2002.05202).

    Args:
        embed_dim: Width of a token.
        mlp_dim: Width between the two maps.
        activation: Which of the formulas.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu",
    ) -> None:
        super().__init__()
        self.is_gated = activation == "swiglu"
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(embed_dim, 2 * mlp_dim if self.is_gated else mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, embed_dim)

    def forward(self, x: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch tokens embed"]:
        x = self.fc1(x)
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.fc2(self.activation(gate) * up)
        return self.fc2(self.activation(x))


class LayerScale(nn.Module):
    """A learned factor on each channel (Touvron et al. 2021, arXiv 2103.17239, section 2)."""

    def __init__(self, embed_dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), initial))

    def forward(self, x: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch tokens embed"]:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth that skips the work: in training, a residual branch runs for a part of the pictures alone.

    round((1 - rate) batch) pictures are chosen anew for every branch; their branch counts batch / chosen times, so that
    the expectation stays, and the others pass it by. The number is fixed, which keeps shapes static for compilation,
    with `dynamic=False`: a batch of fewer than 1 / (2 rate) pictures loses none.

    Args:
        rate: Share of the pictures left out, in [0, 1).

    Source:
        Huang et al. 2016 (arXiv 1603.09382); choosing a part of the batch: DINOv2, Oquab et al. 2023 (arXiv
        2304.07193), section 5.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def choose(self, x: Float[Tensor, "batch tokens embed"]) -> Tensor | None:
        """The numbers of the pictures whose branch runs; None for all."""
        if not self.training:
            return None
        count = max(1, round(len(x) * (1 - self.rate)))
        return None if count >= len(x) else torch.randperm(len(x), device=x.device)[:count]

    def add(
        self,
        x: Float[Tensor, "batch tokens embed"],
        branch: Float[Tensor, "chosen tokens embed"],
        chosen: Tensor | None,
    ) -> Float[Tensor, "batch tokens embed"]:
        """All pictures, with the branch of the chosen ones added."""
        if chosen is None:
            return x + branch
        return x.index_add(0, chosen, branch.to(x.dtype), alpha=len(x) / len(branch))

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class UniqueIndexSelect(torch.autograd.Function):
    """x[chosen] of numbers that are all different: the gradient is copied to its place, where indexing adds it up.

    Compiled for a CPU, that takes a quarter off a step with `DropPath`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.shape = x.shape
        return x.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (chosen,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy(0, chosen, gradient), None


def pick(x: Float[Tensor, "batch *axes"], chosen: Tensor | None) -> Float[Tensor, "some *axes"]:
    """The chosen pictures; all for None."""
    return x if chosen is None else UniqueIndexSelect.apply(x, chosen)
