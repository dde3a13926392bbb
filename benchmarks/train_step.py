"""Training steps against timm: images/s of vitmha's and timm's VisionTransformer, and the seconds of a Muon step.

    python benchmarks/train_step.py [--table model] [--device cpu] [--rounds 15] [--compile] [--size "ViT-S, 224 px"]
    python benchmarks/train_step.py --table optimizer [--device cpu] [--rounds 15]

model: forward, backward and optimizer step. Both models have the same sizes, images and fused AdamW. float32 on the
CPU, bf16 autocast on CUDA. A training step costs three times the arithmetic of a forward pass; "of peak" is its
fraction of the speed of a large matrix product in the same precision, measured here.

optimizer: the optimizer step alone, on the parameters of two configs, vitmha's (`BatchedMuon` and AdamW) against
`timm.optim.Muon` with the same coefficients and AdamW as its fallback, and torch's Muon with AdamW. "difference" is the
norm of the difference between the first updates of the block matrices, relative to the update.

All alternate in one process: each round is one step of each, in rotating order. Ratios are medians over the rounds.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import timm
import timm.optim
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from vitmha import VisionTransformer, ViTConfig
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.training.optimizers import BatchedMuon, CombinedOptimizer, parameter_groups, with_learning_rate

WARM_UP = 3

SIZES: dict[str, dict[str, int]] = {
    "width 192, depth 6, 32 px": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3},
    "ViT-Ti, 32 px": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "ViT-S, 224 px": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "ViT-B, 224 px": {"img_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
}
BATCH = {"cpu": {32: 128, 224: 8}, "cuda": {32: 2048, 224: 256}}
DEFAULT = {"cpu": ["width 192, depth 6, 32 px", "ViT-S, 224 px"], "cuda": list(SIZES)[1:]}

# configs/quickstart.yaml and configs/cifar10.yaml.
CONFIGS = {
    "quickstart": {"image_size": 28, "in_channels": 1, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_dim": 128},
    "cifar10": {"image_size": 32, "embed_dim": 192, "depth": 6, "num_heads": 6, "mlp_dim": 384, "qk_norm": True},
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str) -> float:
    """Returns the seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def alternate(steps: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Returns the seconds of every round of each step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds + WARM_UP):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            duration = timed(steps[name], device)
            if index >= WARM_UP:
                seconds[name].append(duration)
    return seconds


def ratio_quartiles(times: list[float], reference: list[float]) -> list[float]:
    """Returns the quartiles of reference / times over the rounds."""
    return statistics.quantiles([slow / fast for fast, slow in zip(times, reference, strict=True)], n=4)


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Returns a function that takes one training step."""
    optimizer = AdamW(model.parameters(), fused=True)
    device = images.device.type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_vitmha(sizes: dict[str, int]) -> VisionTransformer:
    fields = {name: sizes[name] for name in ("patch_size", "embed_dim", "depth", "num_heads")}
    return VisionTransformer(ViTConfig(image_size=sizes["img_size"], num_classes=100, **fields))


def peak_rate(device: str) -> float:
    """Returns the multiply-accumulates per second of a large matrix product."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    return side**3 / min(timed(lambda: left @ right, device) for _ in range(10))


def print_model_table(options: argparse.Namespace) -> None:
    device, peak = options.device, peak_rate(options.device)
    print(f"a large matrix product reaches {2e-12 * peak:.2f} TFLOP/s")
    print(f"{'model':<28}{'batch':>6}  {'':<16}{'[1/s]':>8}{'of peak':>9}{'timm / it':>11}{'quartiles':>16}")
    for size in options.size or DEFAULT[device]:
        torch.manual_seed(0)
        sizes = SIZES[size]
        batch = BATCH[device][sizes["img_size"]]
        images = torch.randn(batch, 3, sizes["img_size"], sizes["img_size"], device=device)
        labels = torch.randint(100, (batch,), device=device)
        macs = 3 * total_cost(layer_costs(build_vitmha(sizes))).macs
        models = {"timm": timm.models.VisionTransformer(**sizes, num_classes=100), "vitmha": build_vitmha(sizes)}
        assert len({sum(p.numel() for p in model.parameters()) for model in models.values()}) == 1, "sizes differ"
        if options.compile:
            copies = {f"{name}, compiled": copy.deepcopy(model) for name, model in models.items()}
            for model in copies.values():
                model.compile()
            models |= copies
        steps = {name: training_step(model.to(device), images, labels) for name, model in models.items()}
        seconds = alternate(steps, options.rounds, device)
        for name, times in seconds.items():
            low, median, high = ratio_quartiles(times, seconds["timm"])
            speed = batch / statistics.median(times)
            of_peak = f"{speed * macs / peak:.0%}"
            print(f"{size:<28}{batch:>6}  {name:<16}{speed:>8.0f}{of_peak:>9}{median:>11.3f}{low:>9.3f}-{high:.3f}")


def build_optimizer(name: str, model: VisionTransformer) -> Optimizer:
    """Returns an optimizer with the settings that `LitViT` gives to Muon and AdamW."""
    matrices, others = parameter_groups(model, weight_decay=0.05)
    matrices, others = with_learning_rate(matrices, 0.02), with_learning_rate(others, 2e-3)
    betas = (0.9, 0.95)
    if name == "timm":
        # With nesterov, timm's fallback would be NAdamW.
        fallback = {"use_fallback": True, "nesterov": False, "eps": 1e-8, "betas": betas}
        options = {"nesterov": True, "ns_coefficients": "original", "adjust_lr_fn": "original"}
        return timm.optim.Muon([*matrices, *({**group, **fallback} for group in others)], lr=0.02, **options)
    kind = BatchedMuon if name == "vitmha" else Muon
    return CombinedOptimizer(kind(matrices, 0.02), AdamW(others, 2e-3, betas))


def print_optimizer_table(options: argparse.Namespace) -> None:
    header = f"{'config':<14}{'':<10}{'[ms]':>8}{'timm / it':>11}{'quartiles':>16}{'difference':>12}  bit-equal"
    print(header)
    for config, fields in CONFIGS.items():
        torch.manual_seed(0)
        start = VisionTransformer(ViTConfig(**fields, patch_size=4, num_classes=10, pool="mean", pos_embed="rope"))
        gradients = [torch.randn_like(parameter, device=options.device) for parameter in start.parameters()]
        steps: dict[str, Callable[[], object]] = {}
        weights: dict[str, torch.Tensor] = {}
        for name in ("timm", "torch", "vitmha"):
            model = copy.deepcopy(start).to(options.device)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer = build_optimizer(name, model)
            optimizer.step()
            weights[name] = block_matrices(model)
            steps[name] = optimizer.step
        seconds = alternate(steps, options.rounds, options.device)
        update = (weights["timm"] - block_matrices(start).to(options.device)).norm()
        for name, times in seconds.items():
            low, median, high = ratio_quartiles(times, seconds["timm"])
            difference = ((weights[name] - weights["timm"]).norm() / update).item()
            is_equal = torch.equal(weights[name], weights["timm"])
            print(
                f"{config:<14}{name:<10}{1e3 * statistics.median(times):>8.2f}{median:>11.3f}{low:>9.3f}-{high:.3f}"
                f"{difference:>12.1e}  {is_equal}"
            )


def block_matrices(model: VisionTransformer) -> torch.Tensor:
    """Returns a copy of the weights that Muon updates, as one vector."""
    matrices, _ = parameter_groups(model, weight_decay=0.05)
    return torch.cat([parameter.detach().flatten() for group in matrices for parameter in group["params"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="model", choices=("model", "optimizer"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=BATCH)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="add the compiled models")
    parser.add_argument("--size", nargs="+", choices=SIZES)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, timm {timm.__version__}, {options.device}, {torch.get_num_threads()} threads")
    {"model": print_model_table, "optimizer": print_optimizer_table}[options.table](options)


if __name__ == "__main__":
    main()
