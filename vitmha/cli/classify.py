"""classify: predicts the labels of image files, one record per file, in the order of the arguments."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

from vitmha.cli.arguments import (
    CommandParser,
    add_classifier,
    check_classifier,
    classifier_options,
    fraction,
    parse_device,
    positive_int,
    refuse,
    writable_dir,
)
from vitmha.text import printable

if TYPE_CHECKING:  # a wrong call is answered without the seconds of importing torch
    from rich.progress import Progress

    from vitmha.inference.classifier import Classifier
    from vitmha.inference.records import RecordWriter


def main(args: Sequence[str]) -> None:
    """Classifies until the images end, or until whatever reads the records closes the pipe."""
    sys.exit(1 if _classify(parse_args(args)) else 0)


def _classify(args: argparse.Namespace) -> int:
    """Returns the number of files that failed; 0 in all processes but rank 0, which writes."""
    from functools import partial

    from vitmha.images.find import ImageFinder
    from vitmha.inference.classifier import Classifier
    from vitmha.inference.distributed import TorchrunGroup, map_on_ray
    from vitmha.inference.records import make_records, without_done

    group, options = TorchrunGroup(), classifier_options(args)
    classifier, finder = Classifier(**options), ImageFinder(args.recursive)
    classifier.check_outputs(embeddings=args.embeddings, attention=args.attention_dir is not None)
    writer = _writer(args, classifier) if group.is_main else None
    lines = _stdin_paths(b"\0" if args.null else b"\n") if "-" in args.paths else iter(())
    done = writer.done if writer else []
    if group.world_size > 1:
        done, lines = group.broadcast((done, list(lines)) if writer else None)
    images = without_done(finder.below(args.paths, lines), done)
    numbered = group.shard(enumerate(images, len(done)))
    task = partial(
        make_records,
        top_k=args.top_k,
        threshold=args.threshold,
        all_probabilities=args.all_probs,
        embeddings=args.embeddings,
        attention_dir=args.attention_dir,
    )
    if args.cluster:
        results = map_on_ray(task, numbered, options, device_type=parse_device(args.device).type)
    else:
        results = task(classifier, numbered, len(done))
    total = failed = 0
    with closing(writer) if writer else nullcontext(), _progress(args) if writer else nullcontext() as progress:
        for _, record in group.gather(results, classifier.batch_size):
            assert writer is not None  # only rank 0 receives results
            writer.write(record)
            total, failed = total + 1, failed + ("error" in record)
            if progress is not None:
                progress.update(progress.task_ids[0], advance=1, failed=failed)
    group.close()
    num_failed_before = writer.num_failed if writer else 0
    if group.is_main:
        skipped = f"{finder.skipped} hidden or unknown files and directories skipped" if finder.skipped else ""
        nothing_found = [_nothing_found(path, args.recursive) for path in finder.empty]
        if not total and not done:
            refuse("; ".join(nothing_found) + (f" ({skipped})" if skipped else ""))
        for message in nothing_found:
            print(printable(f"warning: {message}"), file=sys.stderr)
        before = f" after {len(done)} before" if done else ""
        before += f", {num_failed_before} of which failed" if num_failed_before else ""
        print(
            f"{total} files{before}: {total - failed} classified, {failed} failed{skipped and f', {skipped}'}",
            file=sys.stderr,
        )
    return failed + num_failed_before


def _nothing_found(path: str, is_recursive: bool) -> str:
    if path == "-":
        return "the list on standard input is empty"
    hint = "" if is_recursive or not os.path.isdir(path) else ": add --recursive to search its subdirectories"
    return f"no image files found in {path}{hint}"


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the arguments."""
    parser = CommandParser(
        prog="vitmha classify", description="Predict the labels of image files: one record per file, in order."
    )
    sources = "files, directories, quoted patterns such as 'x/*.jpg', .tar and .zip archives, or - for a list of them "
    sources += "on standard input"
    parser.add_argument("paths", nargs="*", metavar="IMAGES", help=f"{sources}; after -- a name may begin with a dash")
    parser.add_argument("--top-k", type=positive_int, default=5, metavar="K", help="labels per image; default 5")
    parser.add_argument("--threshold", type=fraction, default=0.0, metavar="P", help="omit less probable labels")
    parser.add_argument("--recursive", action="store_true", help="search subdirectories too")
    parser.add_argument(
        "--null", action="store_true", help="names on standard input end in NUL, as find -print0 writes them"
    )
    parser.add_argument("--format", choices=("table", "csv", "jsonl"), help="default table, or the suffix of --output")
    parser.add_argument("--output", metavar="FILE", help="write the records to this .csv or .jsonl file as they come")
    parser.add_argument("--resume", action="store_true", help="continue --output after an interruption")
    parser.add_argument("--all-probs", action="store_true", help="add the probabilities of all classes")
    parser.add_argument(
        "--embeddings",
        action="store_true",
        help="output embeddings (the input of the classification head) instead of labels",
    )
    parser.add_argument(
        "--attention-dir",
        type=writable_dir,
        metavar="DIR",
        help="save an attention map of the class token per image to this directory",
    )
    add_classifier(parser)
    end = args.index("--") if "--" in args else len(args)
    parsed = parser.parse_intermixed_args(args[:end])
    parsed.paths += args[end + 1 :]
    if parsed.format is None:
        parsed.format = "table" if not parsed.output else "csv" if parsed.output.endswith(".csv") else "jsonl"
    for is_wrong, message in (
        (not parsed.paths, "nothing to classify: pass files, directories, or - for a list on standard input."),
        (parsed.null and "-" not in parsed.paths, "--null is for a list on standard input: add - to the arguments."),
        (parsed.resume and not parsed.output, "--resume continues a file: add --output FILE."),
        (parsed.output and parsed.format == "table", "--output needs --format csv or jsonl; a table is for terminals."),
        (
            parsed.embeddings and parsed.all_probs,
            "--embeddings replaces labels: it cannot be combined with --all-probs.",
        ),
        (
            parsed.embeddings and parsed.attention_dir,
            "--embeddings replaces labels: it cannot be combined with --attention-dir.",
        ),
        (
            (parsed.embeddings or parsed.all_probs) and parsed.format == "table",
            "--embeddings and --all-probs are not part of a table: add --format jsonl or csv.",
        ),
    ):
        if is_wrong:
            refuse(message)
    check_classifier(parsed, resume=parsed.resume)
    return parsed


def _writer(args: argparse.Namespace, classifier: "Classifier") -> "RecordWriter":
    from vitmha.inference.records import RecordWriter

    vectors: dict[str, list[str]] = {}
    if args.embeddings:
        vectors["embedding"] = [f"embedding_{i}" for i in range(classifier.embedding_dim)]
    if args.all_probs:
        vectors["all_probabilities"] = [f"probability of {name}" for name in classifier.class_names]
    return RecordWriter(
        args.format,
        args.output,
        resume=args.resume,
        num_labels=0 if args.embeddings else min(args.top_k, len(classifier.class_names)),
        vectors=vectors,
        fewer_labels=args.threshold > 0,
    )


def _progress(args: argparse.Namespace) -> "AbstractContextManager[Progress | None]":
    """A count of the files on standard error, if that is a terminal on which no records appear."""
    if not sys.stderr.isatty() or (not args.output and sys.stdout.isatty()):
        return nullcontext()
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed} files, {task.fields[failed]} failed"), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("", total=None, failed=0)
    return progress


def _stdin_paths(end: bytes) -> Iterator[str]:
    """Yields the paths on standard input as they come; each ends in a newline or in NUL."""
    from vitmha.errors import UserError

    rest, is_complete = b"", False
    # Not through `sys.stdin`: Python closes it at exit, and aborts if a thread is still reading there.
    with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
        while not is_complete:
            chunk = stdin.read1()
            if end != b"\0" and b"\0" in chunk:
                raise UserError("the names on standard input end in NUL: add --null.")
            is_complete = not chunk
            *paths, rest = (rest + (chunk or end)).split(end)  # the last path may have no end
            for path in paths:
                if name := path if end == b"\0" else path.removesuffix(b"\r"):
                    yield os.fsdecode(name)
