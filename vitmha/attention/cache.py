"""A key/value cache for token-by-token decoding."""

from jaxtyping import Float, Int64
from torch import Tensor

from .errors import UserError

EMPTY_CACHE = "The cache is empty: pass it to an attention call first."


class KVCache:
    """The keys and values that one attention module has computed so far, for decoding a sequence step by step.

    The first call allocates the buffer for `max_tokens` tokens, and each call writes into it in place: decode under
    `torch.no_grad()`.

    Args:
        max_tokens: Capacity in tokens.

    Raises:
        UserError: `max_tokens` is below 1.

    Example:
        >>> import torch
        >>> from vitmha import KVCache, MultiHeadAttention
        >>> attention, cache = MultiHeadAttention(embed_dim=8, num_heads=2), KVCache(max_tokens=16)
        >>> with torch.no_grad():
        ...     for token in torch.randn(3, 1, 1, 8):
        ...         y = attention(token, is_causal=True, cache=cache)
        >>> cache.num_tokens
        3
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {max_tokens}.")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Number of cached tokens."""
        self.is_cross: bool | None = None
        """Whether the keys and values come from a memory; None before the first call."""
        self._buffer: Float[Tensor, "2 batch kv_heads max_tokens head_dim"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, 2 x batch x kv_heads x max_tokens x head_dim elements; 0 before the first call."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def read(self) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """Returns the cached keys (normalized and rotated) and values.

        Raises:
            UserError: The cache is empty.
        """
        if self._buffer is None or not self.num_tokens:
            raise UserError(EMPTY_CACHE)
        return self._buffer[:, :, :, : self.num_tokens]

    def extend(
        self, k: Float[Tensor, "batch kv_heads new head_dim"], v: Float[Tensor, "batch kv_heads new head_dim"]
    ) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """Appends keys and values. They count as cached only once the caller has increased `num_tokens`.

        Returns:
            All keys and all values, including the new ones.

        Raises:
            UserError: The dtype differs from that of the cached tokens.
        """
        if self._buffer is None or not self.num_tokens:
            self._buffer = k.new_empty(2, *k.shape[:2], self.max_tokens, k.shape[3])
        if self._buffer.dtype != k.dtype:
            raise UserError(f"The cache holds {self._buffer.dtype}, the call computes {k.dtype}: use one precision.")
        end = self.num_tokens + k.shape[2]
        self._buffer[0, :, :, self.num_tokens : end] = k
        self._buffer[1, :, :, self.num_tokens : end] = v
        return self._buffer[:, :, :, :end]

    def reorder(self, rows: Int64[Tensor, " new_batch"]) -> None:
        """Replaces the batch by the given rows of it, as beam search needs; a row may be repeated or dropped.

        Raises:
            UserError: The cache is empty.
        """
        if self._buffer is None or not self.num_tokens:
            raise UserError(EMPTY_CACHE)
        self._buffer = self._buffer[:, rows]

    def check(self, shape: tuple[int, int, int, int], is_cross: bool) -> int:
        """Validates the keys of a call against the cached ones.

        Args:
            shape: Shape of the keys of the call: (batch, kv_heads, tokens, head_dim).
            is_cross: Whether they come from a memory.

        Returns:
            The number of keys that the call will attend to.

        Raises:
            UserError: The cache is full, or was filled by another attention module, with another batch or with another
                memory.
        """
        batch, kv_heads, tokens, head_dim = shape
        if self.num_tokens and self.is_cross != is_cross:
            kinds = ("self-attention", "cross-attention")
            raise UserError(f"The cache was filled in {kinds[not is_cross]} and cannot be used in {kinds[is_cross]}.")
        if self._buffer is not None and self.num_tokens:
            cached = (*self._buffer.shape[1:3], self._buffer.shape[4])
            if cached != (batch, kv_heads, head_dim):
                raise UserError(
                    f"The cache holds (batch, kv_heads, head_dim) = {cached}, the call has "
                    f"{(batch, kv_heads, head_dim)}: each attention module needs its own cache; `reorder` changes the "
                    "batch."
                )
        if is_cross and self.num_tokens and self.num_tokens != tokens:
            raise UserError(f"The cache holds a memory of {self.num_tokens} tokens, the call has one of {tokens}.")
        num_keys = tokens if is_cross else self.num_tokens + tokens
        if num_keys > self.max_tokens:
            raise UserError(
                f"max_tokens {self.max_tokens} is too small: the cache holds {self.num_tokens} tokens and the call "
                f"adds {tokens}."
            )
        self.is_cross = is_cross
        return num_keys
