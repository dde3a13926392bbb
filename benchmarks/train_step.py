"""Pictures/s of one training step (forward, backward, optimiser), ours against timm's VisionTransformer.

    python benchmarks/train_step.py [--device cpu] [--rounds 15] [--compile] [--size "ViT-S, 224 px"]

The models have the same sizes, pictures and fused AdamW, in one process, by turns: each round is one step of each, in
rotating order, and a ratio is the median over the rounds. float32 on the CPU, bf16 autocast on CUDA. The arithmetic of
a step is three times that of a forward pass; its share of a peak is that of a large matrix product in the same
precision, measured here.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vitmha import VisionTransformer, ViTConfig
from vitmha.models.profiling import layer_costs, total_cost

WARM_UP = 3

SIZES: dict[str, dict[str, int]] = {
    "width 192, depth 6, 32 px": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3},
    "ViT-Ti, 32 px": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "ViT-S, 224 px": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "ViT-B, 224 px": {"img_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
}
BATCH = {"cpu": {32: 128, 224: 8}, "cuda": {32: 2048, 224: 256}}
DEFAULT = {"cpu": ["width 192, depth 6, 32 px", "ViT-S, 224 px"], "cuda": list(SIZES)[1:]}


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], float]:
    """A function that makes one step and gives its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    device = images.device

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def ours(sizes: dict[str, int]) -> VisionTransformer:
    return VisionTransformer(
        ViTConfig(
            image_size=sizes["img_size"],
            num_classes=100,
            **{key: sizes[key] for key in ("patch_size", "embed_dim", "depth", "num_heads")},
        )
    )


def peak_rate(device: str) -> float:
    """Multiply-adds a second of a large matrix product."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return side**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=BATCH)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="both also compiled")
    parser.add_argument("--size", nargs="+", choices=SIZES)
    options = parser.parse_args()

    peak = peak_rate(options.device)
    print(f"torch {torch.__version__}, timm {timm.__version__}, {options.device}, {torch.get_num_threads()} threads")
    print(f"a large matrix product reaches {2e-12 * peak:.2f} TFLOP/s")
    print(f"{'model':<28}{'batch':>6}  {'':<16}{'[1/s]':>8}{'of peak':>9}{'timm / it':>11}{'quartiles':>16}")
    for name in options.size or DEFAULT[options.device]:
        torch.manual_seed(0)
        sizes = SIZES[name]
        batch = BATCH[options.device][sizes["img_size"]]
        images = torch.randn(batch, 3, sizes["img_size"], sizes["img_size"], device=options.device)
        labels = torch.randint(100, (batch,), device=options.device)
        work = 3 * total_cost(layer_costs(ours(sizes))).macs
        models = {"timm": timm.models.VisionTransformer(**sizes, num_classes=100), "ours": ours(sizes)}
        assert len({sum(p.numel() for p in model.parameters()) for model in models.values()}) == 1, "sizes differ"
        if options.compile:
            copies = {f"{key}, compiled": copy.deepcopy(model) for key, model in models.items()}
            for model in copies.values():
                model.compile()
            models |= copies
        steps = {key: training_step(model.to(options.device), images, labels) for key, model in models.items()}
        seconds: dict[str, list[float]] = {key: [] for key in steps}
        keys = list(steps)
        for number in range(options.rounds + WARM_UP):
            first = number % len(keys)
            for key in keys[first:] + keys[:first]:
                taken = steps[key]()
                if number >= WARM_UP:
                    seconds[key].append(taken)
        for key, times in seconds.items():
            ratios = [theirs / our for our, theirs in zip(times, seconds["timm"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            speed = batch / statistics.median(times)
            share = f"{speed * work / peak:.0%}"
            print(f"{name:<28}{batch:>6}  {key:<16}{speed:>8.0f}{share:>9}{middle:>11.3f}{low:>9.3f}-{high:.3f}")


if __name__ == "__main__":
    main()
