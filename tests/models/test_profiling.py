"""Costs against closed forms and PyTorch's FLOP counter; measurements against known times and allocations."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vitmha.attention import KVCache, MultiHeadAttention
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.profiling import (
    LayerCost,
    at_image_size,
    layer_costs,
    measure,
    median_seconds,
    peak_bytes,
    total_cost,
)
from vitmha.models.vit import VisionTransformer, create_model

CPU = torch.device("cpu")
SMALL = {
    "image_size": (6, 20),
    "patch_size": (2, 4),
    "in_channels": 2,
    "num_classes": 11,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 6,
    "mlp_dim": 13,
}
CONFIGS = {
    "class token": {},
    "mean pool": {"pool": "mean"},
    "attention pool": {"pool": "attention"},
    "grouped heads": {"num_kv_heads": 2},
    "one key/value head": {"num_kv_heads": 1, "pool": "attention"},
    "free head_dim": {"head_dim": 5, "num_kv_heads": 3},
    "swiglu": {"mlp": "swiglu", "pool": "mean"},
    "registers": {"num_registers": 7},
    "distillation token": {"distillation_token": True, "num_registers": 7},
    "registers, mean pool": {"num_registers": 7, "pool": "mean"},
    "rope": {"pos_embed": "rope", "qk_norm": True},
    "fixed positions": {"pos_embed": "sincos2d", "layer_scale_init": 0.1, "qkv_bias": False},
    "one block": {"depth": 1},
}


def count_cpu_kernel(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """PyTorch's counter knows the fused kernels of CUDA, not the CPU's; that of torch 2.9 no grouped heads."""
    return sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


CPU_KERNEL = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_cpu_kernel}


def small(**fields: object) -> VisionTransformer:
    return VisionTransformer(ViTConfig(**{**SMALL, **fields})).eval()


def pruned() -> VisionTransformer:
    """Grouped heads, different ones pruned in each block, so that the groups of one block are of unequal size."""
    model = small(num_kv_heads=3)
    model.blocks[0].attn.prune_heads({0})
    model.blocks[1].attn.prune_heads({2, 3, 5})
    return model


def counted_by_torch(model: VisionTransformer, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNEL) as counter:
        model(images)
    return counter.get_total_flops()


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_macs_are_half_the_flops_that_torch_counts(fields: dict[str, object], backend: str) -> None:
    model = small(**fields, backend=backend)
    assert 2 * total_cost(layer_costs(model, batch_size=5)).macs == counted_by_torch(model, torch.randn(5, 2, 6, 20))


@pytest.mark.parametrize("backend", ["auto", "math", "explicit"])
@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_macs_of_a_decoder_are_half_the_flops_that_torch_counts(pool: str, backend: str) -> None:
    decoder = DecoderConfig(max_length=7, depth=2, num_heads=4, num_kv_heads=2, mlp_dim=11)
    model = EncoderDecoder(ViTConfig(**{**SMALL, "pool": pool, "num_kv_heads": 3, "backend": backend}), decoder)
    model.blocks[1].cross_attn.prune_heads({0})
    costs = layer_costs(model, batch_size=5)
    images, sequences = torch.randn(5, 2, 6, 20), torch.randint(11, (5, 7))
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNEL) as counter:
        model(images, sequences)
    assert 2 * total_cost(costs).macs == counter.get_total_flops()
    assert total_cost(costs).parameters == sum(parameter.numel() for parameter in model.parameters())
    tokens = model.config.layout.num_tokens
    caches = model.new_caches(tokens)
    with torch.no_grad():
        model.decode(sequences, torch.randn(5, tokens, 24), caches)
    cache_bytes = {cost.name: cost.cache_bytes for cost in costs}
    assert [cache_bytes[f"decoder {i}"] for i in (0, 1)] == [c.tokens.nbytes + c.memory.nbytes for c in caches]


def test_an_encoder_decoder_is_measured_at_another_size() -> None:
    model = EncoderDecoder(ViTConfig(**SMALL), DecoderConfig(max_length=7, mlp_dim=11)).eval()
    model.blocks[0].self_attn.prune_heads({1, 2})
    larger = at_image_size(model, (8, 24))
    assert larger.config.layout.grid_size == (4, 6)
    assert [block.self_attn.num_heads for block in larger.blocks] == [2, 4]
    measured = measure(larger, torch.randn(2, 2, 8, 24), "explicit")
    assert measured.seconds > 0
    assert measured.peak_bytes > 0


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_the_parameters_of_the_layers_sum_to_all_parameters(fields: dict[str, object]) -> None:
    model = small(**fields)
    assert total_cost(layer_costs(model)).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_pruned_heads_cost_nothing() -> None:
    model = pruned()
    costs = layer_costs(model, batch_size=5)
    assert 2 * total_cost(costs).macs == counted_by_torch(model, torch.randn(5, 2, 6, 20))
    assert total_cost(costs).parameters == sum(parameter.numel() for parameter in model.parameters())
    # 16 tokens, heads of 4 channels. Block 0 keeps heads 1 2 3 4 5 on 3 key/value heads, block 1 heads 0 1 4 on 2.
    assert [cost.scores for cost in costs] == [0, *(5 * 2 * 16 * 16 * 4 * heads for heads in (5, 3, 6)), 0]
    assert [cost.score_bytes for cost in costs] == [0, *(5 * 4 * 16 * 16 * heads for heads in (5, 3, 6)), 0]
    assert [cost.cache_bytes for cost in costs] == [0, *(5 * 4 * 2 * 16 * 4 * heads for heads in (3, 2, 3)), 0]
    assert [cost.projections for cost in costs[1:-1]] == [5 * 2 * 16 * 24 * 4 * n for n in (5 + 3, 3 + 2, 6 + 3)]


@pytest.mark.parametrize(
    ("name", "parameters"), [("vit_tiny", 5_717_416), ("vit_small", 22_050_664), ("vit_base", 86_567_656)]
)
def test_the_named_sizes_agree_with_their_papers(name: str, parameters: int) -> None:
    model = create_model(name)
    costs, n, d = layer_costs(model), 197, model.config.embed_dim
    block = LayerCost(
        name="block 0",
        parameters=12 * d**2 + 13 * d,
        projections=4 * n * d**2,
        scores=2 * n**2 * d,
        mlp=2 * n * d * 4 * d,
        score_bytes=4 * model.config.num_heads * n**2,
        cache_bytes=4 * 2 * n * d,
    )
    assert costs[1] == block
    assert costs[12].mlp == 2 * d * 4 * d
    assert total_cost(costs).parameters == parameters


def test_grouped_heads_and_swiglu_follow_the_closed_forms() -> None:
    model = small(num_kv_heads=2, head_dim=5, mlp="swiglu", pool="mean", num_registers=1)
    first = layer_costs(model, batch_size=7)[1]
    assert first.projections == 7 * 2 * 16 * 24 * (6 + 2) * 5
    assert first.scores == 7 * 2 * 16 * 16 * 6 * 5
    assert first.mlp == 7 * 3 * 16 * 24 * 13
    assert first.score_bytes == 7 * 6 * 16 * 16 * 4
    assert first.cache_bytes == 7 * 2 * 2 * 5 * 16 * 4


def test_costs_of_every_layer_by_hand() -> None:
    # 2 x 2 patches of 3 pixels, a class token, width 4, 2 heads of 2, an MLP of 3.
    model = VisionTransformer(
        ViTConfig(
            image_size=(2, 6),
            patch_size=(1, 3),
            in_channels=1,
            num_classes=7,
            embed_dim=4,
            depth=2,
            num_heads=2,
            mlp_dim=3,
        )
    )
    block = {"parameters": 80 + 31 + 16, "projections": 4 * 80, "scores": 200, "score_bytes": 200, "cache_bytes": 160}
    assert layer_costs(model) == [
        LayerCost(name="patches", parameters=16 + 4 + 20, other=48),
        LayerCost(name="block 0", mlp=5 * 24, **block),
        LayerCost(name="block 1", mlp=24, **block),
        LayerCost(name="head", parameters=8 + 35, other=28),
    ]
    assert total_cost(layer_costs(model)) == LayerCost(
        name="total",
        parameters=40 + 2 * 127 + 43,
        projections=640,
        scores=400,
        mlp=144,
        other=76,
        score_bytes=400,
        cache_bytes=320,
    )
    assert total_cost(layer_costs(model)).macs == 640 + 400 + 144 + 76


def test_the_pooling_has_one_query() -> None:
    pooling = layer_costs(small(pool="attention", num_kv_heads=2), batch_size=3)[-2]
    assert pooling.name == "pooling"
    assert pooling.projections == 3 * (2 * 24 * 24 + 2 * 15 * 24 * 24)
    assert pooling.scores == 3 * 2 * 15 * 24
    assert pooling.mlp == 3 * 2 * 24 * 13
    assert pooling.score_bytes == 3 * 6 * 15 * 4


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_equal_those_of_a_real_cache(num_kv_heads: int, dtype: torch.dtype) -> None:
    model = small(num_kv_heads=num_kv_heads).to(dtype)
    cache = KVCache(max_tokens=model.layout.num_tokens)
    with torch.no_grad():
        model.blocks[0].attn(torch.randn(5, 16, 24, dtype=dtype), cache=cache)
    assert layer_costs(model, batch_size=5)[1].cache_bytes == cache.nbytes


@pytest.mark.parametrize("pos_embed", ["learned", "rope"])
def test_costs_at_another_size_equal_those_of_a_model_of_that_size(pos_embed: str) -> None:
    model = small(pos_embed=pos_embed, num_registers=2)
    resized = at_image_size(model, (4, 12))
    assert layer_costs(resized) == layer_costs(small(pos_embed=pos_embed, num_registers=2, image_size=(4, 12)))
    assert resized(torch.randn(3, 2, 4, 12)).shape == (3, 11)
    assert not resized.training
    assert model.config.image_size == (6, 20)


def test_another_size_keeps_pruned_heads_and_copies_the_weights() -> None:
    model = pruned().double().train()
    resized = at_image_size(model, 8)
    assert [block.attn.num_heads for block in resized.blocks] == [5, 3, 6]
    assert resized.training
    assert resized(torch.randn(3, 2, 8, 8).double()).dtype == torch.float64
    with torch.no_grad():
        resized.blocks[0].attn.q_proj.weight.zero_()
    assert model.blocks[0].attn.q_proj.weight.abs().min() > 0


def test_another_size_keeps_the_attention_pooling() -> None:
    model = small(pool="attention")
    model.attn_pool.attn.prune_heads({1, 4})
    resized = at_image_size(model, (4, 4))
    assert resized.attn_pool.attn.num_heads == 4
    assert 2 * total_cost(layer_costs(resized)).macs == counted_by_torch(resized, torch.randn(1, 2, 4, 4))


def test_a_size_that_the_patch_size_does_not_divide_is_rejected() -> None:
    with pytest.raises(ValueError, match="image_size 6 x 21 is not divisible by patch_size 2 x 4: change one of them"):
        at_image_size(small(), (6, 21))


def test_peak_bytes_of_known_allocations() -> None:
    held = [torch.empty(999)]

    def run() -> None:
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        third = torch.empty(500)
        del second, third
        held[0] = torch.empty(2000)

    assert peak_bytes(run, CPU) == 4 * 4000
    assert peak_bytes(held.clear, CPU) == 0


def test_peak_bytes_of_attention_include_the_scores_only_if_they_are_stored() -> None:
    n, heads = 512, 4
    x, stored = torch.randn(1, n, 8), 4 * heads * n * n
    peaks = {}
    for backend in ("auto", "explicit"):
        attention = MultiHeadAttention(8, heads, backend=backend)
        with torch.no_grad():
            peaks[backend] = peak_bytes(lambda attention=attention: attention(x), CPU)
    assert peaks["auto"] < stored / 4
    assert stored < peaks["explicit"] < 3 * stored


@pytest.mark.parametrize(
    ("seconds", "calls", "expected"),
    [
        ([3.0, *[0.2] * 4, *[0.01] * 6], 11, 0.01),
        ([0.0, 4.0, 4.0, 1.0], 4, 4.0),
    ],
    ids=["ten after the first", "three if they are slow"],
)
def test_median_seconds_of_a_fake_clock(
    seconds: list[float], calls: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("vitmha.models.profiling.perf_counter", lambda: sum(clock))
    assert median_seconds(lambda: clock.append(seconds[len(clock) - 1]), CPU) == pytest.approx(expected)
    assert len(clock) == 1 + calls


def test_median_seconds_of_a_real_clock() -> None:
    assert median_seconds(lambda: time.sleep(0.01), CPU) >= 0.01  # no upper bound: a shared machine may be slow


def test_measure_runs_the_requested_kernel_and_restores_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, recorded = small(backend="math", pool="attention"), torch.randn(3, 2, 6, 20), []
    attend = MultiHeadAttention._attend

    def recording_attend(self: MultiHeadAttention, q: torch.Tensor, *others: object) -> torch.Tensor:
        recorded.append((self.backend, q.shape[0], torch.is_grad_enabled()))
        return attend(self, q, *others)

    monkeypatch.setattr(MultiHeadAttention, "_attend", recording_attend)
    measured = measure(model, images, "explicit")
    assert measured.backend == "explicit"
    assert measured.seconds > 0
    assert measured.peak_bytes > 0
    assert set(recorded) == {("explicit", 3, False)}
    assert {module.backend for module in model.modules() if isinstance(module, MultiHeadAttention)} == {"math"}


def test_measure_rejects_an_unavailable_kernel_and_restores_the_model() -> None:
    model = small(backend="explicit")
    with pytest.raises(ValueError, match="backend 'efficient' cannot run here"):
        measure(model, torch.randn(1, 2, 6, 20), "efficient")
    assert {block.attn.backend for block in model.blocks} == {"explicit"}


@pytest.mark.gpu
def test_peak_bytes_on_cuda_exclude_what_was_allocated_before() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    held = torch.empty(2**22, device=device)
    assert peak_bytes(lambda: torch.empty(2**20, device=device) + 1, device) == 2 * 4 * 2**20
    assert measure(small().to(device), torch.randn(3, 2, 6, 20, device=device)).seconds > 0
    assert held.numel() == 2**22
