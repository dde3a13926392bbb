"""Faithfulness of maps: how the prediction changes when patches are deleted or inserted in the order of a map."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from vitmha.inspection.maps import rollout, traced_readout_weights, traced_relevance, value_weighted
from vitmha.inspection.trace import Trace, class_target, trace, traced_value_norms
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

Baseline = Literal["mean", "blur"]


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """Deletion and insertion curves of the class's probability, the mean over images, by name of the map."""

    baseline: Baseline
    """What replaces a deleted patch; results with different baselines are not comparable."""
    num_images: int
    """Number of images."""
    deletion_curves: dict[str, list[float]]
    """Probability while the patches are deleted in equal steps, the highest ranked first."""
    insertion_curves: dict[str, list[float]]
    """Probability while the patches are inserted into the baseline in the same order."""

    @property
    def deletion(self) -> dict[str, float]:
        """Area under each deletion curve; smaller is more faithful."""
        return _aucs(self.deletion_curves)

    @property
    def insertion(self) -> dict[str, float]:
        """Area under each insertion curve; larger is more faithful."""
        return _aucs(self.insertion_curves)

    def to_record(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        return {
            "baseline": BASELINES[self.baseline],
            "num_images": self.num_images,
            "deletion": {"auc": self.deletion, "curves": self.deletion_curves},
            "insertion": {"auc": self.insertion, "curves": self.insertion_curves},
        }

    @property
    def summary(self) -> str:
        """The result in a few sentences, for the page."""
        both = self.deletion, self.insertion
        deleted, inserted = (", ".join(f"{name} {value:.3f}" for name, value in aucs.items()) for aucs in both)
        images = "one image" if self.num_images == 1 else f"mean over {self.num_images} images"
        return (
            f"Attention is not by itself an explanation. Deletion test ({images}): patches are replaced by the "
            f"{BASELINES[self.baseline]} in the order of a map; a smaller area under the predicted class's probability "
            f"is more faithful: {deleted}. {self._best} Insertion test, in the same order; larger is more faithful: "
            f"{inserted}."
        )

    @property
    def _best(self) -> str:
        """A sentence on the map with the smallest deletion area, if any differ."""
        deletion = self.deletion
        if math.isclose(min(deletion.values()), max(deletion.values()), rel_tol=1e-6):
            return "The areas are equal: no map is best."
        best = min((name for name in deletion if name not in ("random", "center")), key=deletion.__getitem__)
        of_random, of_center = (deletion[best] / max(deletion[name], 1e-12) for name in ("random", "center"))
        return (
            f"The best map, {best}, has {of_random:.0%} of the area of a random order and {of_center:.0%} of that of "
            "deleting from the center outward, which ignores the image."
        )


BASELINES = {"mean": "mean color (0 after normalization)", "blur": "blurred image"}
ORDERS = 3  # random orders per image


def _aucs(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(auc(torch.tensor(curve))) for name, curve in curves.items()}


def auc(curve: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """Returns the area under a curve over [0, 1] by the trapezoidal rule.

    Source:
        Petsiuk et al. 2018 (RISE, arXiv 1806.07421).
    """
    return (curve.sum(-1) - (curve[..., 0] + curve[..., -1]) / 2) / (curve.shape[-1] - 1)


def perturbation_auc(accuracies: Float[Tensor, "*axes points"]) -> Float[Tensor, "*axes"]:
    """Returns 100 times the area under the accuracy while 0 to 90 % of the patches are deleted in equal steps.

    For a constant accuracy a it is 90 a. Smaller is better if the highest ranked patches are deleted first (positive
    perturbation), larger if the lowest ranked are (negative perturbation).

    Source:
        Chefer et al. 2021 (arXiv 2012.09838), section 4.

    Example:
        >>> perturbation_auc(torch.tensor([1.0, 0.5, 0.0]))
        tensor(45.)
    """
    return 90 * auc(accuracies)


def pointing_game(map_: Float[Tensor, "height width"], box: tuple[int, int, int, int], tolerance: float = 15) -> bool:
    """The pointing game: returns whether the maximum of a map lies in the bounding box of an object, or near it.

    Args:
        map_: At the resolution of the image.
        box: (top, left, bottom, right) of the object in pixels; bottom and right are exclusive.
        tolerance: Distance to the box in pixels that still counts as a hit.

    Source:
        Zhang et al. 2016 (arXiv 1608.00507), section 4.1. Report it next to the hit rate of the image center.

    Example:
        >>> map_ = torch.zeros(9, 12)
        >>> map_[4, 5] = 1
        >>> pointing_game(map_, (2, 3, 6, 7), tolerance=0.0)
        True
    """
    row, column = divmod(int(map_.argmax()), map_.shape[1])
    top, left, bottom, right = box
    distance = (max(top - row, row - (bottom - 1), 0), max(left - column, column - (right - 1), 0))
    return math.hypot(*distance) <= tolerance


def perturbation_curves(
    score: Callable[[Tensor], Tensor],
    image: Float[Tensor, "channels height width"],
    baseline: Float[Tensor, "channels height width"],
    ranks: Float[Tensor, " patches"],
    layout: TokenLayout,
    steps: int = 14,
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """Returns the score while patches are deleted, and while they are inserted, the highest ranked first.

    Args:
        score: Returns one number per image of a batch.
        image: Normalized.
        baseline: What replaces the deleted patches, as `baseline_image` returns it.
        ranks: One number per patch; ties are in the order of the patches.
        layout: The patch grid.
        steps: Number of equal steps; at most the number of patches.

    Returns:
        The deletion curve and the insertion curve, each of steps + 1 points.
    """
    steps = min(steps, layout.num_patches)
    order = ranks.argsort(descending=True, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    num_changed = torch.linspace(0, layout.num_patches, steps + 1, device=position.device).round()
    masks = rearrange(position < num_changed[:, None], "s (h w) -> s 1 h w", h=layout.grid_size[0])
    masks = repeat(masks, "s 1 h w -> s 1 (h p) (w q)", p=layout.patch_size[0], q=layout.patch_size[1])
    with torch.no_grad():
        return score(torch.where(masks, baseline, image)), score(torch.where(masks, image, baseline))


def baseline_image(
    images: Float[Tensor, "batch channels height width"], baseline: Baseline
) -> Float[Tensor, "batch channels height width"]:
    """Returns images without content: "mean" is 0 (the mean color), "blur" a blur over 1/8 of the shorter side."""
    if baseline == "mean":
        return torch.zeros_like(images)
    radius = max(1, min(images.shape[-2:]) // 8)
    weights = torch.exp(-0.5 * (torch.arange(-2 * radius, 2 * radius + 1, device=images.device) / radius) ** 2)
    weights = (weights / weights.sum()).to(images.dtype)
    channels = images.shape[1]
    padded = F.pad(images, (2 * radius,) * 4, mode="replicate")
    blurred = F.conv2d(padded, repeat(weights, "k -> c 1 1 k", c=channels), groups=channels)
    return F.conv2d(blurred, repeat(weights, "k -> c 1 k 1", c=channels), groups=channels)


def patch_maps(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"], classes: Sequence[int]
) -> dict[str, Float[Tensor, "batch patches"]]:
    """Returns one number per patch for each method: its importance for the class, or for the pooled features.

    "attention" and "value-weighted" are the last layer's rows of the tokens that the classification head reads, the
    mean over its heads; "rollout" and "relevance" (for `class_target`) use all layers.
    """
    return traced_patch_maps(model, trace(model, images, class_target(model, classes)))


def traced_patch_maps(model: VisionTransformer, traced: Trace) -> dict[str, Float[Tensor, "batch patches"]]:
    """`patch_maps` for the target of a trace."""
    readout = traced_readout_weights(model, traced)
    tokens = readout.any(0).nonzero()[:, 0].tolist()
    weights = [block.weights for block in traced.blocks]

    def read(maps: Float[Tensor, "batch readout_tokens tokens"]) -> Tensor:
        return (readout[:, None, tokens] @ maps)[:, 0]

    weighted = value_weighted(weights[-1], traced_value_norms(model, traced, -1))
    maps = {
        "attention": read(weights[-1].mean(1)[:, tokens]),
        "value-weighted": read(weighted.mean(1)[:, tokens]),
        "rollout": read(rollout(weights, tokens)),
        "relevance": traced_relevance(model, traced),
    }
    return {name: values[:, model.layout.patches] for name, values in maps.items()}


def center_prior(layout: TokenLayout) -> Float[Tensor, " patches"]:
    """Returns minus the squared distance of each patch to the center of the grid, in patches."""
    center = (torch.tensor(layout.grid_size)[:, None] - 1) / 2
    return -(layout.coordinates() - center).square().sum(0)


def faithfulness(
    model: VisionTransformer,
    images: Float[Tensor, "batch channels height width"],
    classes: Sequence[int] | None = None,
    *,
    baseline: Baseline = "mean",
    steps: int = 14,
    maps: Sequence[Mapping[str, Tensor]] | None = None,
) -> Faithfulness:
    """Measures each method of `patch_maps` by deletion and insertion, next to random orders and `center_prior`.

    Args:
        model: In eval mode, with a classification head.
        images: Normalized.
        classes: Class index of each image; default: the predicted one.
        baseline: What replaces a deleted patch, see `baseline_image`.
        steps: As in `perturbation_curves`.
        maps: `patch_maps` of each image, if already computed.

    Source:
        Petsiuk et al. 2018 (RISE, arXiv 1806.07421), section 4.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> list(faithfulness(model, torch.randn(2, 3, 32, 32), steps=4).deletion)
        ['attention', 'value-weighted', 'rollout', 'relevance', 'random', 'center']
    """
    with torch.no_grad():
        classes = model.forward(images).argmax(1).tolist() if classes is None else classes
    layout, generator = model.layout, torch.Generator().manual_seed(0)
    curves: dict[str, list[Tensor]] = {}
    for i, (image, blank, label) in enumerate(zip(images, baseline_image(images, baseline), classes, strict=True)):

        def score(batch: Tensor, label: int = label) -> Tensor:
            return model.forward(batch).softmax(-1)[:, label]

        methods = patch_maps(model, image[None], [label]) if maps is None else maps[i]
        random = torch.rand(ORDERS, layout.num_patches, generator=generator).to(image)
        for name, rankings in {**methods, "random": random, "center": center_prior(layout)[None].to(image)}.items():
            both = [torch.stack(perturbation_curves(score, image, blank, ranks, layout, steps)) for ranks in rankings]
            curves.setdefault(name, []).extend(both)
    means = {name: torch.stack(pairs).mean(0).tolist() for name, pairs in curves.items()}
    return Faithfulness(
        baseline=baseline,
        num_images=len(images),
        deletion_curves={name: deleted for name, (deleted, _) in means.items()},
        insertion_curves={name: inserted for name, (_, inserted) in means.items()},
    )
