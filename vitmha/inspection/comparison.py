"""Two models side by side: which head is like which, and how far each has drifted."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.adapters import anatomy_of
from vitmha.inspection.heads import spread_rows
from vitmha.inspection.maps import head_divergences
from vitmha.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class HeadComparison:
    """The heads of two models, counted through all layers."""

    heads: tuple[list[int], list[int]]
    """How many each layer has, in the first model and in the second."""
    partner: list[int]
    """For each head of the first that of the second which `matched` gives it: pairs most alike come first, and each is
    taken once while there are any left, so that a head may be more like another than like its partner."""
    drift: list[float]
    """How unlike these two are: their Jensen-Shannon divergence in nats, 0 to ln 2."""
    same_place: list[float] | None
    """Likewise to the head of the same layer and number; None where the layers have other numbers of heads."""

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
    apart = head_divergences(spread_rows(model, images), spread_rows(other, as_seen_by(other, model, images)))
    partner, drift = matched(apart)
    heads = list(anatomy_of(model).num_heads), list(anatomy_of(other).num_heads)
    same = apart.diagonal().tolist() if heads[0] == heads[1] else None
    return HeadComparison(heads=heads, partner=partner, drift=drift, same_place=same)


def as_seen_by(
    other: VisionTransformer, model: VisionTransformer, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch channels height width"]:
    """Pictures that were normalised for a model, as another one wants them; the same where it does not say."""
    return images if other.preprocessing is None else other.preprocessing.renormalize(images, model.preprocessing)


def matched(apart: Float[Tensor, "first second"]) -> tuple[list[int], list[float]]:
    """Pairs heads by divergence, the most alike first, each of the second once while there are any left.

    Returns:
        For each of the first its partner and their divergence.
    """
    partner, drift = [0] * len(apart), [0.0] * len(apart)
    free_rows, free_columns = set(range(len(apart))), set(range(apart.shape[1]))
    for place in apart.flatten().argsort().tolist():
        row, column = divmod(place, apart.shape[1])
        if row in free_rows and column in free_columns:
            partner[row], drift[row] = column, float(apart[row, column])
            free_rows.remove(row)
            free_columns.remove(column)
            free_columns = free_columns or set(range(apart.shape[1]))
    return partner, drift
