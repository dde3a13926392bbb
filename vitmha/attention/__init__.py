"""Multi-head attention. The folder needs torch, einops and jaxtyping alone and can be copied out."""

from .cache import KVCache
from .functional import Backend, attention_gradients, attention_probabilities
from .masks import mask_rows, query_rows
from .module import MultiHeadAttention, Observer, check_heads
from .rotary import apply_rotary

__all__ = [
    "Backend",
    "KVCache",
    "MultiHeadAttention",
    "Observer",
    "apply_rotary",
    "attention_gradients",
    "attention_probabilities",
    "check_heads",
    "mask_rows",
    "query_rows",
]
