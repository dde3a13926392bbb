"""Whole processes that classify the same files: `vitmha classify`, timm's loop and Hugging Face's pipeline.

    python benchmarks/classify.py --root DATA [--model M] [--rounds 5]

DATA/imagenet-sample holds class directories of JPEG files. They are repeated to --images files, and resized to
--phones files of 4000 x 3000 pixels. The model is a ViT-S at 224 pixels, saved in the format of each package: the
weights of --model, or random ones with a head fitted to separate the images, which need no download. Each command is
a process of its own, timed from start to end, with batches of 32 and 2 workers. int8 is converted at the start of the
process, or was exported before. Rounds alternate over the commands, and ratios are medians over the rounds. timm is
run as its inference.py does: its dataset, its loader, softmax and top-5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from vitmha import Classifier, create_model, load_model, save_model
from vitmha.images import Preprocessing, read_image
from vitmha.inference.export import export_model

TIMM = """
import json, sys, timm, torch
from timm.data import create_dataset, create_loader, resolve_data_config
model, directory, output = sys.argv[1:]
model = timm.create_model(f"local-dir:{model}", pretrained=True).eval()
config = resolve_data_config(model=model)
dataset = create_dataset("", directory)
options = {"batch_size": 32, "use_prefetcher": False, "num_workers": 2, "device": torch.device("cpu")}
loader = create_loader(dataset, **options, **config)
best = []
with torch.inference_mode():
    for images, _ in loader:
        best += model(images).softmax(-1).topk(5).indices[:, 0].tolist()
names = dataset.filenames(basename=False, absolute=True)
json.dump(dict(zip(names, best, strict=True)), open(output, "w"))
"""
HUGGING_FACE = """
import json, sys
from pathlib import Path
from transformers import pipeline
model, directory, output = sys.argv[1:]
files = sorted(str(file) for file in Path(directory).rglob("*.JPEG"))
found = pipeline("image-classification", model=model, device="cpu")(files, batch_size=32, num_workers=2)
json.dump({file: labels[0]["label"] for file, labels in zip(files, found, strict=True)}, open(output, "w"))
"""
# The options of each run of vitmha.
OURS = {
    "vitmha": [],
    "vitmha, compiled": ["--compile"],
    "vitmha, bfloat16": ["--precision", "bfloat16"],
    "vitmha, OpenVINO": ["--engine", "openvino"],
    "vitmha, OpenVINO, int8": ["--engine", "openvino", "--precision", "int8"],
    "vitmha, exported in int8": ["--model", "{models}/int8"],
}
OURS_ON_PHONES = {
    "vitmha": [],
    "vitmha, bfloat16": ["--precision", "bfloat16"],
    "vitmha, decoded in full": ["--full-decode"],
}
PEERS = {"timm": TIMM, "Hugging Face": HUGGING_FACE}


def new_model(files: Sequence[Path]) -> torch.nn.Module:
    """A ViT-S with random blocks whose head is fitted to the classes of the images by least squares."""
    torch.manual_seed(0)
    names = sorted({file.parent.name for file in files})
    model = create_model("vit_small", num_classes=len(names)).eval()
    model.class_names = tuple(names)
    model.preprocessing = Preprocessing(image_size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9)
    predictions = Classifier(model).classify(files, embeddings=True)
    seen = torch.stack([prediction.embedding for prediction in predictions]).double()
    wanted = 20 * torch.eye(len(names)).double()[[names.index(file.parent.name) for file in files]]
    mean, spread = seen.mean(0), seen.std(0)
    scaled = (seen - mean) / spread
    ridge = scaled.T @ scaled + 1e-2 * len(files) * torch.eye(scaled.shape[1])
    weight = torch.linalg.solve(ridge, scaled.T @ (wanted - wanted.mean(0))).T / spread
    with torch.no_grad():
        model.head.weight.copy_(weight)
        model.head.bias.copy_(wanted.mean(0) - weight @ mean)
    return model


def linked(files: Sequence[Path], number: int, directory: Path) -> Path:
    """Makes `number` links to the files, in their class directories."""
    for i in range(number):
        file = files[i % len(files)].resolve()
        link = directory / file.parent.name / f"{i // len(files)}_{file.stem}.JPEG"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return directory


def phone_images(files: Sequence[Path], number: int, directory: Path) -> Path:
    """Writes `number` JPEG files of 4000 x 3000 pixels."""
    for file in files[:: max(1, len(files) // number)][:number]:
        target = directory / file.parent.name / f"{file.stem}.JPEG"
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            image.convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC).save(target, quality=90)
    return directory


def timed(command: Sequence[str], output: Path) -> float:
    """Seconds that a process takes."""
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def read_labels(output: Path, names: Sequence[str]) -> dict[str, str]:
    """The predicted class of each file."""
    text = output.read_text()
    if output.suffix == ".jsonl":
        return {str(Path(r["path"]).absolute()): r["labels"][0] for r in map(json.loads, text.splitlines())}
    return {path: names[best] if isinstance(best, int) else best for path, best in json.loads(text).items()}


def compare(directory: Path, models: Path, ours: dict[str, list[str]], rounds: int, names: Sequence[str]) -> None:
    """Prints a table: images per second, the ratio to the faster peer, and the fraction of equal predictions."""
    count = len(list(directory.rglob("*.JPEG")))
    classify = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify", str(directory), "--recursive"]
    ways: dict[str, tuple[list[str], Path]] = {}
    for number, (name, options) in enumerate(ours.items()):
        output = models / f"{number}.jsonl"
        flags = ["--model", str(models / "vitmha"), "--output", str(output), "--num-workers", "2"]
        flags += [each.format(models=models) for each in options]  # the last --model counts
        ways[name] = ([*classify, *flags], output)
    for name, code in PEERS.items():
        output = models / f"{name}.json"
        model = models / {"timm": "timm", "Hugging Face": "hf"}[name]
        ways[name] = ([sys.executable, "-c", code, str(model), str(directory), str(output)], output)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (command, output) in ways.items():
            seconds[name].append(timed(command, output))
    best = [min(times) for times in zip(*(seconds[name] for name in PEERS), strict=True)]
    right = read_labels(ways["vitmha"][1], names)
    print(f"\n{count} images of {directory.name:<25} images/s   x the faster peer   same predictions")
    for name, (_, output) in ways.items():
        ratio = statistics.median(other / own for other, own in zip(best, seconds[name], strict=True))
        pace, found = count / statistics.median(seconds[name]), read_labels(output, names)
        same = sum(found[path] == label for path, label in right.items()) / count
        print(f"{name:<42}{pace:>8.1f}{ratio:>19.2f}{same:>21.1%}")


def first_prediction(directory: Path, model: Path, rounds: int) -> None:
    """Prints the seconds to the first record, in addition to importing torch."""
    command = [sys.executable, "-c", "from vitmha.cli import main; main()", "classify", str(directory), "--recursive"]
    beyond = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.perf_counter()
        options = [*command, "--model", str(model), "--format", "jsonl"]
        with subprocess.Popen(options, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()
            beyond.append(time.perf_counter() - imported - (imported - start))
            process.kill()
    print(f"\nfirst prediction {statistics.median(beyond):.2f} s after importing torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="holds imagenet-sample")
    parser.add_argument("--model", help="weights of a ViT-S/16 at 224, such as timm:vit_small_patch16_224")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--phones", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    files = sorted((given.root / "imagenet-sample").rglob("*.JPEG"))
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        model = load_model(given.model) if given.model else new_model(files)
        for format_ in ("vitmha", "timm", "hf"):
            save_model(model, work / format_, format_)
        seen = [model.preprocessing(read_image(file)) for file in files[:: max(1, len(files) // 64)]]
        export_model(model, work / "int8", "openvino-int8", torch.stack(seen))
        names = model.class_names
        print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
        sample = linked(files, given.images, work / "imagenet-sample")
        compare(sample, work, OURS, given.rounds, names)
        compare(phone_images(files, given.phones, work / "phones"), work, OURS_ON_PHONES, given.rounds, names)
        first_prediction(sample, work / "vitmha", given.rounds)


if __name__ == "__main__":
    main()
