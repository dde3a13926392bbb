"""Train Vision Transformers, classify with them, and see, measure and remove every attention head."""

from vitmha.attention import KVCache, MultiHeadAttention
from vitmha.classify import Classifier
from vitmha.decoder import DecoderBlock, DecoderConfig, EncoderDecoder
from vitmha.inspection import record_attention
from vitmha.pretrained import create_model, load_model, save_model
from vitmha.vit import TokenLayout, VisionTransformer, ViTConfig

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
