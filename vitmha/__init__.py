"""Train Vision Transformers, classify images with them, and see, measure and prune every attention head."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitmha.attention import KVCache, MultiHeadAttention
    from vitmha.errors import UserError
    from vitmha.inference.classifier import Classifier
    from vitmha.inspection.record import record_attention
    from vitmha.models.config import TokenLayout, ViTConfig
    from vitmha.models.encoder_decoder import DecoderBlock, DecoderConfig, EncoderDecoder
    from vitmha.models.vit import VisionTransformer, create_model
    from vitmha.training.module import LitViT
    from vitmha.weights.load import load_model
    from vitmha.weights.save import save_model
    from vitmha.weights.shipped import list_models

# Where each public name is defined. It is imported on first use, so that `import vitmha` stays fast.
_PUBLIC = {
    "Classifier": "inference.classifier",
    "DecoderBlock": "models.encoder_decoder",
    "DecoderConfig": "models.encoder_decoder",
    "EncoderDecoder": "models.encoder_decoder",
    "KVCache": "attention",
    "LitViT": "training.module",
    "MultiHeadAttention": "attention",
    "TokenLayout": "models.config",
    "UserError": "errors",
    "ViTConfig": "models.config",
    "VisionTransformer": "models.vit",
    "create_model": "models.vit",
    "list_models": "weights.shipped",
    "load_model": "weights.load",
    "record_attention": "inspection.record",
    "save_model": "weights.save",
}

__all__ = [
    "Classifier",
    "DecoderBlock",
    "DecoderConfig",
    "EncoderDecoder",
    "KVCache",
    "LitViT",
    "MultiHeadAttention",
    "TokenLayout",
    "UserError",
    "ViTConfig",
    "VisionTransformer",
    "__version__",
    "create_model",
    "list_models",
    "load_model",
    "record_attention",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"vitmha.{_PUBLIC[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
