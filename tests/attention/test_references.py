"""Multi-head attention against other implementations, on randomly drawn sizes and on the cases of the ONNX standard."""

import copy
import importlib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from inspect import signature
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
random_cases = settings(derandomize=True, deadline=None, max_examples=30, print_blob=True)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
assert_equal = partial(assert_close, rtol=0, atol=0)


class AttentionCase(NamedTuple):
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
    """None, boolean, float, or float with -inf; any axis may be of size 1, and leading ones may be missing."""
    kind = draw(st.sampled_from(["none", "boolean", "float", "float with -inf"]))
    if kind == "none":
        return None
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    while len(shape) > 1 and shape[0] == 1 and draw(st.booleans()):
        shape.pop(0)
    allowed, scores = torch.rand(shape) < 0.7, torch.randn(shape)
    return {"boolean": allowed, "float": scores, "float with -inf": scores.masked_fill(~allowed, -torch.inf)}[kind]


@st.composite
def attentions(draw: st.DrawFn) -> AttentionCase:
    """Self- or cross-attention in float32, with all features that SDPA has too."""
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
        # A LayerNorm over two or three values is nearly their signs: float32 loses its gradient.
        qk_norm=head_dim > 3 and draw(st.booleans()),
    )
    randomize_norms(attention)
    x = torch.randn(batch, queries, embed_dim)
    memory = None if is_self else torch.randn(batch, keys, memory_dim)
    mask = draw(masks(batch, group * kv_heads, queries, queries if is_self else keys))
    return AttentionCase(attention, x, memory, mask, is_causal=draw(st.booleans()))


def randomize_norms(attention: nn.Module) -> None:
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)


def sdpa(
    attention: MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and weights by PyTorch's SDPA with the math kernel, between the projections of the module."""
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
        y, weights = (F.scaled_dot_product_attention(q, k, values, mask, enable_gqa=True) for values in (v, one_hot))
    return attention.out_proj(y.transpose(1, 2).flatten(2)), weights


def small_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum of the outputs, with a weight vector of norm 1 for each output."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    return torch.autograd.grad(outputs, inputs, [weights / weights.norm() for weights in drawn])


def assert_near(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype], check_dtype=False)


@every_dtype
@every_backend
@random_cases
@given(drawn=attentions())
def test_output_weights_and_all_gradients_equal_sdpa(backend: str, dtype: torch.dtype, drawn: AttentionCase) -> None:
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
    """Attention with parameters computed from those of another module, so that gradients reach the latter."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return self.attention(*tokens, **options), self.attention.attention_weights(*tokens, **options)

    def under(self, parameters: dict[str, Tensor], *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        named = {f"attention.{name}": tensor for name, tensor in parameters.items()}
        assert named.keys() == dict(self.named_parameters()).keys()
        return functional_call(self, named, tokens, options)


class TorchCase(NamedTuple):
    reference: nn.MultiheadAttention
    inputs: list[Tensor]
    padding: Tensor | None
    attn_mask: Tensor | None


@st.composite
def torch_attentions(draw: st.DrawFn) -> TorchCase:
    """`nn.MultiheadAttention`, its query, or query, key and value, and its masks (True = may not attend)."""
    torch.manual_seed(draw(st.integers(0, 999)))
    batch, queries, keys, head_dim, key_dim, value_dim = draw(different_primes(6))
    is_self, heads, bias = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.booleans())
    dim, keys = heads * head_dim, queries if is_self else keys
    widths = {} if is_self else {"kdim": key_dim, "vdim": value_dim}
    reference = nn.MultiheadAttention(dim, heads, bias=bias, batch_first=True, **widths)
    for parameter in (reference.in_proj_bias, reference.out_proj.bias) if bias else ():
        nn.init.normal_(parameter)
    inputs = [torch.randn(batch, queries, dim)]
    if not is_self:
        inputs += [torch.randn(batch, keys, key_dim), torch.randn(batch, keys, value_dim)]
    # PyTorch returns NaN weights for a fully masked query, so the first key is never masked.
    padding = (torch.rand(batch, keys) < 0.4) & (torch.arange(keys) > 0) if draw(st.booleans()) else None
    shape = draw(st.sampled_from([(queries, keys), (batch * heads, queries, keys)]))
    blocked = (torch.rand(shape) < 0.4) & (torch.arange(keys) > 0)
    attn_mask = draw(st.sampled_from([None, blocked, torch.randn(shape).masked_fill(blocked, -torch.inf)]))
    return TorchCase(reference, inputs, padding, attn_mask)


def from_torch(reference: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Parameters under vitmha's names; in cross-attention the memory is the key and the value concatenated."""
    if reference.in_proj_weight is None:
        k = F.pad(reference.k_proj_weight, (0, reference.vdim))
        v = F.pad(reference.v_proj_weight, (reference.kdim, 0))
        weights = reference.q_proj_weight, k, v
    else:
        weights = reference.in_proj_weight.chunk(3)
    parameters = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if reference.in_proj_bias is not None:
        biases = reference.in_proj_bias.chunk(3)
        parameters |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    return parameters | {f"out_proj.{name}": parameter for name, parameter in reference.out_proj.named_parameters()}


def torch_mask(drawn: TorchCase, dtype: torch.dtype) -> Tensor | None:
    """Both masks of `nn.MultiheadAttention` as one, where True = may attend."""
    allowed = None if drawn.padding is None else ~drawn.padding[:, None, None]
    if drawn.attn_mask is None:
        return allowed
    mask = drawn.attn_mask
    mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, drawn.reference.num_heads))
    if mask.dtype == torch.bool:
        return ~mask if allowed is None else ~mask & allowed
    return mask.to(dtype) if allowed is None else mask.to(dtype).masked_fill(~allowed, -torch.inf)


@every_dtype
@random_cases
@given(drawn=torch_attentions())
def test_output_weights_and_all_gradients_equal_nn_multihead_attention(dtype: torch.dtype, drawn: TorchCase) -> None:
    outcomes = []
    for precision in (dtype, torch.float64):
        reference = copy.deepcopy(drawn.reference).to(precision)
        x, *memory = inputs = [tensor.to(precision, copy=True).requires_grad_() for tensor in drawn.inputs]
        if not outcomes:
            bias, memory_dim = reference.in_proj_bias is not None, reference.kdim + reference.vdim if memory else None
            model = MultiHeadAttention(
                reference.embed_dim, reference.num_heads, memory_dim=memory_dim, qkv_bias=bias, out_bias=bias
            )
            tokens = [x, torch.cat(memory, -1)] if memory else [x]
            mask = torch_mask(drawn, precision)
            y, weights = OutputAndWeights(model).under(from_torch(reference), *tokens, mask=mask)
        else:
            padding, attn_mask = drawn.padding, drawn.attn_mask
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.double()
                padding = (
                    None if padding is None else attn_mask.new_zeros(padding.shape).masked_fill(padding, -torch.inf)
                )
            y, weights = reference(
                *(inputs if memory else 3 * [x]),
                key_padding_mask=padding,
                attn_mask=attn_mask,
                average_attn_weights=False,
            )
        outcomes.append([y, weights, *small_gradients([y, weights], [*inputs, *reference.parameters()])])
    assert_near(*outcomes, dtype)


class TimmCase(NamedTuple):
    reference: nn.Module
    x: Tensor
    mask: Tensor | None
    is_causal: bool
    layout: TokenLayout
    fields: dict[str, Any]


@st.composite
def timm_attentions(draw: st.DrawFn, rope: bool) -> TimmCase:
    """A module of timm, its input, and the arguments of MultiHeadAttention."""
    torch.manual_seed(draw(st.integers(0, 999)))
    batch, height, width, heads = draw(different_primes(4))
    layout = TokenLayout(
        num_class_tokens=1, num_registers=draw(st.integers(0, 2)), grid_size=(height, width), patch_size=(1, 1)
    )
    flags = {name: draw(st.booleans()) for name in ("qkv_bias", "qk_norm", "proj_bias")}
    options = {**flags, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}
    has_groups = rope and "num_kv_heads" in signature(timm.layers.AttentionRope).parameters  # not in timm 1.0.26
    kv_heads = draw(st.sampled_from([heads, 1])) if has_groups else heads
    # The width of a rotated head is a multiple of 4.
    dim = heads * draw(st.sampled_from([4, 8, 12] if rope else [5, 7, 11]))
    if rope:
        options |= {"qkv_fused": False, "num_prefix_tokens": layout.num_prefix_tokens}
    if has_groups:
        options["num_kv_heads"] = kv_heads
    reference = (timm.layers.AttentionRope if rope else timm.layers.Attention)(dim, heads, **options)
    randomize_norms(reference)
    fields = {"embed_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads, "out_bias": flags.pop("proj_bias")}
    mask = draw(masks(batch, heads, layout.num_tokens, layout.num_tokens))
    is_causal = mask is None and draw(st.booleans())
    return TimmCase(reference, torch.randn(batch, layout.num_tokens, dim), mask, is_causal, layout, fields | flags)


def from_timm(reference: nn.Module) -> dict[str, Tensor]:
    """Parameters under vitmha's names; timm may fuse those of q, k and v."""
    parameters = {}
    for name, parameter in reference.named_parameters():
        layer, kind = name.rsplit(".", 1)
        if layer == "qkv":
            parameters |= {f"{name}_proj.{kind}": part for name, part in zip("qkv", parameter.chunk(3), strict=True)}
        else:
            parameters[f"out_proj.{kind}" if layer == "proj" else name] = parameter
    return parameters


def assert_equals_timm(drawn: TimmCase, dtype: torch.dtype, rope: Tensor | None, timm_rope: Tensor | None) -> None:
    outcomes = []
    for precision in (dtype, torch.float64):
        reference, x = copy.deepcopy(drawn.reference).to(precision), drawn.x.to(precision, copy=True).requires_grad_()
        mask = drawn.mask.to(precision) if drawn.mask is not None and drawn.mask.is_floating_point() else drawn.mask
        if not outcomes:
            model, options = OutputAndWeights(MultiHeadAttention(**drawn.fields)), {"is_causal": drawn.is_causal}
            y, _ = model.under(from_timm(reference), x, mask=mask, rope=rope, **options)
        else:
            attn_mask = None if mask is None else torch.atleast_2d(mask)
            rotation = {} if timm_rope is None else {"rope": timm_rope.double()}
            y = reference(x, attn_mask=attn_mask, is_causal=drawn.is_causal, **rotation)
        outcomes.append([y, *small_gradients([y], [x, *reference.parameters()])])
    assert_near(*outcomes, dtype)


@every_dtype
@random_cases
@given(drawn=timm_attentions(rope=False))
def test_output_and_all_gradients_equal_timm_attention(dtype: torch.dtype, drawn: TimmCase) -> None:
    assert_equals_timm(drawn, dtype, None, None)


@every_dtype
@random_cases
@given(drawn=timm_attentions(rope=True), per_image=st.booleans())
def test_rotary_output_and_all_gradients_equal_timm(dtype: torch.dtype, drawn: TimmCase, per_image: bool) -> None:
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


SOFTCAP = "applies a tanh to the scores, which MultiHeadAttention does not support"
UNSUPPORTED = {"*_softcap*": SOFTCAP, "test_attention_local_window_gqa_rank4_mask": SOFTCAP}


def onnx_cases() -> list[Any]:
    """The cases of the ONNX operator `Attention`, without their copies that are expanded into other operators."""
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Only this module of cases: `load_model_tests` would import all operators, which takes ten seconds.
        importlib.import_module("onnx.backend.test.case.node.attention")
        cases = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
        return [case for case in cases if case.name.startswith("test_attention") and "expanded" not in case.name]
    return []


def is_unsupported(case: Any) -> bool:
    return any(fnmatch(case.name, pattern) for pattern in UNSUPPORTED)


ONNX_CASES = onnx_cases()
SUPPORTED = [case for case in ONNX_CASES if not is_unsupported(case)]


def tensors(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, Tensor]:
    """Tensors by name; the name of an optional input that is missing is ""."""
    named = zip([name for name in names if name], arrays, strict=True)
    return {name: torch.tensor(a.astype("float32")).to(getattr(torch, a.dtype.name)) for name, a in named}


class OnnxCase:
    """One case as (batch, heads, tokens, width) tensors, with its masks merged into one.

    If keys and values have different widths, the narrower are padded with zeros. A scale other than 1 / sqrt(head_dim)
    is folded into the weights of `q_proj`.
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
        self.q, self.k, self.v = (F.pad(t, (0, self.head_dim - t.shape[-1])) for t in (q, k, v))

    def mask(self, causal_offset: int) -> tuple[Tensor | None, bool]:
        """The mask, and is_causal if the case is causal with query i attending to keys up to i + causal_offset."""
        batch, _, queries, _ = self.q.shape
        keys = torch.arange(self.k.shape[2])
        offset = torch.tensor([self.k.shape[2] - self.num_new])
        allowed = torch.ones(batch, 1, queries, len(keys), dtype=torch.bool)
        if "nonpad_kv_seqlen" in self.inputs:
            present = self.inputs["nonpad_kv_seqlen"]
            offset = present - queries
            allowed &= keys < present[:, None, None, None]
        last = torch.arange(queries)[:, None] + offset[:, None, None, None]
        is_causal = bool(self.options.get("is_causal"))
        is_aligned = bool((offset == causal_offset).all())
        if is_causal and not is_aligned:
            allowed &= keys <= last
        left, right = (self.options.get(f"{side}_window_size", -1) for side in ("left", "right"))
        allowed &= (keys >= last - left) | (left < 0)
        allowed &= (keys <= last + right) | (right < 0)
        return self._merged(allowed), is_causal and is_aligned

    def _merged(self, allowed: Tensor) -> Tensor | None:
        mask, is_trivial = self.inputs.get("attn_mask"), bool(allowed.all())
        if mask is None:
            return None if is_trivial else allowed
        is_bool = mask.dtype == torch.bool
        mask = F.pad(mask, (0, allowed.shape[-1] - mask.shape[-1]), value=False if is_bool else -torch.inf)
        if is_trivial:
            return mask
        return mask & allowed if is_bool else mask.masked_fill(~allowed, -torch.inf)

    def attention(self, backend: str, *, is_self: bool) -> MultiHeadAttention:
        """Projections that only select: from q, and from k and v concatenated; in self-attention from all three."""
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
        """Compares a tensor (batch, heads, tokens, width) with an output of the case."""
        expected = self.outputs[name]
        if expected.ndim == 3:
            expected = expected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[self.dtype]
        assert_close(found.to(self.dtype), expected, rtol=tolerance, atol=tolerance)


def concatenated(*parts: Tensor) -> Tensor:
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)


@every_backend
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name.removeprefix("test_attention_"))
@torch.no_grad()
def test_onnx_cases(case: Any, backend: str) -> None:
    case = OnnxCase(case)
    queries, keys = case.q.shape[2], case.k.shape[2]
    attention = case.attention(backend, is_self=False)
    mask, is_causal = case.mask(keys - queries)
    tokens = concatenated(case.q), concatenated(case.k, case.v)
    y = attention(*tokens, mask=mask, is_causal=is_causal).unflatten(-1, (case.num_heads, -1)).transpose(1, 2)
    case.check("Y", y[..., : case.value_width])
    if case.options.get("qk_matmul_output_mode") == 3:
        weights = attention.attention_weights(*tokens, mask=mask, is_causal=is_causal)
        case.check("qk_matmul_output", weights)


@every_backend
@pytest.mark.parametrize(
    "case",
    [case for case in SUPPORTED if "present_key" in case.model.graph.node[0].output],
    ids=lambda case: case.name.removeprefix("test_attention_"),
)
@torch.no_grad()
def test_onnx_cases_with_a_past_by_the_cache(case: Any, backend: str) -> None:
    case = OnnxCase(case)
    queries, keys = case.q.shape[2], case.k.shape[2]
    # In self-attention each token is query, key and value: missing queries are padded with zeros.
    last = max(queries, case.num_new)
    q = F.pad(case.q, (0, 0, keys - last, last - queries))
    mask, is_causal = case.mask(keys - last)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, (0, 0, 0, last - queries), value=mask.dtype == torch.bool)
    attention, cache = case.attention(backend, is_self=True), KVCache(keys + 1)
    past, new = concatenated(q, case.k, case.v).split([keys - last, last], 1)
    attention(past, cache=cache)
    y = attention(new, mask=mask, is_causal=is_causal, cache=cache)[:, :queries, : case.num_heads * case.head_dim]
    case.check("Y", y.unflatten(-1, (case.num_heads, -1)).transpose(1, 2)[..., : case.value_width])
    present_key, present_value = cache.read()
    assert_equal(present_key[..., : case.key_width], case.outputs["present_key"])
    assert_equal(present_value[..., : case.value_width], case.outputs["present_value"])


def test_each_onnx_case_is_run_or_unsupported_for_a_reason(record_property: Any) -> None:
    pytest.importorskip("onnx")
    unsupported = [case for case in ONNX_CASES if is_unsupported(case)]
    record_property("onnx_cases_run", len(SUPPORTED))
    record_property("onnx_cases_unsupported", UNSUPPORTED)
    assert len(SUPPORTED) + len(unsupported) == 93
    for case in unsupported:
        assert "softcap" in [attribute.name for attribute in case.model.graph.node[0].attribute]
    for pattern in UNSUPPORTED:
        assert any(fnmatch(case.name, pattern) for case in unsupported)
