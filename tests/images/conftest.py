"""An image that the tests of decoding and of preprocessing use."""

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image


@pytest.fixture
def image() -> Image.Image:
    """Noise on a gradient, 67 wide and 43 high."""
    gradient = torch.linspace(0, 180, 67)[None, None] + 30 * torch.rand(3, 43, 1)
    return to_pil_image((gradient + 40 * torch.rand(3, 43, 67)).clamp(0, 255).to(torch.uint8))
