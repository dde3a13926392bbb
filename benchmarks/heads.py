"""What removed heads save: time of ViT-S's attention and of the whole model, and of `vitmha classify`.

    python benchmarks/heads.py [--rounds 15] [--models WHOLE PRUNED --pictures FOLDER]

Of each layer of ViT-S (6 heads, random weights, 8 pictures at 224 px, 197 tokens) 0 to 5 heads are removed. Attention
is one layer's, projections and kernel. Runs take turns in one process, a ratio is the median over the rounds of that to
the unpruned one within the round. With two model folders instead, whole processes that classify the same files take
turns, five each.
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
    """One table: shares of the unpruned model's time, multiply-adds and parameters."""
    whole = create_model("vit_small").eval()
    models = {str(removed): copy.deepcopy(whole) for removed in range(6)}
    for removed, model in models.items():
        prune(model, {layer: range(int(removed)) for layer in range(len(model.blocks))})
    tokens, images = torch.randn(8, 197, 384), torch.randn(8, 3, 224, 224)
    attention = in_rounds({name: lambda m=m: m.blocks[0].attn(tokens) for name, m in models.items()}, rounds, "cpu")
    passes = in_rounds({name: lambda m=m: m(images) for name, m in models.items()}, rounds, "cpu")
    print("heads of 6   attention's time          the model's time          multiply-adds   parameters")
    costs = {name: total_cost(layer_costs(model, 8)) for name, model in models.items()}
    for name, cost in costs.items():
        work, parameters = cost.macs / costs["0"].macs, cost.parameters / costs["0"].parameters
        times = [ratio(seconds[name], seconds["0"]) for seconds in (attention, passes)]
        print(f"{6 - int(name):>10}   {times[0]:<26}{times[1]:<26}{work:>13.2f}{parameters:>13.2f}")


def of_classify(models: list[str], pictures: str, rounds: int = 5) -> None:
    """Pictures a second of whole processes, and the median of the pairs' ratios."""
    seconds: dict[str, list[float]] = {model: [] for model in models}
    with tempfile.TemporaryDirectory() as place:
        output = Path(place, "answers.jsonl")
        word = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify", pictures, "--recursive"]
        for _ in range(rounds):
            for model in models:
                seconds[model].append(timed([*word, "--model", model, "--output", str(output)], output))
        count = len(output.read_text().splitlines())
    faster = statistics.median(whole / pruned for whole, pruned in zip(*seconds.values(), strict=True))
    for model, times in seconds.items():
        print(f"{model}: {count / statistics.median(times):.0f} pictures/s")
    print(f"The second is {faster:.2f}x as fast.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs=2, metavar=("WHOLE", "PRUNED"), help="model folders")
    parser.add_argument("--pictures", metavar="FOLDER", help="what they classify")
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if given.models:
        of_classify(given.models, given.pictures)
    else:
        of_vit_s(given.rounds)


if __name__ == "__main__":
    main()
