"""Small Vision Transformers and images that the tests of vitmha.models share."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer

assert_equal = partial(assert_close, rtol=0, atol=0)

SMALL = {
    "image_size": (21, 55),
    "patch_size": (7, 11),
    "num_classes": 13,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "mlp_dim": 31,
}


def random_model(**fields: Any) -> VisionTransformer:
    """A small model in eval mode whose weights are all random."""
    model = VisionTransformer(ViTConfig(**{**SMALL, **fields})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def random_images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 21, 55)
