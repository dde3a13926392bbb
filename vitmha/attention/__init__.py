"""Multi-head attention. The folder needs torch, einops and jaxtyping alone and can be copied out."""

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
