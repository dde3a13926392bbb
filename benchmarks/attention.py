"""Attention against its peers: time of the module, cost of maps, memory by length, decoding with a cache.

    python benchmarks/attention.py [--device cpu] [--table module maps memory decoding] [--pairs 15] [--threads 2]

All candidates alternate in one process: a round is one run of each, in rotating order, and a ratio is the median over
the rounds of the ratio within the round, with its quartiles. float32 on the CPU; bf16 weights and inputs on CUDA.
Dropout is off everywhere. The Hugging Face rows need `pip install transformers` (5.24 or later).
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vitmha import KVCache, MultiHeadAttention, create_model, record_attention
from vitmha.attention import attention_probabilities
from vitmha.models.profiling import peak_bytes

MODULE_SIZES = [(128, 65, 192, 3), (8, 197, 384, 6), (2, 1025, 384, 6)]  # batch, tokens, width, heads
LENGTHS = [256, 512, 1024, 2048, 4096]
BATCH = {"maps": {"cpu": 8, "cuda": 64}, "decoding": {"cpu": 16, "cuda": 64}}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
PAIRS = {"cpu": 15, "cuda": 50}
WARM_UP = 3


def in_rounds(runs: dict[str, Callable[[], object]], count: int, device: str) -> dict[str, list[float]]:
    """Measures the seconds of each run in each round."""
    names, seconds = list(runs), {name: [] for name in runs}
    for index in range(WARM_UP + count):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            synchronize(device)
            start = time.perf_counter()
            result = runs[name]()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
            del result  # freed after the clock has stopped
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(seconds: list[float], of_reference: list[float]) -> str:
    """Median over the rounds of the ratio within the round, and its quartiles."""
    ratios = [one / other for one, other in zip(seconds, of_reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


@functools.cache
def hugging_face() -> ModuleType | None:
    """Returns the ViT module of transformers, or None if it is not installed."""
    try:
        from transformers.models.vit import modeling_vit
    except ImportError:
        print("transformers is not installed: its rows are skipped.")
        return None
    return modeling_vit


def flash_kernels(run: Callable[[], object], device: str) -> list[str]:
    """Returns the operators and kernels of a run with flash in their name."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        run()
        synchronize(device)
    names = {event.key.split("<")[0] for event in profiler.key_averages()}
    return sorted(name for name in names if "flash" in name.lower() and "Backward0" not in name)


@torch.no_grad()
def same_modules(width: int, heads: int) -> dict[str, nn.Module]:
    """Self-attention of each library, all with the same weights."""
    import timm

    model = MultiHeadAttention(width, heads)
    in_out = model.out_proj.state_dict()
    qkv = {
        k: torch.cat([getattr(m, k) for m in (model.q_proj, model.k_proj, model.v_proj)]) for k in ("weight", "bias")
    }
    modules = {"vitmha": model, "torch": nn.MultiheadAttention(width, heads, batch_first=True)}
    modules["torch"].out_proj.load_state_dict(in_out)
    modules["torch"].in_proj_weight.data, modules["torch"].in_proj_bias.data = qkv["weight"], qkv["bias"]
    modules["timm"] = timm.layers.Attention(width, heads, qkv_bias=True)
    assert modules["timm"].fused_attn, "timm's fused attention is switched off"
    modules["timm"].qkv.load_state_dict(qkv)
    modules["timm"].proj.load_state_dict(in_out)
    if (library := hugging_face()) is not None:
        config = library.ViTConfig(hidden_size=width, num_attention_heads=heads, attn_implementation="sdpa")
        modules["HF"] = library.ViTAttention(config)
        modules["HF"].load_state_dict({k.replace("out_proj", "o_proj"): v for k, v in model.state_dict().items()})
    # All do the same work: projections to q, k and v and an output projection, each with a bias.
    assert all(sum(p.numel() for p in m.parameters()) == 4 * width * (width + 1) for m in modules.values())
    return modules


def call(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x, x, x, need_weights=False) if isinstance(module, nn.MultiheadAttention) else module(x)
    return y[0] if isinstance(y, tuple) else y


def passes(module: nn.Module, x: Tensor, grad_y: Tensor, training: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a run that computes the output; in training also the gradients of the input and the parameters."""
    leaves = [x, *module.parameters()]

    def run() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(training):
            y = call(module, x)
        return (y.detach(), *(torch.autograd.grad(y, leaves, grad_y) if training else ()))

    return run


def check_agreement(modules: dict[str, nn.Module], x: Tensor, grad_y: Tensor, tolerance: float) -> None:
    """Checks that outputs and input gradients agree, relative to the largest value."""
    for training in (False, True):
        own, *peers = (passes(module.train(training), x, grad_y, training)()[:2] for module in modules.values())
        for result, reference in ((r, o) for peer in peers for r, o in zip(peer, own, strict=True)):
            error = ((result - reference).abs().max() / reference.abs().max()).item()
            assert error < tolerance, f"the modules differ by {error:.2g}"


def module_table(device: str, count: int) -> None:
    """Measures one attention module: forward in eval mode without gradients; forward and backward in train mode."""
    names = ("vitmha", "torch", "timm", "HF")
    print("module: ms of self-attention; torch is nn.MultiheadAttention(need_weights=False), timm layers.Attention,")
    print("HF ViTAttention with sdpa. All hold the same q, k, v and output projections. Below 1 vitmha is faster.")
    print(f"{'batch, tokens, width, heads':<28}{'pass':<17}", *(f"{n:>8}" for n in names), "  vitmha / fastest peer")
    for batch, tokens, width, heads in MODULE_SIZES:
        modules = same_modules(width, heads)
        x, grad_y = torch.randn(2, batch, tokens, width)
        check_agreement(modules, x.requires_grad_(), grad_y, tolerance=1e-5)
        for module in modules.values():
            module.to(device, DTYPE[device])
        x, grad_y = (t.detach().to(device, DTYPE[device]) for t in (x, grad_y))
        check_agreement(modules, x.requires_grad_(), grad_y, tolerance=1e-5 if device == "cpu" else 3e-2)
        kernels = flash_kernels(passes(modules["vitmha"], x, grad_y, True), device)
        assert kernels, "no flash kernel ran"
        for training, title in ((False, "forward"), (True, "forward+backward")):
            runs = {name: passes(module.train(training), x, grad_y, training) for name, module in modules.items()}
            seconds = in_rounds(runs, count, device)
            ms = {name: statistics.median(seconds[name]) * 1e3 for name in runs}
            best = min((name for name in runs if name != "vitmha"), key=ms.get)
            times = [f"{ms[name]:8.3f}" if name in ms else f"{'-':>8}" for name in names]
            compared = f"{ratio(seconds['vitmha'], seconds[best])}  {best}"
            print(f"{f'{batch}, {tokens}, {width}, {heads}':<28}{title:<17}", *times, f"  {compared}")
    print(f"kernels of vitmha: {', '.join(kernels)}")


@torch.no_grad()
def maps_table(device: str, count: int) -> None:
    """Measures the cost of getting attention maps out of a ViT-S at 224 pixels."""
    import timm

    batch = BATCH["maps"][device]
    images = torch.randn(batch, 3, 224, 224, device=device, dtype=DTYPE[device])

    def prepared(model: nn.Module) -> nn.Module:
        return model.to(device, DTYPE[device]).eval()

    def from_timm(fused: bool) -> nn.Module:
        timm.layers.set_fused_attn(fused)
        return prepared(timm.create_model("vit_small_patch16_224"))

    hook, fx = (timm.utils.AttentionExtract(from_timm(fused=False), method=method) for method in ("hook", "fx"))
    model, fused = prepared(create_model("vit_small")), from_timm(fused=True)
    assert fused.blocks[0].attn.fused_attn, "timm's fused attention is switched off"

    def record(queries: str) -> list[Tensor]:
        with record_attention(model, queries=queries) as recorded:
            model(images)
        return recorded.maps

    # The plain forward pass of each package first, then its ways to get maps.
    groups: dict[str, dict[str, Callable]] = {
        "vitmha": {
            "plain": lambda: model(images),
            "record_attention, class token": lambda: record("cls"),
            "record_attention, all tokens": lambda: record("all"),
        },
        "timm": {
            "plain": lambda: fused(images),
            "AttentionExtract, hook": lambda: list(hook(images).values()),
            "AttentionExtract, fx": lambda: list(fx(images).values()),
        },
    }
    if (library := hugging_face()) is not None:
        sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
        sdpa, eager = (
            prepared(library.ViTForImageClassification(library.ViTConfig(**sizes, attn_implementation=name)))
            for name in ("sdpa", "eager")
        )
        groups["HF"] = {
            "plain (sdpa)": lambda: sdpa(images),
            "output_attentions (eager)": lambda: eager(images, output_attentions=True).attentions,
        }

    for package, group in groups.items():
        for title, run in list(group.items())[1:]:
            maps, queries = run(), 1 if "class" in title else 197
            assert [tuple(m.shape) for m in maps] == [(batch, 6, queries, 197)] * 12, (
                f"{package}, {title}: wrong shapes"
            )
            error = max((m.float().sum(-1) - 1).abs().max().item() for m in maps)
            assert error < (1e-4 if package == "vitmha" else 2e-2), f"{package}, {title}: sums to 1 within {error:.2g}"
    pairs = zip(record("cls"), record("all"), strict=True)
    assert all(torch.allclose(row, full[:, :, :1], atol=1e-5) for row, full in pairs), "the rows differ"
    del maps, pairs

    runs = {f"{package}, {title}": run for package, group in groups.items() for title, run in group.items()}
    seconds = in_rounds(runs, count, device)
    print(f"maps: ViT-S, {batch} images of 224 px, maps of all heads and layers; vitmha and HF return the logits too")
    print(f"{'':<36}{'ms':>9}  {'/ own plain':<22}  {'/ vitmha plain':<22}  peak MB  above own plain")
    peaks = {name: settled_peak(run, device) / 1e6 for name, run in runs.items()}
    for package, group in groups.items():
        for name in (f"{package}, {title}" for title in group):
            references = f"{package}, {next(iter(group))}", "vitmha, plain"
            own, of_vitmha = (ratio(seconds[name], seconds[reference]) for reference in references)
            memory = f"{peaks[name]:>7.1f}  {peaks[name] - peaks[references[0]]:+.1f}"
            print(f"{name:<36}{statistics.median(seconds[name]) * 1e3:>9.2f}  {own:<22}  {of_vitmha:<22}  {memory}")


def settled_peak(run: Callable[[], object], device: str) -> int:
    """Measures the peak bytes of a second run: the first also allocates what stays allocated."""
    run()
    return peak_bytes(run, torch.device(device))


def memory_table(device: str, _: int) -> None:
    """Measures the peak memory of forward and backward by number of tokens."""
    width, heads, dtype = 384, 6, DTYPE[device]
    print(f"memory: peak bytes of forward + backward, width {width}, {heads} heads, batch 1, {dtype};")
    print("per added: per token added to the row above, which is constant if memory is linear")
    columns = f"{'bytes':>16}{'per token':>12}{'per added':>12}"
    print(f"{'tokens':<8}{'fused (auto)':>40}{'explicit':>40}\n{'':<8}{columns}{columns}")
    before = {"auto": (0, 0), "explicit": (0, 0)}
    for tokens in LENGTHS:
        line = f"{tokens:<8}"
        for backend, (fewer, less) in before.items():
            module = MultiHeadAttention(width, heads, backend=backend).to(device, dtype)
            x, grad_y = torch.randn(2, 1, tokens, width, device=device, dtype=dtype)
            peak = settled_peak(passes(module, x.requires_grad_(), grad_y, True), device)
            line += f"{peak:>16,}{peak / tokens:>12,.0f}{(peak - less) / (tokens - fewer):>12,.0f}"
            before[backend] = tokens, peak
        print(line)
    full = heads * tokens**2 * 4
    module = MultiHeadAttention(width, heads).to(device, dtype)
    run, recorded = passes(module, x, grad_y, True), []

    @torch.no_grad()
    def record(q: Tensor, k: Tensor, *_: object) -> None:
        recorded.append(attention_probabilities(q[:, :, :1], k))

    plain = settled_peak(run, device)
    module.attention_hook = record
    added = settled_peak(run, device) - plain
    fraction = f"{added / full:.2%} of the {full:,} bytes of the full map"
    print(f"the class token's map of {tokens} tokens, recorded, adds {added:,} bytes to the peak, {fraction}")


@torch.no_grad()
def decoding_table(device: str, count: int) -> None:
    """Measures token-by-token decoding with a cache, for fewer and fewer key/value heads, and without a cache."""
    batch, width, heads, room, long, short = BATCH["decoding"][device], 512, 8, 1024, 900, 256
    kinds = {str(n): MultiHeadAttention(width, heads, num_kv_heads=n) for n in (8, 4, 2, 1)}
    modules = {name: module.to(device, DTYPE[device]).eval() for name, module in kinds.items()}
    x = torch.randn(batch, room, width, device=device, dtype=DTYPE[device])

    def steps(tokens: int) -> tuple[dict[str, Callable[[], Tensor]], dict[str, KVCache]]:
        """Returns the next step of each module, and the caches, which hold `tokens` tokens at first."""
        caches = {name: KVCache(room) for name in modules}

        def step(name: str) -> Tensor:
            cache = caches[name]
            return modules[name](x[:, cache.num_tokens, None], is_causal=True, cache=cache)

        for name, module in modules.items():
            module(x[:, :tokens], is_causal=True, cache=caches[name])
        return {name: functools.partial(step, name) for name in modules}, caches

    uncached = {name: lambda m=module: m(x[:, :short], is_causal=True)[:, -1:] for name, module in modules.items()}
    for name, step in steps(short - 1)[0].items():
        error = (uncached[name]() - step()).abs().max().item()
        assert error < (1e-5 if device == "cpu" else 2e-2), f"with a cache the output differs by {error:.2g}"
    runs, caches = steps(long)
    many = min(4 * count, room - long - WARM_UP)
    from_long, from_short = in_rounds(runs, many, device), in_rounds(steps(short)[0], many, device)
    without = in_rounds(uncached, count, device)

    print(f"decoding: tokens/s of {batch} sequences in one attention, width {width}, {heads} query heads;")
    print("without a cache each token takes a causal pass over all tokens so far")
    titles = ("cache bytes", f"{long} cached", f"{short} cached", f"{short} without")
    columns = "".join(f"{title:>14}" for title in titles)
    print(f"{'kv heads':<10}{columns}{'with / without':>16}   time at {long}, of that of {heads} kv heads")
    for name in caches:
        speeds = [batch / statistics.median(seconds[name]) for seconds in (from_long, from_short, without)]
        columns = "".join(f"{value:>14,.0f}" for value in (caches[name].nbytes, *speeds))
        print(f"{name:<10}{columns}{speeds[1] / speeds[2]:>15.1f}x   {ratio(from_long[name], from_long[str(heads)])}")


TABLES = {"module": module_table, "maps": maps_table, "memory": memory_table, "decoding": decoding_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=DTYPE)
    parser.add_argument("--table", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--pairs", type=int, help="rounds; 15 on the CPU, 50 on CUDA")
    parser.add_argument("--threads", type=int, help="threads of the CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    count = options.pairs or PAIRS[options.device]
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {count} rounds")
    for name in options.table:
        torch.manual_seed(0)
        print()
        TABLES[name](options.device, count)


if __name__ == "__main__":
    main()
