"""classify: files to labels, one record for each file, in the order given."""

import argparse
import logging
import os
import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from vitmha.cli.arguments import CommandParser, fraction, parse_device, positive_int, writable_dir
from vitmha.data.labeled import find_class_dirs, real_labels
from vitmha.errors import UserError
from vitmha.images import ImageReadError, read_image
from vitmha.images.find import ImageFinder, ImageSource, display_name
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.distributed import Result, TorchrunGroup
from vitmha.inference.engines import Engine, Precision, is_openvino_dir
from vitmha.inference.overlay import draw_attention
from vitmha.inference.records import RecordWriter, to_record
from vitmha.metrics import Evaluation, write_report

RAY_BLOCK = 16_384  # files that a cluster has at a time


def main(args: Sequence[str]) -> None:
    """Classifies until the files, or the readers of the records, end."""
    processes = TorchrunGroup()
    sys.exit(1 if _classify(_arguments(args, processes), processes) else 0)


def _classify(given: argparse.Namespace, processes: TorchrunGroup) -> int:
    """How many files failed; 0 in all processes but the first, which writes."""
    classifier, search = _classifier(given, processes), ImageFinder(given.recursive)
    classifier.check_wanted(features=given.embed, attention=given.attention is not None)
    truth = Truth(given.truth, classifier.class_names) if given.truth else None
    records = _records(given, classifier) if processes.is_first else None
    lines = _lines() if "-" in given.paths else iter(())
    done = records.done if records else []
    if processes.count > 1:
        done, lines = processes.broadcast((done, list(lines)) if records else None)
    items = _not_yet(search.below(given.paths, lines), Counter(done))
    numbered = processes.share(enumerate(items, len(done)))
    made = _on_ray(given, numbered) if given.cluster else _made(given, numbered, classifier, truth, len(done))
    total = failed = 0
    with closing(records) if records else nullcontext(), _progress(given) if records else nullcontext() as progress:
        for record, vector in processes.gather(made, classifier.batch_size):
            assert records is not None  # only the first process is given any
            records.write(record)
            total, failed = total + 1, failed + ("error" in record)
            if truth and vector is not None:
                truth.count(record["path"], vector)
            if progress is not None:
                progress.update(progress.task_ids[0], advance=1, failed=failed)
    processes.close()
    if processes.is_first:
        skipped = f", {search.skipped} hidden or unknown files and folders skipped" if search.skipped else ""
        before = f" after {len(done)} before" if done else ""
        if records and records.failed:
            before += f", {records.failed} of which failed"
        print(f"{total} files{before}: {total - failed} classified, {failed} failed{skipped}", file=sys.stderr)
        if truth:
            truth.tell(given.report)
    return failed + (records.failed if records else 0)


def _made(
    given: argparse.Namespace,
    numbered: Iterable[tuple[int, ImageSource]],
    classifier: Classifier,
    truth: "Truth | None",
    done: int = 0,
) -> Iterator[Result]:
    """The records of one process's files."""
    taken: deque[tuple[int, ImageSource]] = deque()
    answers = classifier.classify(
        _noted(numbered, taken),
        given.top_k,
        threshold=given.threshold,
        vector=given.probabilities or truth is not None,
        features=given.embed,
        attention=given.attention is not None,
        done=done,
    )
    for answer in answers:
        drawn = _drawn(given.attention, *taken.popleft(), answer, classifier)
        right = truth.name_of(os.fspath(answer.path)) if truth else None
        yield to_record(answer, given.probabilities, truth=right, attention=drawn), answer.vector if truth else None


def _on_ray(given: argparse.Namespace, numbered: Iterator[tuple[int, ImageSource]]) -> Iterator[Result]:
    """The records of all files, made by the workers of a Ray cluster, one for each of its GPUs or CPUs."""
    import ray.data

    ray.init(log_to_driver=False, logging_level=logging.ERROR)  # the cluster of RAY_ADDRESS, or one on this machine
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    is_cuda = parse_device(given.device).type == "cuda"
    options: dict[str, Any] = {"num_gpus": 1} if is_cuda else {"num_cpus": 1}
    try:
        kind = "GPU" if is_cuda else "CPU"
        workers = int(ray.cluster_resources().get(kind, 0))
        if not workers:
            raise UserError(f"--cluster ray: no worker of it has a {kind}; take another --device.")
        while block := list(islice(numbered, RAY_BLOCK)):  # pictures in archives are held in memory
            # Names that are no UTF-8 cannot be sent as text.
            rows = ray.data.from_items([{"item": pickle.dumps(each)} for each in block])
            made = rows.map_batches(
                RayWorker,
                fn_constructor_args=(given, os.getcwd()),
                batch_size=given.batch_size,
                concurrency=workers,
                **options,
            )
            for row in made.iter_rows():
                yield pickle.loads(row["made"])
    finally:
        ray.shutdown()


class RayWorker:
    """A classifier on a worker of a Ray cluster.

    Args:
        given: The words of the call.
        place: The folder that it was made in, where paths begin.
    """

    def __init__(self, given: argparse.Namespace, place: str) -> None:
        os.chdir(place)
        self.given = given
        self.classifier = _classifier(given, TorchrunGroup())
        self.truth = Truth(given.truth, self.classifier.class_names) if given.truth else None

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[bytes]]:
        numbered = [pickle.loads(item) for item in rows["item"]]
        # As if all were under way: a batch of the cluster is one of the model.
        made = _made(self.given, numbered, self.classifier, self.truth, done=self.classifier.batch_size)
        return {"made": [pickle.dumps(each) for each in made]}


class Truth:
    """The right answers for the files below a folder with a folder for each class, and how many were given.

    Args:
        folder: Holds CLASS/x.jpg, or ImageNet's validation files, whose ReaL labels are known by their names.
        class_names: The model's.
    """

    def __init__(self, folder: str, class_names: Sequence[str]) -> None:
        self.folder, self.class_names = folder, class_names
        self.numbers = find_class_dirs(folder, class_names)
        is_known = len(class_names) == 1000 and any(real_labels(name) is not None for name in os.listdir(folder))
        if not (self.numbers or is_known):
            raise UserError(f"--truth: {folder} holds no folder for each class, FOLDER/CLASS/x.jpg.")
        self.evaluation = Evaluation(len(class_names))
        self.real: list[bool] = []

    def number_of(self, path: str) -> int | None:
        return self.numbers.get(os.path.relpath(path, self.folder).split(os.sep)[0])

    def name_of(self, path: str) -> str | None:
        """The model's name of the right class."""
        number = self.number_of(path)
        return None if number is None else self.class_names[number]

    def count(self, path: str, probabilities: Tensor) -> None:
        number, real = self.number_of(path), real_labels(path)
        if number is not None:
            self.evaluation.update(probabilities[None], torch.tensor([number]))
        if real and len(self.class_names) == 1000:
            self.real.append(int(probabilities.argmax()) in real)

    def tell(self, folder: str | None) -> None:
        """Says how many answers were right, and writes the report where there is a folder for it."""
        report = self.evaluation.compute()
        further = {"top1_real": sum(self.real) / len(self.real)} if self.real else {}
        for name, number in {**report.summary, **further}.items():
            print(f"{name.replace('_', ' '):<20}{number:>12,.6g}", file=sys.stderr)
        if folder:
            write_report(report, self.class_names, folder, **further)


def _not_yet(items: Iterable[ImageSource], done: Counter[str]) -> Iterator[ImageSource]:
    """All but the first so many of each name, which are done."""
    for item in items:
        name = display_name(item)
        if done[name] > 0:
            done[name] -= 1
        else:
            yield item


def _noted(numbered: Iterable[tuple[int, ImageSource]], taken: deque[tuple[int, ImageSource]]) -> Iterator[ImageSource]:
    """The items, each kept until its answer is there."""
    for number, item in numbered:
        taken.append((number, item))
        yield item


def _lines() -> Iterator[str]:
    """The paths on standard input, one a line, as they come."""
    # Python closes its own `sys.stdin` at its end, and aborts where a thread still waits there for a line.
    with open(sys.stdin.fileno(), "rb", closefd=False) as lines:
        for line in lines:
            if path := os.fsdecode(line.rstrip(b"\r\n")):
                yield path


def _arguments(args: Sequence[str], processes: TorchrunGroup) -> argparse.Namespace:
    parser = CommandParser(
        prog="vitmha classify", description="Files to labels, one record for each, in the order given."
    )
    sources = "files, folders, quoted patterns such as 'x/*.jpg', .tar archives, or - for a list on standard input"
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"{sources}; behind -- a name may begin with a dash")
    parser.add_argument("--model", required=True, metavar="M", help="a model folder, a .ckpt, timm:NAME, hf:REPO, ...")
    parser.add_argument("--top-k", type=positive_int, default=5, metavar="K", help="labels for each file; default 5")
    parser.add_argument("--threshold", type=fraction, default=0.0, metavar="P", help="leave out labels less probable")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one a line, in place of the model's")
    parser.add_argument("--recursive", action="store_true", help="search folders in folders too")
    parser.add_argument("--format", choices=("table", "csv", "jsonl"), help="default table; with --output its suffix's")
    parser.add_argument("--output", metavar="FILE", help="write the records here, as they come, as .csv or .jsonl")
    parser.add_argument("--resume", action="store_true", help="go on with --output after an interruption")
    parser.add_argument("--probabilities", action="store_true", help="give those of all classes too, as `vector`")
    parser.add_argument("--embed", action="store_true", help="give what the model's head reads, in place of labels")
    parser.add_argument(
        "--attention",
        type=writable_dir,
        metavar="DIR",
        help="draw there where the class token looks in each picture",
    )
    parser.add_argument("--truth", metavar="FOLDER", help="classify FOLDER/CLASS/x.jpg and measure how right it is")
    parser.add_argument(
        "--report", type=writable_dir, metavar="DIR", help="write the measures, each class's and the confusion there"
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=32, metavar="N", help="pictures in a pass; default 32"
    )
    parser.add_argument(
        "--workers", type=positive_int, metavar="N", help="threads that read; default: the CPUs, at most 8"
    )
    parser.add_argument("--cluster", choices=("ray",), help="share the files over the workers of a Ray cluster")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--engine", choices=get_args(Engine), default="torch", help="what computes; default torch")
    parser.add_argument("--compile", action="store_const", dest="engine", const="compile", help="--engine compile")
    precision = (
        "int8: with openvino alone, calibrated on the first pictures; with --resume or --cluster export it before"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="float32", help=precision)
    parser.add_argument("--flip", action="store_true", help="take the mean over the picture and its mirror image")
    parser.add_argument("--exact", action="store_true", help="decode large JPEGs in full, which takes longer")
    words = args
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_intermixed_args(words[:end])
    given.paths += words[end + 1 :]
    if given.format is None:
        given.format = "table" if not given.output else "csv" if given.output.endswith(".csv") else "jsonl"
    for is_wrong, message in (
        (
            not given.paths and not given.truth,
            "nothing to classify: give files, folders, or - for a list on standard input.",
        ),
        (given.resume and not given.output, "--resume goes on with a file: it needs --output."),
        (given.output and given.format == "table", "--output takes --format csv or jsonl; a table is for people."),
        (given.truth and given.paths, "--truth names the files itself: leave PATH out."),
        (
            given.truth and (given.embed or given.resume),
            "--truth measures labels of all files: no --embed, no --resume.",
        ),
        (given.report and not given.truth, "--report is about how right the labels are: it needs --truth."),
        (given.embed and given.probabilities, "--embed takes the place of labels: leave --probabilities out."),
        (given.embed and given.attention, "--embed takes the place of labels: leave --attention out."),
        (
            (given.embed or given.probabilities) and given.format == "table",
            "--embed and --probabilities are for programs: add --format jsonl or csv.",
        ),
        (
            given.precision == "int8" and (given.resume or given.cluster or processes.count > 1),
            "--precision int8 hangs on the first pictures of a call: to resume or share it, classify with what "
            "vitmha export --format openvino-int8 makes of the model.",
        ),
        (given.cluster and find_spec("ray") is None, "--cluster ray needs Ray: pip install 'vitmha[ray]'."),
    ):
        if is_wrong:
            raise UserError(message)
    if given.truth:
        given.paths, given.recursive = [given.truth], True
    return given


def _classifier(given: argparse.Namespace, processes: TorchrunGroup) -> Classifier:
    device = parse_device(given.device).type
    if given.engine == "openvino" or is_openvino_dir(given.model):
        device = given.device  # "auto" is the CPU then
    elif device == "cuda" and processes.count > 1:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    names = None
    if given.labels:
        try:
            names = Path(given.labels).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--labels {given.labels} cannot be read: {error}.") from None
    return Classifier(
        given.model,
        device=device,
        batch_size=given.batch_size,
        workers=given.workers,
        engine=given.engine,
        precision=given.precision,
        flip=given.flip,
        exact=given.exact,
        class_names=names,
    )


def _records(given: argparse.Namespace, classifier: Classifier) -> RecordWriter:
    numbers: dict[str, list[str]] = {}
    if given.embed:
        numbers["features"] = [f"feature_{i}" for i in range(classifier.num_features)]
    if given.probabilities:
        numbers["vector"] = [f"probability of {name}" for name in classifier.class_names]
    labels = 0 if given.embed else min(given.top_k, len(classifier.class_names))
    return RecordWriter(
        given.format,
        given.output,
        resume=given.resume,
        num_labels=labels,
        numbers=numbers,
        may_lack=given.threshold > 0,
    )


def _progress(given: argparse.Namespace) -> AbstractContextManager[Progress | None]:
    """A count of the files on standard error, where that is a terminal on which no records appear."""
    if not sys.stderr.isatty() or (not given.output and sys.stdout.isatty()):
        return nullcontext()
    columns = (TextColumn("{task.completed} files, {task.fields[failed]} failed"), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("", total=None, failed=0)
    return progress


def _drawn(
    folder: str | None, number: int, item: ImageSource, answer: Prediction, classifier: Classifier
) -> str | None:
    """Draws where the class token looks, and gives the file's name; the number keeps files of one name apart."""
    if folder is None or answer.attention is None or isinstance(item, ImageReadError):
        return None
    stem = "".join(letter if letter.isalnum() else "_" for letter in Path(answer.path).stem)[:60]
    file = Path(folder, f"{number:06d}_{stem}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_attention(read_image(item), answer.attention, classifier.preprocessing).save(file)
    return str(file)
