"""Multi-head attention: projections, masks, kernels, cache, the attention weights on request, and removal of heads.

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
        UserError: Heads that do not divide, a rate outside [0, 1) or an unknown backend.

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
        # Which key/value head each query head reads; and, behind `prune_heads`, the numbers that the heads left had in
        # the module as built: a buffer, so that a state dict tells.
        self.kv_head_index = [head * num_kv_heads // num_heads for head in range(num_heads)]
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
            rope: Cosines and sines that rotate q and k, see `apply_rope`; in self-attention only.
            cache: What earlier calls have left. In self-attention x goes on where it ends, and the keys are all tokens
                so far. In cross-attention the first call fills it, and later ones do not project the memory again.

        Returns:
            One row per query.

        Raises:
            UserError: Shapes that do not fit, a mask that is neither boolean nor added, a cache that is full or that
                another attention has filled, or a kernel that was asked for by name and cannot run here.
        """
        mask, is_causal = self._checked(x, memory, mask, is_causal, rope, cache)
        if not self.num_heads:
            return self._without_heads(x, memory, cache)
        memory, has_mask = x if memory is None else memory, mask is not None or is_causal
        k, v, finite_keys = self._keys_and_values(memory, rope, cache, has_mask)
        x, finite_queries = zero_nonfinite(x) if has_mask else (x, None)
        q = self._queries(x, rope)
        y = self._attend(q, k, v, mask, is_causal)
        if cache is not None:
            cache.num_tokens = k.shape[2]  # only now: a call that is refused leaves the cache as it was
        if self.attention_hook is not None:
            self.attention_hook(q, k, v, y, mask, is_causal)
        y = self.out_proj(rearrange(y, "b h q d -> b q (h d)"))
        spoilt = nan_queries(finite_queries, finite_keys, mask)
        return y if spoilt is None else y.masked_fill(spoilt[..., None], torch.nan)

    def attention_weights(
        self,
        x: Float[Tensor, "batch queries embed"],
        memory: Float[Tensor, "batch keys memory_embed"] | None = None,
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        queries: int | slice | Sequence[int] | None = None,
        rope: Float[Tensor, "2 ... tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch heads chosen keys"]:
        """The softmaxed matrix of every head: after scale, mask, norm and rotation, before dropout.

        Args:
            x: As in `forward`.
            memory: As in `forward`.
            mask: As in `forward`.
            is_causal: As in `forward`.
            queries: The rows wanted; all by default. Only these are computed.
            rope: As in `forward`.

        Returns:
            Weights in float32 (float64 where x is), in [0, 1]. Each row sums to 1, or is all 0 where the query may
            see nothing.

        Raises:
            UserError: As `forward`, or rows that do not exist.
        """
        mask, is_causal = self._checked(x, memory, mask, is_causal, rope, None)
        memory, has_mask = x if memory is None else memory, mask is not None or is_causal
        rows = query_rows(queries, x.shape[1], x.device)
        if not self.num_heads:
            return torch.zeros(len(x), 0, len(rows), memory.shape[1], device=x.device)
        mask = mask_rows(mask, is_causal, rows, x.shape[1], memory.shape[1])
        x, rotary_of_rows = x[:, rows], None if rope is None else rope[..., rows, :]
        (x, finite_queries), (memory, finite_keys) = (zero_nonfinite(t) if has_mask else (t, None) for t in (x, memory))
        k = self._expand_kv(self._keys(memory, rope))
        weights = attention_probabilities(self._queries(x, rotary_of_rows), k, mask)
        spoilt = nan_queries(finite_queries, finite_keys, mask)
        return weights if spoilt is None else weights.masked_fill(spoilt[:, None, :, None], torch.nan)

    def prune_heads(self, heads: Collection[int]) -> None:
        """Removes heads for good. The output is what it was with zeros for them in what `out_proj` reads.

        A key/value head goes with the last query head that reads it. The parameters are new ones: make an optimiser
        afterwards. The state dict names the heads that remain, and a module as first built takes it. Where none
        remains, the output is the bias of `out_proj`, and the attention_hook is not called.

        Args:
            heads: Numbers in [0, num_heads), counted among the heads that earlier calls have left.

        Raises:
            UserError: A head that does not exist.
        """
        if not all(0 <= head < self.num_heads for head in heads):
            raise UserError(f"heads must lie in [0, {self.num_heads}), those that there are; got {sorted(heads)}.")
        kept = [head for head in range(self.num_heads) if head not in set(heads)]
        if len(kept) == self.num_heads:
            return
        kept_kv = sorted({self.kv_head_index[head] for head in kept})
        for layer, axis, numbers in (
            (self.q_proj, 0, kept),
            (self.k_proj, 0, kept_kv),
            (self.v_proj, 0, kept_kv),
            (self.out_proj, 1, kept),
        ):
            _keep_features(layer, axis, [head * self.head_dim + i for head in numbers for i in range(self.head_dim)])
        at_first = torch.tensor(self.original_head_index, dtype=torch.int64, device=self.q_proj.weight.device)
        self.head_index = at_first[kept]
        self.kv_head_index = [kept_kv.index(self.kv_head_index[head]) for head in kept]
        self.num_heads, self.num_kv_heads = len(kept), len(kept_kv)
        if not kept:  # what is left of them takes no part: many processes would wait for its gradient
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
            for parameter in (*self.q_proj.parameters(), *self.k_proj.parameters(), *self.v_proj.parameters()):
                parameter.requires_grad_(False)
            self.out_proj.weight.requires_grad_(False)

    @property
    def original_head_index(self) -> list[int]:
        """Of each head that is there, the number that it had when the module was built."""
        return list(range(self.num_heads)) if self.head_index is None else self.head_index.tolist()

    def keep_heads(self, heads: Collection[int]) -> None:
        """Prunes all heads but these, given by the numbers they had when the module was built.

        Raises:
            UserError: A head that is not there.
        """
        present = self.original_head_index
        if not set(heads) <= set(present):
            raise UserError(f"Heads {sorted(heads)} are to be kept, but only {present} are there.")
        self.prune_heads([place for place, head in enumerate(present) if head not in heads])

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
        self, memory: Tensor, rope: Tensor | None, cache: "KVCache | None", has_mask: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As the kernel takes them; where a mask hides some, with zeros in place of NaN, and which had none."""
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

    def _without_heads(self, x: Tensor, memory: Tensor | None, cache: "KVCache | None") -> Tensor:
        """The bias of `out_proj` for each query; the cache counts the tokens as those of other layers do."""
        if cache is not None and not (cache.is_cross and cache.num_tokens):
            nothing = x.new_empty(len(x), 0, (x if memory is None else memory).shape[1], self.head_dim)
            cache.num_tokens = cache.extend(nothing, nothing).shape[3]
        # Zeros also where x is NaN, which x still leads to: many processes wait for the gradient of what made it.
        zeros = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
        return zeros if self.out_proj.bias is None else zeros + self.out_proj.bias

    def _expand_kv(self, x: Tensor) -> Tensor:
        """Keys or values as kernels take them: one per query head, where pruning has left groups of unequal size."""
        share = self.num_heads // self.num_kv_heads
        is_even = self.kv_head_index == [head // share for head in range(self.num_heads)]
        return x if is_even else x[:, self.kv_head_index]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        if self.backend != "explicit":
            return fused_attention(q, k, v, mask, is_causal, dropout, self.backend)
        mask = mask_rows(mask, is_causal, query_rows(None, q.shape[2], q.device), q.shape[2], k.shape[2])
        weights = F.dropout(attention_probabilities(q, k, mask), dropout).to(v.dtype)
        return einsum(group_heads(weights, k), v, "b g r q k, b g k d -> b g r q d").flatten(1, 2)

    def _checked(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        rope: Tensor | None,
        cache: "KVCache | None",
    ) -> tuple[Tensor | None, bool]:
        """The mask with all four axes, and whether the kernel is to be causal; or a refusal.

        The causal mask is merged into the other, or left to the kernel where there is no other: SDPA's own flag hangs
        on the upper left, which is the same where there are as many keys as queries.
        """
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise UserError(f"x must be (batch, queries, {self.embed_dim}), got {tuple(x.shape)}.")
        if memory is None and self.memory_dim != self.embed_dim:
            raise UserError(f"memory_dim {self.memory_dim} differs from embed_dim {self.embed_dim}: give a memory.")
        if memory is not None and rope is not None:
            raise UserError("rotary turns the queries and keys of one sequence: it cannot be used with a memory.")
        is_cross, memory = memory is not None, x if memory is None else memory
        if memory.ndim != 3 or memory.shape[0] != x.shape[0] or memory.shape[-1] != self.memory_dim:
            raise UserError(f"memory must be ({x.shape[0]}, keys, {self.memory_dim}), got {tuple(memory.shape)}.")
        queries, keys = x.shape[1], memory.shape[1]
        if cache is not None:
            keys = cache.check((len(x), self.num_kv_heads, keys, self.head_dim), is_cross)
        if mask is not None:
            mask = check_mask(mask, (x.shape[0], self.num_heads, queries, keys))
        is_causal = is_causal and queries > 1  # a single query is the last one, which sees every key
        if is_causal and (mask is not None or queries != keys):
            mask, is_causal = mask_rows(mask, True, query_rows(None, queries, x.device), queries, keys), False
        return mask, is_causal

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, backend={self.backend!r}"


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Refuses numbers of heads that do not divide what they split."""
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
            "every key/value head must serve the same number of query heads."
        )


def _keep_features(layer: nn.Linear, axis: int, features: list[int]) -> None:
    """Leaves only the given outputs (axis 0) or inputs (axis 1) of a linear layer."""

    def chosen(parameter: Tensor, axis: int) -> nn.Parameter:
        index = torch.tensor(features, dtype=torch.int64, device=parameter.device)
        return nn.Parameter(parameter.detach().index_select(axis, index), requires_grad=parameter.requires_grad)

    layer.weight = chosen(layer.weight, axis)
    if axis == 0 and layer.bias is not None:
        layer.bias = chosen(layer.bias, 0)
    layer.out_features, layer.in_features = layer.weight.shape
