"""Two models side by side: which head is like which, how far each has drifted, and how alike their layers are."""

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
    """The heads of two models, counted through all layers."""

    heads: tuple[list[int], list[int]]
    """How many each layer has, in the first model and in the second."""
    partner: list[int]
    """For each head of the first that of the second which `greedy_match` gives it: pairs most alike come first, and each is
    taken once while there are any left, so that a head may be more like another than like its partner."""
    drift: list[float]
    """How unlike these two are: their Jensen-Shannon divergence in nats, 0 to ln 2."""
    same_place: list[float] | None
    """Likewise to the head of the same layer and number; None where the layers have other numbers of heads."""
    layer_cka: list[list[float]]
    """How alike what leaves each layer of the first and each of the second is, over all tokens, by `linear_cka`."""

    def records(self) -> list[dict[str, Any]]:
        """One for each head of the first model."""
        first, second = ([(i, j) for i, count in enumerate(each) for j in range(count)] for each in self.heads)
        pairs = zip(first, self.partner, self.drift, strict=True)
        return [
            {"layer": layer, "head": head, "paired_with": list(second[partner]), "drift": drift}
            for (layer, head), partner, drift in pairs
        ]


def compare_heads(
    model: VisionTransformer, other: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> HeadComparison:
    """Pairs the heads of two models by their maps.

    Args:
        model: In eval mode.
        other: With the same tokens.
        images: Normalised for the first model.
    """
    theirs = renormalized_for(other, model, images)
    divergence = head_divergences(sample_query_rows(model, images), sample_query_rows(other, theirs))
    partner, drift = greedy_match(divergence)
    heads = list(get_attention_spec(model).num_heads), list(get_attention_spec(other).num_heads)
    same = divergence.diagonal().tolist() if heads[0] == heads[1] else None
    layers, others = layer_tokens(model, images), layer_tokens(other, theirs)
    cka = [[linear_cka(one, two) for two in others] for one in layers]
    return HeadComparison(heads=heads, partner=partner, drift=drift, same_place=same, layer_cka=cka)


def renormalized_for(
    other: VisionTransformer, model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch channels height width"]:
    """Pictures that were normalised for a model, as another one wants them; the same where it does not say."""
    return images if other.preprocessing is None else other.preprocessing.renormalize(images, model.preprocessing)


def greedy_match(divergence: Float[Tensor, "first second"]) -> tuple[list[int], list[float]]:
    """Pairs heads by divergence, the most alike first, each of the second once while there are any left.

    Returns:
        For each of the first its partner and their divergence.
    """
    partner, drift = [0] * len(divergence), [0.0] * len(divergence)
    free_rows, free_columns = set(range(len(divergence))), set(range(divergence.shape[1]))
    for place in divergence.flatten().argsort().tolist():
        row, column = divmod(place, divergence.shape[1])
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
    """What leaves each layer, of every token of every picture."""
    x, rope = model.embed(images)
    left = [x := block(x, rope) for block in model.blocks]
    return [tokens.flatten(0, 1) for tokens in left]


def linear_cka(x: Float[Tensor, "samples first"], y: Float[Tensor, "samples second"]) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414): how alike two descriptions are.

    Turning the axes of either or scaling all of it changes nothing.

    Returns:
        1 where one is the other but for these, 0 where the two are uncorrelated; NaN where one does not vary at all.
    """
    x, y = (samples.double() - samples.double().mean(0) for samples in (x, y))
    return float((x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))
