"""How far maps can be trusted: what a prediction loses when the patches they point at go, and wins when they come."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.maps import class_target, readout_weights, relevance, rollout, value_weighted
from vitmha.inspection.record import record_attention
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

Baseline = Literal["mean", "blur"]


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """Curves of the class's probability, mean over the pictures, and the areas below, by the name of the method."""

    baseline: Baseline
    """What stands where a patch is deleted; the numbers of another one differ a lot."""
    pictures: int
    """How many."""
    deletion_curves: dict[str, list[float]]
    """While the patches go in equal parts, those that the map ranks highest first."""
    insertion_curves: dict[str, list[float]]
    """While they come into the baseline, likewise."""

    @property
    def deletion(self) -> dict[str, float]:
        """Areas of the one: a map that is faithful makes them small."""
        return _areas(self.deletion_curves)

    @property
    def insertion(self) -> dict[str, float]:
        """Areas of the other: a map that is faithful makes them large."""
        return _areas(self.insertion_curves)

    def record(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "baseline": BASELINES[self.baseline],
            "pictures": self.pictures,
            "deletion": {"areas": self.deletion, "curves": self.deletion_curves},
            "insertion": {"areas": self.insertion, "curves": self.insertion_curves},
        }

    @property
    def sentence(self) -> str:
        """What stands on every page."""
        deletion, both = self.deletion, (self.deletion, self.insertion)
        gone, come = (", ".join(f"{name} {value:.3f}" for name, value in areas.items()) for areas in both)
        best = min((name for name in deletion if name not in ("random", "centre")), key=deletion.__getitem__)
        of_random, of_centre = (deletion[best] / max(deletion[name], 1e-12) for name in ("random", "centre"))
        return (
            "Attention is not by itself an explanation. When patches are deleted (replaced by the "
            f"{BASELINES[self.baseline]}) in the order of a map, the area under the predicted class's probability, "
            f"where less is more faithful, is: {gone} ({_count(self.pictures)}). The best of the maps, {best}, "
            f"comes to {of_random:.0%} of a random order's and to {of_centre:.0%} of what deleting from the centre on "
            "gives, which looks at nothing. When they are put back in that order, more is more faithful: "
            f"{come}."
        )


BASELINES = {"mean": "colour that the normalisation maps to 0", "blur": "blurred picture"}
ORDERS = 3  # of the random baseline, for each picture


def _areas(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(area(torch.tensor(curve))) for name, curve in curves.items()}


def _count(pictures: int) -> str:
    return "one picture" if pictures == 1 else f"mean over {pictures} pictures"


def area(curve: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """The area under a curve over [0, 1], by trapezoids; of a constant the constant.

    Source:
        Petsiuk et al. 2018 (RISE, arXiv 1806.07421).
    """
    return (curve.sum(-1) - (curve[..., 0] + curve[..., -1]) / 2) / (curve.shape[-1] - 1)


def perturbation_auc(accuracies: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """100 times the area under the accuracy while 0 to 90 % of the patches go, in equal steps; of a constant a, 90 a.

    Less is better where the highest ranked go first (positive), more where the lowest do (negative).

    Source:
        Chefer et al. 2021 (arXiv 2012.09838), section 4.
    """
    return 90 * area(accuracies)


def pointing_game(map_: Float[Tensor, "height width"], box: tuple[int, int, int, int], tolerance: float = 15) -> bool:
    """The pointing game: whether the highest pixel of a map lies in an object's box, or near it.

    Args:
        map_: In pixels of the picture.
        box: (top, left, bottom, right) of the object, the last two behind it.
        tolerance: How many pixels away still counts.

    Source:
        Zhang et al. 2016 (arXiv 1608.00507), section 4.1. Report it beside the middle of the picture as the answer.
    """
    row, column = divmod(int(map_.argmax()), map_.shape[1])
    top, left, bottom, right = box
    away = (max(top - row, row - (bottom - 1), 0), max(left - column, column - (right - 1), 0))
    return math.hypot(*away) <= tolerance


def perturbation_curves(
    score: Callable[[Tensor], Tensor],
    image: Float[Tensor, "channels height width"],
    baseline_image: Float[Tensor, "channels height width"],
    ranks: Float[Tensor, " patches"],
    layout: TokenLayout,
    steps: int = 14,
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """The score while the patches go, and while they come, the highest ranked first.

    Args:
        score: Gives one number for each picture of a batch.
        image: The picture.
        baseline_image: What it becomes.
        ranks: One number for each patch; equal ones go in the order of the patches.
        layout: Where the patches are.
        steps: Equal parts in which the patches go; at most as many as there are patches.

    Returns:
        The curve of deletion, and that of insertion, each of steps + 1 points.
    """
    steps = min(steps, layout.num_patches)
    order = ranks.argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    gone = torch.linspace(0, layout.num_patches, steps + 1, device=place.device).round()
    masks = rearrange(place < gone[:, None], "s (h w) -> s 1 h w", h=layout.grid_size[0])
    masks = repeat(masks, "s 1 h w -> s 1 (h p) (w q)", p=layout.patch_size[0], q=layout.patch_size[1])
    with torch.no_grad():
        return score(torch.where(masks, baseline_image, image)), score(torch.where(masks, image, baseline_image))


def baseline_image(
    images: Float[Tensor, "batch channels height width"], baseline: Baseline
) -> Float[Tensor, "batch channels height width"]:
    """Normalised pictures without content: all 0, or blurred over an eighth of the shorter side."""
    if baseline == "mean":
        return torch.zeros_like(images)
    radius = max(1, min(images.shape[-2:]) // 8)
    weights = torch.exp(-0.5 * (torch.arange(-2 * radius, 2 * radius + 1, device=images.device) / radius) ** 2)
    weights = (weights / weights.sum()).to(images.dtype)
    channels = images.shape[1]
    padded = F.pad(images, (2 * radius,) * 4, mode="replicate")
    across = F.conv2d(padded, repeat(weights, "k -> c 1 1 k", c=channels), groups=channels)
    return F.conv2d(across, repeat(weights, "k -> c 1 k 1", c=channels), groups=channels)


def patch_maps(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"], classes: Sequence[int]
) -> dict[str, Float[Tensor, "batch patches"]]:
    """For each method one number per patch: how much it counts for the class, or for what the model reads.

    attention and value-weighted take the last layer's rows of what the head reads, mean over its heads; rollout and
    relevance all layers. Relevance is that for `class_target`.
    """
    rows = readout_weights(model, images)
    readers = rows.any(0).nonzero()[:, 0].tolist()
    with torch.no_grad(), record_attention(model, queries="all", value_norms=True) as recorded:
        model.forward(images)

    def read(maps: Float[Tensor, "batch readers tokens"]) -> Tensor:
        return (rows[:, None, readers] @ maps)[:, 0]

    weighted = value_weighted(recorded.maps[-1], recorded.value_norms[-1])
    found = {
        "attention": read(recorded.maps[-1].mean(1)[:, readers]),
        "value-weighted": read(weighted.mean(1)[:, readers]),
        "rollout": read(rollout(recorded.maps, readers)),
        "relevance": relevance(model, images, class_target(model, classes)),
    }
    return {name: values[:, model.layout.patches] for name, values in found.items()}


def center_prior(layout: TokenLayout) -> Float[Tensor, " patches"]:
    """The nearer a patch is to the middle the more, whatever the picture."""
    rows, columns = torch.meshgrid(*(torch.arange(n) - (n - 1) / 2 for n in layout.grid_size), indexing="ij")
    return -(rows.square() + columns.square()).flatten()


def faithfulness(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    classes: Sequence[int] | None = None,
    *,
    baseline: Baseline = "mean",
    steps: int = 14,
    maps: Sequence[Mapping[str, Tensor]] | None = None,
) -> Faithfulness:
    """Measures every method of `patch_maps` on pictures, beside random orders and the middle first.

    Args:
        model: In eval mode, with a head.
        images: Normalised.
        classes: Of each picture; the predicted one by default.
        baseline: What stands where a patch is deleted.
        steps: As in `perturbation_curves`.
        maps: Those of `patch_maps` of each picture alone; computed where not given.
    """
    with torch.no_grad():
        classes = model.forward(images).argmax(1).tolist() if classes is None else classes
    layout, dice = model.layout, torch.Generator().manual_seed(0)
    curves: dict[str, list[Tensor]] = {}
    for place, (image, blank, label) in enumerate(zip(images, baseline_image(images, baseline), classes, strict=True)):

        def score(batch: Tensor, label: int = label) -> Tensor:
            return model.forward(batch).softmax(-1)[:, label]

        mapped = patch_maps(model, image[None], [label]) if maps is None else maps[place]
        noise = torch.rand(ORDERS, layout.num_patches, generator=dice).to(image)
        for name, several in {**mapped, "random": noise, "centre": center_prior(layout)[None].to(image)}.items():
            both = [torch.stack(perturbation_curves(score, image, blank, ranks, layout, steps)) for ranks in several]
            curves.setdefault(name, []).extend(both)
    means = {name: torch.stack(found).mean(0).tolist() for name, found in curves.items()}
    return Faithfulness(
        baseline=baseline,
        pictures=len(images),
        deletion_curves={name: gone for name, (gone, _) in means.items()},
        insertion_curves={name: come for name, (_, come) in means.items()},
    )
