"""Multi-head attention: projections, masks, kernels, cache, attention weights on request, and head pruning.

Letters in the patterns: b batch, q queries, k keys, h query heads, g key/value heads, r query heads per key/value
head (h = g r), d head_dim.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .cache import KVCache
from .errors import UserError
from .functional import KERNELS, Backend, attention_probabilities, fused_attention, group_heads
from .masks import check_mask, mask_rows, nan_queries, query_rows, zero_nonfinite
from .rotary import apply_rope


class AttentionHook(Protocol):
    """Receives, in each forward pass, the inputs and the output of the attention kernel.

    Without a mask but with `is_causal`, the kernel applies the causal mask itself; else `mask` is all that is masked.
    """

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
    """Multi-head self- or cross-attention, computed by a fused kernel.

    For head i, with q the projected queries and k, v the projected memory::

        weights_i = softmax(q_i k_j^T / sqrt(head_dim) + mask),   j = i // (num_heads / num_kv_heads)
        y = concat_i(weights_i v_j) W_out

    The forward pass never stores the weights. `attention_weights` recomputes them from q and k alone, for the requested
    query rows.

    A query that may attend to no key has zeros as its output (before `out_proj`) and as its row of weights. A token
    that contains NaN or inf makes NaN of the queries that may attend to it and affects nothing else: no other row, and
    no gradient of another row.

    Args:
        embed_dim: Width of the queries and of the output.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; must divide num_heads. 1 is multi-query attention, num_heads (the
            default) is multi-head attention, and anything between is grouped-query attention.
        head_dim: Width of one head; embed_dim / num_heads by default.
        memory_dim: Width of the memory in cross-attention; embed_dim by default.
        qkv_bias: Add a bias in q_proj, k_proj and v_proj.
        out_bias: Add a bias in out_proj.
        qk_norm: Apply a LayerNorm over head_dim to queries and keys.
        attention_dropout: Probability in [0, 1) of dropping an attention weight, in training only.
        backend: The kernel. "auto" leaves the choice to PyTorch (half-precision training on a CPU is computed in
            float32, which is faster there); "flash", "efficient" and "math" are PyTorch's kernels; "explicit" computes
            the formula above.

    Raises:
        UserError: Head counts that do not divide, a dropout outside [0, 1) or an unknown backend.

    Example:
        >>> import torch
        >>> from vitmha import MultiHeadAttention
        >>> attention, x = MultiHeadAttention(embed_dim=24, num_heads=3), torch.randn(2, 17, 24)
        >>> attention(x).shape
        torch.Size([2, 17, 24])
        >>> attention.attention_weights(x, queries=[0]).shape
        torch.Size([2, 3, 1, 17])

    Source:
        Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023 (arXiv 2305.13245), in the order of
        PyTorch's `enable_gqa`; LayerNorm of q and k: Dehghani et al. 2023 (arXiv 2302.05442), section 2.
    """

    head_index: Tensor | None

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
            raise UserError(f"attention_dropout must lie in [0, 1), got {attention_dropout}.")
        if backend not in ("auto", "explicit", *KERNELS):
            raise UserError(f"backend must be one of auto, explicit, {', '.join(KERNELS)}; got {backend!r}.")

        self.embed_dim, self.memory_dim = embed_dim, memory_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.attention_hook: AttentionHook | None = None
        """Called in each forward pass; None for no hook."""
        self.kv_head_index = [head * num_kv_heads // num_heads for head in range(num_heads)]
        """The key/value head of each query head."""
        # After `prune_heads` the original indices of the remaining heads: a buffer, so that a state dict records them.
        self.register_buffer("head_index", None)

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
        rope: Float[Tensor, "2 ... tokens head_dim"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch queries embed"]:
        """Attends from x to memory, or to x itself without a memory.

        Args:
            x: The tokens that the queries are projected from.
            memory: The tokens that the keys and values are projected from; x by default.
            mask: Broadcasts to (batch, heads, queries, keys). Boolean: True = may attend. Float: added to the scores.
                Note that True means the opposite in `nn.MultiheadAttention`. A mask of two axes is (queries, keys), as
                in PyTorch's SDPA; a padding mask is (batch, 1, 1, keys). One of three axes is refused if the first may
                be the batch or the heads.
            is_causal: Mask the keys after each query. The mask is aligned to the lower right corner: the last query
                attends to every key, also if there are more keys than queries.
            rope: Cosines and sines that rotate q and k, see `apply_rope`; in self-attention only.
            cache: Keys and values of earlier calls; extended in place. In self-attention x continues the cached
                sequence, and the keys are all tokens so far. In cross-attention the first call fills the cache, and
                later ones do not project the memory again.

        Returns:
            One output per query.

        Raises:
            UserError: Shapes that do not match, an invalid mask, a cache that is full or was filled by another
                attention module, or a kernel that is not available.
        """
        mask, is_causal = self._check_inputs(x, memory, mask, is_causal, rope, cache)
        if not self.num_heads:
            return self._forward_without_heads(x, memory, cache)
        memory, has_mask = x if memory is None else memory, mask is not None or is_causal
        k, v, finite_keys = self._keys_and_values(memory, rope, cache, has_mask)
        x, finite_queries = zero_nonfinite(x) if has_mask else (x, None)
        q = self._queries(x, rope)
        y = self._attend(q, k, v, mask, is_causal)
        if cache is not None:
            cache.num_tokens = k.shape[2]  # only now: a call that raises leaves the cache unchanged
        if self.attention_hook is not None:
            self.attention_hook(q, k, v, y, mask, is_causal)
        y = self.out_proj(rearrange(y, "b h q d -> b q (h d)"))
        is_nan = nan_queries(finite_queries, finite_keys, mask)
        return y if is_nan is None else y.masked_fill(is_nan[..., None], torch.nan)

    def attention_weights(
        self,
        x: Float[Tensor, "batch queries embed"],
        memory: Float[Tensor, "batch keys memory_embed"] | None = None,
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        queries: int | slice | Sequence[int] | None = None,
        rope: Float[Tensor, "2 ... tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch heads selected keys"]:
        """Computes the attention weights of every head: the softmax of the masked scores, before dropout.

        Args:
            x: See `forward`.
            memory: See `forward`.
            mask: See `forward`.
            is_causal: See `forward`.
            queries: Indices of the query rows to compute; all by default.
            rope: See `forward`.

        Returns:
            Weights in [0, 1], float32 (float64 if x is float64). Each row sums to 1, or is all zeros if the query may
            attend to no key.

        Raises:
            UserError: As in `forward`, or a query index is out of range.
        """
        mask, is_causal = self._check_inputs(x, memory, mask, is_causal, rope, None)
        memory, has_mask = x if memory is None else memory, mask is not None or is_causal
        rows = query_rows(queries, x.shape[1], x.device)
        if not self.num_heads:
            return torch.zeros(len(x), 0, len(rows), memory.shape[1], device=x.device)
        mask = mask_rows(mask, is_causal, rows, x.shape[1], memory.shape[1])
        x, row_rope = x[:, rows], None if rope is None else rope[..., rows, :]
        (x, finite_queries), (memory, finite_keys) = (zero_nonfinite(t) if has_mask else (t, None) for t in (x, memory))
        k = self._expand_kv(self._keys(memory, rope))
        weights = attention_probabilities(self._queries(x, row_rope), k, mask)
        is_nan = nan_queries(finite_queries, finite_keys, mask)
        return weights if is_nan is None else weights.masked_fill(is_nan[:, None, :, None], torch.nan)

    def prune_heads(self, heads: Collection[int]) -> None:
        """Removes heads and their weights. The output is the same as with these heads zeroed before `out_proj`.

        A key/value head is removed with the last query head of its group. The parameters are replaced: create the
        optimizer afterwards. The state dict records the remaining heads, and an unpruned module can load it. If no head
        remains, the output is the bias of `out_proj`, and `attention_hook` is not called.

        Args:
            heads: Indices in [0, num_heads) among the heads that remain after earlier calls.

        Raises:
            UserError: An index is out of range.
        """
        if not all(0 <= head < self.num_heads for head in heads):
            raise UserError(f"heads must lie in [0, {self.num_heads}), the remaining heads; got {sorted(heads)}.")
        kept = [head for head in range(self.num_heads) if head not in set(heads)]
        if len(kept) == self.num_heads:
            return
        kept_kv = sorted({self.kv_head_index[head] for head in kept})
        for layer, axis, layer_heads in (
            (self.q_proj, 0, kept),
            (self.k_proj, 0, kept_kv),
            (self.v_proj, 0, kept_kv),
            (self.out_proj, 1, kept),
        ):
            features = [head * self.head_dim + i for head in layer_heads for i in range(self.head_dim)]
            _keep_features(layer, axis, features)
        original = torch.tensor(self.original_head_index, dtype=torch.int64, device=self.q_proj.weight.device)
        self.head_index = original[kept]
        self.kv_head_index = [kept_kv.index(self.kv_head_index[head]) for head in kept]
        self.num_heads, self.num_kv_heads = len(kept), len(kept_kv)
        if not kept:  # the empty parameters get no gradient, which distributed training would wait for
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
            for parameter in (*self.q_proj.parameters(), *self.k_proj.parameters(), *self.v_proj.parameters()):
                parameter.requires_grad_(False)
            self.out_proj.weight.requires_grad_(False)

    @property
    def original_head_index(self) -> list[int]:
        """Original indices of the remaining heads: those before any pruning."""
        return list(range(self.num_heads)) if self.head_index is None else self.head_index.tolist()

    def keep_heads(self, heads: Collection[int]) -> None:
        """Removes all heads except these.

        Args:
            heads: Original indices: those before any pruning.

        Raises:
            UserError: One of these heads has been pruned already, or never existed.
        """
        remaining = self.original_head_index
        if not set(heads) <= set(remaining):
            raise UserError(f"Cannot keep heads {sorted(heads)}: only {remaining} remain.")
        self.prune_heads([index for index, head in enumerate(remaining) if head not in heads])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}head_index")
        if kept is not None:
            self.keep_heads(kept.tolist())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _queries(self, x: Tensor, rope: Tensor | None) -> Tensor:
        q = rearrange(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), "b q h d -> b h q d")
        return q if rope is None else apply_rope(q, rope)

    def _keys(self, memory: Tensor, rope: Tensor | None) -> Tensor:
        k = rearrange(self.k_norm(self.k_proj(memory).unflatten(-1, (-1, self.head_dim))), "b k g d -> b g k d")
        return k if rope is None else apply_rope(k, rope)

    def _values(self, memory: Tensor) -> Tensor:
        return rearrange(self.v_proj(memory), "b k (g d) -> b g k d", d=self.head_dim)

    def _keys_and_values(
        self, memory: Tensor, rope: Tensor | None, cache: KVCache | None, has_mask: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the kernel's keys and values; with a mask, non-finite ones are zeroed, and also which were finite."""
        finite = None
        if cache is None:
            # Before the projections: the gradient of their weights sums over all tokens, and 0 times NaN is NaN.
            memory, finite = zero_nonfinite(memory) if has_mask else (memory, None)
            k, v = self._keys(memory, rope), self._values(memory)
        else:
            is_complete = cache.is_cross and cache.num_tokens
            k, v = cache.read() if is_complete else cache.extend(self._keys(memory, rope), self._values(memory))
            if has_mask:
                finite = (k.isfinite() & v.isfinite()).all(-1).all(1)
                k, v = (x.where(finite[:, None, :, None], 0) for x in (k, v))
        return self._expand_kv(k), self._expand_kv(v), finite

    def _forward_without_heads(self, x: Tensor, memory: Tensor | None, cache: KVCache | None) -> Tensor:
        """Returns the bias of `out_proj` for each query; the cache counts the tokens, as those of other layers do."""
        if cache is not None and not (cache.is_cross and cache.num_tokens):
            no_heads = x.new_empty(len(x), 0, (x if memory is None else memory).shape[1], self.head_dim)
            cache.num_tokens = cache.extend(no_heads, no_heads).shape[3]
        # Zeros, also where x is NaN, that depend on x: distributed training waits for the gradients of earlier layers.
        zeros = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
        return zeros if self.out_proj.bias is None else zeros + self.out_proj.bias

    def _expand_kv(self, x: Tensor) -> Tensor:
        """Repeats keys or values for each query head if pruning has made groups of unequal size, which kernels lack."""
        group_size = self.num_heads // self.num_kv_heads
        is_even = self.kv_head_index == [head // group_size for head in range(self.num_heads)]
        return x if is_even else x[:, self.kv_head_index]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        if self.backend != "explicit":
            return fused_attention(q, k, v, mask, is_causal, dropout, self.backend)
        mask = mask_rows(mask, is_causal, query_rows(None, q.shape[2], q.device), q.shape[2], k.shape[2])
        weights = F.dropout(attention_probabilities(q, k, mask), dropout).to(v.dtype)
        return einsum(group_heads(weights, k), v, "b g r q k, b g k d -> b g r q d").flatten(1, 2)

    def _check_inputs(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        rope: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Tensor | None, bool]:
        """Validates the arguments of `forward`; returns the mask with all four axes, and the kernel's causal flag.

        The causal mask is merged into a given mask, and left to the kernel only if there is none and there are as many
        keys as queries: SDPA's flag aligns to the upper left corner, which is then the same.
        """
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise UserError(f"x must be (batch, queries, {self.embed_dim}), got {tuple(x.shape)}.")
        if memory is None and self.memory_dim != self.embed_dim:
            raise UserError(f"memory_dim {self.memory_dim} differs from embed_dim {self.embed_dim}: pass a memory.")
        if memory is not None and rope is not None:
            raise UserError("rope rotates the queries and keys of one sequence: it cannot be combined with a memory.")
        is_cross, memory = memory is not None, x if memory is None else memory
        if memory.ndim != 3 or memory.shape[0] != x.shape[0] or memory.shape[-1] != self.memory_dim:
            raise UserError(f"memory must be ({x.shape[0]}, keys, {self.memory_dim}), got {tuple(memory.shape)}.")
        queries, keys = x.shape[1], memory.shape[1]
        if cache is not None:
            keys = cache.check((len(x), self.num_kv_heads, keys, self.head_dim), is_cross)
        if mask is not None:
            mask = check_mask(mask, (x.shape[0], self.num_heads, queries, keys))
        is_causal = is_causal and queries > 1  # a single query is the last one, which attends to every key
        if is_causal and (mask is not None or queries != keys):
            mask, is_causal = mask_rows(mask, True, query_rows(None, queries, x.device), queries, keys), False
        return mask, is_causal

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, backend={self.backend!r}"


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Validates head counts.

    Raises:
        UserError: A count below 1, or counts that do not divide.
    """
    if num_heads < 1 or num_kv_heads < 1:
        raise UserError(f"num_heads and num_kv_heads must be at least 1, got {num_heads} and {num_kv_heads}.")
    if head_dim is None and embed_dim % num_heads:
        raise UserError(
            f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}: change one of them, or set head_dim."
        )
    if head_dim is not None and head_dim < 1:
        raise UserError(f"head_dim must be at least 1, got {head_dim}.")
    if num_heads % num_kv_heads:
        raise UserError(
            f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}: "
            "every key/value head needs the same number of query heads."
        )


def _keep_features(layer: nn.Linear, axis: int, features: list[int]) -> None:
    """Removes all outputs (axis 0) or inputs (axis 1) of a linear layer except the given ones."""

    def select(parameter: Tensor, axis: int) -> nn.Parameter:
        index = torch.tensor(features, dtype=torch.int64, device=parameter.device)
        return nn.Parameter(parameter.detach().index_select(axis, index), requires_grad=parameter.requires_grad)

    layer.weight = select(layer.weight, axis)
    if axis == 0 and layer.bias is not None:
        layer.bias = select(layer.bias, 0)
    layer.out_features, layer.in_features = layer.weight.shape
