"""Pictures/s of one training step (forward, backward, optimiser), ours against timm's VisionTransformer.

    python benchmarks/train_step.py [--device cpu] [--pairs 15] [--compile]

Both models have the same sizes, pictures and fused AdamW, in one process, by turns: each pair is one step of each, in
changing order, and the ratio is the median over the pairs. float32 on the CPU, bf16 autocast on CUDA.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vitmha import VisionTransformer, ViTConfig

CASES = {
    "32 px, patch 4, width 192, depth 6": {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 192,
        "depth": 6,
        "num_heads": 3,
    },
    "224 px, patch 16, width 384, depth 12": {
        "img_size": 224,
        "patch_size": 16,
        "embed_dim": 384,
        "depth": 12,
        "num_heads": 6,
    },
}
BATCH = {"cpu": {32: 128, 224: 8}, "cuda": {32: 2048, 224: 256}}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=BATCH)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    print(f"torch {torch.__version__}, timm {timm.__version__}, {options.device}, {torch.get_num_threads()} threads")
    print(f"{'model':<40}{'batch':>6}{'ours [1/s]':>12}{'timm [1/s]':>12}{'ratio':>8}{'quartiles':>16}")
    for name, sizes in CASES.items():
        torch.manual_seed(0)
        batch = BATCH[options.device][sizes["img_size"]]
        images = torch.randn(batch, 3, sizes["img_size"], sizes["img_size"], device=options.device)
        labels = torch.randint(100, (batch,), device=options.device)
        models = [ours(sizes), timm.models.VisionTransformer(**sizes, num_classes=100)]
        assert len({sum(p.numel() for p in model.parameters()) for model in models}) == 1, "the models differ in size"
        models = [
            torch.compile(model) if options.compile else model for model in (m.to(options.device) for m in models)
        ]
        steps = [training_step(model, images, labels) for model in models]
        seconds: list[list[float]] = [[], []]
        for pair in range(options.pairs + 3):
            for i in (0, 1) if pair % 2 else (1, 0):
                taken = steps[i]()
                if pair >= 3:  # the first steps warm up
                    seconds[i].append(taken)
        ratios = [theirs / our for our, theirs in zip(*seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        speeds = [batch / statistics.median(times) for times in seconds]
        print(f"{name:<40}{batch:>6}{speeds[0]:>12.0f}{speeds[1]:>12.0f}{middle:>8.3f}{low:>9.3f}-{high:.3f}")


if __name__ == "__main__":
    main()
