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
    """Splits an image into patches and projects each to a token.

    The projection is a convolution whose kernel size and stride are the patch size. It equals a linear layer applied to
    each patch, flattened in the order (channel, row, column).

    Args:
        in_channels: Color channels.
        patch_size: Height and width of a patch in pixels.
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
    """Two linear layers with an activation between them, applied to each token.

    gelu: W2 gelu(W1 x), with gelu(x) = x Phi(x); gelu_tanh approximates Phi by a tanh, and quick_gelu by the logistic
    function of 1.702 x. swiglu: W2 (silu(g) * u), with (g, u) the halves of W1 x.

    Args:
        embed_dim: Width of a token.
        mlp_dim: Hidden width.
        activation: Name of the formula.

    Source:
        Hendrycks and Gimpel 2016 (arXiv 1606.08415); swiglu: Shazeer 2020 (arXiv 2002.05202).
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
    """Multiplies each channel by a learned factor.

    Args:
        embed_dim: Number of channels.
        initial: Initial value of all factors.

    Source:
        Touvron et al. 2021 (CaiT, arXiv 2103.17239), section 2.
    """

    def __init__(self, embed_dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), initial))

    def forward(self, x: Float[Tensor, "batch tokens embed"]) -> Float[Tensor, "batch tokens embed"]:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth that skips the computation: in training, a residual branch runs for a fraction of the batch.

    round((1 - rate) batch) images are drawn for each call. Their branch is scaled by batch / kept, so that its
    expectation is unchanged; the others skip the branch. The number of kept images is fixed, not random: shapes are
    static, and `torch.compile(dynamic=False)` does not recompile. A batch of fewer than 1 / (2 rate) images drops none,
    and a batch of 1 never drops.

    Args:
        rate: Fraction of the batch whose branch is skipped, in [0, 1).

    Source:
        Huang et al. 2016 (arXiv 1603.09382); on a subset of the batch: DINOv2, Oquab et al. 2023 (arXiv 2304.07193),
        section 5.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(
        self,
        x: Float[Tensor, "batch tokens embed"],
        branch: Callable[[Tensor, Tensor | None], Tensor],
        rope: Float[Tensor, "2 ... tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch tokens embed"]:
        """Adds a residual branch to x, or in training to a random subset of the batch.

        Args:
            x: Tokens.
            branch: Computes the residual from the tokens of the kept images and their rotation.
            rope: The rotation for `branch`, shared or of each image.
        """
        if not self.training:  # before any comparison of sizes, which would fix the batch size in torch.export
            return x + branch(x, rope)
        kept_count = max(1, round(len(x) * (1 - self.rate)))
        if kept_count == len(x):
            return x + branch(x, rope)
        kept = torch.randperm(len(x), device=x.device)[:kept_count]
        if rope is not None and rope.ndim > 3:  # each image has its own rotation
            rope = rope[:, kept]
        residual = branch(UniqueIndexSelect.apply(x, kept), rope)
        return x.index_add(0, kept, residual.to(x.dtype), alpha=len(x) / kept_count)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class UniqueIndexSelect(torch.autograd.Function):
    """x[index] for an index without repetitions: the gradient is copied, where that of indexing is accumulated.

    Compiled for a CPU, this saves a quarter of a training step with `DropPath`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy(0, index, gradient), None
