"""The time that pruned heads save: in the attention of ViT-S, in the full model, and in `vitmha classify`.

    python benchmarks/heads.py [--rounds 15] [--models FULL PRUNED --images DIR]

In each layer of ViT-S (6 heads, random weights, 8 images of 224 px, 197 tokens) 0 to 5 heads are pruned. The time of
attention is that of one layer with its projections. Models alternate in one process; a ratio is the median over the
rounds of the ratio to the unpruned model within the round. With two model directories instead, processes that classify
the same files alternate, five of each.
"""

import argparse
import copy
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from attention import in_rounds, ratio
from classify import timed

from vitmha import create_model
from vitmha.models.profiling import layer_costs, total_cost
from vitmha.pruning.remove import prune


@torch.no_grad()
def of_vit_s(rounds: int) -> None:
    """Prints time, MACs and parameters as fractions of those of the unpruned model."""
    unpruned = create_model("vit_small").eval()
    models = {str(removed): copy.deepcopy(unpruned) for removed in range(6)}
    for removed, model in models.items():
        prune(model, {layer: range(int(removed)) for layer in range(len(model.blocks))})
    tokens, images = torch.randn(8, 197, 384), torch.randn(8, 3, 224, 224)
    attention = in_rounds({name: lambda m=m: m.blocks[0].attn(tokens) for name, m in models.items()}, rounds, "cpu")
    passes = in_rounds({name: lambda m=m: m(images) for name, m in models.items()}, rounds, "cpu")
    print("heads of 6   attention time            model time                         MACs   parameters")
    costs = {name: total_cost(layer_costs(model, 8)) for name, model in models.items()}
    for name, cost in costs.items():
        work, parameters = cost.macs / costs["0"].macs, cost.parameters / costs["0"].parameters
        times = [ratio(seconds[name], seconds["0"]) for seconds in (attention, passes)]
        print(f"{6 - int(name):>10}   {times[0]:<26}{times[1]:<26}{work:>13.2f}{parameters:>13.2f}")


def of_classify(models: list[str], images: str, rounds: int = 5) -> None:
    """Prints images per second of processes, and the median ratio of the pairs."""
    seconds: dict[str, list[float]] = {model: [] for model in models}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "answers.jsonl")
        command = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify", images, "--recursive"]
        for _ in range(rounds):
            for model in models:
                seconds[model].append(timed([*command, "--model", model, "--output", str(output)], output))
        count = len(output.read_text().splitlines())
    faster = statistics.median(full / pruned for full, pruned in zip(*seconds.values(), strict=True))
    for model, times in seconds.items():
        print(f"{model}: {count / statistics.median(times):.0f} images/s")
    print(f"The second is {faster:.2f}x as fast.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs=2, metavar=("FULL", "PRUNED"), help="model directories")
    parser.add_argument("--images", metavar="DIR", help="images to classify")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if args.models:
        of_classify(args.models, args.images)
    else:
        of_vit_s(args.rounds)


if __name__ == "__main__":
    main()
