"""Comparison of the heads of two models."""

import copy
import json
import math
from functools import partial

import builders
import pytest
import torch

from vitmha.images import Preprocessing
from vitmha.inspection.compare import compare_heads, greedy_match, layer_tokens, linear_cka, renormalized_for

random_model = partial(builders.random_vit, std=0.4, depth=2, num_classes=3)


def test_greedy_match_pairs_the_most_similar_first_and_each_once() -> None:
    divergence = torch.tensor([[0.1, 0.3, 0.5], [0.05, 0.4, 0.6], [0.2, 0.2, 0.9]])
    assert greedy_match(divergence) == ([2, 0, 1], pytest.approx([0.5, 0.05, 0.2]))
    assert greedy_match(torch.tensor([[0.1], [0.2]]))[0] == [0, 0]


def test_permuted_heads_are_matched() -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 12)
    other = copy.deepcopy(model)
    with torch.no_grad():
        attention = other.blocks[0].attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            for parameter in layer.parameters():
                parameter.copy_(parameter.unflatten(0, (3, 4))[[2, 0, 1]].flatten(0, 1))
        out = attention.out_proj.weight
        out.copy_(out.unflatten(1, (3, 4))[:, [2, 0, 1]].flatten(1))
    found = compare_heads(model, other, images)
    assert found.partner == [1, 2, 0, 3, 4, 5]
    assert found.drift == pytest.approx([0.0] * 6, abs=1e-6)
    assert found.same_index is not None
    assert min(found.same_index[:3]) > 0.01
    assert found.records()[2] == {"layer": 0, "head": 2, "paired_with": [0, 0], "drift": found.drift[2]}
    json.dumps(found.records())
    expected = [[linear_cka(one, two) for two in layer_tokens(other, images)] for one in layer_tokens(model, images)]
    assert found.layer_cka == expected
    assert found.layer_cka[0][0] == pytest.approx(1)  # the sum over heads is the same in any order
    assert found.layer_cka[0][1] < 0.999  # 0.953 to 0.997 over 30 random models


def test_linear_cka_is_invariant_to_rotation_and_scale() -> None:
    x = torch.randn(50, 6)
    rotation, _ = torch.linalg.qr(torch.randn(6, 6))
    assert linear_cka(x, 3 * x @ rotation + 1) == pytest.approx(1, abs=1e-6)
    both, _ = torch.linalg.qr(torch.cat([torch.ones(50, 1), torch.randn(50, 7)], 1).double())
    assert linear_cka(both[:, 1:4], both[:, 4:]) == pytest.approx(0, abs=1e-12)
    y = x + torch.randn(50, 6)
    gram, other = (samples @ samples.T for samples in (x.double(), y.double()))
    center = torch.eye(50, dtype=torch.double) - 1 / 50
    hsic = [((center @ one @ center) * two).sum() for one, two in ((gram, other), (gram, gram), (other, other))]
    assert linear_cka(x, y) == pytest.approx(float(hsic[0] / (hsic[1] * hsic[2]).sqrt()))
    assert math.isnan(linear_cka(x, torch.ones(50, 2)))


def test_layer_tokens_of_the_last_layer_are_the_features_before_the_norm() -> None:
    model, images = random_model(), torch.randn(2, 3, 8, 12)
    last = layer_tokens(model, images)[-1]
    torch.testing.assert_close(model.norm(last), model.forward_features(images).flatten(0, 1))


def test_images_are_renormalized_for_the_other_model() -> None:
    model, other, pixels = random_model(), random_model(), torch.rand(2, 3, 8, 12)
    model.preprocessing = Preprocessing(image_size=(8, 12), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert torch.equal(renormalized_for(other, model, pixels), pixels)
    other.preprocessing = Preprocessing(image_size=(8, 12), mean=(0.3, 0.2, 0.1), std=(0.2,) * 3)
    expected = (pixels - torch.tensor([0.3, 0.2, 0.1])[:, None, None]) / 0.2
    torch.testing.assert_close(renormalized_for(other, model, (pixels - 0.5) / 0.5), expected)
