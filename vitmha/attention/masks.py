"""Attention masks: validation, selection of query rows, and containment of tokens that are NaN or inf."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from .errors import UserError


def query_rows(
    queries: int | slice | Sequence[int] | None, count: int, device: torch.device
) -> Int64[Tensor, " selected"]:
    """Converts any index of query rows to indices in [0, count).

    Args:
        queries: One index, a slice or several indices; negative ones count from the end. None selects all rows.
        count: Number of queries.
        device: Device of the result.

    Raises:
        UserError: An index is out of range.
    """
    indices = range(count)
    if queries is None or isinstance(queries, slice):
        return torch.tensor(indices[queries or slice(None)], dtype=torch.int64, device=device)
    selected = [queries] if isinstance(queries, int) else list(queries)
    if not all(-count <= index < count for index in selected):
        raise UserError(f"queries must lie in [{-count}, {count}), got {selected}.")
    return torch.tensor([indices[index] for index in selected], dtype=torch.int64, device=device)


def mask_rows(
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None,
    is_causal: bool,
    rows: Int64[Tensor, " selected"],
    num_queries: int,
    num_keys: int,
) -> Shaped[Tensor, "#batch #heads #selected #keys"] | None:
    """Selects query rows of a mask and merges the causal mask into them.

    Args:
        mask: Boolean (True = may attend), or float (added to the scores).
        is_causal: Whether to merge the causal mask, aligned to the lower right corner.
        rows: Indices of the queries.
        num_queries: Number of all queries.
        num_keys: Number of keys.

    Returns:
        The mask of the selected rows; None if nothing is masked.
    """
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if not is_causal:
        return mask
    past = torch.arange(num_keys, device=rows.device) <= rows[:, None] + (num_keys - num_queries)
    if mask is None:
        return past[None, None]
    return mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)


def attends(mask: Tensor) -> Tensor:
    """Returns where a query may attend to a key: the mask itself if it is boolean, else where it is not -inf."""
    return mask if mask.dtype == torch.bool else mask != -torch.inf


def zero_nonfinite(tokens: Tensor) -> tuple[Tensor, Bool[Tensor, "batch tokens"]]:
    """Replaces each token that contains NaN or inf by zeros; also returns which tokens are finite."""
    finite = tokens.isfinite().all(-1)
    return tokens.where(finite[..., None], 0), finite


def nan_queries(
    finite_queries: Bool[Tensor, "batch queries"] | None,
    finite_keys: Bool[Tensor, "batch keys"] | None,
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None,
) -> Bool[Tensor, "batch queries"] | None:
    """Returns the queries whose output must be NaN: what `zero_nonfinite` has replaced would have reached them.

    A query's output is NaN if it may attend to a non-finite key, or if it is itself non-finite and may attend to any.

    Args:
        finite_queries: Which queries are finite; None if nothing was replaced.
        finite_keys: Which keys are finite; None if nothing was replaced.
        mask: The mask; None stands for the causal mask of as many queries as keys.

    Returns:
        One boolean per query; None if nothing was replaced.
    """
    if finite_queries is None or finite_keys is None:
        return None
    if mask is None:
        return ~finite_queries | (~finite_keys).cumsum(1).bool()
    allowed = attends(mask).any(1).expand(-1, -1, finite_keys.shape[1])
    # As a matrix product: (batch, queries, keys) is never stored for a mask that all images share.
    reaches_nonfinite = (allowed.float() @ (~finite_keys).float()[..., None])[..., 0].bool()
    return (~finite_queries & allowed.any(-1)) | reaches_nonfinite


def check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Validates a mask and adds its missing leading axes.

    Args:
        mask: Any number of axes up to four.
        shape: (batch, heads, queries, keys), to which the mask must broadcast.

    Raises:
        UserError: The mask is neither boolean nor float, is a float mask of zeros and ones, does not broadcast, or has
            three axes of which the first may be the batch or the heads.
    """
    if mask.dtype != torch.bool and (not mask.is_floating_point() or _is_zero_one(mask)):
        kind = f"{mask.dtype} zeros and ones" if mask.is_floating_point() else mask.dtype
        raise UserError(
            f"mask must be boolean (True = may attend) or float (added to the scores), got {kind}: "
            "write mask.bool() for a 0/1 mask."
        )
    _refuse_ambiguous(mask, *shape)
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, shape, strict=True)):
        raise UserError(f"mask must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(mask.shape)}.")
    return mask


def _refuse_ambiguous(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
    """Refuses a mask of three axes, of as many samples as heads: it broadcasts as one mask per head."""
    if torch.compiler.is_exporting() or mask.ndim != 3:  # a batch of any size is compared with nothing
        return
    if 1 < len(mask) == batch == heads:
        raise UserError(
            f"mask of shape {tuple(mask.shape)} is ambiguous. It may mean (1, heads, queries, keys) = "
            f"(1, {heads}, {queries}, {keys}): write mask[None], or (batch, 1, queries, keys) = "
            f"({batch}, 1, {queries}, {keys}): write mask[:, None]."
        )


def _is_zero_one(mask: Tensor) -> bool:
    """Whether a float mask was meant as a boolean one: all 0 or 1, and not all 0. Always False while compiling.

    On a GPU this forces a host-device sync; a boolean mask, or a learned one, avoids it.
    """
    if torch.compiler.is_compiling() or mask.requires_grad or not mask.numel():
        return False
    return bool(mask.amax() == 1) and bool(((mask == 0) | (mask == 1)).all())
