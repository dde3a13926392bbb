"""gqa.py: grouped models against models with equal heads, and against averaged weights."""

from functools import partial

import pytest
import torch
from builders import batches, small_model
from torch.testing import assert_close

from vitmha.pruning.gqa import convert_to_gqa, head_similarity
from vitmha.pruning.remove import prune

exactly = partial(assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_grouping_equal_heads_does_not_change_the_output(num_kv_heads: int) -> None:
    model = small_model(qk_norm=True, pos_embed="rope", num_registers=2)
    size = 6 // num_kv_heads
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.k_proj, block.attn.v_proj):
                for parameter in (layer.weight, layer.bias):
                    heads = parameter.view(6, 4, -1)
                    heads.copy_(heads[::size].repeat_interleave(size, 0))
    model.class_names = ("a", "b", "c", "d", "e")
    grouped = convert_to_gqa(model, num_kv_heads)
    assert grouped.config.num_kv_heads == num_kv_heads
    assert grouped.blocks[0].attn.k_proj.weight.shape == (num_kv_heads * 4, 24)
    assert grouped.class_names == model.class_names
    assert not grouped.training
    assert_close(grouped(batches()[0][0]), model(batches()[0][0]))


def test_grouping_averages_neighboring_heads() -> None:
    model = small_model()
    attention, grouped = model.blocks[1].attn, convert_to_gqa(model, 2).blocks[1].attn
    for name in ("k_proj", "v_proj"):
        old, new = getattr(attention, name), getattr(grouped, name)
        assert_close(new.weight[5], (old.weight[13] + old.weight[17] + old.weight[21]) / 3)
        assert_close(new.bias[3], (old.bias[3] + old.bias[7] + old.bias[11]) / 3)
    exactly(grouped.q_proj.weight, attention.q_proj.weight)
    # Grouping from 6 to 2 and then to 1 equals grouping from 6 to 1.
    twice = convert_to_gqa(convert_to_gqa(model, 2), 1)
    assert_close(twice.blocks[1].attn.k_proj.weight, convert_to_gqa(model, 1).blocks[1].attn.k_proj.weight)


def test_similar_heads_are_grouped_and_equal_heads_keep_the_output() -> None:
    model = small_model()
    twins = [0, 1, 2, 1, 0, 2]  # heads 0 and 4, 1 and 3, 2 and 5 are equal
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj):
                for parameter in (layer.weight, layer.bias):
                    heads = parameter.view(6, 4, -1)
                    heads.copy_(heads[twins])
    similarity = head_similarity(model, batches())
    for matrix in similarity:
        assert_close(matrix.diag(), torch.ones(6))
        assert_close(matrix[[0, 1, 2], [4, 3, 5]], torch.ones(3))
        assert matrix[0, 1] < 0.999
    images = batches()[0][0]
    assert_close(convert_to_gqa(model, 3, similarity)(images), model(images))
    assert (convert_to_gqa(model, 3)(images) - model(images)).abs().max() > 1e-3


def test_invalid_groups_are_refused() -> None:
    model = small_model()
    for count in (0, 4, 12):
        with pytest.raises(ValueError, match=f"must divide the 6 key/value heads of the model, got {count}"):
            convert_to_gqa(model, count)
    with pytest.raises(ValueError, match="The 6 heads already share 2 key/value heads: group without similarity"):
        convert_to_gqa(small_model(num_kv_heads=2), 1, head_similarity(model, batches()))
    prune(model, {0: [1]})
    with pytest.raises(ValueError, match=r"The model has pruned heads.*group first, then prune"):
        convert_to_gqa(model, 2)
