"""Attention maps drawn on images."""

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from vitmha.images import Preprocessing
from vitmha.inference.overlay import draw_attention


def test_attention_is_drawn_on_the_part_that_the_model_receives() -> None:
    white = Image.new("RGB", (300, 100), "white")
    attention = torch.zeros(2, 2, 2)
    attention[:, 1, 0] = 1  # lower left
    drawn = draw_attention(white, attention, Preprocessing(image_size=(20, 20), mean=(0.5,), std=(0.5,), crop_pct=0.5))
    # The model sees the center of the image: 50 pixels of 100, from column 125 and row 25.
    light = pil_to_tensor(drawn)[0]
    assert drawn.size == (300, 100)
    assert light[:, :124].max() == light[:, 176:].max() == 255 // 4
    assert light[60:75, 125:140].min() > 200
    assert light[25:40, 160:175].max() < 70


def test_attention_shows_on_a_black_image() -> None:
    attention = torch.zeros(2, 2, 2)
    attention[:, 1, 0] = 1  # lower left
    preprocessing = Preprocessing(image_size=(20, 20), mean=(0.5,), std=(0.5,), crop_pct=1.0)
    light = pil_to_tensor(draw_attention(Image.new("RGB", (100, 100)), attention, preprocessing))[0]
    assert light[70:, :30].min() > 55
    assert light[:30, 70:].max() < 5
