"""What `vitmha classify` writes: records in three formats."""

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitmha.errors import UserError
from vitmha.inference.classifier import Prediction

Format = Literal["table", "csv", "jsonl"]
Record = dict[str, Any]


def to_record(answer: Prediction, with_vector: bool = False, **further: str | None) -> Record:
    """What is written of a prediction.

    Args:
        answer: The prediction.
        with_vector: Whether the probabilities of all classes are.
        further: What else is known: the truth, the file that shows its attention.
    """
    record: Record = {"path": os.fspath(answer.path)} | {key: value for key, value in further.items() if value}
    if answer.error is not None:
        return {**record, "error": answer.error}
    if answer.features is not None:
        return {**record, "features": _rounded(answer.features.tolist())}
    record |= {"labels": list(answer.labels), "probabilities": _rounded(answer.probabilities)}
    if with_vector and answer.vector is not None:
        record["vector"] = _rounded(answer.vector.tolist())
    return record


def _rounded(numbers: Iterable[float]) -> list[float]:
    """To what float32 can tell apart near 1."""
    return [round(number, 7) for number in numbers]


class RecordWriter:
    """Records on their way out, each whole and at once.

    Args:
        form: Table for people, CSV or JSON lines for programs.
        output: A file; standard output where not given.
        resume: Whether what stands in the file stays, but for a last record that is cut off.
        num_labels: Columns of a CSV file for labels, and as many for their probabilities.
        numbers: Its further columns of numbers: what they are called, and the record's key for them.
        may_lack: Whether records may have fewer labels, which is so above a threshold.

    Raises:
        UserError: The output exists and is not to be gone on with, or is of another kind.
    """

    def __init__(
        self,
        form: Format,
        output: str | None,
        *,
        resume: bool,
        num_labels: int,
        numbers: Mapping[str, Sequence[str]],
        may_lack: bool = False,
    ) -> None:
        self.form, self.num_labels, self.numbers, self.may_lack = form, num_labels, numbers, may_lack
        self.done: list[str] = []
        self.failed = 0  # of those that are done
        self.file: BinaryIO = sys.stdout.buffer
        self.header = self._header()
        if output is not None:
            if os.path.exists(output) and not os.path.isfile(output):
                raise UserError(f"--output {output} is no file: give a new one; standard output takes no flag.")
            if not resume and os.path.lexists(output):
                raise UserError(f"--output {output} exists: go on with --resume, or remove it.")
            self.done, length = self._standing(Path(output)) if os.path.exists(output) else ([], 0)
            try:
                self.file = open(output, "ab")  # noqa: SIM115 (see close)
            except OSError as error:
                raise UserError(f"--output {output} cannot be written: {error.strerror}.") from None
            self.file.truncate(length)
        self.is_begun = bool(self.done)

    def write(self, record: Record) -> None:
        """Writes one record; what is written is whole."""
        if self.form == "table":
            text = _table(record, with_header=not self.is_begun)
        elif self.form == "jsonl":
            text = json.dumps(record) + "\n"
        else:
            text = ("" if self.is_begun else _row(self.header)) + _row(self._cells(record))
        self.is_begun = True
        with self._named():
            # Names that are not UTF-8 come out as the bytes that they are.
            self.file.write(text.encode(errors="surrogateescape"))
            self.file.flush()

    def close(self) -> None:
        if self.file is not sys.stdout.buffer:
            with self._named():
                self.file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of writing, such as that of a full disk, says in which file."""
        try:
            yield
        except OSError as error:
            error.filename = self.file.name
            raise

    def _header(self) -> list[str]:
        if self.form != "csv":
            return ["path", "error"]
        labels = [f"{what}_{i + 1}" for i in range(self.num_labels) for what in ("label", "probability")]
        numbers = [name for names in self.numbers.values() for name in names]
        return ["path", *labels, *numbers, "truth", "attention", "error"]

    def _cells(self, record: Record) -> list[Any]:
        pairs = zip(record.get("labels", ()), record.get("probabilities", ()), strict=True)
        labels = [cell for pair in pairs for cell in pair]
        labels += [""] * (2 * self.num_labels - len(labels))
        numbers = [cell for key, names in self.numbers.items() for cell in record.get(key) or [""] * len(names)]
        return [record["path"], *labels, *numbers, *(record.get(key, "") for key in ("truth", "attention", "error"))]

    def _standing(self, output: Path) -> tuple[list[str], int]:
        """The paths of the whole records in a file, and the bytes up to where the last of them ends."""
        paths: list[str] = []
        length = 0
        text = b""  # since then

        def lines() -> Iterator[str]:
            nonlocal text
            with output.open("rb") as file:
                for line in file:
                    text += line
                    yield line.decode(errors="surrogateescape")

        is_csv, unread = self.form == "csv", lines()
        refusal = UserError(f"--resume: {output} has other records or columns than this call would write.")
        try:
            for cells in csv.reader(unread) if is_csv else map(self._loaded, unread):
                is_header = is_csv and not length
                is_correct = cells == self.header if is_header else len(cells) == len(self.header)
                if not (is_correct and text.endswith(b"\n")):
                    if self._is_cut(text, is_header) and next(unread, None) is None:
                        break
                    raise refusal
                if not is_header:
                    paths.append(cells[0])
                    self.failed += bool(cells[-1])
                length, text = length + len(text), b""
        except csv.Error:
            raise refusal from None
        return paths, length if paths else 0

    def _is_cut(self, text: bytes, is_header: bool) -> bool:
        """Whether it may be the beginning of the header or of a record, and not what another program has written."""
        if is_header:
            return _row(self.header).encode(errors="surrogateescape").startswith(text)
        is_csv = self.form == "csv"  # where a line may end in a name
        begin = b'"' if is_csv else b'{"path": "'
        return (is_csv or not text.endswith(b"\n")) and text.startswith(begin[: len(text)])

    def _loaded(self, line: str) -> list[str]:
        """The path and the error of a JSON line; no cells of one that this call would not write."""
        try:
            record = json.loads(line)
            if "error" in record:
                return [record["path"], record["error"]]
            labels, keys = len(record.get("labels", ())), set(self.numbers)
            keys |= {"labels", "probabilities"} if self.num_labels else set()
            is_correct = record.keys() - {"truth", "attention"} == {"path"} | keys
            is_correct &= labels == self.num_labels or (self.may_lack and labels < self.num_labels)
            is_correct &= all(len(record[key]) == len(names) for key, names in self.numbers.items())
            return [record["path"], ""] if is_correct else []
        except (ValueError, TypeError, KeyError, AttributeError):
            return []


def _row(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerow(cells)
    return text.getvalue()


def _table(record: Record, *, with_header: bool) -> str:
    """One record as rows for people, a line for each label."""
    console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty())
    table = Table(box=None, show_header=with_header, pad_edge=False)
    width = max(console.width - 14, 20)
    table.add_column("file", width=width * 3 // 5, overflow="fold")
    table.add_column("label", width=width - width * 3 // 5 - 2, overflow="fold")
    table.add_column("", width=12, justify="right")
    name = Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in record["path"]), "bold")
    if "error" in record:
        table.add_row(name, Text(record["error"], "red"), "")
    for i, (label, value) in enumerate(zip(record.get("labels", ()), record.get("probabilities", ()), strict=True)):
        table.add_row(name if i == 0 else "", Text(label), f"{value:.1%}")
    if not record.get("labels", True):
        table.add_row(name, Text("nothing above the threshold", "dim"), "")
    with console.capture() as captured:
        console.print(table)
    return captured.get()
