"""Metrics of each attention head, accumulated over any number of images, and the role they imply."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitmha.attention import attention_probabilities
from vitmha.errors import UserError
from vitmha.inspection.adapters import get_attention_spec, observe_attention
from vitmha.inspection.figures import draw_head_metrics
from vitmha.inspection.maps import head_divergences
from vitmha.inspection.record import record_attention
from vitmha.inspection.trace import Trace
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

ROWS = 64  # query rows of a map in memory at a time
UNITS = {"entropy": "nats", "distance": "pixels", "distance_with_prefix": "pixels"}


def attention_entropy(weights: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Returns the entropy of each attention row in nats: -sum_j w_j ln w_j.

    Args:
        weights: Attention weights; rows sum to 1.

    Returns:
        0 for a row with all its weight on one key, ln(keys) for a uniform row.

    Example:
        >>> attention_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.0000, 0.6931])
    """
    return torch.special.entr(weights).sum(-1)


def attention_distance(
    weights: Float[Tensor, "*axes tokens tokens"], layout: TokenLayout, *, renormalize: bool = True
) -> Float[Tensor, "*axes"]:
    """Returns the mean attention distance of the patches in pixels.

    It is the distance from a patch to every patch, weighted by attention, averaged over the query patches. Prefix
    tokens have no position.

    Args:
        weights: Attention weights of all tokens to all tokens.
        layout: The order of the tokens, and the patch size.
        renormalize: Whether the weights of a patch on all patches are rescaled to sum to 1. If not, mass c on the
            prefix tokens scales the distance by 1 - c, as in commonly used public code.

    Returns:
        Pixels between the centers of patches; 0 if each patch attends only to itself, or only to prefix tokens.

    Source:
        Dosovitskiy et al. 2021 (arXiv 2010.11929), appendix D.7; Raghu et al. 2021 (arXiv 2108.08810), section 3.

    Example:
        >>> layout = TokenLayout(num_class_tokens=1, num_registers=0, grid_size=(2, 2), patch_size=(16, 16))
        >>> attention_distance(torch.full((5, 5), 0.2), layout)  # uniform attention
        tensor(13.6569)
    """
    on_patches = weights[..., layout.patches, layout.patches]
    if renormalize:
        on_patches = on_patches / on_patches.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return (on_patches * _distances(layout, weights)).sum(-1).mean(-1)


def _distances(layout: TokenLayout, like: Tensor) -> Float[Tensor, "patches patches"]:
    """Returns the pixels between the centers of patches."""
    patch_size = torch.tensor(layout.patch_size, device=like.device)
    centers = (layout.coordinates(like.device).T * patch_size).to(like.dtype)
    return torch.cdist(centers, centers, compute_mode="donot_use_mm_for_euclid_dist")


class Role(NamedTuple):
    """The role of a head, by the rules of `role_of`."""

    name: str
    """self, positional, sink, uniform, local, global or mixed."""
    description: str
    """One phrase, with the metric that decided."""


def role_of(metrics: Mapping[str, float], offset: tuple[int, int]) -> Role:
    """Returns the first role whose rule holds, by the metrics of `HeadMetrics`.

    self: self_mass >= 0.5; positional: offset_mass >= 0.4; sink: cls_mass, dist_mass, register_mass or sink_mass
    >= 0.5; uniform: normalized_entropy >= 0.95; local: local_mass >= 0.5; global: relative_distance >= 0.9; else mixed.

    Args:
        metrics: Of one head.
        offset: The offset in (rows, columns) that offset_mass belongs to.
    """
    sinks = {"cls_mass": "class token", "dist_mass": "distillation token", "register_mass": "registers"}
    sink = max(sinks, key=lambda name: metrics[name])
    if metrics["self_mass"] >= 0.5:
        return Role("self", f"each token attends to itself ({metrics['self_mass']:.0%})")
    if metrics["offset_mass"] >= 0.4:
        return Role("positional", f"attends {describe_offset(offset)} ({metrics['offset_mass']:.0%})")
    if metrics[sink] >= 0.5:
        return Role("sink", f"attends to the {sinks[sink]} ({metrics[sink]:.0%})")
    if metrics["sink_mass"] >= 0.5:
        return Role("sink", f"attends to one token of the image ({metrics['sink_mass']:.0%})")
    if metrics["normalized_entropy"] >= 0.95:
        return Role(
            "uniform", f"attends to all tokens alike ({metrics['normalized_entropy']:.0%} of the maximum entropy)"
        )
    if metrics["local_mass"] >= 0.5:
        return Role("local", f"attends to neighbors ({metrics['local_mass']:.0%} within one patch)")
    if metrics["relative_distance"] >= 0.9:
        return Role("global", f"attends across the image (mean distance {metrics['distance']:.0f} pixels)")
    return Role("mixed", f"no single rule holds (mean distance {metrics['distance']:.0f} pixels)")


def describe_offset(offset: tuple[int, int]) -> str:
    """Describes an offset in (rows, columns): (-1, 0) is "one patch up", (2, 1) "2 patches down, one patch right"."""
    parts = []
    for steps, directions in zip(offset, (("up", "down"), ("left", "right")), strict=True):
        if steps:
            count = "one patch" if abs(steps) == 1 else f"{abs(steps)} patches"
            parts.append(f"{count} {directions[steps > 0]}")
    return ", ".join(parts) or "at no offset"


class HeadMetrics:
    """Metrics of every head of a model, averaged over the query rows of all images passed to `update`.

    Memory does not depend on the number of images, and only some rows of a map are in memory at a time. Each metric has
    the shape (layers, heads), with NaN where pruning has left a layer fewer heads than another:

    - entropy: of a row, in nats; normalized_entropy: divided by ln(tokens), in [0, 1].
    - distance: mean attention distance of the patches in pixels, with weights on patches rescaled to sum to 1;
      distance_with_prefix: without rescaling; relative_distance: distance divided by that of uniform attention.
    - cls_mass, dist_mass, register_mass: weight on these tokens; self_mass: on the query's own token.
    - sink_mass: mean weight on the key of an image that receives the most, averaged over images.
    - local_mass: fraction of a patch's weight on patches that lies within one step, diagonals and itself included.
    - offset_mass: weight of a patch on the patch at a fixed offset in (rows, columns). `offsets` is the offset with the
      largest such weight among those that lie inside the image for at least half of the patches.
    - class_selectivity: adjusted R^2 of the rows of the class token (without one, of the mean over the patch rows)
      given the image's class: the fraction of their variance that is between classes. About 0 by chance, 1 if all
      images of a class have the same row; NaN without labels, or if all images have the same row.

    Args:
        model: In eval mode.

    Example:
        >>> from vitmha import create_model
        >>> metrics = HeadMetrics(create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval())
        >>> logits = metrics.update(torch.randn(4, 3, 32, 32))
        >>> metrics.values()["entropy"].shape  # (layers, heads)
        torch.Size([12, 3])
    """

    def __init__(self, model: VisionTransformer) -> None:
        self.model, self.layout = model, model.layout
        spec = get_attention_spec(model)
        self.heads = list(spec.num_heads)
        self.count = 0
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[int, Tensor] = {}
        self.by_class: dict[int, tuple[int, Tensor]] = {}
        self.squares = torch.zeros(len(self.heads), max(self.heads), dtype=torch.float64)
        device = next(model.parameters()).device
        like = torch.zeros(1, device=device)
        self._pixels, self._near, self._offset, self._reachable = _geometry(self.layout, like)

    def update(
        self, images: Float[Tensor, "batch channels height width"], labels: Int64[Tensor, " batch"] | None = None
    ) -> Tensor:
        """Runs the model on a batch and accumulates the metrics.

        Args:
            images: Normalized.
            labels: Class indices, for class_selectivity; pass them for all images or for none.

        Returns:
            The logits.
        """
        with_heads = [layer for layer, count in enumerate(self.heads) if count]
        with torch.no_grad(), observe_attention(self.model, with_heads, self._add):
            logits = self.model.forward(images)  # not self.model(images): that would recompile a compiled model
        self.count += len(images)
        if labels is not None:
            self._add_classes(labels.tolist())
        return logits

    def add(self, traced: Trace) -> None:
        """Accumulates the metrics of images that were traced, without class labels."""
        with torch.no_grad():
            for layer, block in zip(traced.layers, traced.blocks, strict=True):
                self._add(layer, block.q, block.k)
        self.count += len(traced.logits)

    def _add(self, layer: int, q: Tensor, k: Tensor, *_: object) -> None:
        """Accumulates one layer, `ROWS` rows at a time; transfers from the device once, at the end."""
        layout, tokens, prefix = self.layout, q.shape[2], self.layout.num_prefix_tokens
        received = q.new_zeros(*q.shape[:2], tokens, dtype=torch.float32)
        offsets = q.new_zeros(q.shape[1], self._reachable.numel(), dtype=torch.float32)
        readout = torch.zeros_like(received)
        sums: dict[str, Tensor] = {}

        def add(name: str, values: Float[Tensor, "batch heads rows"], rows: int) -> None:
            sums[name] = sums.get(name, 0) + values.sum((0, 2)) / rows

        for first in range(0, tokens, ROWS):
            weights = attention_probabilities(q[:, :, first : first + ROWS], k)
            received += weights.sum(2)
            queries = torch.arange(first, min(first + ROWS, tokens), device=q.device)
            add("entropy", attention_entropy(weights), tokens)
            add("cls_mass", weights[..., : layout.num_class_tokens].sum(-1), tokens)
            add("dist_mass", weights[..., layout.distillation].sum(-1), tokens)
            add("register_mass", weights[..., layout.registers].sum(-1), tokens)
            add("self_mass", weights.gather(-1, queries.expand(*weights.shape[:2], -1)[..., None])[..., 0], tokens)
            skipped = max(prefix - first, 0)  # prefix rows of this chunk
            if layout.num_class_tokens:
                readout += weights[:, :, : max(1 - first, 0)].sum(2)
            else:
                readout += weights[:, :, skipped:].sum(2) / layout.num_patches
            on_patches, patches = weights[:, :, skipped:, prefix:], slice(max(first - prefix, 0), first + ROWS - prefix)
            rescaled = on_patches / on_patches.sum(-1, keepdim=True).clamp_min(torch.finfo(on_patches.dtype).tiny)
            add("distance", (rescaled * self._pixels[patches]).sum(-1), layout.num_patches)
            add("distance_with_prefix", (on_patches * self._pixels[patches]).sum(-1), layout.num_patches)
            add("local_mass", (rescaled * self._near[patches]).sum(-1), layout.num_patches)
            offsets.index_add_(1, self._offset[patches].flatten(), on_patches.sum(0).flatten(1))
        add("sink_mass", received.amax(-1, keepdim=True), tokens)
        for name, values in {**sums, "offset": offsets}.items():
            self._add_to_sum(name, layer, values.cpu().double())
        self.rows[layer] = readout.cpu()

    def _add_to_sum(self, name: str, layer: int, values: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = torch.full((len(self.heads), max(self.heads), *values.shape[1:]), math.nan).double()
            for index, count in enumerate(self.heads):
                self.sums[name][index, :count] = 0
        self.sums[name][layer, : self.heads[layer]] += values

    def _add_classes(self, labels: Sequence[int]) -> None:
        for image, label in enumerate(labels):
            rows = torch.zeros(len(self.heads), max(self.heads), self.layout.num_tokens, dtype=torch.float64)
            for layer, readout in self.rows.items():
                rows[layer, : self.heads[layer]] = readout[image]
            count, total = self.by_class.get(label, (0, torch.zeros_like(rows)))
            self.by_class[label] = count + 1, total + rows
            self.squares += rows.square().sum(-1)

    @property
    def readout_attention(self) -> Float[Tensor, "batch all_heads tokens"]:
        """The class token's attention row in every head, layer by layer, for the images of the last update.

        Without a class token, the mean over the rows of the patches.
        """
        return torch.cat([self.rows[layer] for layer in sorted(self.rows)], dim=1)

    @property
    def offsets(self) -> list[list[tuple[int, int]]]:
        """For each layer and head, the offset in (rows, columns), other than (0, 0), that offset_mass belongs to."""
        _, indices = self._strongest_offset()
        width = 2 * self.layout.grid_size[1] - 1
        center = (self.layout.grid_size[0] - 1, self.layout.grid_size[1] - 1)
        return [
            [(index // width - center[0], index % width - center[1]) for index in row[:count].tolist()]
            for row, count in zip(indices, self.heads, strict=True)
        ]

    def _strongest_offset(self) -> tuple[Tensor, Tensor]:
        reachable = self._reachable.double().cpu()
        means = self.sums["offset"] / self.count / reachable.clamp_min(1)
        allowed = reachable >= self.layout.num_patches / 2
        allowed[(len(allowed) - 1) // 2] = False  # offset (0, 0)
        if not allowed.any():
            return torch.full_like(means[..., 0], math.nan), torch.full(means.shape[:2], (len(allowed) - 1) // 2)
        best = means.masked_fill(~allowed, -1).max(-1)
        return best.values.where(best.values >= 0, math.nan), best.indices

    def _selectivity(self) -> Float[Tensor, "layers heads"]:
        num_classes, count = len(self.by_class), sum(n for n, _ in self.by_class.values())
        if num_classes < 2 or count <= num_classes:
            return torch.full_like(self.squares, math.nan)
        total = sum(sums for _, sums in self.by_class.values())
        variation = self.squares - (total.square().sum(-1) / count)  # type: ignore[union-attr]
        within = self.squares - sum(sums.square().sum(-1) / n for n, sums in self.by_class.values())
        is_rounding = variation <= 1e-12 * self.squares  # all rows are equal, up to the precision of float32
        return (1 - (within / (count - num_classes)) / (variation / (count - 1))).where(~is_rounding, math.nan)

    def values(self) -> dict[str, Float[Tensor, "layers heads"]]:
        """Returns all metrics by name; see the class.

        Raises:
            UserError: No images yet.
        """
        if not self.count:
            raise UserError("HeadMetrics has no images yet: call update first.")
        metrics = {name: sums / self.count for name, sums in self.sums.items() if name != "offset"}
        metrics["normalized_entropy"] = metrics["entropy"] / math.log(self.layout.num_tokens)
        metrics["relative_distance"] = metrics["distance"] / self._pixels.double().mean().clamp_min(1e-12).cpu()
        metrics["offset_mass"] = self._strongest_offset()[0]
        metrics["class_selectivity"] = self._selectivity()
        return {name: values.float() for name, values in metrics.items()}

    def records(self) -> list[dict[str, Any]]:
        """Returns one record per head: layer, head, all metrics, the offset, and the role by `role_of`."""
        values, records = self.values(), []
        for layer, offsets in enumerate(self.offsets):
            for head, offset in enumerate(offsets):
                metrics = {name: float(metric[layer, head]) for name, metric in values.items()}
                role = role_of(metrics, offset)
                offsets_of_head = {"offset_rows": offset[0], "offset_columns": offset[1]}
                role_of_head = {"role": role.name, "description": role.description}
                records.append({"layer": layer, "head": head, **metrics, **offsets_of_head, **role_of_head})
        return records

    def for_plot(self) -> dict[str, Float[Tensor, "layers heads"]]:
        """Returns the metrics to plot, by name and unit: without rescaled copies and those that are 0 everywhere."""
        values = self.values()
        rescaled = {"normalized_entropy", "relative_distance"}
        if not self.layout.num_prefix_tokens:
            rescaled.add("distance_with_prefix")
        return {
            f"{name} [{UNITS[name]}]" if name in UNITS else name.replace("_", " "): metric
            for name, metric in values.items()
            if name not in rescaled and (metric > 0).any()
        }

    def write(self, directory: str | Path) -> None:
        """Writes heads.json, heads.csv and heads.png (heat maps of layers by heads) to a directory."""
        directory, records = Path(directory), self.records()
        directory.mkdir(parents=True, exist_ok=True)
        facts = {"num_images": self.count, "layout": asdict(self.layout), "units": UNITS, "heads": for_json(records)}
        (directory / "heads.json").write_text(json.dumps(facts, indent=1, allow_nan=False))
        with (directory / "heads.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
        figure = draw_head_metrics(self.for_plot(), f"all heads, mean over {self.count} images")
        figure.savefig(directory / "heads.png", dpi=110)


def for_json(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replaces NaN and infinity, which JSON cannot hold, by None."""
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        for record in records
    ]


def _geometry(layout: TokenLayout, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns, for each pair of patches, their distance in pixels, whether they touch, and the index of their offset.

    The last tensor is the number of pairs with each offset.
    """
    height, width = layout.grid_size
    rows, columns = layout.coordinates(like.device)
    down, right = rows[None] - rows[:, None], columns[None] - columns[:, None]
    near = ((down.abs() <= 1) & (right.abs() <= 1)).to(like.dtype)
    offset = (down + height - 1) * (2 * width - 1) + right + width - 1
    return (
        _distances(layout, like),
        near,
        offset,
        offset.flatten().bincount(minlength=(2 * height - 1) * (2 * width - 1)),
    )


def head_divergence(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"], rows: int = 16
) -> Float[Tensor, "all_heads all_heads"]:
    """Returns the Jensen-Shannon divergence in nats between the maps of all pairs of heads, layer by layer.

    Args:
        model: In eval mode.
        images: Normalized.
        rows: Number of query rows to compare, spread evenly over the tokens, including the first.

    Returns:
        0 for heads with equal maps, at most ln 2.

    Example:
        >>> from vitmha import create_model
        >>> model = create_model("vit_tiny", num_classes=10, image_size=32, patch_size=8).eval()
        >>> head_divergence(model, torch.randn(2, 3, 32, 32)).shape  # 12 layers of 3 heads
        torch.Size([36, 36])
    """
    maps = sample_query_rows(model, images, rows)
    return head_divergences(maps, maps)


def sample_query_rows(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"], rows: int = 16
) -> Float[Tensor, "batch all_heads rows tokens"]:
    """Returns `rows` query rows, spread evenly over the tokens, of the maps of all heads, layer by layer."""
    chosen = _spread_rows(model.layout.num_tokens, rows)
    with torch.no_grad(), record_attention(model, queries=chosen) as recorded:
        model.forward(images)
    return torch.cat(recorded.maps, dim=1)


def traced_query_rows(traced: Trace, rows: int = 16) -> Float[Tensor, "batch all_heads rows tokens"]:
    """`sample_query_rows` of the images of a trace."""
    chosen = _spread_rows(traced.blocks[0].q.shape[2], rows)
    with torch.no_grad():
        return torch.cat([attention_probabilities(block.q[:, :, chosen], block.k) for block in traced.blocks], dim=1)


def _spread_rows(tokens: int, rows: int) -> list[int]:
    return sorted({round(i * (tokens - 1) / max(rows - 1, 1)) for i in range(rows)})
