"""evaluate: measures a model on labeled images."""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from vitmha.atomic import atomic_path
from vitmha.cli.arguments import (
    CommandParser,
    add_classifier,
    add_data,
    check_classifier,
    classifier_options,
    parse_device,
    refuse,
    writable_dir,
)
from vitmha.text import printable

if TYPE_CHECKING:  # a wrong call is answered without the seconds of importing torch
    from vitmha.inference.classifier import Prediction

COLUMNS = ("path", "label", "predicted", "probability", "correct")


def main(args: Sequence[str]) -> None:
    """Evaluates; exits with status 1 if some images could not be read."""
    sys.exit(1 if _evaluate(parse_args(args)) else 0)


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the arguments."""
    parser = CommandParser(
        prog="vitmha evaluate",
        description="Measure a model on labeled images: top-1, top-5, calibration error, per-class accuracy, confusion "
        "matrix. If the data has splits, the validation split is used.",
    )
    add_data(parser, note="; for ImageNet's validation images also the ReaL accuracy is measured")
    help_ = "write metrics.json, per_class.csv, confusion.csv and confusion.png to this directory"
    parser.add_argument("--output", type=writable_dir, metavar="DIR", help=help_)
    help_ = f"write one row per image to this .csv or .jsonl file: {', '.join(COLUMNS)}"
    parser.add_argument("--predictions", metavar="FILE", help=help_)
    add_classifier(parser)
    parsed = parser.parse_args(args)
    if parsed.predictions and not parsed.predictions.endswith((".csv", ".jsonl")):
        refuse(f"--predictions must end in .csv or .jsonl, got {parsed.predictions}")
    check_classifier(parsed)
    return parsed


def _evaluate(args: argparse.Namespace) -> int:
    """Returns the number of images that could not be classified; 0 in all processes but rank 0, which reports."""
    from vitmha.data.labeled import read_labeled
    from vitmha.inference.classifier import Classifier
    from vitmha.inference.distributed import TorchrunGroup, map_on_ray
    from vitmha.inference.evaluation import LabeledEvaluation, predict

    group, options = TorchrunGroup(), classifier_options(args)
    classifier = Classifier(**options)
    classifier.check_outputs(embeddings=False, attention=False)
    labeled = read_labeled(args.data, classifier.class_names, data_root=args.data_root)
    numbered = group.shard(enumerate(image for image, _ in labeled.val))
    if args.cluster:
        results = map_on_ray(predict, numbered, options, device_type=parse_device(args.device).type)
    else:
        results = predict(classifier, numbered)
    evaluation = LabeledEvaluation(classifier.class_names)
    with _predictions_file(args.predictions if group.is_main else None) as file:
        for name, (position, prediction) in group.gather(results, classifier.batch_size):
            label = labeled.val[position][1]
            evaluation.update(prediction, label)
            if prediction.error is not None:
                print(printable(f"error: {name}: {prediction.error}"), file=sys.stderr)
            if file is not None:
                is_file = isinstance(labeled.val[position][0], str | os.PathLike) or name != "ndarray"
                path = name if is_file else f"{args.data}[{position}]"
                label_name = None if label is None else classifier.class_names[label]
                _write_prediction(file, _row(path, label_name, prediction), args.predictions.endswith(".csv"))
    group.close()
    if not group.is_main:
        return 0
    print(_table(evaluation.metrics, f"validation split of {args.data}" if labeled.train else args.data))
    if args.output:
        evaluation.write(args.output)
    failed = len(evaluation.errors)
    if failed:
        print(f"{failed} of {len(labeled.val)} images could not be read and are not counted", file=sys.stderr)
    return failed


def _table(metrics: dict[str, Any], source: str) -> str:
    """One line per metric: fractions in percent, except for the calibration error."""
    lines = [f"{'num_images':<12}{metrics['num_images']:>10}   {source}"]
    for name in ("top1", "top5", "top1_real"):
        if name in metrics:
            lines.append(f"{name:<12}{metrics[name]:>10.2%}")
    if "ece" in metrics:
        lines.append(f"{'ece':<12}{metrics['ece']:>10.4f}")
    return "\n".join(lines)


def _row(path: str, label: str | None, prediction: "Prediction") -> dict[str, Any]:
    predicted = prediction.labels[0] if prediction.labels else None
    probability = round(prediction.probabilities[0], 7) if prediction.probabilities else None
    correct = None if label is None or predicted is None else predicted == label
    return dict(zip(COLUMNS, (path, label, predicted, probability, correct), strict=True))


@contextmanager
def _predictions_file(output: str | None) -> Iterator[TextIO | None]:
    """The file of --predictions, with the column names if it is a CSV file; it appears when all rows are written."""
    if output is None:
        yield None
        return
    with (
        atomic_path(output) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        if output.endswith(".csv"):
            csv.writer(file, lineterminator="\n").writerow(COLUMNS)
        yield file


def _write_prediction(file: TextIO, row: dict[str, Any], is_csv: bool) -> None:
    if is_csv:
        cells = [
            "" if value is None else str(value).lower() if isinstance(value, bool) else value for value in row.values()
        ]
        csv.writer(file, lineterminator="\n").writerow(cells)
    else:
        file.write(json.dumps(row) + "\n")
