"""Attention masks: validation, query rows, and tokens that hold NaN or infinity."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from .errors import UserError


def query_rows(
    queries: int | slice | Sequence[int] | None, count: int, device: torch.device
) -> Int64[Tensor, " chosen"]:
    """Query rows as numbers in [0, count); negative ones count from the end, None means all.

    Raises:
        UserError: A row that does not exist.
    """
    every = range(count)
    if queries is None or isinstance(queries, slice):
        return torch.tensor(every[queries or slice(None)], dtype=torch.int64, device=device)
    chosen = [queries] if isinstance(queries, int) else list(queries)
    if not all(-count <= row < count for row in chosen):
        raise UserError(f"queries must lie in [{-count}, {count}), got {chosen}.")
    return torch.tensor([every[row] for row in chosen], dtype=torch.int64, device=device)


def mask_rows(
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None,
    is_causal: bool,
    rows: Int64[Tensor, " chosen"],
    num_queries: int,
    num_keys: int,
) -> Shaped[Tensor, "#batch #heads #chosen #keys"] | None:
    """The given query rows of a mask, with the causal one (on the lower right) merged in."""
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if not is_causal:
        return mask
    past = torch.arange(num_keys, device=rows.device) <= rows[:, None] + (num_keys - num_queries)
    if mask is None:
        return past[None, None]
    return mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)


def attends(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != -torch.inf


def zero_nonfinite(tokens: Tensor) -> tuple[Tensor, Bool[Tensor, "batch tokens"]]:
    """Zeros in place of tokens that hold NaN or infinity, and which hold none."""
    finite = tokens.isfinite().all(-1)
    return tokens.where(finite[..., None], 0), finite


def nan_queries(
    finite_queries: Bool[Tensor, "batch queries"] | None,
    finite_keys: Bool[Tensor, "batch keys"] | None,
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None,
) -> Bool[Tensor, "batch queries"] | None:
    """Which queries are NaN by right: they see something and are not finite, or see a key that is not.

    Without a mask they see the keys up to their own place. None where nothing is hidden, and so nothing was replaced.
    """
    if finite_queries is None or finite_keys is None:
        return None
    if mask is None:
        return ~finite_queries | (~finite_keys).cumsum(1).bool()
    sees = attends(mask).any(1).expand(-1, -1, finite_keys.shape[1])
    # As a product of matrices: (batch, queries, keys) is never stored for a mask that all pictures share.
    sees_bad = (sees.float() @ (~finite_keys).float()[..., None])[..., 0].bool()
    return (~finite_queries & sees.any(-1)) | sees_bad


def check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask with all four axes."""
    if mask.dtype != torch.bool and (not mask.is_floating_point() or _is_zero_one(mask)):
        kind = f"{mask.dtype} zeros and ones" if mask.is_floating_point() else mask.dtype
        raise UserError(
            f"mask must be boolean (True = may attend) or float (added to the scores), got {kind}: "
            "write mask.bool() for a 0/1 mask."
        )
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, shape, strict=True)):
        raise UserError(f"mask must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(mask.shape)}.")
    return mask


def _is_zero_one(mask: Tensor) -> bool:
    """Whether a float mask looks like a boolean one: all 0 or 1, and not only 0. Not known while compiling.

    On a GPU the host waits for the answer; a boolean mask, or one that is learned, asks no question.
    """
    if torch.compiler.is_compiling() or mask.requires_grad or not mask.numel():
        return False
    return bool(mask.amax() == 1) and bool(((mask == 0) | (mask == 1)).all())
