"""Stochastic depth that skips the computation against the usual masking: time of a training step.

    python benchmarks/drop_path.py [--compile]

The architecture of configs/cifar10_30min.yaml, float32, batch of 128, one thread; rates rise linearly up to the given
one in the last block. CPU time of forward and backward passes, alternating in one process; the ratio is of the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitmha import VisionTransformer, ViTConfig
from vitmha.models.vit import ALL_TOKENS, Block


def masked(self: Block, x: Tensor, rope: Tensor | None = None, out_tokens: slice = ALL_TOKENS) -> Tensor:
    """Block.forward as in timm: each image's branch is multiplied by 0 or by 1 / (1 - rate)."""

    def drop(branch: Tensor) -> Tensor:
        if not self.training or self.drop_path.rate == 0:
            return branch
        return (
            branch * branch.new_empty(len(branch), 1, 1).bernoulli_(1 - self.drop_path.rate) / (1 - self.drop_path.rate)
        )

    x = (x + drop(self.ls1(self.attn(self.norm1(x), rope=rope))))[:, out_tokens]
    return x + drop(self.ls2(self.mlp(self.norm2(x))))


def new_step(rate: float, forward: Callable[..., Tensor], compiled: bool) -> Callable[[], None]:
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        num_classes=10,
        embed_dim=128,
        depth=6,
        num_heads=4,
        mlp_dim=256,
        pool="mean",
        pos_embed="rope",
        qk_norm=True,
        drop_path=rate,
    )
    model, images = VisionTransformer(config), torch.randn(128, 3, 32, 32)
    for block in model.blocks:
        block.forward = forward.__get__(block)
    if compiled:
        model.compile(dynamic=False)

    def step() -> None:
        model(images).square().sum().backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.3], help="rates of the last block")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("rate  masked  skipped  ratio")
    for rate in args.rates:
        torch._dynamo.reset()
        steps = [new_step(rate, forward, args.compile) for forward in (masked, Block.forward)]
        seconds: list[list[float]] = [[], []]
        for round_ in range(args.rounds + 2):
            for step, times in zip(steps, seconds, strict=True):
                start = time.process_time()
                step()
                if round_ > 1:
                    times.append(time.process_time() - start)
        masked_ms, skipped_ms = (1000 * statistics.median(times) for times in seconds)
        print(f"{rate:4.2f}  {masked_ms:3.0f} ms   {skipped_ms:3.0f} ms   {masked_ms / skipped_ms:.2f}", flush=True)


if __name__ == "__main__":
    main()
