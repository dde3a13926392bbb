"""Multi-head attention: projections, masks, kernels, cache, the attention weights on request, and removal of heads.

Letters in the patterns: b batch, q queries, k keys, h query heads, g key/value heads, r query heads per key/value
head (h = g r), d head_dim.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Backend = Literal["auto", "flash", "efficient", "math", "explicit"]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
EMPTY_CACHE = "The cache is empty: call the attention with it first."


class Observer(Protocol):
    """What is shown, in each forward pass, the tensors that the kernel attends with and what comes of them."""

    def __call__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "batch kv_heads keys head_dim"],
        y: Float[Tensor, "batch heads queries head_dim"],
        mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None,
        is_causal: bool,
    ) -> None: ...


class MultiHeadAttention(nn.Module):
    """Self or cross attention with many heads, computed by a fused kernel.

    For head i, with q, k, v the projections of the queries and of the memory:

        weights_i = softmax(q_i k_j^T / sqrt(head_dim) + mask),   j = i // (num_heads / num_kv_heads)
        y = concat_i(weights_i v_j) W_out

    The weights are never stored on the way to the output. `attention_weights` recomputes them from q and k alone, for
    the query rows that are asked for.

    A query that may see nothing gives zeros (before `out_proj`) and a row of zero weights. A token that holds NaN or
    infinity spoils the queries that see it and nothing else: no other row, and no gradient of another row.

    Args:
        embed_dim: Width of the queries and of the output.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; must divide num_heads. 1 is multi-query attention; num_heads, the
            default, is multi-head attention; what lies between is grouped-query attention.
        head_dim: Width of one head; embed_dim / num_heads by default.
        memory_dim: Width of the memory in cross attention; embed_dim by default.
        qkv_bias: Whether q_proj, k_proj and v_proj add a bias.
        out_bias: Whether out_proj adds a bias.
        qk_norm: Whether queries and keys pass a LayerNorm over head_dim before the scores.
        attention_dropout: Share in [0, 1) of the weights that is dropped, in training only.
        backend: The kernel. "auto" leaves it to PyTorch (in training on a CPU always in float32, which is faster
            there), "flash", "efficient" and "math" are PyTorch's kernels, "explicit" is the formula above, written out.

    Raises:
        ValueError: Heads that do not divide, a rate outside [0, 1) or an unknown backend.

    Source:
        Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023 (arXiv 2305.13245), in the order of
        PyTorch's `enable_gqa`; LayerNorm of q and k: Dehghani et al. 2023 (arXiv 2302.05442), section 2.
    """

    kept_heads: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        memory_dim: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        attention_dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        memory_dim = embed_dim if memory_dim is None else memory_dim
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout must lie in [0, 1), got {attention_dropout}.")
        if backend not in ("auto", "explicit", *KERNELS):
            raise ValueError(f"backend must be one of auto, explicit, {', '.join(KERNELS)}; got {backend!r}.")

        self.embed_dim, self.memory_dim = embed_dim, memory_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.observer: Observer | None = None
        # Which key/value head each query head reads; and, behind `prune_heads`, the numbers that the heads left had in
        # the module as built: a buffer, so that a state dict tells.
        self.kv_head_of = [head * num_kv_heads // num_heads for head in range(num_heads)]
        self.register_buffer("kept_heads", None)

        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=out_bias)

    def forward(
        self,
        x: Float[Tensor, "batch queries embed"],
        memory: Float[Tensor, "batch keys memory_embed"] | None = None,
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        rotary: Float[Tensor, "2 ... tokens head_dim"] | None = None,
        cache: "KVCache | None" = None,
    ) -> Float[Tensor, "batch queries embed"]:
        """Attends from x to memory, or to x itself where there is no memory.

        Args:
            x: Queries.
            memory: Where keys and values come from.
            mask: Broadcasts to (batch, heads, queries, keys). Boolean: True = may attend. Float: added to the scores.
                Note that `nn.MultiheadAttention` means the opposite by its boolean masks.
            is_causal: Whether a query sees only keys up to its own place. The last query sees every key, also where
                there are more keys than queries.
            rotary: Cosines and sines that rotate q and k, see `apply_rotary`; in self-attention only.
            cache: What earlier calls have left. In self-attention x goes on where it ends, and the keys are all tokens
                so far. In cross-attention the first call fills it, and later ones do not project the memory again.

        Returns:
            One row per query.

        Raises:
            ValueError: Shapes that do not fit, a mask that is neither boolean nor added, a cache that is full or that
                another attention has filled, or a kernel that was asked for by name and cannot run here.
        """
        mask, is_causal = self._checked(x, memory, mask, is_causal, rotary, cache)
        if not self.num_heads:
            return self._without_heads(x, memory, cache)
        memory, hides = x if memory is None else memory, mask is not None or is_causal
        k, v, finite_keys = self._keys_and_values(memory, rotary, cache, hides)
        x, finite_queries = _without_nan(x) if hides else (x, None)
        q = self._queries(x, rotary)
        y = self._attend(q, k, v, mask, is_causal)
        if cache is not None:
            cache.num_tokens = k.shape[2]  # only now: a call that is refused leaves the cache as it was
        if self.observer is not None:
            self.observer(q, k, v, y, mask, is_causal)
        y = self.out_proj(rearrange(y, "b h q d -> b q (h d)"))
        spoilt = _spoilt(finite_queries, finite_keys, mask)
        return y if spoilt is None else y.masked_fill(spoilt[..., None], torch.nan)

    def attention_weights(
        self,
        x: Float[Tensor, "batch queries embed"],
        memory: Float[Tensor, "batch keys memory_embed"] | None = None,
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        queries: int | slice | Sequence[int] | None = None,
        rotary: Float[Tensor, "2 ... tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch heads chosen keys"]:
        """The softmaxed matrix of every head: after scale, mask, norm and rotation, before dropout.

        Args:
            x: As in `forward`.
            memory: As in `forward`.
            mask: As in `forward`.
            is_causal: As in `forward`.
            queries: The rows wanted; all by default. Only these are computed.
            rotary: As in `forward`.

        Returns:
            Weights in float32 (float64 where x is), in [0, 1]. Each row sums to 1, or is all 0 where the query may
            see nothing.

        Raises:
            ValueError: As `forward`, or rows that do not exist.
        """
        mask, is_causal = self._checked(x, memory, mask, is_causal, rotary, None)
        memory, hides = x if memory is None else memory, mask is not None or is_causal
        rows = query_rows(queries, x.shape[1], x.device)
        if not self.num_heads:
            return torch.zeros(len(x), 0, len(rows), memory.shape[1], device=x.device)
        mask = mask_rows(mask, is_causal, rows, x.shape[1], memory.shape[1])
        x, rotary_of_rows = x[:, rows], None if rotary is None else rotary[..., rows, :]
        (x, finite_queries), (memory, finite_keys) = (_without_nan(t) if hides else (t, None) for t in (x, memory))
        k = self._served(self._keys(memory, rotary))
        weights = attention_probabilities(self._queries(x, rotary_of_rows), k, mask)
        spoilt = _spoilt(finite_queries, finite_keys, mask)
        return weights if spoilt is None else weights.masked_fill(spoilt[:, None, :, None], torch.nan)

    def prune_heads(self, heads: Collection[int]) -> None:
        """Removes heads for good. The output is what it was with zeros for them in what `out_proj` reads.

        A key/value head goes with the last query head that reads it. The parameters are new ones: make an optimiser
        afterwards. The state dict names the heads that remain, and a module as first built takes it. Where none
        remains, the output is the bias of `out_proj`, and the observer is not called.

        Args:
            heads: Numbers in [0, num_heads), counted among the heads that earlier calls have left.

        Raises:
            ValueError: A head that does not exist.
        """
        if not all(0 <= head < self.num_heads for head in heads):
            raise ValueError(f"heads must lie in [0, {self.num_heads}), those that there are; got {sorted(heads)}.")
        kept = [head for head in range(self.num_heads) if head not in set(heads)]
        if len(kept) == self.num_heads:
            return
        kept_kv = sorted({self.kv_head_of[head] for head in kept})
        for layer, axis, numbers in (
            (self.q_proj, 0, kept),
            (self.k_proj, 0, kept_kv),
            (self.v_proj, 0, kept_kv),
            (self.out_proj, 1, kept),
        ):
            _keep_features(layer, axis, [head * self.head_dim + i for head in numbers for i in range(self.head_dim)])
        at_first = torch.tensor(self.numbers_at_first, dtype=torch.int64, device=self.q_proj.weight.device)
        self.kept_heads = at_first[kept]
        self.kv_head_of = [kept_kv.index(self.kv_head_of[head]) for head in kept]
        self.num_heads, self.num_kv_heads = len(kept), len(kept_kv)
        if not kept:  # what is left of them takes no part: many processes would wait for its gradient
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
            for parameter in (*self.q_proj.parameters(), *self.k_proj.parameters(), *self.v_proj.parameters()):
                parameter.requires_grad_(False)
            self.out_proj.weight.requires_grad_(False)

    @property
    def numbers_at_first(self) -> list[int]:
        """Of each head that is there, the number that it had when the module was built."""
        return list(range(self.num_heads)) if self.kept_heads is None else self.kept_heads.tolist()

    def keep_heads(self, heads: Collection[int]) -> None:
        """Prunes all heads but these, given by the numbers they had when the module was built.

        Raises:
            ValueError: A head that is not there.
        """
        present = self.numbers_at_first
        if not set(heads) <= set(present):
            raise ValueError(f"Heads {sorted(heads)} are to be kept, but only {present} are there.")
        self.prune_heads([place for place, head in enumerate(present) if head not in heads])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}kept_heads")
        if kept is not None:
            self.keep_heads(kept.tolist())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _queries(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        q = rearrange(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), "b q h d -> b h q d")
        return q if rotary is None else apply_rotary(q, rotary)

    def _keys(self, memory: Tensor, rotary: Tensor | None) -> Tensor:
        k = rearrange(self.k_norm(self.k_proj(memory).unflatten(-1, (-1, self.head_dim))), "b k g d -> b g k d")
        return k if rotary is None else apply_rotary(k, rotary)

    def _values(self, memory: Tensor) -> Tensor:
        return rearrange(self.v_proj(memory), "b k (g d) -> b g k d", d=self.head_dim)

    def _keys_and_values(
        self, memory: Tensor, rotary: Tensor | None, cache: "KVCache | None", hides: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As the kernel takes them; where a mask hides some, with zeros in place of NaN, and which had none."""
        finite = None
        if cache is None:
            # Before the projections: the gradient of their weights sums over all tokens, and 0 times NaN is NaN.
            memory, finite = _without_nan(memory) if hides else (memory, None)
            k, v = self._keys(memory, rotary), self._values(memory)
        else:
            is_complete = cache.is_cross and cache.num_tokens
            k, v = cache.read() if is_complete else cache.extend(self._keys(memory, rotary), self._values(memory))
            if hides:
                finite = (k.isfinite() & v.isfinite()).all(-1).all(1)
                k, v = (x.where(finite[:, None, :, None], 0) for x in (k, v))
        return self._served(k), self._served(v), finite

    def _without_heads(self, x: Tensor, memory: Tensor | None, cache: "KVCache | None") -> Tensor:
        """The bias of `out_proj` for each query; the cache counts the tokens as those of other layers do."""
        if cache is not None and not (cache.is_cross and cache.num_tokens):
            nothing = x.new_empty(len(x), 0, (x if memory is None else memory).shape[1], self.head_dim)
            cache.num_tokens = cache.extend(nothing, nothing).shape[3]
        # Zeros also where x is NaN, which x still leads to: many processes wait for the gradient of what made it.
        zeros = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
        return zeros if self.out_proj.bias is None else zeros + self.out_proj.bias

    def _served(self, x: Tensor) -> Tensor:
        """Keys or values as kernels take them: one per query head, where pruning has left groups of unequal size."""
        share = self.num_heads // self.num_kv_heads
        is_even = self.kv_head_of == [head // share for head in range(self.num_heads)]
        return x if is_even else x[:, self.kv_head_of]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        if self.backend != "explicit":
            return _fused(q, k, v, mask, is_causal, dropout, self.backend)
        mask = mask_rows(mask, is_causal, query_rows(None, q.shape[2], q.device), q.shape[2], k.shape[2])
        weights = F.dropout(attention_probabilities(q, k, mask), dropout).to(v.dtype)
        return einsum(_grouped(weights, k), v, "b g r q k, b g k d -> b g r q d").flatten(1, 2)

    def _checked(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        rotary: Tensor | None,
        cache: "KVCache | None",
    ) -> tuple[Tensor | None, bool]:
        """The mask with all four axes, and whether the kernel is to be causal; or a refusal.

        The causal mask is merged into the other, or left to the kernel where there is no other: SDPA's own flag hangs
        on the upper left, which is the same where there are as many keys as queries.
        """
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must be (batch, queries, {self.embed_dim}), got {tuple(x.shape)}.")
        if memory is None and self.memory_dim != self.embed_dim:
            raise ValueError(f"memory_dim {self.memory_dim} differs from embed_dim {self.embed_dim}: give a memory.")
        if memory is not None and rotary is not None:
            raise ValueError("rotary turns the queries and keys of one sequence: it cannot be used with a memory.")
        is_cross, memory = memory is not None, x if memory is None else memory
        if memory.ndim != 3 or memory.shape[0] != x.shape[0] or memory.shape[-1] != self.memory_dim:
            raise ValueError(f"memory must be ({x.shape[0]}, keys, {self.memory_dim}), got {tuple(memory.shape)}.")
        queries, keys = x.shape[1], memory.shape[1]
        if cache is not None:
            keys = cache.check((len(x), self.num_kv_heads, keys, self.head_dim), is_cross)
        if mask is not None:
            mask = _checked_mask(mask, (x.shape[0], self.num_heads, queries, keys))
        is_causal = is_causal and queries > 1  # a single query is the last one, which sees every key
        if is_causal and (mask is not None or queries != keys):
            mask, is_causal = mask_rows(mask, True, query_rows(None, queries, x.device), queries, keys), False
        return mask, is_causal

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, backend={self.backend!r}"


class KVCache:
    """The keys and values that one attention has computed, so that a sequence can be decoded piece by piece.

    The first call takes the room for all tokens. It is written in place: decode under `torch.no_grad()`.

    Args:
        max_tokens: Tokens it has room for.

    Raises:
        ValueError: No room.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens in it."""
        self.is_cross: bool | None = None
        """Whether they come from a memory; not known before the first call."""
        self._room: Float[Tensor, "2 batch kv_heads max_tokens head_dim"] | None = None

    @property
    def nbytes(self) -> int:
        """2 x batch x kv_heads x max_tokens x head_dim x bytes of a number; 0 before the first call."""
        return 0 if self._room is None else self._room.nbytes

    def read(self) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """The keys (normalised and rotated) and the values so far.

        Raises:
            ValueError: There are none.
        """
        if self._room is None or not self.num_tokens:
            raise ValueError(EMPTY_CACHE)
        return self._room[:, :, :, : self.num_tokens]

    def extend(
        self, k: Float[Tensor, "batch kv_heads new head_dim"], v: Float[Tensor, "batch kv_heads new head_dim"]
    ) -> Float[Tensor, "2 batch kv_heads tokens head_dim"]:
        """Writes further keys and values behind those that are there; they count once `num_tokens` says so.

        Returns:
            All keys and all values, the further ones among them.

        Raises:
            ValueError: Another dtype than those that are there.
        """
        if self._room is None or not self.num_tokens:
            self._room = k.new_empty(2, *k.shape[:2], self.max_tokens, k.shape[3])
        if self._room.dtype != k.dtype:
            raise ValueError(f"The cache holds {self._room.dtype}, the call computes {k.dtype}: use one precision.")
        end = self.num_tokens + k.shape[2]
        self._room[0, :, :, self.num_tokens : end] = k
        self._room[1, :, :, self.num_tokens : end] = v
        return self._room[:, :, :, :end]

    def reorder(self, rows: Int64[Tensor, " chosen"]) -> None:
        """Makes the given rows of the batch the new batch; a row may come several times, or not at all.

        Raises:
            ValueError: The cache is empty.
        """
        if self._room is None or not self.num_tokens:
            raise ValueError(EMPTY_CACHE)
        self._room = self._room[:, rows]

    def check(self, shape: tuple[int, int, int, int], is_cross: bool) -> int:
        """Refuses keys that do not belong here.

        Args:
            shape: Of the keys of the call: (batch, kv_heads, tokens, head_dim).
            is_cross: Whether they come from a memory.

        Returns:
            The number of keys that the call will attend to.

        Raises:
            ValueError: The cache is full, or was filled by another attention or with another batch or memory.
        """
        batch, kv_heads, tokens, head_dim = shape
        if self.num_tokens and self.is_cross != is_cross:
            kinds = ("self-attention", "cross-attention")
            raise ValueError(f"The cache was filled in {kinds[not is_cross]} and cannot serve in {kinds[is_cross]}.")
        if self._room is not None and self.num_tokens:
            there = (*self._room.shape[1:3], self._room.shape[4])
            if there != (batch, kv_heads, head_dim):
                raise ValueError(
                    f"The cache holds (batch, kv_heads, head_dim) = {there}, the call has "
                    f"{(batch, kv_heads, head_dim)}: each attention needs its own cache; `reorder` changes a batch."
                )
        if is_cross and self.num_tokens and self.num_tokens != tokens:
            raise ValueError(f"The cache holds a memory of {self.num_tokens} tokens, the call has one of {tokens}.")
        keys = tokens if is_cross else self.num_tokens + tokens
        if keys > self.max_tokens:
            raise ValueError(
                f"The cache has room for max_tokens {self.max_tokens}; {self.num_tokens} are in it and {tokens} "
                "more came."
            )
        self.is_cross = is_cross
        return keys


def attention_probabilities(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    mask: Shaped[Tensor, "#batch #heads #queries #keys"] | None = None,
) -> Float[Tensor, "batch heads queries keys"]:
    """softmax(q k^T / sqrt(head_dim) + mask), without expanding grouped keys.

    Args:
        q: Queries, as the kernel takes them.
        k: Keys likewise; kv_heads divides heads.
        mask: Boolean (True = may attend) or added to the scores.

    Returns:
        Probabilities in float32, or float64 where q is. In half precision they would be off by up to 3.5e-3.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.to(precise) * q.shape[-1] ** -0.5, k.to(precise)
        group = q.shape[1] // k.shape[1]
        # Keys head by head, row by row: the product would copy them anyway, and column by column, which is slower.
        scores = rearrange(q, "b (g r) q d -> b g (r q) d", r=group) @ k.contiguous().mT
        scores = rearrange(scores, "b g (r q) k -> b (g r) q k", r=group)
        if mask is None:
            return scores.softmax(-1)
        scores = scores.masked_fill(~_visible(mask), -torch.inf)
        scores = scores if mask.dtype == torch.bool else scores + mask
        # Softmax over no key at all is 0/0, and its gradient spreads: such a row is softmaxed as zeros, then zeroed.
        blind = ~_visible(mask).any(-1, keepdim=True)
        return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def attention_gradients(
    grad_y: Float[Tensor, "batch heads queries head_dim"], v: Float[Tensor, "batch kv_heads keys head_dim"]
) -> Float[Tensor, "batch heads queries keys"]:
    """The gradient of a scalar with respect to the attention weights, though they were never stored.

    y = A v, so dA = dy v^T, for any rows of y.

    Args:
        grad_y: The scalar's gradient with respect to what the heads give, before `out_proj`.
        v: The values that they read; kv_heads divides heads.

    Returns:
        The gradient with respect to each weight, in the dtype of both.
    """
    return einsum(_grouped(grad_y, v), v, "b g r q d, b g k d -> b g r q k").flatten(1, 2)


def query_rows(
    queries: int | slice | Sequence[int] | None, count: int, device: torch.device
) -> Int64[Tensor, " chosen"]:
    """Query rows as numbers in [0, count); negative ones count from the end, None means all.

    Raises:
        ValueError: A row that does not exist.
    """
    every = range(count)
    if queries is None or isinstance(queries, slice):
        return torch.tensor(every[queries or slice(None)], dtype=torch.int64, device=device)
    chosen = [queries] if isinstance(queries, int) else list(queries)
    if not all(-count <= row < count for row in chosen):
        raise ValueError(f"queries must lie in [{-count}, {count}), got {chosen}.")
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


def apply_rotary(
    x: Float[Tensor, "batch heads tokens head_dim"], rotary: Float[Tensor, "2 ... tokens head_dim"]
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Turns each pair of neighbouring channels (2i, 2i + 1) of each token by its angle.

    Args:
        x: Queries or keys.
        rotary: Cosines and sines of the angles, each angle twice, once per channel of its pair; for all pictures
            (2, tokens, head_dim), or apart (2, batch, 1, tokens, head_dim). Cosine 1 and sine 0 leave a token as it is.

    Returns:
        The turned vectors, of the same length as before.

    Source:
        Su et al. 2021 (arXiv 2104.09864), equation 34.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    cosine, sine = rotary[..., ::2].to(pairs.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses this into one kernel, and knows no complex numbers
        even, odd = pairs.unbind(-1)
        turned = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cosine, sine))
    return turned.flatten(-2).type_as(x)


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Refuses numbers of heads that do not divide what they split."""
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, got {num_heads} and {num_kv_heads}.")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}: change one of them, or set head_dim."
        )
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}: "
            "every key/value head must serve the same number of query heads."
        )


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float, backend: Backend
) -> Tensor:
    if backend == "auto" and q.device.type == "cpu" and q.dtype.itemsize == 2 and q.requires_grad:
        # On a CPU, PyTorch's backward pass takes in half precision several times as long as in float32.
        with torch.autocast("cpu", enabled=False):
            return _fused(q.float(), k.float(), v.float(), mask, is_causal, dropout, backend).to(q.dtype)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=q.shape[1] != k.shape[1])

    if mask is not None and mask.dtype != torch.bool:
        # A large number of float32 must not become infinity in half precision: a row of -inf would count as hidden.
        limits = torch.finfo(q.dtype)
        mask = mask.clamp(limits.min, limits.max).where(_visible(mask), -torch.inf).to(q.dtype)
    if backend == "auto":
        return attend()
    try:
        with sdpa_kernel(KERNELS[backend]):
            return attend()
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise ValueError(
            f"backend {backend!r} cannot run here: PyTorch {torch.__version__} has no such kernel for {q.dtype} on "
            f"{q.device.type} with head_dim {q.shape[-1]}, {'no mask' if mask is None else f'a {mask.dtype} mask'} and "
            f"dropout {dropout}. Take 'auto', or 'math', which always runs."
        ) from None


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Splits the head axis of x into (key/value heads of k, query heads on each)."""
    return rearrange(x, "b (g r) ... -> b g r ...", g=k.shape[1])


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != -torch.inf


def _without_nan(tokens: Tensor) -> tuple[Tensor, Bool[Tensor, "batch tokens"]]:
    """Zeros in place of tokens that hold NaN or infinity, and which hold none."""
    finite = tokens.isfinite().all(-1)
    return tokens.where(finite[..., None], 0), finite


def _spoilt(
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
    sees = _visible(mask).any(1).expand(-1, -1, finite_keys.shape[1])
    # As a product of matrices: (batch, queries, keys) is never stored for a mask that all pictures share.
    sees_bad = (sees.float() @ (~finite_keys).float()[..., None])[..., 0].bool()
    return (~finite_queries & sees.any(-1)) | sees_bad


def _keep_features(layer: nn.Linear, axis: int, features: list[int]) -> None:
    """Leaves only the given outputs (axis 0) or inputs (axis 1) of a linear layer."""

    def chosen(parameter: Tensor, axis: int) -> nn.Parameter:
        index = torch.tensor(features, dtype=torch.int64, device=parameter.device)
        return nn.Parameter(parameter.detach().index_select(axis, index), requires_grad=parameter.requires_grad)

    layer.weight = chosen(layer.weight, axis)
    if axis == 0 and layer.bias is not None:
        layer.bias = chosen(layer.bias, 0)
    layer.out_features, layer.in_features = layer.weight.shape


def _checked_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask with all four axes."""
    if mask.dtype != torch.bool and (not mask.is_floating_point() or _is_zero_one(mask)):
        kind = f"{mask.dtype} zeros and ones" if mask.is_floating_point() else mask.dtype
        raise ValueError(
            f"mask must be boolean (True = may attend) or float (added to the scores), got {kind}: "
            "write mask.bool() for a 0/1 mask."
        )
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, shape, strict=True)):
        raise ValueError(f"mask must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(mask.shape)}.")
    return mask


def _is_zero_one(mask: Tensor) -> bool:
    """Whether a float mask looks like a boolean one: all 0 or 1, and not only 0. Not known while compiling.

    On a GPU the host waits for the answer; a boolean mask, or one that is learned, asks no question.
    """
    if torch.compiler.is_compiling() or mask.requires_grad or not mask.numel():
        return False
    return bool(mask.amax() == 1) and bool(((mask == 0) | (mask == 1)).all())
