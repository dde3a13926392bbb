"""What `vitmha classify` reads and writes: files found below the paths given, and records in three formats."""

import csv
import glob
import io
import json
import os
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitmha.classify import Item, Prediction
from vitmha.images import SUFFIXES, ImageReadError, PictureBytes, read_image

TARS = (".tar", ".tar.gz", ".tgz")
Format = Literal["table", "csv", "jsonl"]
Record = dict[str, Any]


@dataclass
class Search:
    """Finds pictures below files, folders, patterns and tar archives, in a fixed order.

    In folders and archives, hidden files and those without a picture's suffix are skipped; what is named is not.
    """

    recursive: bool
    """Whether folders in folders are searched."""
    skipped: int = 0
    """Hidden or unknown files and folders passed by so far."""

    def below(self, paths: Iterable[str], lines: Iterable[str]) -> Iterator[Item]:
        """The pictures below each path in turn; for "-" those below the lines."""
        for path in paths:
            yield from self._at(lines if path == "-" else [path])

    def _at(self, paths: Iterable[str]) -> Iterator[Item]:
        for path in paths:
            if os.path.isdir(path):
                yield from self._in_folder(path, ())
            elif path.lower().endswith(TARS) and os.path.isfile(path):
                yield from self._in_tar(path)
            elif glob.has_magic(path) and not os.path.lexists(path):
                matches = sorted(glob.glob(path, recursive=True))
                yield from self._at(matches) if matches else [path]
            else:
                yield path

    def _in_folder(self, folder: str, above: tuple[str, ...]) -> Iterator[Item]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            yield ImageReadError(folder, str(error.strerror))
            return
        place = os.path.realpath(folder)
        for entry in entries:
            name = entry.name.lower()
            if name.startswith(".") or place in above:  # a link leads back up
                self.skipped += 1
            elif os.path.isdir(entry.path):
                if self.recursive:
                    yield from self._in_folder(entry.path, (*above, place))
                else:
                    self.skipped += 1
            elif name.endswith(TARS):
                yield from self._in_tar(entry.path)
            elif os.path.splitext(name)[1] in SUFFIXES and (os.path.isfile(entry.path) or entry.is_symlink()):
                yield entry.path
            else:
                self.skipped += 1

    def _in_tar(self, path: str) -> Iterator[Item]:
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    parts = member.name.removeprefix("./").split("/")
                    is_hidden = any(part.startswith(".") for part in parts)
                    if member.isfile() and not is_hidden and os.path.splitext(parts[-1].lower())[1] in SUFFIXES:
                        content = archive.extractfile(member)
                        assert content is not None  # a file
                        yield PictureBytes(content.read(), f"{path}/{'/'.join(parts)}")
                    elif not member.isdir():
                        self.skipped += 1
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            yield ImageReadError(path, f"the archive is damaged: {' '.join(str(error).split())}")


def picture_of(item: Item) -> Image.Image:
    """The picture that was found.

    Raises:
        ImageReadError: It cannot be read, or the search has found that there is none.
    """
    if isinstance(item, ImageReadError):
        raise item
    return read_image(item)


def evenly(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most so many of them, spread evenly."""
    return items[:: max(1, -(-len(items) // most))]


def record_of(answer: Prediction, with_vector: bool = False, **further: str | None) -> Record:
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


class Records:
    """Records on their way out, each whole and at once.

    Args:
        form: Table for people, CSV or JSON lines for programs.
        output: A file; standard output where not given.
        resume: Whether what stands in the file stays, but for a last record that is cut off.
        num_labels: Columns of a CSV file for labels, and as many for their probabilities.
        numbers: Its further columns of numbers: what they are called, and the record's key for them.

    Raises:
        ValueError: The output exists and is not to be gone on with, or is of another kind.
    """

    def __init__(
        self, form: Format, output: str | None, *, resume: bool, num_labels: int, numbers: Mapping[str, Sequence[str]]
    ) -> None:
        self.form, self.num_labels, self.numbers = form, num_labels, numbers
        self.done: list[str] = []
        self.file: BinaryIO = sys.stdout.buffer
        self.header = self._header()
        if output is not None:
            if not resume and os.path.lexists(output):
                raise ValueError(f"--output {output} exists: go on with --resume, or remove it.")
            self.done, length = self._standing(Path(output)) if os.path.exists(output) else ([], 0)
            try:
                self.file = open(output, "ab")  # noqa: SIM115 (see close)
            except OSError as error:
                raise ValueError(f"--output {output} cannot be written: {error.strerror}.") from None
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
        # Names that are not UTF-8 come out as the bytes that they are.
        self.file.write(text.encode(errors="surrogateescape"))
        self.file.flush()

    def close(self) -> None:
        if self.file is not sys.stdout.buffer:
            self.file.close()

    def _header(self) -> list[str]:
        if self.form != "csv":
            return ["path"]
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
        length = read = 0
        text = ""

        def lines() -> Iterator[str]:
            nonlocal read, text
            with output.open("rb") as file:
                for line in file:
                    read, text = read + len(line), line.decode(errors="surrogateescape")
                    yield text

        is_csv = self.form == "csv"
        for cells in csv.reader(lines()) if is_csv else map(_loaded, lines()):
            is_right = len(cells) == len(self.header) and (not is_csv or bool(paths) or cells == self.header)
            if not text.endswith("\n") or (is_csv and paths and not is_right):
                break  # cut off, maybe behind a line end in a name
            if not is_right:
                raise ValueError(f"--resume: {output} has other records or columns than this call would write.")
            paths.append(cells[0])
            length = read
        paths = paths[1:] if is_csv else paths
        return paths, length if paths else 0


def _loaded(line: str) -> list[str]:
    """The path of a JSON line, as the only cell; none of a line that is no record."""
    try:
        return [json.loads(line)["path"]]
    except (ValueError, TypeError, KeyError):
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
