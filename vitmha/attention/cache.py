"""A key/value cache for decoding token by token."""

from jaxtyping import Float, Int64
from torch import Tensor

from .errors import UserError

EMPTY_CACHE = "The cache is empty: call the attention with it first."


class KVCache:
    """The keys and values that one attention has computed, so that a sequence can be decoded piece by piece.

    The first call takes the room for all tokens. It is written in place: decode under `torch.no_grad()`.

    Args:
        max_tokens: Tokens it has room for.

    Raises:
        UserError: No room.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {max_tokens}.")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens in it."""
        self.is_cross: bool | None = None
        """Whether they come from a memory; not known before the first call."""
        self._buffer: Float[Tensor, "2 batch kv_heads max_tokens head_dim"] | None = None

    @property
    def nbytes(self) -> int:
        """2 x batch x kv_heads x max_tokens x head_dim x bytes of a number; 0 before the first call."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def read(self) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """The keys (normalised and rotated) and the values so far.

        Raises:
            UserError: There are none.
        """
        if self._buffer is None or not self.num_tokens:
            raise UserError(EMPTY_CACHE)
        return self._buffer[:, :, :, : self.num_tokens]

    def extend(
        self, k: Float[Tensor, "batch kv_heads new head_dim"], v: Float[Tensor, "batch kv_heads new head_dim"]
    ) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """Writes further keys and values behind those that are there; they count once `num_tokens` says so.

        Returns:
            All keys and all values, the further ones among them.

        Raises:
            UserError: Another dtype than those that are there.
        """
        if self._buffer is None or not self.num_tokens:
            self._buffer = k.new_empty(2, *k.shape[:2], self.max_tokens, k.shape[3])
        if self._buffer.dtype != k.dtype:
            raise UserError(f"The cache holds {self._buffer.dtype}, the call computes {k.dtype}: use one precision.")
        end = self.num_tokens + k.shape[2]
        self._buffer[0, :, :, self.num_tokens : end] = k
        self._buffer[1, :, :, self.num_tokens : end] = v
        return self._buffer[:, :, :, :end]

    def reorder(self, rows: Int64[Tensor, " chosen"]) -> None:
        """Makes the given rows of the batch the new batch; a row may come several times, or not at all.

        Raises:
            UserError: The cache is empty.
        """
        if self._buffer is None or not self.num_tokens:
            raise UserError(EMPTY_CACHE)
        self._buffer = self._buffer[:, rows]

    def check(self, shape: tuple[int, int, int, int], is_cross: bool) -> int:
        """Refuses keys that do not belong here.

        Args:
            shape: Of the keys of the call: (batch, kv_heads, tokens, head_dim).
            is_cross: Whether they come from a memory.

        Returns:
            The number of keys that the call will attend to.

        Raises:
            UserError: The cache is full, or was filled by another attention or with another batch or memory.
        """
        batch, kv_heads, tokens, head_dim = shape
        if self.num_tokens and self.is_cross != is_cross:
            kinds = ("self-attention", "cross-attention")
            raise UserError(f"The cache was filled in {kinds[not is_cross]} and cannot serve in {kinds[is_cross]}.")
        if self._buffer is not None and self.num_tokens:
            there = (*self._buffer.shape[1:3], self._buffer.shape[4])
            if there != (batch, kv_heads, head_dim):
                raise UserError(
                    f"The cache holds (batch, kv_heads, head_dim) = {there}, the call has "
                    f"{(batch, kv_heads, head_dim)}: each attention needs its own cache; `reorder` changes a batch."
                )
        if is_cross and self.num_tokens and self.num_tokens != tokens:
            raise UserError(f"The cache holds a memory of {self.num_tokens} tokens, the call has one of {tokens}.")
        keys = tokens if is_cross else self.num_tokens + tokens
        if keys > self.max_tokens:
            raise UserError(
                f"The cache has room for max_tokens {self.max_tokens}; {self.num_tokens} are in it and {tokens} "
                "more came."
            )
        self.is_cross = is_cross
        return keys
