"""Multi-head attention: self, cross, grouped, masked, causal and cached.

This directory uses relative imports and depends only on torch, einops and jaxtyping, so that it can be copied into
another project.
"""

from .cache import KVCache
from .functional import Backend, attention_gradients, attention_probabilities
from .masks import mask_rows, query_rows
from .module import AttentionHook, MultiHeadAttention, check_heads
from .rotary import apply_rope

__all__ = [
    "AttentionHook",
    "Backend",
    "KVCache",
    "MultiHeadAttention",
    "apply_rope",
    "attention_gradients",
    "attention_probabilities",
    "check_heads",
    "mask_rows",
    "query_rows",
]
