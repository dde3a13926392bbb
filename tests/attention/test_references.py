"""Multi-head attention against that of others, over sizes drawn at random and over the cases of the ONNX standard."""

import copy
import importlib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from vitmha.attention import KVCache, MultiHeadAttention
from vitmha.models.config import TokenLayout
from vitmha.models.positions import build_rope2d

CPU_BACKENDS = ["auto", "math", "flash", "explicit"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
drawn_at_random = settings(derandomize=True, deadline=None, max_examples=30, print_blob=True)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
assert_equal = partial(assert_close, rtol=0, atol=0)


class Drawn(NamedTuple):
    attention: MultiHeadAttention
    x: Tensor
    memory: Tensor | None
    mask: Tensor | None
    is_causal: bool

    def __repr__(self) -> str:
        x, memory, mask = (None if t is None else (t.dtype, tuple(t.shape)) for t in self[1:4])
        return f"{self.attention}, x {x}, memory {memory}, mask {mask}, is_causal={self.is_causal}"


def different_primes(count: int) -> st.SearchStrategy[list[int]]:
    return st.permutations([2, 3, 5, 7, 11, 13]).map(lambda primes: primes[:count])


@st.composite
def masks(draw: st.DrawFn, batch: int, heads: int, queries: int, keys: int) -> Tensor | None:
    """None, boolean, added, or added with -inf; each axis there or shared, leading ones written or not."""
    kind = draw(st.sampled_from(["none", "boolean", "added", "added with -inf"]))
    if kind == "none":
        return None
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    while len(shape) > 1 and shape[0] == 1 and draw(st.booleans()):
        shape.pop(0)
    sees, added = torch.rand(shape) < 0.7, torch.randn(shape)
    return {"boolean": sees, "added": added, "added with -inf": added.masked_fill(~sees, -torch.inf)}[kind]


@st.composite
def attentions(draw: st.DrawFn) -> Drawn:
    """In float32, self or cross, with all that SDPA has too."""
    torch.manual_seed(draw(st.integers(0, 999)))
    batch, queries, keys, embed_dim, memory_dim, head_dim = draw(different_primes(6))
    is_self, kv_heads, group = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attention = MultiHeadAttention(
        embed_dim,
        group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        memory_dim=None if is_self else memory_dim,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        # A LayerNorm over two or three numbers is nearly their signs: float32 loses its gradient.
        qk_norm=head_dim > 3 and draw(st.booleans()),
    )
    randomize_norms(attention)
    x = torch.randn(batch, queries, embed_dim)
    memory = None if is_self else torch.randn(batch, keys, memory_dim)
    mask = draw(masks(batch, group * kv_heads, queries, queries if is_self else keys))
    return Drawn(attention, x, memory, mask, is_causal=draw(st.booleans()))


def randomize_norms(attention: nn.Module) -> None:
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)


def sdpa(
    attention: MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The output and the weights by PyTorch's SDPA, in its plain form, between the module's own projections."""
    q, k, v = (
        norm(proj(tokens).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
        for proj, norm, tokens in (
            (attention.q_proj, attention.q_norm, x),
            (attention.k_proj, attention.k_norm, memory),
            (attention.v_proj, nn.Identity(), memory),
        )
    )
    if is_causal:
        past = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
        if mask is None or mask.dtype == torch.bool:
            mask = past if mask is None else mask & past
        else:
            mask = mask.masked_fill(~past, -torch.inf)
    one_hot = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    mask = None if mask is None else torch.atleast_2d(mask)
    with sdpa_kernel(SDPBackend.MATH):
        y, weights = (F.scaled_dot_product_attention(q, k, each, mask, enable_gqa=True) for each in (v, one_hot))
    return attention.out_proj(y.transpose(1, 2).flatten(2)), weights


def small_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a weighted sum of the outputs, each with weights of length 1."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    return torch.autograd.grad(outputs, inputs, [weights / weights.norm() for weights in drawn])


def assert_near(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype], check_dtype=False)


@every_dtype
@every_backend
@drawn_at_random
@given(drawn=attentions())
def test_output_weights_and_all_gradients_equal_sdpa(backend: str, dtype: torch.dtype, drawn: Drawn) -> None:
    outcomes = []
    for precision in (dtype, torch.float64):
        attention = copy.deepcopy(drawn.attention).to(precision)
        attention.backend = backend
        x = drawn.x.to(precision, copy=True).requires_grad_()
        memory = None if drawn.memory is None else drawn.memory.to(precision, copy=True).requires_grad_()
        mask = drawn.mask.to(precision) if drawn.mask is not None and drawn.mask.is_floating_point() else drawn.mask
        if not outcomes:
            y = attention(x, memory, mask=mask, is_causal=drawn.is_causal)
            weights = attention.attention_weights(x, memory, mask=mask, is_causal=drawn.is_causal)
        else:
            y, weights = sdpa(attention, x, x if memory is None else memory, mask, drawn.is_causal)
        inputs = [x, *([] if memory is None else [memory]), *attention.parameters()]
        outcomes.append([y, weights, *small_gradients([y, weights], inputs)])
    assert_near(*outcomes, dtype)


class OutputAndWeights(nn.Module):
    """Our attention under parameters that are functions of another module's, so that gradients reach those."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return self.attention(*tokens, **options), self.attention.attention_weights(*tokens, **options)

    def under(self, parameters: dict[str, Tensor], *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        named = {f"attention.{name}": tensor for name, tensor in parameters.items()}
        assert named.keys() == dict(self.named_parameters()).keys()
        return functional_call(self, named, tokens, options)


class DrawnStock(NamedTuple):
    theirs: nn.MultiheadAttention
    inputs: list[Tensor]
    padding: Tensor | None
    attn_mask: Tensor | None


@st.composite
def stock_attentions(draw: st.DrawFn) -> DrawnStock:
    """`nn.MultiheadAttention`, its query, or query, key and value, and its masks (True = may not attend)."""
    torch.manual_seed(draw(st.integers(0, 999)))
    batch, queries, keys, head_dim, key_dim, value_dim = draw(different_primes(6))
    is_self, heads, bias = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.booleans())
    dim, keys = heads * head_dim, queries if is_self else keys
    widths = {} if is_self else {"kdim": key_dim, "vdim": value_dim}
    theirs = nn.MultiheadAttention(dim, heads, bias=bias, batch_first=True, **widths)
    for parameter in (theirs.in_proj_bias, theirs.out_proj.bias) if bias else ():
        nn.init.normal_(parameter)
    inputs = [torch.randn(batch, queries, dim)]
    if not is_self:
        inputs += [torch.randn(batch, keys, key_dim), torch.randn(batch, keys, value_dim)]
    # Their weights are NaN where a query may see nothing, so the first key is always seen.
    padding = (torch.rand(batch, keys) < 0.4) & (torch.arange(keys) > 0) if draw(st.booleans()) else None
    shape = draw(st.sampled_from([(queries, keys), (batch * heads, queries, keys)]))
    blocked = (torch.rand(shape) < 0.4) & (torch.arange(keys) > 0)
    attn_mask = draw(st.sampled_from([None, blocked, torch.randn(shape).masked_fill(blocked, -torch.inf)]))
    return DrawnStock(theirs, inputs, padding, attn_mask)


def from_stock(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Our parameters; in cross-attention our memory is the key and the value side by side."""
    if theirs.in_proj_weight is None:
        k = F.pad(theirs.k_proj_weight, (0, theirs.vdim))
        v = F.pad(theirs.v_proj_weight, (theirs.kdim, 0))
        weights = theirs.q_proj_weight, k, v
    else:
        weights = theirs.in_proj_weight.chunk(3)
    ours = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if theirs.in_proj_bias is not None:
        biases = theirs.in_proj_bias.chunk(3)
        ours |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    return ours | {f"out_proj.{name}": parameter for name, parameter in theirs.out_proj.named_parameters()}


def stock_mask(drawn: DrawnStock, dtype: torch.dtype) -> Tensor | None:
    """Both masks of theirs as one of ours, where True = may attend."""
    seen = None if drawn.padding is None else ~drawn.padding[:, None, None]
    if drawn.attn_mask is None:
        return seen
    mask = drawn.attn_mask
    mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, drawn.theirs.num_heads))
    if mask.dtype == torch.bool:
        return ~mask if seen is None else ~mask & seen
    return mask.to(dtype) if seen is None else mask.to(dtype).masked_fill(~seen, -torch.inf)


@every_dtype
@drawn_at_random
@given(drawn=stock_attentions())
def test_output_weights_and_all_gradients_equal_nn_multihead_attention(dtype: torch.dtype, drawn: DrawnStock) -> None:
    outcomes = []
    for precision in (dtype, torch.float64):
        theirs = copy.deepcopy(drawn.theirs).to(precision)
        x, *memory = inputs = [each.to(precision, copy=True).requires_grad_() for each in drawn.inputs]
        if not outcomes:
            bias, memory_dim = theirs.in_proj_bias is not None, theirs.kdim + theirs.vdim if memory else None
            ours = MultiHeadAttention(
                theirs.embed_dim, theirs.num_heads, memory_dim=memory_dim, qkv_bias=bias, out_bias=bias
            )
            tokens = [x, torch.cat(memory, -1)] if memory else [x]
            mask = stock_mask(drawn, precision)
            y, weights = OutputAndWeights(ours).under(from_stock(theirs), *tokens, mask=mask)
        else:
            padding, attn_mask = drawn.padding, drawn.attn_mask
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.double()
                padding = (
                    None if padding is None else attn_mask.new_zeros(padding.shape).masked_fill(padding, -torch.inf)
                )
            y, weights = theirs(
                *(inputs if memory else 3 * [x]),
                key_padding_mask=padding,
                attn_mask=attn_mask,
                average_attn_weights=False,
            )
        outcomes.append([y, weights, *small_gradients([y, weights], [*inputs, *theirs.parameters()])])
    assert_near(*outcomes, dtype)


class DrawnTimm(NamedTuple):
    theirs: nn.Module
    x: Tensor
    mask: Tensor | None
    is_causal: bool
    layout: TokenLayout
    fields: dict[str, Any]


@st.composite
def timm_attentions(draw: st.DrawFn, rope: bool) -> DrawnTimm:
    """timm's module, its input, and our arguments."""
    torch.manual_seed(draw(st.integers(0, 999)))
    batch, height, width, heads = draw(different_primes(4))
    layout = TokenLayout(
        num_class_tokens=1, num_registers=draw(st.integers(0, 2)), grid_size=(height, width), patch_size=(1, 1)
    )
    flags = {name: draw(st.booleans()) for name in ("qkv_bias", "qk_norm", "proj_bias")}
    options = {**flags, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}
    kv_heads = draw(st.sampled_from([heads, 1])) if rope else heads
    # The width of a rotated head is a multiple of 4.
    dim = heads * draw(st.sampled_from([4, 8, 12] if rope else [5, 7, 11]))
    if rope:
        options |= {"num_kv_heads": kv_heads, "qkv_fused": False, "num_prefix_tokens": layout.num_prefix_tokens}
    theirs = (timm.layers.AttentionRope if rope else timm.layers.Attention)(dim, heads, **options)
    randomize_norms(theirs)
    fields = {"embed_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads, "out_bias": flags.pop("proj_bias")}
    mask = draw(masks(batch, heads, layout.num_tokens, layout.num_tokens))
    is_causal = mask is None and draw(st.booleans())
    return DrawnTimm(theirs, torch.randn(batch, layout.num_tokens, dim), mask, is_causal, layout, fields | flags)


def from_timm(theirs: nn.Module) -> dict[str, Tensor]:
    """Our parameters; theirs of q, k and v may be one."""
    ours = {}
    for name, parameter in theirs.named_parameters():
        layer, kind = name.rsplit(".", 1)
        if layer == "qkv":
            ours |= {f"{each}_proj.{kind}": part for each, part in zip("qkv", parameter.chunk(3), strict=True)}
        else:
            ours[f"out_proj.{kind}" if layer == "proj" else name] = parameter
    return ours


def assert_equals_timm(drawn: DrawnTimm, dtype: torch.dtype, rope: Tensor | None, timm_rope: Tensor | None) -> None:
    outcomes = []
    for precision in (dtype, torch.float64):
        theirs, x = copy.deepcopy(drawn.theirs).to(precision), drawn.x.to(precision, copy=True).requires_grad_()
        mask = drawn.mask.to(precision) if drawn.mask is not None and drawn.mask.is_floating_point() else drawn.mask
        if not outcomes:
            ours, options = OutputAndWeights(MultiHeadAttention(**drawn.fields)), {"is_causal": drawn.is_causal}
            y, _ = ours.under(from_timm(theirs), x, mask=mask, rope=rope, **options)
        else:
            attn_mask = None if mask is None else torch.atleast_2d(mask)
            rotation = {} if timm_rope is None else {"rope": timm_rope.double()}
            y = theirs(x, attn_mask=attn_mask, is_causal=drawn.is_causal, **rotation)
        outcomes.append([y, *small_gradients([y], [x, *theirs.parameters()])])
    assert_near(*outcomes, dtype)


@every_dtype
@drawn_at_random
@given(drawn=timm_attentions(rope=False))
def test_output_and_all_gradients_equal_timm_attention(dtype: torch.dtype, drawn: DrawnTimm) -> None:
    assert_equals_timm(drawn, dtype, None, None)


@every_dtype
@drawn_at_random
@given(drawn=timm_attentions(rope=True), per_image=st.booleans())
def test_rotary_output_and_all_gradients_equal_timm(dtype: torch.dtype, drawn: DrawnTimm, per_image: bool) -> None:
    head_dim = drawn.fields["embed_dim"] // drawn.fields["num_heads"]
    rope = build_rope2d(drawn.layout, head_dim)
    timm_rope = timm.layers.RotaryEmbeddingCat(
        head_dim, in_pixels=False, feat_shape=list(drawn.layout.grid_size)
    ).get_embed()
    as_timm = torch.cat([rope[1], rope[0]], -1)[drawn.layout.num_prefix_tokens :]
    assert_close(as_timm, timm_rope, rtol=0, atol=1e-6)
    rope = rope.to(dtype)
    if per_image:
        rope = rope[:, None, None].expand(2, len(drawn.x), 1, -1, -1)
    assert_equals_timm(drawn, dtype, rope, as_timm)


SOFTCAP = "squeezes the scores through a tanh, which this attention has not"
LEFT_OUT = {"*_softcap*": SOFTCAP, "test_attention_local_window_gqa_rank4_mask": SOFTCAP}


def onnx_cases() -> list[Any]:
    """Those of the ONNX operator `Attention`, but not their copies that are written out in other operators."""
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Only this module of cases: `load_model_tests` would import all operators, for ten seconds.
        importlib.import_module("onnx.backend.test.case.node.attention")
        every = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
        return [case for case in every if case.name.startswith("test_attention") and "expanded" not in case.name]
    return []


def is_left_out(case: Any) -> bool:
    return any(fnmatch(case.name, pattern) for pattern in LEFT_OUT)


ONNX_CASES = onnx_cases()
APPLIED = [case for case in ONNX_CASES if not is_left_out(case)]


def tensors(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, Tensor]:
    """By name; optional ones that a case has not are called ""."""
    named = zip([name for name in names if name], arrays, strict=True)
    return {name: torch.tensor(a.astype("float32")).to(getattr(torch, a.dtype.name)) for name, a in named}


class OnnxCase:
    """One case as (batch, heads, tokens, width) tensors, and its masks as one mask of ours.

    Heads whose values are wider or narrower than their keys are filled up with zeros, and another scale than
    1 / sqrt(head_dim) goes into the weights of `q_proj`.
    """

    def __init__(self, case: Any) -> None:
        from onnx.helper import get_attribute_value

        (node,) = case.model.graph.node
        ((inputs, outputs),) = case.data_sets
        self.options = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
        self.inputs, self.outputs = tensors(node.input, inputs), tensors(node.output, outputs)
        q, k, v = (self.inputs[name] for name in "QKV")
        if q.ndim == 3:
            self.num_heads, kv_heads = self.options["q_num_heads"], self.options["kv_num_heads"]
            q, k, v = (
                t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, self.num_heads), (k, kv_heads), (v, kv_heads))
            )
        self.num_heads, self.num_kv_heads, self.dtype = q.shape[1], k.shape[1], q.dtype
        self.key_width, self.value_width = k.shape[-1], v.shape[-1]
        self.scale = self.options.get("scale", self.key_width**-0.5)
        self.num_new = k.shape[2]
        if "past_key" in self.inputs:
            k, v = torch.cat([self.inputs["past_key"], k], 2), torch.cat([self.inputs["past_value"], v], 2)
        self.head_dim = max(self.key_width, self.value_width)
        self.q, self.k, self.v = (F.pad(each, (0, self.head_dim - each.shape[-1])) for each in (q, k, v))

    def mask(self, causal_offset: int) -> tuple[Tensor | None, bool]:
        """Our mask, and our flag where their causal mask is the one that lets query i see keys up to i + offset."""
        batch, _, queries, _ = self.q.shape
        keys = torch.arange(self.k.shape[2])
        offset = torch.tensor([self.k.shape[2] - self.num_new])
        sees = torch.ones(batch, 1, queries, len(keys), dtype=torch.bool)
        if "nonpad_kv_seqlen" in self.inputs:
            present = self.inputs["nonpad_kv_seqlen"]
            offset = present - queries
            sees &= keys < present[:, None, None, None]
        last = torch.arange(queries)[:, None] + offset[:, None, None, None]
        is_causal = bool(self.options.get("is_causal"))
        is_ours = bool((offset == causal_offset).all())
        if is_causal and not is_ours:
            sees &= keys <= last
        left, right = (self.options.get(f"{side}_window_size", -1) for side in ("left", "right"))
        sees &= (keys >= last - left) | (left < 0)
        sees &= (keys <= last + right) | (right < 0)
        return self._joined(sees), is_causal and is_ours

    def _joined(self, sees: Tensor) -> Tensor | None:
        mask, everywhere = self.inputs.get("attn_mask"), bool(sees.all())
        if mask is None:
            return None if everywhere else sees
        is_bool = mask.dtype == torch.bool
        mask = F.pad(mask, (0, sees.shape[-1] - mask.shape[-1]), value=False if is_bool else -torch.inf)
        if everywhere:
            return mask
        return mask & sees if is_bool else mask.masked_fill(~sees, -torch.inf)

    def attention(self, backend: str, *, is_self: bool) -> MultiHeadAttention:
        """Projections that only pick: from q, and k beside v; in self-attention from q, k and v side by side."""
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = MultiHeadAttention(
            q_width + 2 * kv_width * is_self,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            memory_dim=q_width * is_self + 2 * kv_width,
            qkv_bias=False,
            out_bias=False,
            backend=backend,
        )
        before = q_width * is_self
        nn.init.zeros_(attention.out_proj.weight)[:q_width] = torch.eye(q_width)
        for layer, start, factor in (
            (attention.q_proj, 0, self.scale * self.head_dim**0.5),
            (attention.k_proj, before, 1),
            (attention.v_proj, before + kv_width, 1),
        ):
            count = layer.out_features
            nn.init.zeros_(layer.weight)[:, start : start + count] = factor * torch.eye(count)
        return attention.to(self.dtype)

    def check(self, name: str, found: Tensor) -> None:
        """Compares (batch, heads, tokens, width) with an output of the case."""
        expected = self.outputs[name]
        if expected.ndim == 3:
            expected = expected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[self.dtype]
        assert_close(found.to(self.dtype), expected, rtol=tolerance, atol=tolerance)


def side_by_side(*parts: Tensor) -> Tensor:
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)


@every_backend
@pytest.mark.parametrize("case", APPLIED, ids=lambda case: case.name.removeprefix("test_attention_"))
@torch.no_grad()
def test_onnx_cases(case: Any, backend: str) -> None:
    case = OnnxCase(case)
    queries, keys = case.q.shape[2], case.k.shape[2]
    attention = case.attention(backend, is_self=False)
    mask, is_causal = case.mask(keys - queries)
    tokens = side_by_side(case.q), side_by_side(case.k, case.v)
    y = attention(*tokens, mask=mask, is_causal=is_causal).unflatten(-1, (case.num_heads, -1)).transpose(1, 2)
    case.check("Y", y[..., : case.value_width])
    if case.options.get("qk_matmul_output_mode") == 3:
        weights = attention.attention_weights(*tokens, mask=mask, is_causal=is_causal)
        case.check("qk_matmul_output", weights)


@every_backend
@pytest.mark.parametrize(
    "case",
    [case for case in APPLIED if "present_key" in case.model.graph.node[0].output],
    ids=lambda case: case.name.removeprefix("test_attention_"),
)
@torch.no_grad()
def test_onnx_cases_with_a_past_by_our_cache(case: Any, backend: str) -> None:
    case = OnnxCase(case)
    queries, keys = case.q.shape[2], case.k.shape[2]
    # Each token of a self-attention is query, key and value: where there are fewer queries, further ones are zeros.
    last = max(queries, case.num_new)
    q = F.pad(case.q, (0, 0, keys - last, last - queries))
    mask, is_causal = case.mask(keys - last)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, (0, 0, 0, last - queries), value=mask.dtype == torch.bool)
    attention, cache = case.attention(backend, is_self=True), KVCache(keys + 1)
    past, new = side_by_side(q, case.k, case.v).split([keys - last, last], 1)
    attention(past, cache=cache)
    y = attention(new, mask=mask, is_causal=is_causal, cache=cache)[:, :queries, : case.num_heads * case.head_dim]
    case.check("Y", y.unflatten(-1, (case.num_heads, -1)).transpose(1, 2)[..., : case.value_width])
    present_key, present_value = cache.read()
    assert_equal(present_key[..., : case.key_width], case.outputs["present_key"])
    assert_equal(present_value[..., : case.value_width], case.outputs["present_value"])


def test_each_onnx_case_is_run_or_left_out_for_a_reason(record_property: Any) -> None:
    pytest.importorskip("onnx")
    left_out = [case for case in ONNX_CASES if is_left_out(case)]
    record_property("onnx_cases_run", len(APPLIED))
    record_property("onnx_cases_left_out", LEFT_OUT)
    assert len(APPLIED) + len(left_out) == 93
    for case in left_out:
        assert "softcap" in [attribute.name for attribute in case.model.graph.node[0].attribute]
    for pattern in LEFT_OUT:
        assert any(fnmatch(case.name, pattern) for case in left_out)
