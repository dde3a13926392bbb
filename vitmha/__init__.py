"""Train Vision Transformers, classify with them, and see, measure and remove every attention head."""

from typing import TYPE_CHECKING, Any

from vitmha.attention import KVCache, MultiHeadAttention
from vitmha.classify import Classifier
from vitmha.decoder import DecoderBlock, DecoderConfig, EncoderDecoder
from vitmha.pretrained import create_model, load_model, save_model
from vitmha.vit import TokenLayout, VisionTransformer, ViTConfig

if TYPE_CHECKING:
    from vitmha.inspection import record_attention

__all__ = [
    "Classifier",
    "DecoderBlock",
    "DecoderConfig",
    "EncoderDecoder",
    "KVCache",
    "MultiHeadAttention",
    "TokenLayout",
    "ViTConfig",
    "VisionTransformer",
    "create_model",
    "load_model",
    "record_attention",
    "save_model",
]


def __getattr__(name: str) -> Any:
    """record_attention, when it is first asked for: its package draws, with matplotlib, which takes half a second."""
    if name == "record_attention":
        from vitmha.inspection import record_attention

        return record_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
