"""How far maps can be trusted: what a prediction loses when the patches they point at go, and wins when they come."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.maps import reading_row, relevance, rollout, value_weighted
from vitmha.inspection.record import record_attention
from vitmha.vit import TokenLayout, VisionTransformer

Baseline = Literal["mean", "blur"]


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """Areas under the curves of the class's probability, mean over the pictures, by the name of the method."""

    baseline: Baseline
    """What stands where a patch is deleted; the numbers of another one differ a lot."""
    pictures: int
    """How many."""
    deletion: dict[str, float]
    """Patches deleted, those that the map ranks highest first: a map that is faithful makes it small."""
    insertion: dict[str, float]
    """Patches inserted into the baseline, likewise: a map that is faithful makes it large."""

    @property
    def sentence(self) -> str:
        """What stands on every page."""
        worst = max(self.deletion["random"], 1e-12)
        both = (self.deletion, self.insertion)
        gone, come = (", ".join(f"{name} {value:.3f}" for name, value in areas.items()) for areas in both)
        best = min((name for name in self.deletion if name not in ("random", "centre")), key=self.deletion.__getitem__)
        share = self.deletion[best] / worst
        return (
            "Attention is not by itself an explanation. When patches are deleted (replaced by the "
            f"{BASELINES[self.baseline]}) in the order of a map, the area under the predicted class's probability, "
            f"where less is more faithful, is: {gone} ({_count(self.pictures)}). The best of the maps, {best}, "
            f"comes to {share:.0%} of a random order's. When they are put back in that order, more is more faithful: "
            f"{come}."
        )


BASELINES = {"mean": "training set's mean colour", "blur": "blurred picture"}


def _count(pictures: int) -> str:
    return "one picture" if pictures == 1 else f"mean over {pictures} pictures"


def area(curve: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """The area under a curve over [0, 1], by trapezoids; of a constant the constant.

    Source:
        Petsiuk et al. 2018 (RISE, arXiv 1806.07421).
    """
    return (curve.sum(-1) - (curve[..., 0] + curve[..., -1]) / 2) / (curve.shape[-1] - 1)


def perturbation_area(accuracies: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """100 times the area under the accuracy while 0 to 90 % of the patches go, in equal steps; of a constant a, 90 a.

    Less is better where the highest ranked go first (positive), more where the lowest do (negative).

    Source:
        Chefer et al. 2021 (arXiv 2012.09838), section 4.
    """
    return 90 * area(accuracies)


def points_at(map_: Float[Tensor, "height width"], box: tuple[int, int, int, int], tolerance: float = 15) -> bool:
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
    blank: Float[Tensor, "channels height width"],
    ranks: Float[Tensor, " patches"],
    layout: TokenLayout,
    steps: int = 14,
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """The score while the patches go, and while they come, the highest ranked first.

    Args:
        score: Gives one number for each picture of a batch.
        image: The picture.
        blank: What it becomes.
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
        return score(torch.where(masks, blank, image)), score(torch.where(masks, image, blank))


def blank_of(
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
    relevance all layers; random and centre, the nearer to the middle the more, know nothing of model and picture.
    """
    layout, row = model.layout, reading_row(model)
    readers = row.nonzero()[:, 0].tolist()
    with torch.no_grad(), record_attention(model, queries="all", value_norms=True) as recorded:
        model.forward(images)
    chosen = torch.tensor(list(classes), device=images.device)

    def read(maps: Tensor) -> Tensor:
        return (maps.mean(1)[:, readers] * row[readers, None]).sum(1)

    rolled = rollout(recorded.maps, readers)
    rows, columns = torch.meshgrid(*(torch.arange(n) - (n - 1) / 2 for n in layout.grid_size), indexing="ij")
    found = {
        "attention": read(recorded.maps[-1]),
        "value-weighted": read(value_weighted(recorded.maps[-1], recorded.value_norms[-1])),
        "rollout": (rolled * row[readers, None]).sum(1),
        "relevance": relevance(model, images, lambda logits: logits.gather(1, chosen[:, None]).sum()),
    }
    patches = {name: values[:, layout.patches] for name, values in found.items()}
    noise = torch.rand(len(images), layout.num_patches, generator=torch.Generator().manual_seed(0))
    centre = -(rows.square() + columns.square()).flatten().expand(len(images), -1)
    return patches | {"random": noise.to(images), "centre": centre.to(images)}


def faithfulness(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    classes: Sequence[int] | None = None,
    *,
    baseline: Baseline = "mean",
    steps: int = 14,
) -> Faithfulness:
    """Measures every method of `patch_maps` on pictures.

    Args:
        model: In eval mode, with a head.
        images: Normalised.
        classes: Of each picture; the predicted one by default.
        baseline: What stands where a patch is deleted.
        steps: As in `perturbation_curves`.
    """
    with torch.no_grad():
        classes = model.forward(images).argmax(1).tolist() if classes is None else classes
    deletion: dict[str, list[Tensor]] = {}
    insertion: dict[str, list[Tensor]] = {}
    for image, blank, label in zip(images, blank_of(images, baseline), classes, strict=True):

        def score(batch: Tensor, label: int = label) -> Tensor:
            return model.forward(batch).softmax(-1)[:, label]

        for name, ranks in patch_maps(model, image[None], [label]).items():
            gone, come = perturbation_curves(score, image, blank, ranks[0], model.layout, steps)
            deletion.setdefault(name, []).append(area(gone))
            insertion.setdefault(name, []).append(area(come))
    return Faithfulness(
        baseline=baseline,
        pictures=len(images),
        deletion={name: float(torch.stack(areas).mean()) for name, areas in deletion.items()},
        insertion={name: float(torch.stack(areas).mean()) for name, areas in insertion.items()},
    )
