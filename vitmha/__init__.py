"""Train Vision Transformers, classify with them, and see, measure and remove every attention head."""

from vitmha.attention import KVCache, MultiHeadAttention
from vitmha.inference.classifier import Classifier
from vitmha.inspection import record_attention
from vitmha.models.config import TokenLayout, ViTConfig
from vitmha.models.encoder_decoder import DecoderBlock, DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

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
