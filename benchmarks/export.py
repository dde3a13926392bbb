"""Images per second of a model and of its exports, and how far they agree.

    pip install -e '.[onnx,openvino]'
    python benchmarks/export.py --root DATA [--model runs/x/version_0/model] [--rounds 25]

ViT-S at 224 with random weights, or the model given; batches of 8 real images from any folders below DATA, of which
there must be 200. Each round runs every way once, in turning order, so that what else the machine does falls on all of
them; ratios are medians over the rounds. All have as many threads as PyTorch, and float32 is float32: OpenVINO would
take bfloat16 where the processor can. 8 bits are calibrated on 100 images; agreement, that the same class comes
first, is counted on 100 others.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import openvino
import torch
from torch import Tensor, nn

from vitmha import VisionTransformer, create_model, load_model
from vitmha.images import SUFFIXES, Preprocessing, read_image
from vitmha.inference.export import export_model

BATCH, COMPARED, WARM_UP = 8, 100, 3
Run = Callable[[Tensor], Tensor]


def a_model(source: str | None) -> VisionTransformer:
    if source is not None:
        model = load_model(source)
        assert isinstance(model, VisionTransformer), "only classifiers can be exported"
        return model
    model = create_model("vit_small")
    assert isinstance(model.head, nn.Linear)
    nn.init.xavier_uniform_(model.head.weight)
    model.preprocessing = Preprocessing(image_size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return model.eval()


def real_images(root: Path, preprocessing: Preprocessing | None) -> Tensor:
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES)
    assert preprocessing is not None, "the model does not say how an image becomes its input"
    assert len(files) >= 2 * COMPARED, f"there are {len(files)} images below {root}, {2 * COMPARED} are needed"
    chosen = files[:: len(files) // (2 * COMPARED)][: 2 * COMPARED]
    return torch.stack([preprocessing(read_image(file)) for file in chosen])


def exports(model: VisionTransformer, images: Tensor, folder: Path) -> dict[str, Run]:
    """The exported files, ready to run."""
    threads = torch.get_num_threads()
    export_model(model, folder / "onnx", "onnx", images[:BATCH])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "onnx/model.onnx", options, providers=["CPUExecutionProvider"])
    runs: dict[str, Run] = {
        "ONNX Runtime": lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    }
    for name, file_format in (("OpenVINO float32", "openvino"), ("OpenVINO int8", "openvino-int8")):
        export_model(model, folder / file_format, file_format, images)
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        compiled = openvino.Core().compile_model(folder / file_format / "model.xml", "CPU", hints)
        runs[name] = lambda images, compiled=compiled: torch.from_numpy(compiled(images.numpy())[0])
    return runs


@torch.inference_mode()
def measure(runs: dict[str, Run], images: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names, batches = list(runs), images[: len(images) // BATCH * BATCH].split(BATCH)
    for number in range(rounds + WARM_UP):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            runs[name](batches[number % len(batches)])
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = a_model(options.model)
    images = real_images(options.root, model.preprocessing)
    compiled = torch.compile(model)
    runs: dict[str, Run] = {"eager": model, "compiled": compiled}
    with tempfile.TemporaryDirectory() as folder:
        runs |= exports(model, images, Path(folder))
        held_out = images[1::2]
        seconds = measure(runs, held_out, options.rounds)
        outputs = {name: torch.cat([run(batch) for batch in held_out.split(BATCH)]) for name, run in runs.items()}
    size = " x ".join(map(str, images.shape[2:]))
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, openvino {openvino.__version__}")
    print(f"{torch.get_num_threads()} threads, {size} pixels, batch of {BATCH}")
    print(
        f"{'':<18}{'images/s':>11}{'to eager':>10}{'quartiles':>14}{'agree of ' + str(COMPARED):>14}{'differ by':>11}"
    )
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(
            [eager / own for eager, own in zip(seconds["eager"], times, strict=True)], n=4
        )
        agreeing = (outputs[name].argmax(1) == outputs["eager"].argmax(1)).sum().item()
        difference = (outputs[name] - outputs["eager"]).abs().max().item()
        speed, quartiles = BATCH / statistics.median(times), f"{low:.2f}-{high:.2f}"
        print(f"{name:<18}{speed:>11.1f}{middle:>10.2f}{quartiles:>14}{agreeing:>14}{difference:>11.1e}")
    print(f"the largest output is {outputs['eager'].abs().max():.3g}")


if __name__ == "__main__":
    main()
