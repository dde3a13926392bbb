"""Image sequences decoded per second, with the key/value cache and without it.

    python benchmarks/decoder.py [--device cpu] [--pairs 9]

The model of configs/fashion_mnist_sequences.yaml with random weights, and models for longer sequences; greedy search.
Without the cache every step recomputes the full sequence and the keys and values of the image. Both encode the image
once and generate the same sequences, alternating in one process; the ratio is the median over the pairs.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitmha import DecoderConfig, EncoderDecoder, ViTConfig

BATCH = {"cpu": 64, "cuda": 1024}


def new_model(max_length: int) -> EncoderDecoder:
    config = ViTConfig(
        image_size=(28, 140),
        in_channels=1,
        num_classes=10,
        patch_size=7,
        embed_dim=96,
        depth=4,
        num_heads=4,
        mlp_dim=192,
        pool="mean",
        pos_embed="rope",
    )
    model = EncoderDecoder(config, DecoderConfig(max_length=max_length, mlp_dim=192))
    nn.init.normal_(model.head.weight)
    nn.init.constant_(model.head.bias[model.end_token : model.end_token + 1], -1e9)  # no sequence ends early
    return model.eval()


@torch.no_grad()
def with_cache(model: EncoderDecoder, images: Tensor) -> Tensor:
    return model.generate(images)[0]


@torch.no_grad()
def without_cache(model: EncoderDecoder, images: Tensor) -> Tensor:
    memory = model.encoder.forward_features(images)
    tokens = torch.full((len(images), 1), model.end_token, device=images.device)
    for _ in range(model.decoder.max_length):
        tokens = torch.cat([tokens, model.decode(tokens, memory)[:, -1:].argmax(-1)], dim=1)
    return tokens[:, 1:]


def seconds(decode: Callable[[EncoderDecoder, Tensor], Tensor], model: EncoderDecoder, images: Tensor) -> float:
    start = time.perf_counter()
    decode(model, images).cpu()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=BATCH)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    batch = BATCH[options.device]
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {batch} sequences")
    print(f"{'tokens':>6}{'cached [seq/s]':>17}{'uncached [seq/s]':>19}{'ratio':>8}{'quartiles':>16}")
    for max_length in (6, 32, 128):
        torch.manual_seed(0)
        model = new_model(max_length).to(options.device)
        images = torch.randn(BATCH[options.device], 1, 28, 140, device=options.device)
        assert torch.equal(with_cache(model, images), without_cache(model, images)), "the sequences differ"
        decoders: tuple[Callable[[EncoderDecoder, Tensor], Tensor], ...] = with_cache, without_cache
        times_taken: list[list[float]] = [[], []]
        for pair in range(options.pairs):
            for i in (0, 1) if pair % 2 else (1, 0):
                times_taken[i].append(seconds(decoders[i], model, images))
        low, middle, high = statistics.quantiles([b / a for a, b in zip(*times_taken, strict=True)], n=4)
        speeds = [len(images) / statistics.median(times) for times in times_taken]
        print(f"{max_length:>6}{speeds[0]:>17.0f}{speeds[1]:>19.0f}{middle:>8.2f}{low:>9.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
