"""Numbers that say what each head does, over any number of pictures in little memory, and the role they give it."""

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
from vitmha.inspection.figures import draw_head_numbers
from vitmha.inspection.maps import head_divergences
from vitmha.inspection.record import record_attention
from vitmha.models.config import TokenLayout
from vitmha.models.vit import VisionTransformer

ROWS = 64  # query rows of a map that are in memory at a time
UNITS = {"entropy": "nats", "distance": "pixels", "distance_with_prefix": "pixels"}


def attention_entropy(weights: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Entropy of each attention row in nats: -sum_j w_j ln w_j.

    Args:
        weights: Attention weights; rows sum to 1.

    Returns:
        0 where one key takes everything, ln(keys) where all keys share equally.
    """
    return torch.special.entr(weights).sum(-1)


def attention_distance(
    weights: Float[Tensor, "*axes tokens tokens"], layout: TokenLayout, *, renormalize: bool = True
) -> Float[Tensor, "*axes"]:
    """Mean attention distance: how far, in pixels, the patches look on average.

    The distance from a patch to every patch, weighted by attention, averaged over the patches. Mass on prefix tokens
    has no place in the picture.

    Args:
        weights: Attention weights of all tokens to all tokens.
        layout: Which token is what, and the patch size.
        renormalize: Whether a patch's mass on the other patches counts as 1. Without, mass c on the prefix tokens
            shrinks the distance by 1 - c, as the usual public code has it.

    Returns:
        Pixels between the centres of patches; 0 where each patch looks at itself, or only at prefix tokens.

    Source:
        Dosovitskiy et al. 2021 (arXiv 2010.11929), appendix D.7; Raghu et al. 2021 (arXiv 2108.08810), section 3.
    """
    among = weights[..., layout.patches, layout.patches]
    if renormalize:
        among = among / among.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return (among * _distances(layout, weights)).sum(-1).mean(-1)


def _distances(layout: TokenLayout, like: Tensor) -> Float[Tensor, "patches patches"]:
    """Pixels between the centres of patches."""
    rows, columns = torch.meshgrid(
        *(torch.arange(n, device=like.device) * p for n, p in zip(layout.grid_size, layout.patch_size, strict=True)),
        indexing="ij",
    )
    centres = torch.stack([rows, columns], -1).flatten(0, 1).to(like.dtype)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


class Role(NamedTuple):
    """What a head does, by the rules of `role_of`."""

    name: str
    """itself, positional, sink, uniform, local, global or mixed."""
    words: str
    """The same for people, with the number that decided."""


def role_of(numbers: Mapping[str, float], offset: tuple[int, int]) -> Role:
    """The first of these that holds, by the numbers of `HeadMetrics`:

    itself: self_mass is at least 0.5; positional: offset_mass is at least 0.4; sink: cls_mass, dist_mass,
    register_mass or sink_mass is at least 0.5; uniform: normalized_entropy is at least 0.95; local: local_mass is at least 0.5;
    global: reach is at least 0.9. What is left is mixed.

    Args:
        numbers: Of one head.
        offset: The one that offset_mass belongs to, in (rows, columns).
    """
    sinks = {"class token": "cls_mass", "distillation token": "dist_mass", "registers": "register_mass"}
    place, name = max(((place, name) for place, name in sinks.items()), key=lambda pair: numbers[pair[1]])
    if numbers["self_mass"] >= 0.5:
        return Role("itself", f"each token looks at itself ({numbers['self_mass']:.0%})")
    if numbers["offset_mass"] >= 0.4:
        return Role("positional", f"looks {offset_in_words(offset)} ({numbers['offset_mass']:.0%})")
    if numbers[name] >= 0.5:
        return Role("sink", f"looks at the {place} ({numbers[name]:.0%})")
    if numbers["sink_mass"] >= 0.5:
        return Role("sink", f"looks at one token of the picture ({numbers['sink_mass']:.0%})")
    if numbers["normalized_entropy"] >= 0.95:
        return Role(
            "uniform", f"looks at everything alike ({numbers['normalized_entropy']:.0%} of the greatest entropy)"
        )
    if numbers["local_mass"] >= 0.5:
        return Role("local", f"looks at neighbours ({numbers['local_mass']:.0%} within one patch)")
    if numbers["relative_distance"] >= 0.9:
        return Role("global", f"looks across the picture (mean distance {numbers['distance']:.0f} pixels)")
    return Role("mixed", f"no single rule holds (mean distance {numbers['distance']:.0f} pixels)")


def offset_in_words(offset: tuple[int, int]) -> str:
    """(-1, 0) is "one patch up", (2, 1) is "2 patches down, one patch right"."""
    parts = []
    for steps, directions in zip(offset, (("up", "down"), ("left", "right")), strict=True):
        if steps:
            count = "one patch" if abs(steps) == 1 else f"{abs(steps)} patches"
            parts.append(f"{count} {directions[steps > 0]}")
    return ", ".join(parts) or "nowhere else"


class HeadMetrics:
    """What each head of a model does, on average over the query rows of all pictures seen.

    Memory does not grow with the pictures, and of a map only some rows stand in it at a time. The numbers, each of
    (layers, heads), NaN where pruning has left a layer fewer heads than another:

    - entropy: of a row, in nats; normalized_entropy: divided by ln(tokens), 0 to 1.
    - distance: mean attention distance of the patches in pixels, a patch's mass on patches counted as 1;
      distance_with_prefix: mass on prefix tokens counted as no distance; reach: distance divided by that of uniform
      attention.
    - cls_mass, dist_mass, register_mass: mass on these tokens; self_mass: on the query's own token.
    - sink_mass: mass on the one key of the picture that gets most, averaged over pictures.
    - local_mass: of a patch's mass on patches, the share within one step, diagonals and itself included.
    - offset_mass: a patch's mass on the patch at one offset in (rows, columns), the one with the greatest, among those
      that are inside the picture for at least half of the patches; `offsets` names it.
    - class_selectivity: how far the class of a picture tells where its class token (where there is none, the mean patch)
      looks: the adjusted share of the variance of these maps that lies between the classes. About 0 by chance, 1 where
      all pictures of a class give one map; NaN without labels, and where all pictures give one map.

    Args:
        model: In eval mode.
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
        """Runs the model on further pictures.

        Args:
            images: Normalised.
            labels: Their classes, for the class_selectivity; of all pictures or of none.

        Returns:
            The logits.
        """
        present = [layer for layer, count in enumerate(self.heads) if count]
        with torch.no_grad(), observe_attention(self.model, present, self._add):
            logits = self.model.forward(images)  # not the call: a compiled model would be compiled anew
        self.count += len(images)
        if labels is not None:
            self._add_classes(labels.tolist())
        return logits

    def _add(self, layer: int, q: Tensor, k: Tensor, *_: object) -> None:
        """Adds the rows of one layer, block by block; all stays on the device until the last."""
        layout, tokens, prefix = self.layout, q.shape[2], self.layout.num_prefix_tokens
        received = q.new_zeros(*q.shape[:2], tokens, dtype=torch.float32)
        offsets = q.new_zeros(q.shape[1], self._reachable.numel(), dtype=torch.float32)
        reader = torch.zeros_like(received)
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
            skipped = max(prefix - first, 0)  # rows of this block that are no patches
            if layout.num_class_tokens:
                reader += weights[:, :, : max(1 - first, 0)].sum(2)
            else:
                reader += weights[:, :, skipped:].sum(2) / layout.num_patches
            among, numbers = weights[:, :, skipped:, prefix:], slice(max(first - prefix, 0), first + ROWS - prefix)
            shares = among / among.sum(-1, keepdim=True).clamp_min(torch.finfo(among.dtype).tiny)
            add("distance", (shares * self._pixels[numbers]).sum(-1), layout.num_patches)
            add("distance_with_prefix", (among * self._pixels[numbers]).sum(-1), layout.num_patches)
            add("local_mass", (shares * self._near[numbers]).sum(-1), layout.num_patches)
            offsets.index_add_(1, self._offset[numbers].flatten(), among.sum(0).flatten(1))
        add("sink_mass", received.amax(-1, keepdim=True), tokens)
        for name, values in {**sums, "offset": offsets}.items():
            self._into(name, layer, values.cpu().double())
        self.rows[layer] = reader.cpu()

    def _into(self, name: str, layer: int, values: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = torch.full((len(self.heads), max(self.heads), *values.shape[1:]), math.nan).double()
            for each, count in enumerate(self.heads):
                self.sums[name][each, :count] = 0
        self.sums[name][layer, : self.heads[layer]] += values

    def _add_classes(self, labels: Sequence[int]) -> None:
        for place, label in enumerate(labels):
            rows = torch.zeros(len(self.heads), max(self.heads), self.layout.num_tokens, dtype=torch.float64)
            for layer, seen in self.rows.items():
                rows[layer, : self.heads[layer]] = seen[place]
            count, total = self.by_class.get(label, (0, torch.zeros_like(rows)))
            self.by_class[label] = count + 1, total + rows
            self.squares += rows.square().sum(-1)

    @property
    def readout_attention(self) -> Float[Tensor, "batch all_heads tokens"]:
        """Where the class token looked in the pictures of the last update, in every head, layer by layer; where there
        is none, the mean over the patches."""
        return torch.cat([self.rows[layer] for layer in sorted(self.rows)], dim=1)

    @property
    def offsets(self) -> list[list[tuple[int, int]]]:
        """For each layer and head the offset in (rows, columns) at which the patches look most, themselves apart."""
        _, places = self._strongest_offset()
        width = 2 * self.layout.grid_size[1] - 1
        middle = (self.layout.grid_size[0] - 1, self.layout.grid_size[1] - 1)
        return [
            [(place // width - middle[0], place % width - middle[1]) for place in row[:count].tolist()]
            for row, count in zip(places, self.heads, strict=True)
        ]

    def _strongest_offset(self) -> tuple[Tensor, Tensor]:
        reachable = self._reachable.double().cpu()
        means = self.sums["offset"] / self.count / reachable.clamp_min(1)
        allowed = reachable >= self.layout.num_patches / 2
        allowed[(len(allowed) - 1) // 2] = False  # itself
        if not allowed.any():
            return torch.full_like(means[..., 0], math.nan), torch.full(means.shape[:2], (len(allowed) - 1) // 2)
        best = means.masked_fill(~allowed, -1).max(-1)
        return best.values.where(best.values >= 0, math.nan), best.indices

    def _selectivity(self) -> Float[Tensor, "layers heads"]:
        groups, count = len(self.by_class), sum(n for n, _ in self.by_class.values())
        if groups < 2 or count <= groups:
            return torch.full_like(self.squares, math.nan)
        total = sum(sums for _, sums in self.by_class.values())
        whole = self.squares - (total.square().sum(-1) / count)  # type: ignore[union-attr]
        within = self.squares - sum(sums.square().sum(-1) / n for n, sums in self.by_class.values())
        is_rounding = whole <= 1e-12 * self.squares  # all maps alike, up to the precision of float32
        return (1 - (within / (count - groups)) / (whole / (count - 1))).where(~is_rounding, math.nan)

    def values(self) -> dict[str, Float[Tensor, "layers heads"]]:
        """All numbers by name; see the class.

        Raises:
            UserError: No picture was seen.
        """
        if not self.count:
            raise UserError("No picture was seen: call update first.")
        found = {name: sums / self.count for name, sums in self.sums.items() if name != "offset"}
        found["normalized_entropy"] = found["entropy"] / math.log(self.layout.num_tokens)
        found["relative_distance"] = found["distance"] / self._pixels.double().mean().clamp_min(1e-12).cpu()
        found["offset_mass"] = self._strongest_offset()[0]
        found["class_selectivity"] = self._selectivity()
        return {name: values.float() for name, values in found.items()}

    def records(self) -> list[dict[str, Any]]:
        """One for each head: layer, head, every number, the offset and, by `role_of`, the role."""
        values, records = self.values(), []
        for layer, offsets in enumerate(self.offsets):
            for head, offset in enumerate(offsets):
                numbers = {name: float(each[layer, head]) for name, each in values.items()}
                role = role_of(numbers, offset)
                place = {"offset_rows": offset[0], "offset_columns": offset[1]}
                words = {"role": role.name, "words": role.words}
                records.append({"layer": layer, "head": head, **numbers, **place, **words})
        return records

    def shown(self) -> dict[str, Float[Tensor, "layers heads"]]:
        """The numbers to be drawn, by a name with the unit: without those that are others scaled, or 0 everywhere."""
        values = self.values()
        scaled = {"normalized_entropy", "relative_distance"} | (
            {"distance_with_prefix"} if not self.layout.num_prefix_tokens else set()
        )
        return {
            f"{name} [{UNITS[name]}]" if name in UNITS else name.replace("_", " "): each
            for name, each in values.items()
            if name not in scaled and (each > 0).any()
        }

    def write(self, folder: str | Path) -> None:
        """Writes heads.json, heads.csv and heads.png, heat maps of layers by heads, to a folder."""
        folder, records = Path(folder), self.records()
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"pictures": self.count, "layout": asdict(self.layout), "units": UNITS, "heads": for_json(records)}
        (folder / "heads.json").write_text(json.dumps(facts, indent=1, allow_nan=False))
        with (folder / "heads.csv").open("w", newline="") as table:
            writer = csv.DictWriter(table, records[0])
            writer.writeheader()
            writer.writerows(records)
        draw_head_numbers(self.shown(), f"all heads, mean over {self.count} pictures").savefig(
            folder / "heads.png", dpi=110
        )


def for_json(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Numbers that JSON has no word for, NaN and the infinite, become None."""
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in each.items()}
        for each in records
    ]


def _geometry(layout: TokenLayout, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each pair of patches the pixels between them, whether they touch, the number of their offset; and how many
    pairs each offset has."""
    height, width = layout.grid_size
    numbers = torch.arange(layout.num_patches, device=like.device)
    rows, columns = numbers // width, numbers % width
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
    """Jensen-Shannon divergence in nats between the maps of all heads of all layers, layer by layer.

    Args:
        model: In eval mode.
        images: Normalised.
        rows: Query rows compared, spread evenly over the tokens, the first among them.

    Returns:
        0 for heads that look alike, at most ln 2.
    """
    maps = sample_query_rows(model, images, rows)
    return head_divergences(maps, maps)


def sample_query_rows(
    model: VisionTransformer, images: Float[Tensor, "batch channels height width"], rows: int = 16
) -> Float[Tensor, "batch all_heads rows tokens"]:
    """The maps of all heads of all layers, of some query rows spread evenly over the tokens."""
    tokens = model.layout.num_tokens
    chosen = sorted({round(i * (tokens - 1) / max(rows - 1, 1)) for i in range(rows)})
    with torch.no_grad(), record_attention(model, queries=chosen) as recorded:
        model.forward(images)
    return torch.cat(recorded.maps, dim=1)
