"""Compares the heads of two models: matching heads, their divergence, and the similarity of the layers."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.adapters import get_attention_spec
from vitmha.inspection.head_metrics import sample_query_rows
from vitmha.inspection.maps import head_divergences
from vitmha.models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class HeadComparison:
    """The heads of two models, each numbered through all layers."""

    heads: tuple[list[int], list[int]]
    """Number of heads of each layer, in the first model and in the second."""
    partner: list[int]
    """For each head of the first model, the head of the second that `greedy_match` pairs it with. As the most similar
    pairs come first, a head may be more similar to another head than to its partner."""
    drift: list[float]
    """Jensen-Shannon divergence of each pair in nats, 0 to ln 2."""
    same_index: list[float] | None
    """Divergence to the head with the same layer and index; None if the numbers of heads differ."""
    layer_cka: list[list[float]]
    """`linear_cka` of the output tokens of each layer of the first model and each layer of the second."""

    def records(self) -> list[dict[str, Any]]:
        """Returns one record per head of the first model."""
        first, second = ([(i, j) for i, count in enumerate(counts) for j in range(count)] for counts in self.heads)
        pairs = zip(first, self.partner, self.drift, strict=True)
        return [
            {"layer": layer, "head": head, "paired_with": list(second[partner]), "drift": drift}
            for (layer, head), partner, drift in pairs
        ]


def compare_heads(
    model: VisionTransformer, other: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> HeadComparison:
    """Pairs the heads of two models by the similarity of their maps.

    Args:
        model: In eval mode.
        other: With the same tokens.
        images: Normalized for the first model.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> compare_heads(model, model, torch.randn(2, 3, 32, 32)).partner == list(range(36))
        True
    """
    others = renormalized_for(other, model, images)
    divergence = head_divergences(sample_query_rows(model, images), sample_query_rows(other, others))
    partner, drift = greedy_match(divergence)
    heads = list(get_attention_spec(model).num_heads), list(get_attention_spec(other).num_heads)
    same = divergence.diagonal().tolist() if heads[0] == heads[1] else None
    layers, other_layers = layer_tokens(model, images), layer_tokens(other, others)
    cka = [[linear_cka(first, second) for second in other_layers] for first in layers]
    return HeadComparison(heads=heads, partner=partner, drift=drift, same_index=same, layer_cka=cka)


def renormalized_for(
    other: VisionTransformer, model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch channels height width"]:
    """Converts images normalized for `model` to the normalization of `other`, if that has its own preprocessing."""
    return images if other.preprocessing is None else other.preprocessing.renormalize(images, model.preprocessing)


def greedy_match(divergence: Float[Tensor, "first second"]) -> tuple[list[int], list[float]]:
    """Pairs heads by divergence, the most similar first; each of the second is used once while any are unused.

    Returns:
        The partner of each head of the first, and their divergence.

    Example:
        >>> greedy_match(torch.tensor([[0.5, 0.25], [0.125, 0.75]]))
        ([1, 0], [0.25, 0.125])
    """
    partner, drift = [0] * len(divergence), [0.0] * len(divergence)
    free_rows, free_columns = set(range(len(divergence))), set(range(divergence.shape[1]))
    for index in divergence.flatten().argsort().tolist():
        row, column = divmod(index, divergence.shape[1])
        if row in free_rows and column in free_columns:
            partner[row], drift[row] = column, float(divergence[row, column])
            free_rows.remove(row)
            free_columns.remove(column)
            free_columns = free_columns or set(range(divergence.shape[1]))
    return partner, drift


@torch.no_grad()
def layer_tokens(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> list[Float[Tensor, "all_tokens embed"]]:
    """Returns the output tokens of each block, over all images."""
    x, rope = model.embed(images)
    outputs = [x := block(x, rope) for block in model.blocks]
    return [tokens.flatten(0, 1) for tokens in outputs]


def linear_cka(x: Float[Tensor, "samples first"], y: Float[Tensor, "samples second"]) -> float:
    """Returns the linear centered kernel alignment of two representations.

    It does not depend on orthogonal transforms or the scale of either.

    Returns:
        1 for representations equal up to these, 0 for uncorrelated ones; NaN if one is constant.

    Source:
        Kornblith et al. 2019 (arXiv 1905.00414), section 3.
    """
    x, y = (samples.double() - samples.double().mean(0) for samples in (x, y))
    return float((x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))
