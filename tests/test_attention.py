"""Multi-head attention against PyTorch's, timm's and numbers worked out by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jaxtyping
import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from vitmha.attention import MultiHeadAttention, apply_rotary, attention_probabilities, query_rows
from vitmha.vit import TokenLayout, rotary_positions

CPU_BACKENDS = ["auto", "math", "flash", "explicit"]
exactly = partial(assert_close, rtol=0, atol=0)


def reference(
    attention: MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """PyTorch's SDPA, in its plain form, between the module's own projections."""
    q, k, v = (
        norm(proj(tokens).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
        for proj, norm, tokens in (
            (attention.q_proj, attention.q_norm, x),
            (attention.k_proj, attention.k_norm, memory),
            (attention.v_proj, nn.Identity(), memory),
        )
    )
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
    return attention.out_proj(y.transpose(1, 2).flatten(2))


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), inputs)


def set_linear(layer: nn.Linear, weight: Any, bias: Any = 0.0) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight, dtype=torch.float32).expand_as(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(torch.as_tensor(bias, dtype=torch.float32).expand_as(layer.bias))


def reading_values(backend: str) -> MultiHeadAttention:
    """Width 1, queries 0, values the memory itself: the output is the plain mean of what a query sees."""
    attention = MultiHeadAttention(1, 1, head_dim=2, backend=backend)
    for layer, weight in (
        (attention.q_proj, 0),
        (attention.k_proj, 1),
        (attention.v_proj, [[1], [0]]),
        (attention.out_proj, [[1, 0]]),
    ):
        set_linear(layer, weight)
    return attention


def timm_weights(attention: MultiHeadAttention) -> dict[str, Tensor]:
    """Our weights under timm's names."""
    weights = attention.state_dict()
    split = [name for name in weights if name.startswith(("q_proj", "k_proj", "v_proj"))]
    merged = {
        f"qkv.{kind}": torch.cat([weights[f"{p}_proj.{kind}"] for p in "qkv"])
        for kind in {name.split(".")[1] for name in split}
    }
    rest = {name.replace("out_proj", "proj"): tensor for name, tensor in weights.items() if name not in split}
    return merged | rest


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, q, k: None,
    "bool each": lambda b, h, q, k: torch.rand(b, h, q, k) < 0.6,
    "bool padding": lambda b, h, q, k: (torch.arange(k) < torch.tensor([k, k - 2, 1])[:, None])[:, None, None],
    "bool shared": lambda b, h, q, k: torch.rand(q, k) < 0.6,
    "bool per head": lambda b, h, q, k: torch.rand(h, 1, k) < 0.6,
    "float each": lambda b, h, q, k: torch.randn(b, h, q, k, dtype=torch.float64),
    "float per head": lambda b, h, q, k: torch.randn(h, q, k, dtype=torch.float64),
    "float per batch": lambda b, h, q, k: torch.randn(b, 1, 1, k, dtype=torch.float64),
    "float shared with -inf": lambda b, h, q, k: torch.randn(q, k, dtype=torch.float64).masked_fill(
        torch.rand(q, k) < 0.4, -torch.inf
    ),
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    ("num_kv_heads", "mask"),
    [*((kv, mask) for kv in (6, 1) for mask in ("none", "bool each")), *((3, m) for m in MASKS)],
)
def test_output_and_all_gradients_equal_sdpa(backend: str, num_kv_heads: int, mask: str) -> None:
    attention = MultiHeadAttention(
        11, 6, num_kv_heads=num_kv_heads, head_dim=5, memory_dim=13, qk_norm=True, backend=backend
    ).double()
    x = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(3, 7, 13, dtype=torch.float64, requires_grad=True)
    drawn = MASKS[mask](3, 6, 5, 7)
    y, expected = attention(x, memory, mask=drawn), reference(attention, x, memory, drawn)
    assert_close(y, expected, rtol=0, atol=1e-12)
    inputs = x, memory, *attention.parameters()
    assert_close(gradients(y, *inputs), gradients(expected, *inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_causal_self_attention_equals_sdpa(backend: str, num_kv_heads: int) -> None:
    attention = MultiHeadAttention(30, 6, num_kv_heads=num_kv_heads, backend=backend).double()
    x = torch.randn(2, 7, 30, dtype=torch.float64, requires_grad=True)
    y, expected = attention(x, is_causal=True), reference(attention, x, x, is_causal=True)
    assert_close(y, expected, rtol=0, atol=1e-12)
    inputs = x, *attention.parameters()
    assert_close(gradients(y, *inputs), gradients(expected, *inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_causal_joins_a_mask(backend: str, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(10, 2, num_kv_heads=1, backend=backend).double()
    x, memory = torch.randn(3, 5, 10, dtype=torch.float64), torch.randn(3, 7, 10, dtype=torch.float64)
    seen = torch.rand(3, 2, 5, 7) < 0.7
    past = torch.ones(5, 7).tril(2).bool()
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    expected = reference(attention, x, memory, seen & past)
    assert_close(attention(x, memory, mask=mask, is_causal=True), expected, rtol=0, atol=1e-12)
    assert_close(
        attention.attention_weights(x, memory, mask=mask, is_causal=True),
        attention.attention_weights(x, memory, mask=seen & past),
        rtol=0,
        atol=1e-15,
    )


@pytest.mark.parametrize("backend", ["math", "flash", "explicit"])
@pytest.mark.parametrize("mask", ["none", "bool each", "float each"])
def test_every_kernel_gives_the_same_in_float32(backend: str, mask: str) -> None:
    attention = MultiHeadAttention(33, 3)
    x, drawn = torch.randn(3, 37, 33), MASKS[mask](3, 3, 37, 37)
    expected = attention(x, mask=drawn)
    attention.backend = backend
    assert_close(attention(x, mask=drawn), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("memory_dim", [None, 13])
def test_equals_nn_multihead_attention(memory_dim: int | None) -> None:
    ours = MultiHeadAttention(15, 3, memory_dim=memory_dim).double()
    theirs = nn.MultiheadAttention(15, 3, kdim=memory_dim, vdim=memory_dim, batch_first=True).double()
    layers = ours.q_proj, ours.k_proj, ours.v_proj
    with torch.no_grad():
        if memory_dim is None:
            theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        else:
            for layer, weight in zip(
                layers, (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight), strict=True
            ):
                weight.copy_(layer.weight)
        theirs.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())

    x = torch.randn(2, 5, 15, dtype=torch.float64)
    memory = None if memory_dim is None else torch.randn(2, 7, 13, dtype=torch.float64)
    attended = x if memory is None else memory
    padding = torch.arange(attended.shape[1]) >= torch.tensor([3, attended.shape[1]])[:, None]
    expected, weights = theirs(x, attended, attended, key_padding_mask=padding, average_attn_weights=False)
    mask = ~padding[:, None, None]
    assert_close(ours(x, memory, mask=mask), expected, rtol=0, atol=1e-12)
    assert_close(ours.attention_weights(x, memory, mask=mask), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_equals_timm_attention(qk_norm: bool, qkv_bias: bool) -> None:
    ours = MultiHeadAttention(15, 3, qkv_bias=qkv_bias, qk_norm=qk_norm)
    theirs = timm.layers.Attention(
        15, 3, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_layer=partial(nn.LayerNorm, eps=1e-6)
    )
    if qk_norm:
        for norm in (ours.q_norm, ours.k_norm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    theirs.load_state_dict(timm_weights(ours))
    x = torch.randn(3, 7, 15)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("per_picture", [False, True])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_rotary_attention_equals_timm(backend: str, per_picture: bool) -> None:
    layout = TokenLayout(num_class_tokens=1, num_registers=2, grid_size=(3, 5), patch_size=(7, 11))
    ours = MultiHeadAttention(24, 3, num_kv_heads=1, backend=backend)
    theirs = timm.layers.AttentionRope(24, 3, num_kv_heads=1, qkv_fused=False, num_prefix_tokens=3)
    theirs.load_state_dict({name.replace("out_proj", "proj"): tensor for name, tensor in ours.state_dict().items()})
    rope = timm.layers.RotaryEmbeddingCat(8, in_pixels=False, feat_shape=(3, 5)).get_embed()
    x, rotary = torch.randn(2, 18, 24), rotary_positions(layout, 8)
    if per_picture:
        rotary = rotary[:, None, None].expand(2, 2, 1, 18, 8)
    expected = theirs(x, rope)
    assert_close(ours(x, rotary=rotary), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(ours(x), expected, atol=1e-3)
    rows = ours.attention_weights(x, rotary=rotary, queries=[17, 0])
    exactly(rows, ours.attention_weights(x, rotary=rotary)[:, :, [17, 0]])


def test_rotation_turns_neighbouring_channels_by_their_angle() -> None:
    angles = torch.tensor([torch.pi / 2, torch.pi]).repeat_interleave(2)
    x = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4)
    turned = apply_rotary(x, torch.stack([angles.cos(), angles.sin()])[:, None])
    assert_close(turned, torch.tensor([-2.0, 1, -3, -4]).view(1, 1, 1, 4))


def test_rotation_is_the_same_written_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4).repeat_interleave(2, 1)
    rotary = torch.stack([angles.cos(), angles.sin()])
    expected = apply_rotary(x, rotary)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(apply_rotary(x, rotary), expected)


def test_rotation_in_bfloat16_rounds_once() -> None:
    x, angles = torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(5, 4).repeat_interleave(2, 1)
    rotary = torch.stack([angles.cos(), angles.sin()])
    exactly(apply_rotary(x, rotary), apply_rotary(x.float(), rotary).bfloat16())


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_acts_in_training_only(backend: str) -> None:
    with_dropout = MultiHeadAttention(15, 3, attention_dropout=0.5, backend=backend)
    without = MultiHeadAttention(15, 3, backend=backend)
    without.load_state_dict(with_dropout.state_dict())
    x = torch.randn(2, 7, 15)
    assert not torch.equal(with_dropout(x), with_dropout(x))
    with_dropout.eval()
    exactly(with_dropout(x), without(x))
    exactly(with_dropout(x), with_dropout(x))


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
def test_dropout_scales_what_it_keeps(backend: str) -> None:
    attention = reading_values(backend)
    attention.attention_dropout = 0.2
    y = attention(torch.ones(97, 1, 1))
    assert set(y.flatten().tolist()) == {0.0, 1.25}


def test_weights_are_those_before_dropout() -> None:
    attention = MultiHeadAttention(15, 3, attention_dropout=0.5)
    x = torch.randn(2, 7, 15)
    weights = attention.train().attention_weights(x)
    assert_close(weights.sum(-1), torch.ones(2, 3, 7))
    exactly(weights, attention.eval().attention_weights(x))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_query_that_sees_nothing_gives_zeros(backend: str, num_kv_heads: int, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(6, 2, num_kv_heads=num_kv_heads, backend=backend)
    x = torch.randn(2, 5, 6, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 1] = False
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    y, weights, free = attention(x, mask=mask), attention.attention_weights(x, mask=mask), attention(x)
    others = torch.arange(5) != 1
    exactly(y[0, 1], attention.out_proj.bias)
    exactly(weights[0, :, 1], torch.zeros(2, 5))
    assert_close(y[1], free[1])
    assert_close(y[0, others], free[0, others])
    assert_close(weights[0, :, others], attention.attention_weights(x)[0, :, others])
    for gradient in gradients(y, x, *attention.parameters()) + gradients(weights, x):
        assert gradient.isfinite().all()


def test_a_learned_mask_has_a_finite_gradient_where_a_query_sees_nothing() -> None:
    attention = MultiHeadAttention(6, 2, backend="explicit")
    mask = torch.zeros(5, 5).index_fill(0, torch.tensor([1]), -torch.inf).requires_grad_()
    for y in (attention(torch.randn(2, 5, 6), mask=mask), attention.attention_weights(torch.randn(2, 5, 6), mask=mask)):
        (gradient,) = gradients(y, mask)
        exactly(gradient[1], torch.zeros(5))
        assert gradient[[0, 2, 3, 4]].abs().min() > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_an_unseen_key_reaches_nothing(backend: str, bad: float, dtype: torch.dtype) -> None:
    attention = MultiHeadAttention(6, 2, num_kv_heads=1, backend=backend)
    x, memory = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 5, 6)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    spoilt = memory.masked_fill(torch.tensor([[False] * 5, [False] * 3 + [True] * 2])[..., None], bad)
    memory, spoilt = memory.requires_grad_(), spoilt.requires_grad_()
    for attend in (attention, attention.attention_weights):
        inputs = x, *(p for p in attention.parameters() if attend is attention)
        expected, y = attend(x, memory, mask=mask), attend(x, spoilt, mask=mask)
        assert_close(y, expected)
        assert_close(gradients(y, spoilt, *inputs), gradients(expected, memory, *inputs))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_key_that_mask_and_causality_hide_together_reaches_nothing(backend: str) -> None:
    attention = MultiHeadAttention(6, 2, backend=backend)
    x, memory = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    spoilt = memory.index_fill(1, torch.tensor([2]), torch.nan)
    for attend in (attention, attention.attention_weights):
        assert_close(attend(x, spoilt, mask=mask, is_causal=True), attend(x, memory, mask=mask, is_causal=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_key_hidden_from_one_head_only_still_serves_the_other(backend: str) -> None:
    attention = MultiHeadAttention(2, 2, num_kv_heads=1, head_dim=1, backend=backend)
    set_linear(attention.q_proj, 0)
    set_linear(attention.v_proj, [1, 0])
    set_linear(attention.out_proj, torch.eye(2))
    mask = torch.tensor([[True, False], [True, True]])[:, None]
    y = attention(torch.tensor([[[2.0, 5], [8, 5]]]), mask=mask)
    assert_close(y, torch.tensor([[[2.0, 5.0], [2.0, 5.0]]]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("num_queries", "seen", "expected"), [(2, 4, [2, 2.5]), (4, 2, [0, 0, 1, 1.5])])
def test_causal_hangs_on_the_lower_right(backend: str, num_queries: int, seen: int, expected: list[float]) -> None:
    attention = reading_values(backend)
    memory = torch.arange(1.0, seen + 1).view(1, seen, 1)
    y = attention(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close(y.flatten(), torch.tensor(expected))
    weights = attention.attention_weights(torch.zeros(1, num_queries, 1), memory, is_causal=True)
    assert_close((weights[0, 0] @ memory[0]).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_true_in_a_mask_lets_attend(backend: str) -> None:
    y = reading_values(backend)(torch.tensor([[[1.0], [2], [3]]]), mask=torch.tensor([True, True, False]))
    assert_close(y, torch.full((1, 3, 1), 1.5))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("values", "expected"), [([1, 2], [1, 1, 2, 2]), ([3], [3, 3, 3, 3])])
def test_query_heads_read_key_heads_in_groups(backend: str, values: list[float], expected: list[float]) -> None:
    attention = MultiHeadAttention(4, 4, num_kv_heads=len(values), head_dim=1, backend=backend)
    set_linear(attention.q_proj, 0)
    set_linear(attention.v_proj, 0, values)
    set_linear(attention.out_proj, torch.eye(4))
    x = torch.randn(2, 3, 4)
    assert_close(attention(x), torch.tensor(expected, dtype=torch.float32).expand(2, 3, 4))
    assert attention.attention_weights(x).shape == (2, 4, 3, 3)


def test_weights_of_query_heads_use_the_keys_of_their_group() -> None:
    attention = MultiHeadAttention(4, 4, num_kv_heads=2, head_dim=1)
    set_linear(attention.q_proj, 0, 1)
    set_linear(attention.k_proj, [[1, 0, 0, 0], [0, 1, 0, 0]])
    weights = attention.attention_weights(torch.tensor([[[30.0, 0, 0, 0], [0, 30, 0, 0]]]))
    assert_close(weights[0, :, 0], torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]))


def test_weights_are_per_head_and_not_averaged() -> None:
    attention = MultiHeadAttention(2, 2)
    for layer in (attention.q_proj, attention.k_proj):
        set_linear(layer, torch.eye(2))
    weights = attention.attention_weights(torch.tensor([[[10.0, 0], [0, 10]]]))
    expected = torch.tensor([[[[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0, 1]]]])
    assert_close(weights, expected, rtol=0, atol=1e-6)


def test_weights_equal_the_softmax_written_out() -> None:
    attention = MultiHeadAttention(6, 2, head_dim=5).double()
    x, memory = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    mask = torch.randn(3, 7, dtype=torch.float64)
    weights = attention.attention_weights(x, memory, mask=mask)
    for head in range(2):
        channels = slice(5 * head, 5 * head + 5)
        scores = attention.q_proj(x)[..., channels] @ attention.k_proj(memory)[..., channels].mT / 5**0.5 + mask
        assert_close(weights[:, head], scores.exp() / scores.exp().sum(-1, keepdim=True), rtol=0, atol=1e-15)


@pytest.mark.parametrize("queries", [-1, 0, [4, -2, 1, 1], [], slice(1, 5, 2)])
@pytest.mark.parametrize("mask", ["none", "bool each", "float per head"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_chosen_queries_equal_the_rows_of_the_full_map(
    queries: int | slice | list[int], mask: str, is_causal: bool
) -> None:
    attention = MultiHeadAttention(18, 6, num_kv_heads=3, qk_norm=True).double()
    x, memory = torch.randn(3, 5, 18, dtype=torch.float64), torch.randn(3, 7, 18, dtype=torch.float64)
    weights = partial(attention.attention_weights, x, memory, mask=MASKS[mask](3, 6, 5, 7), is_causal=is_causal)
    rows = [queries] if isinstance(queries, int) else queries
    assert_close(weights(queries=queries), weights()[:, :, rows], rtol=0, atol=1e-14)


@pytest.mark.parametrize("queries", [5, -6, [0, 5], [-6]])
def test_queries_that_do_not_exist_are_refused(queries: int | list[int]) -> None:
    with pytest.raises(ValueError, match=r"queries must lie in \[-5, 5\), got \[.*(5|-6)\]"):
        MultiHeadAttention(6, 2).attention_weights(torch.randn(2, 5, 6), queries=queries)


def test_query_rows_counts_negative_rows_from_the_end() -> None:
    exactly(query_rows([-1, 0, 2], 5, torch.device("cpu")), torch.tensor([4, 0, 2]))


@pytest.mark.parametrize(("dtype", "precise"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_probabilities_are_computed_in_float32_at_least(dtype: torch.dtype, precise: torch.dtype) -> None:
    q, k = torch.randn(2, 6, 3, 5).to(dtype), torch.randn(2, 3, 7, 5).to(dtype)
    expected = attention_probabilities(q.double(), k.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(attention_probabilities(q, k), expected.to(precise), rtol=0, atol=1e-6)


def test_weights_stay_float32_under_autocast() -> None:
    attention = MultiHeadAttention(15, 3)
    x = torch.randn(2, 7, 15)
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention.attention_weights(x)
        q, k = (proj(x).unflatten(-1, (3, 5)).transpose(1, 2) for proj in (attention.q_proj, attention.k_proj))
    assert q.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert_close(weights, (q.float() @ k.float().mT / 5**0.5).softmax(-1), rtol=0, atol=1e-6)
    assert_close(weights.sum(-1), torch.ones(2, 3, 7), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_output_in_bfloat16_is_near_that_in_float32(backend: str) -> None:
    attention = MultiHeadAttention(32, 2, backend=backend)
    x, mask = torch.randn(2, 7, 32), torch.randn(2, 1, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, mask=mask)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), attention(x, mask=mask), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("backend", "is_fused"), [("auto", True), ("flash", True), ("math", False), ("explicit", False)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_asked_for_is_the_one_that_runs(backend: str, is_fused: bool, is_causal: bool) -> None:
    attention = MultiHeadAttention(15, 3, backend=backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attention(torch.randn(2, 7, 15), is_causal=is_causal)
    ran = {event.key for event in profiler.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == is_fused
    assert ("aten::_scaled_dot_product_attention_math" in ran) == (backend == "math")


def test_a_kernel_that_cannot_run_is_refused_and_not_replaced() -> None:
    attention = MultiHeadAttention(15, 3, backend="efficient")
    with pytest.raises(ValueError, match=r"backend 'efficient' cannot run here.*float32 on cpu.*head_dim 5.*'auto'"):
        attention(torch.randn(2, 7, 15))


def test_the_observer_sees_what_the_kernel_attends_with() -> None:
    attention = MultiHeadAttention(15, 3)
    seen = []
    attention.observer = lambda *arguments: seen.append(arguments)
    x, memory, mask = torch.randn(2, 5, 15), torch.randn(2, 7, 15), torch.rand(2, 1, 1, 7) < 0.5
    attention(x, memory, mask=mask)
    ((q, k, _, _, observed_mask, is_causal),) = seen
    expected = attention.attention_weights(x, memory, mask=mask)
    exactly(attention_probabilities(q, k, observed_mask), expected)
    assert is_causal is False


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"embed_dim": 4096, "num_heads": 32, "qkv_bias": False, "out_bias": False}, 67_108_864),
        ({"embed_dim": 512, "num_heads": 8, "qkv_bias": False, "out_bias": False}, 1_048_576),
        ({"embed_dim": 512, "num_heads": 16, "qkv_bias": False, "out_bias": False}, 1_048_576),
        ({"embed_dim": 512, "num_heads": 8}, 1_048_576 + 4 * 512),
        ({"embed_dim": 512, "num_heads": 8, "qkv_bias": False}, 1_048_576 + 512),
        ({"embed_dim": 512, "num_heads": 8, "out_bias": False}, 1_048_576 + 3 * 512),
        (
            {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 2, "qkv_bias": False, "out_bias": False},
            2 * 512**2 + 2 * 512 * 2 * 64,
        ),
        ({"embed_dim": 6, "num_heads": 2, "head_dim": 5, "memory_dim": 7}, 6 * 10 + 2 * 7 * 10 + 10 * 6 + 3 * 10 + 6),
    ],
)
def test_parameter_count(arguments: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        attention = MultiHeadAttention(**arguments)
    assert sum(parameter.numel() for parameter in attention.parameters()) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 6, "num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not divisible by num_kv_heads 2"),
        ({"embed_dim": 7, "num_heads": 2}, "embed_dim 7 is not divisible by num_heads 2.*set head_dim"),
        ({"embed_dim": 6, "num_heads": 0}, "must be at least 1, got 0 and 0"),
        ({"embed_dim": 6, "num_heads": 2, "num_kv_heads": 0}, "must be at least 1, got 2 and 0"),
        (
            {"embed_dim": 6, "num_heads": 2, "attention_dropout": 1.0},
            r"attention_dropout must lie in \[0, 1\), got 1.0",
        ),
        ({"embed_dim": 6, "num_heads": 2, "attention_dropout": -0.1}, r"must lie in \[0, 1\), got -0.1"),
    ],
)
def test_what_does_not_fit_is_refused_when_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_an_integer_mask_is_refused_with_the_remedy(dtype: torch.dtype, method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must be boolean.*or float.*write mask\.bool\(\)"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(5, 5, dtype=dtype))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 5, 5), (5, 2, 1, 5), (2, 2, 4, 5), (1, 2, 2, 5, 5)])
@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_a_mask_that_does_not_broadcast_is_refused(shape: tuple[int, ...], method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2), method)
    with pytest.raises(ValueError, match=r"must broadcast to \(batch, heads, queries, keys\) = \(2, 2, 5, 5\), got"):
        attend(torch.randn(2, 5, 6), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_wrong_widths_are_refused(method: str) -> None:
    attend = getattr(MultiHeadAttention(6, 2, memory_dim=7), method)
    with pytest.raises(ValueError, match=r"x must be \(batch, queries, 6\), got \(2, 5, 7\)"):
        attend(torch.randn(2, 5, 7), torch.randn(2, 3, 7))
    with pytest.raises(ValueError, match=r"memory must be \(2, keys, 7\), got \(2, 3, 6\)"):
        attend(torch.randn(2, 5, 6), torch.randn(2, 3, 6))
    with pytest.raises(ValueError, match="memory_dim 7 differs from embed_dim 6: give a memory"):
        attend(torch.randn(2, 5, 6))


@pytest.mark.parametrize("method", ["forward", "attention_weights"])
def test_rotary_with_a_memory_is_refused(method: str) -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="cannot be used with a memory"):
        getattr(MultiHeadAttention(8, 2), method)(x, x, rotary=torch.ones(2, 5, 4))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run-time checks of types and shapes, on in tests only, which would refuse before the code does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of auto, explicit, flash, efficient, math; got 'fused'"):
        MultiHeadAttention(6, 2, backend="fused")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("x", "memory", "message"),
    [
        ((5, 6), None, r"x must be \(batch, queries, 6\), got \(5, 6\)"),
        ((2, 5, 6), (2, 6), r"memory must be \(2, keys, 6\), got \(2, 6\)"),
        ((2, 5, 6), (3, 5, 6), r"memory must be \(2, keys, 6\), got \(3, 5, 6\)"),
    ],
)
def test_wrong_axes_are_refused(x: tuple[int, ...], memory: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(6, 2)(torch.zeros(x), None if memory is None else torch.zeros(memory))


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_float32_mask_means_the_same_in_half_precision(lowest: float) -> None:
    x = torch.randn(2, 5, 12)
    mask = torch.zeros(5, 5)
    mask[3] = lowest
    outputs = []
    for backend in ("auto", "explicit"):
        torch.manual_seed(1)
        attention = MultiHeadAttention(12, 3, backend=backend)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(attention(x, mask=mask).float())
    torch.testing.assert_close(*outputs, rtol=0, atol=0.02)
    hidden = attention.out_proj.bias.expand(2, -1)
    assert torch.allclose(outputs[0][:, 3], hidden, atol=1e-3) == (lowest == -torch.inf)
