"""Recording the attention of vitmha's models."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import builders
import jaxtyping
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import attention_probabilities
from vitmha.inspection import RecordedAttention, record_attention
from vitmha.inspection.record import Queries, value_lengths
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer

# A grid of 3 x 5 patches, in eval mode.
SIZES = {"image_size": (21, 55), "patch_size": (7, 11), "embed_dim": 24, "num_heads": 6, "mlp_dim": 31}
random_model = partial(builders.random_vit, std=0.4, num_classes=13, **SIZES)
exactly = partial(assert_close, rtol=0, atol=0)


def random_images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 21, 55)


def record(model: VisionTransformer, images: Tensor, **chosen: Any) -> list[Tensor]:
    with record_attention(model, **chosen) as recorded:
        model(images)
    return recorded.maps


def full_maps(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    """`attention_weights` of each block, from the input of the block."""
    tokens, rope = model.embed(images)
    maps = []
    for block in model.blocks:
        maps.append(block.attn.attention_weights(block.norm1(tokens), rope=rope))
        tokens = block(tokens, rope)
    return maps


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 2, "num_registers": 2},
        {"pos_embed": "rope", "qk_norm": True, "num_registers": 2},
        {"pool": "mean", "pos_embed": "sincos2d"},
        {"pool": "attention", "backend": "explicit"},
        {"num_kv_heads": 1, "head_dim": 8, "backend": "math"},
    ],
    ids=["plain", "grouped", "rope", "mean", "attention pool", "wide heads"],
)
def test_maps_equal_the_weights_of_every_block(fields: dict[str, Any]) -> None:
    model, images = random_model(**fields), random_images()
    maps, expected = record(model, images, queries="all"), full_maps(model, images)
    assert len(maps) == 3
    for recorded, weights in zip(maps, expected, strict=True):
        exactly(recorded, weights)
        assert recorded.dtype == torch.float32


@pytest.mark.parametrize("training", [False, True])
def test_recording_changes_no_bit_of_logits_and_gradients(training: bool) -> None:
    model = random_model(attention_dropout=0.3, num_kv_heads=3).train(training)
    images = random_images()
    outcomes = []
    for is_recorded in (False, True):
        torch.manual_seed(7)
        if is_recorded:
            with record_attention(model, queries="all"):
                logits = model(images)
        else:
            logits = model(images)
        outcomes.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    exactly(outcomes[0], outcomes[1])


def test_the_fused_kernel_stays_on_while_recording() -> None:
    model, images = random_model(), random_images()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        record_attention(model),
    ):
        model(images)
    ran = {event.key: event.count for event in profiler.key_averages()}
    assert ran["aten::_scaled_dot_product_flash_attention_for_cpu"] == 3


@pytest.mark.parametrize(
    ("queries", "rows"),
    [
        ("cls", [0]),
        ("registers", [1, 2]),
        ("patches", list(range(3, 18))),
        ("all", list(range(18))),
        ([5, -1, 5], [5, 17, 5]),
    ],
)
def test_chosen_queries_are_rows_of_the_full_map(queries: Queries, rows: list[int]) -> None:
    model, images = random_model(num_registers=2, num_kv_heads=2), random_images()
    for recorded, weights in zip(record(model, images, queries=queries), full_maps(model, images), strict=True):
        assert_close(recorded, weights[:, :, rows], rtol=0, atol=1e-6)


def test_distillation_class_and_register_rows_are_distinguished() -> None:
    model, images = random_model(num_registers=2, distillation_token=True), random_images()
    for queries, rows in (("cls", [0]), ("distillation", [1]), ("registers", [2, 3]), ("patches", range(4, 19))):
        for recorded, weights in zip(record(model, images, queries=queries), full_maps(model, images), strict=True):
            assert_close(recorded, weights[:, :, list(rows)], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="queries='distillation' needs a distillation token"):
        record(random_model(), images, queries="distillation")


def test_blocks_with_drop_path_in_training_are_refused() -> None:
    model = random_model(drop_path=0.3).train()
    with pytest.raises(ValueError, match=r"With drop_path, .* record in eval mode"):
        record(model, random_images())
    assert len(record(model.eval(), random_images())) == 3


def test_the_class_token_is_recorded_by_default() -> None:
    model, images = random_model(), random_images()
    exactly(record(model, images), record(model, images, queries="cls"))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_pooled_is_the_mean_over_the_rows_of_the_patches(pool: str) -> None:
    model, images = random_model(pool=pool, num_registers=2), random_images()
    first = model.layout.num_prefix_tokens
    for recorded, weights in zip(record(model, images, queries="pooled"), full_maps(model, images), strict=True):
        assert_close(recorded, sum(weights[:, :, first + i : first + i + 1] for i in range(15)) / 15)


@pytest.mark.parametrize("num_kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("heads", [[0], [5, 1, 2], [1, 3]])
def test_chosen_heads_and_layers_are_those_of_all(num_kv_heads: int, heads: list[int]) -> None:
    model, images = random_model(num_kv_heads=num_kv_heads), random_images()
    every = record(model, images)
    chosen = record(model, images, layers=[2, 0], heads=heads)
    assert_close(chosen, [every[2][:, heads], every[0][:, heads]], rtol=0, atol=1e-6)


def test_a_batch_is_recorded_as_its_images_one_by_one() -> None:
    model, images = random_model(), random_images()
    alone = [torch.cat(maps) for maps in zip(*(record(model, image[None]) for image in images), strict=True)]
    assert_close(record(model, images), alone, rtol=0, atol=1e-5)


def test_a_second_pass_replaces_the_record_of_the_first() -> None:
    model, first, second = random_model(), random_images(2), random_images(5)
    with record_attention(model) as recorded:
        model(first)
        once = recorded.maps
        model(second)
        model(first)
    exactly(recorded.maps, once)
    exactly(record(model, first), once)


def test_attention_to_a_marked_patch_is_at_its_grid_position() -> None:
    model = random_model(num_registers=2)
    for name, parameter in model.named_parameters():
        if "patch_embed" not in name and "norm1" not in name:
            nn.init.zeros_(parameter)
    with torch.no_grad():
        model.patch_embed.proj.weight.fill_(1)
        model.patch_embed.proj.bias.zero_()
        model.patch_embed.proj.weight[::2] = -1
        attention = model.blocks[0].attn
        attention.q_proj.bias.fill_(1)
        attention.k_proj.weight.copy_(torch.eye(24) * torch.tensor([-1.0, 1]).repeat(12)[:, None] * 5)
        model.blocks[0].norm1.weight.fill_(1)
        model.blocks[0].norm1.bias.zero_()
    images = torch.zeros(1, 3, 21, 55)
    images[..., 7:14, 33:44] = 1
    grid = model.layout.to_grid(record(model, images, layers=[0])[0])
    assert grid.shape == (1, 6, 1, 3, 5)
    for head in grid[0, :, 0]:
        assert (head > 0.9).nonzero().tolist() == [[1, 3]]


def test_hooks_are_removed_after_the_block() -> None:
    model = random_model()
    with record_attention(model, layers=[0, 2]):
        model(random_images())
        assert [block.attn.attention_hook is None for block in model.blocks] == [False, True, False]
    assert all(block.attn.attention_hook is None for block in model.blocks)


def test_hooks_are_removed_after_an_exception_which_propagates() -> None:
    model = random_model()
    with pytest.raises(KeyError, match="of the caller"), record_attention(model):
        raise KeyError("of the caller")
    assert all(block.attn.attention_hook is None for block in model.blocks)


def test_maps_in_training_are_before_dropout() -> None:
    model, images = random_model(attention_dropout=0.5), random_images()
    expected = record(model, images, queries="all")[0]
    maps = record(model.train(), images, queries="all")
    exactly(maps[0], expected)
    for weights in maps:
        assert_close(weights.sum(-1), torch.ones(3, 6, 16))
        assert not weights.requires_grad


def test_maps_are_float32_under_autocast() -> None:
    model, images = random_model(), random_images()
    expected = record(model, images, layers=[0])[0]
    with torch.autocast("cpu", torch.bfloat16):
        maps = record(model, images)
    for weights in maps:
        assert weights.dtype == torch.float32
        assert_close(weights.sum(-1), torch.ones(3, 6, 1), rtol=0, atol=1e-5)
    assert_close(maps[0], expected, rtol=0, atol=0.05)


def test_value_norms_are_float32_under_autocast() -> None:
    v, weight = torch.randn(2, 2, 16, 4), torch.randn(24, 24)
    expected = value_lengths(v, weight, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(value_lengths(v, weight, 6), expected)


@contextmanager
def maps_in_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The maps that models with the explicit backend compute, in their graph."""
    maps = []

    def keep(*arguments: Any) -> Tensor:
        weights = attention_probabilities(*arguments)
        maps.append(weights if weights.requires_grad else weights.requires_grad_())
        return weights

    with monkeypatch.context() as patch:
        patch.setattr("vitmha.attention.module.attention_probabilities", keep)
        yield maps


@pytest.mark.parametrize(
    "fields",
    [
        {"num_registers": 2},
        {"num_kv_heads": 2, "pos_embed": "rope", "qk_norm": True},
        {"pool": "mean", "num_kv_heads": 1},
        {"pool": "mean", "pos_embed": "sincos2d", "backend": "explicit"},
        {"backend": "math", "num_kv_heads": 3},
    ],
    ids=["plain", "grouped, rotary", "mean, multi-query", "mean, explicit", "grouped, math"],
)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("chosen", "layers", "heads", "rows"),
    [
        ({"queries": "all"}, [0, 1, 2], range(6), slice(None)),
        ({"queries": "patches", "layers": [2, 0]}, [2, 0], range(6), slice(-15, None)),
        ({"queries": [3, -1, 0], "heads": [4, 1], "layers": [1]}, [1], [4, 1], [3, -1, 0]),
        ({"queries": [5], "heads": [5, 0, 5]}, [0, 1, 2], [5, 0, 5], [5]),
    ],
    ids=["all", "patches", "rows and heads", "one row"],
)
def test_gradients_equal_those_of_maps_in_the_graph(
    fields: dict[str, Any],
    is_frozen: bool,
    chosen: dict[str, Any],
    layers: list[int],
    heads: Sequence[int],
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, images = random_model(**fields).double().requires_grad_(not is_frozen), random_images().double()
    logits = model(images)
    with record_attention(model, gradients=True, **chosen) as recorded:
        outputs = model(images)
    exactly(outputs, logits)
    targets = outputs[:, 5].sum(), (outputs.softmax(-1)[0, 2] - outputs[1, 7])
    found = [recorded.gradients(target) for target in targets]
    assert all(parameter.grad is None for parameter in model.parameters())
    exactly(recorded.gradients(targets[0]), found[0])

    for block in model.blocks:
        block.attn.backend = "explicit"
    with maps_in_graph(monkeypatch) as maps:
        outputs = model(images)
    for target, gradients in zip(
        (outputs[:, 5].sum(), (outputs.softmax(-1)[0, 2] - outputs[1, 7])), found, strict=True
    ):
        every = torch.autograd.grad(target, maps, retain_graph=True)
        expected = [every[layer][:, list(heads)][:, :, rows].float() for layer in layers]
        assert max(gradient.abs().max() for gradient in expected) > 1e-4
        assert_close(gradients, expected, rtol=1e-5, atol=1e-7)
        assert [gradient.shape for gradient in gradients] == [map_.shape for map_ in recorded.maps]


def test_gradients_are_of_the_class_token_by_default() -> None:
    model, images = random_model(), random_images()
    outcomes = []
    for chosen in ({}, {"queries": [0]}):
        with record_attention(model, gradients=True, **chosen) as recorded:
            outcomes.append(recorded.gradients(model(images)[:, 3].sum()))
    exactly(*outcomes)


def test_gradients_do_not_change_those_of_the_parameters() -> None:
    model, images = random_model(), random_images()
    model(images).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with record_attention(model, gradients=True) as recorded:
        target = model(images)[:, 3].sum()
    recorded.gradients(target)
    exactly([parameter.grad for parameter in model.parameters()], before)
    target.backward()
    assert not torch.equal(model.head.weight.grad, before[-2])


def test_gradients_under_autocast_are_float32() -> None:
    model, images = random_model(), random_images()
    outcomes = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled), record_attention(model, gradients=True) as recorded:
            outcomes.append(recorded.gradients(model(images)[:, 3].float().sum())[-1])
    assert outcomes[1].dtype == torch.float32
    assert_close(outcomes[1], outcomes[0], rtol=0, atol=0.1 * float(outcomes[0].abs().max()))


def test_gradients_that_were_not_recorded_are_an_error_with_the_remedy() -> None:
    model = random_model()
    with record_attention(model) as recorded:
        target = model(random_images()).sum()
    with pytest.raises(RuntimeError, match="pass gradients=True to record_attention"):
        recorded.gradients(target)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_without_a_graph_are_an_error(mode: Any) -> None:
    model, images = random_model(), random_images()
    with (
        pytest.raises(RuntimeError, match="run the model with gradients enabled"),
        mode(),
        record_attention(model, gradients=True),
    ):
        model(images)
    assert all(block.attn.attention_hook is None for block in model.blocks)


def test_a_target_that_does_not_come_from_the_recorded_pass_is_an_error() -> None:
    model, images = random_model(), random_images()
    with record_attention(model, gradients=True) as recorded:
        with pytest.raises(RuntimeError, match=r"No attention was recorded in layers \[0, 1, 2\]"):
            recorded.gradients(torch.ones((), requires_grad=True))
        first = model(images)[:, 3].sum()
        second = model(images)[:, 3].sum()
    for target, message in (
        (second.detach(), "The target has no gradient: compute it from the recorded pass"),
        (first, "does not depend on the recorded pass"),
        (model(images).sum(), "does not depend on the recorded pass"),
    ):
        with pytest.raises(RuntimeError, match=message):
            recorded.gradients(target)
    assert len(recorded.gradients(second)) == 3


def test_gradients_of_means_are_refused_with_the_remedy() -> None:
    with (
        pytest.raises(ValueError, match="means, which have no gradient of their own: use 'patches'"),
        record_attention(random_model(), queries="pooled", gradients=True),
    ):
        pass


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_a_compiled_model_are_refused(in_place: bool) -> None:
    model = random_model()
    if in_place:
        model.compile()
    with (
        pytest.raises(ValueError, match="gradients=True needs a model that is not compiled"),
        record_attention(model if in_place else torch.compile(model), gradients=True),
    ):
        pass


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("heads", [[2, 3], [0], [1, 4, 5]])
def test_a_model_without_some_heads_of_a_block_is_recorded_and_loads_into_a_new_one(
    num_kv_heads: int, heads: list[int]
) -> None:
    whole, images = random_model(num_kv_heads=num_kv_heads, num_registers=2), random_images()
    slim = copy.deepcopy(whole)
    slim.blocks[1].attn.prune_heads(heads)
    with torch.no_grad():
        whole.blocks[1].attn.out_proj.weight.unflatten(1, (6, -1))[:, heads] = 0
    kept = [head for head in range(6) if head not in heads]
    fresh = random_model(num_kv_heads=num_kv_heads, num_registers=2)
    fresh.load_state_dict(slim.state_dict())

    outcomes = []
    for model in (whole, slim, fresh):
        with record_attention(model, queries="all", gradients=True) as recorded:
            logits = model(images)
        outcomes.append((logits, recorded.maps, recorded.gradients(logits[:, 3].sum())))
    exactly(outcomes[2], outcomes[1])
    (expected, *lists), (logits, *found) = outcomes[:2]
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_close(found[0], [lists[0][0], lists[0][1][:, kept], lists[0][2]], rtol=0, atol=1e-5)
    with record_attention(model, layers=[1], heads=[len(kept) - 1, 0], gradients=True) as recorded:
        chosen = recorded.gradients(model(images)[:, 3].sum())
    assert_close(recorded.maps[0], lists[0][1][:, [kept[-1], kept[0]], :1], rtol=0, atol=1e-5)
    assert_close(chosen[0], found[1][1][:, [len(kept) - 1, 0], :1], rtol=1e-4, atol=1e-5)
    with (
        pytest.raises(ValueError, match=rf"heads must be indices in \[0, {len(kept)}\), got \[5\]"),
        record_attention(model, heads=[5]),
    ):
        pass


def test_a_missing_pass_is_an_error_with_the_remedy() -> None:
    with (
        pytest.raises(RuntimeError, match=r"No attention was recorded in layers \[0, 2\]: run the same model object"),
        record_attention(random_model(), layers=[0, 2]),
    ):
        pass


def test_reading_maps_before_the_pass_is_an_error() -> None:
    model = random_model()
    with record_attention(model) as recorded:
        with pytest.raises(RuntimeError, match=r"No attention was recorded in layers \[0, 1, 2\]"):
            _ = recorded.maps
        model(random_images())


def test_rows_that_do_not_sum_to_one_are_an_error() -> None:
    model = random_model()
    nn.init.constant_(model.blocks[1].attn.q_proj.bias, torch.nan)
    with pytest.raises(RuntimeError, match=r"layer 1 do not sum to 1 .*the model computes NaN"):
        record(model, random_images())


def test_patch_dropout_in_training_is_refused() -> None:
    model = random_model(patch_dropout=0.5).train()
    with pytest.raises(
        ValueError, match=r"Expected 16 tokens in layer 0 .*, got 9: patch dropout .* record in eval mode"
    ):
        record(model, random_images())
    assert len(record(model.eval(), random_images())) == 3


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"layers": [3]}, r"layers must be indices in \[0, 3\), got \[3\]"),
        ({"layers": [-1]}, r"layers must be indices in \[0, 3\), got \[-1\]"),
        ({"layers": []}, r"layers must be indices in \[0, 3\), got \[\]"),
        ({"heads": [0, 6]}, r"heads must be indices in \[0, 6\), got \[0, 6\]"),
        ({"heads": []}, r"heads must be indices in \[0, 6\), got \[\]"),
        ({"queries": [16]}, r"queries must lie in \[-16, 16\), got \[16\]"),
        ({"queries": "registers"}, "queries='registers' needs register tokens and the model has none"),
        (
            {"queries": "class"},
            "queries must be one of cls, distillation, pooled, registers, patches, all or token indices, got 'class'",
        ),
    ],
)
def test_layers_heads_and_queries_out_of_range_are_refused(
    chosen: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run-time checks of types, on in tests only, would refuse a misspelled name before the code does.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message), record_attention(random_model(), **chosen):
        pass


def test_cls_rows_of_a_model_without_a_class_token_are_refused_with_the_remedy() -> None:
    with (
        pytest.raises(ValueError, match="queries='cls' needs a class token and the model has none: use 'pooled'"),
        record_attention(random_model(pool="mean")),
    ):
        pass


def test_an_unsupported_model_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="Cannot inspect a Linear of torch: supported are"),
        record_attention(nn.Linear(2, 3)),
    ):
        pass


COMPILED = """
import sys

import torch
from vitmha import VisionTransformer, ViTConfig, record_attention

torch.manual_seed(0)
model = VisionTransformer(ViTConfig(image_size=(21, 55), patch_size=(7, 11), embed_dim=24, depth=2,
                                    num_heads=3, num_classes=13, pos_embed="rope")).eval()
torch.nn.init.normal_(model.head.weight)
images = torch.randn(3, 3, 21, 55)
with record_attention(model, queries="all") as expected:
    logits = model(images)

compiled = torch.compile(model, backend=sys.argv[1])
with torch.inference_mode():
    before = compiled(images)
    with record_attention(compiled, queries="all") as recorded:
        during = compiled(images)
    after = compiled(images)
torch.testing.assert_close(recorded.maps, expected.maps, rtol=0, atol=1e-5)
for output in (before, during, after):
    torch.testing.assert_close(output, logits, rtol=0, atol=1e-5)

model.blocks[1].attn.prune_heads([1])
with record_attention(model, queries="all") as expected:
    logits = model(images)
with torch.inference_mode(), record_attention(compiled, queries="all") as recorded:
    torch.testing.assert_close(compiled(images), logits, rtol=0, atol=1e-5)
torch.testing.assert_close(recorded.maps, expected.maps, rtol=0, atol=1e-5)
assert recorded.maps[1].shape[1] == 2
"""


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_recorded_like_the_eager_one(backend: str) -> None:
    # In a separate process: the run-time checks of shapes, on in tests only, cannot be compiled.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", COMPILED, backend], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "num_registers": 1}])
def test_value_norms_are_the_lengths_of_what_each_key_adds(fields: dict[str, Any]) -> None:
    model, images = random_model(**fields), random_images(2)
    attention = model.blocks[1].attn
    with record_attention(model, layers=[1], heads=[4, 0], value_norms=True) as recorded:
        inputs = []
        handle = attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        model(images)
        handle.remove()
    (norms,) = recorded.value_norms
    for i, head in enumerate((4, 0)):
        kv_head = head * attention.num_kv_heads // 6
        v = attention.v_proj(inputs[0])[..., kv_head * 4 : kv_head * 4 + 4]
        added = v @ attention.out_proj.weight[:, head * 4 : head * 4 + 4].T
        assert_close(norms[:, i], added.norm(dim=-1))
    with record_attention(model) as recorded:
        model(images)
    with pytest.raises(RuntimeError, match="pass value_norms=True to record_attention"):
        _ = recorded.value_norms


@pytest.mark.parametrize("heads", [None, [1]])
def test_the_recorder_has_the_recorded_layers_heads_and_queries(heads: Sequence[int] | None) -> None:
    model = random_model()
    with record_attention(model, layers=range(2), heads=heads) as recorded:
        model(random_images())
    assert isinstance(recorded, RecordedAttention)
    assert (recorded.layout, recorded.layers, recorded.heads) == (model.layout, [0, 1], heads)
    assert recorded.queries == "cls"


def test_recording_a_model_twice_at_once_is_refused_and_the_first_continues() -> None:
    config = ViTConfig(image_size=8, patch_size=4, in_channels=1, embed_dim=12, depth=2, num_heads=3)
    model = VisionTransformer(config).eval()
    with record_attention(model) as recorded:
        with pytest.raises(RuntimeError, match="already being recorded"), record_attention(model, queries="all"):
            pass
        model(torch.randn(2, 1, 8, 8))
    assert len(recorded.maps) == 2
