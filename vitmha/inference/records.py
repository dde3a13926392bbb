"""Classifies images to records, and writes them as a table, CSV or JSON lines."""

import csv
import io
import json
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.images import ImageReadError, read_image
from vitmha.images.find import ImageSource, display_name
from vitmha.inference.classifier import Classifier, Prediction
from vitmha.inference.distributed import Numbered
from vitmha.inference.overlay import draw_attention
from vitmha.text import printable

Format = Literal["table", "csv", "jsonl"]
Record = dict[str, Any]


def to_record(prediction: Prediction, **extra: str | None) -> Record:
    """Converts a prediction to a record: its path, then either labels and probabilities, an embedding, or an error.

    Args:
        prediction: All of its fields but `attention` are included.
        extra: More fields, such as the file of the attention map; None is omitted.

    Example:
        >>> to_record(Prediction(path="a.png", labels=("cat",), probabilities=(0.75,)))
        {'path': 'a.png', 'labels': ['cat'], 'probabilities': [0.75]}
    """
    record: Record = {"path": os.fspath(prediction.path)} | {key: value for key, value in extra.items() if value}
    if prediction.error is not None:
        return {**record, "error": prediction.error}
    if prediction.embedding is not None:
        return {**record, "embedding": _rounded(prediction.embedding.tolist())}
    record |= {"labels": list(prediction.labels), "probabilities": _rounded(prediction.probabilities)}
    if prediction.all_probabilities is not None:
        record["all_probabilities"] = _rounded(prediction.all_probabilities.tolist())
    return record


def _rounded(values: Iterable[float]) -> list[float]:
    """Rounded to 7 digits, the resolution of float32 near 1."""
    return [round(value, 7) for value in values]


def make_records(
    classifier: Classifier,
    numbered: Iterable[Numbered],
    num_done: int = 0,
    *,
    attention_dir: str | None = None,
    **options: Any,
) -> Iterator[tuple[str, Record]]:
    """Classifies images; yields the path and the record of each, in order.

    Args:
        classifier: The classifier.
        numbered: Images with their positions among all images of the call.
        num_done: Images classified before an interruption.
        attention_dir: Save the attention map of each image here; the record holds the file's name.
        options: Further arguments of `Classifier.classify`.
    """
    pending: deque[Numbered] = deque()

    def sources() -> Iterator[ImageSource]:
        for position, source in numbered:
            pending.append((position, source))
            yield source

    predictions = classifier.classify(sources(), attention=attention_dir is not None, _num_done=num_done, **options)
    for prediction in predictions:
        position, source = pending.popleft()
        file = None
        if attention_dir and prediction.attention is not None and not isinstance(source, ImageReadError):
            stem = "".join(letter if letter.isalnum() else "_" for letter in Path(prediction.path).stem)[:60]
            path = Path(
                attention_dir, f"{position:06d}_{stem}.png"
            )  # the position, since several files may share a stem
            attention_map = draw_attention(read_image(source), prediction.attention, classifier.preprocessing)
            with atomic_path(path) as partial:
                attention_map.save(partial, "PNG")
            file = str(path)
        yield os.fspath(prediction.path), to_record(prediction, attention=file)


def without_done(images: Iterable[ImageSource], done: Sequence[str]) -> Iterator[ImageSource]:
    """Skips images that have records already: as many of each name as `done` holds."""
    counts = Counter(done)
    for image in images:
        name = display_name(image)
        if counts[name] > 0:
            counts[name] -= 1
        else:
            yield image


class RecordWriter:
    """Writes records, each completely and at once.

    Args:
        format: A human-readable table, CSV or JSON lines.
        output: A file; standard output if None.
        resume: Keep the records in the file, except for a last one that is incomplete.
        num_labels: Number of labels per record; a CSV file has a column for each, and one for its probability.
        vectors: Further columns of a CSV file: their names, by the key of the record that holds the numbers.
        fewer_labels: Records may have fewer labels than `num_labels`, because of a threshold.

    Raises:
        UserError: The output exists and `resume` is False, holds other records, or cannot be written.
    """

    def __init__(
        self,
        format: Format,  # noqa: A002 (as the flag)
        output: str | None,
        *,
        resume: bool,
        num_labels: int,
        vectors: Mapping[str, Sequence[str]],
        fewer_labels: bool = False,
    ) -> None:
        self.format, self.num_labels, self.vectors, self.fewer_labels = format, num_labels, vectors, fewer_labels
        self.done: list[str] = []
        """Paths of the records that the file held before."""
        self.num_failed = 0
        """Number of errors among them."""
        self.file: BinaryIO = sys.stdout.buffer
        self.is_terminal = output is None and sys.stdout.isatty()
        self.header = self._header()
        if output is not None:
            if os.path.exists(output) and not os.path.isfile(output):
                raise UserError(f"output {output} is not a regular file; without it records go to standard output.")
            if not resume and os.path.lexists(output):
                raise UserError(f"output {output} already exists: pass `resume` to continue it, or remove the file.")
            self.done, length = self._read_existing(Path(output)) if os.path.exists(output) else ([], 0)
            try:
                self.file = open(output, "ab")  # noqa: SIM115 (see close)
            except OSError as error:
                raise UserError(f"output {output} cannot be written: {error.strerror}.") from None
            self.file.truncate(length)
        self.has_header = bool(self.done)

    def write(self, record: Record) -> None:
        """Writes and flushes one record."""
        if self.format == "table":
            width = shutil.get_terminal_size().columns if self.is_terminal else None
            text = table_rows(record, width=width, with_header=not self.has_header, color=self.is_terminal)
        elif self.format == "jsonl":
            text = json.dumps(record) + "\n"
        else:
            rows = [csv_row(self._cells(record))]
            rows = rows if self.has_header else [csv_row(self.header), *rows]
            text = "".join(f"{printable(row.rstrip())}\n" if self.is_terminal else row for row in rows)
        self.has_header = True
        with self._naming_the_file():
            # File names that are not UTF-8 are written as their bytes.
            self.file.write(text.encode(errors="surrogateescape"))
            self.file.flush()

    def close(self) -> None:
        """Closes the file; removes it if it has no record."""
        if self.file is not sys.stdout.buffer:
            with self._naming_the_file():
                self.file.close()
                if not self.has_header:
                    os.remove(self.file.name)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Adds the file's name to an error of writing, such as a full disk."""
        try:
            yield
        except OSError as error:
            error.filename = self.file.name
            raise

    def _header(self) -> list[str]:
        if self.format != "csv":
            return ["path", "error"]
        labels = [f"{name}_{i + 1}" for i in range(self.num_labels) for name in ("label", "probability")]
        vectors = [name for names in self.vectors.values() for name in names]
        return ["path", *labels, *vectors, "attention", "error"]

    def _cells(self, record: Record) -> list[Any]:
        pairs = zip(record.get("labels", ()), record.get("probabilities", ()), strict=True)
        labels = [cell for pair in pairs for cell in pair]
        labels += [""] * (2 * self.num_labels - len(labels))
        vectors = [cell for key, names in self.vectors.items() for cell in record.get(key) or [""] * len(names)]
        return [record["path"], *labels, *vectors, *(record.get(key, "") for key in ("attention", "error"))]

    def _read_existing(self, output: Path) -> tuple[list[str], int]:
        """The paths of the complete records in a file, and the number of bytes up to the end of the last."""
        paths: list[str] = []
        length = 0
        text = b""  # what was read after `length`

        def lines() -> Iterator[str]:
            nonlocal text
            with output.open("rb") as file:
                for line in file:
                    text += line
                    yield line.decode(errors="surrogateescape")

        is_csv, unread = self.format == "csv", lines()
        refusal = UserError(f"output {output} has other records or columns than this call would write.")
        try:
            for cells in csv.reader(unread) if is_csv else map(self._parse_json, unread):
                is_header = is_csv and not length
                is_valid = cells == self.header if is_header else len(cells) == len(self.header)
                if not (is_valid and text.endswith(b"\n")):
                    if self._is_incomplete(text, is_header) and next(unread, None) is None:
                        break
                    raise refusal
                if not is_header:
                    paths.append(cells[0])
                    self.num_failed += bool(cells[-1])
                length, text = length + len(text), b""
        except csv.Error:
            raise refusal from None
        return paths, length if paths else 0

    def _is_incomplete(self, text: bytes, is_header: bool) -> bool:
        """Whether this may be the beginning of the header or of a record, and not the output of another program."""
        if is_header:
            return csv_row(self.header).encode(errors="surrogateescape").startswith(text)
        is_csv = self.format == "csv"  # where a line may end inside a quoted path
        begin = b'"' if is_csv else b'{"path": "'
        return (is_csv or not text.endswith(b"\n")) and text.startswith(begin[: len(text)])

    def _parse_json(self, line: str) -> list[str]:
        """The path and the error of a JSON line; an empty list if this call would not write such a record."""
        try:
            record = json.loads(line)
            if "error" in record:
                return [record["path"], record["error"]]
            num_labels, keys = len(record.get("labels", ())), set(self.vectors)
            keys |= {"labels", "probabilities"} if self.num_labels else set()
            is_valid = record.keys() - {"attention"} == {"path"} | keys
            is_valid &= num_labels == self.num_labels or (self.fewer_labels and num_labels < self.num_labels)
            is_valid &= all(len(record[key]) == len(names) for key, names in self.vectors.items())
            return [record["path"], ""] if is_valid else []
        except (ValueError, TypeError, KeyError, AttributeError):
            return []


def csv_row(cells: Sequence[Any]) -> str:
    """One line of a CSV file, with all text in quotes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerow(cells)
    return text.getvalue()


def table_rows(record: Record, *, width: int | None, with_header: bool, color: bool = False) -> str:
    """Formats one record for a terminal, with one line per label.

    Paths are never broken or cropped: a path that is wider than its column has a line of its own.

    Args:
        record: From `to_record`.
        width: Of the terminal, in characters; None for no limit.
        with_header: Begin with the column names.
        color: Use the terminal's colors.
    """
    path = printable(record["path"])
    labels = [printable(label) for label in record.get("labels", [])]
    if width is None:
        path_width = max(40, cell_len(path))
        label_width = max(24, *(cell_len(text) for text in (*labels, record.get("error", ""))))
    else:
        path_width = max(16, (width - 12) * 3 // 5)
        label_width = max(12, width - path_width - 12)
    console = Console(file=io.StringIO(), force_terminal=color, width=path_width + label_width + 13)
    table = Table(box=None, show_header=with_header, pad_edge=False)
    table.add_column("file", width=path_width, no_wrap=True)
    table.add_column("label", width=label_width, overflow="fold")
    table.add_column("", width=7, justify="right")
    name = Text(path, "bold")
    first: Text | str = name
    if cell_len(path) > path_width:
        first = ""
    if "error" in record:
        table.add_row(first, Text(printable(record["error"]), "red"), "")
    for i, (label, p) in enumerate(zip(labels, record.get("probabilities", ()), strict=True)):
        table.add_row(first if i == 0 else "", Text(label), f"{p:.1%}")
    if not record.get("labels", True):
        table.add_row(first, Text("no label above the threshold", "dim"), "")
    with console.capture() as captured:
        if first == "":
            console.print(name, soft_wrap=True)
        console.print(table)
    return captured.get()
