"""Finds images in files, directories, glob patterns and tar archives."""

import glob
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vitmha.images.decode import SUFFIXES, ImageBytes, ImageReadError, Source, name_of, read_image

# What can be classified; in place of a picture, why there is none.
ImageSource = Source | ImageReadError

TARS = (".tar", ".tar.gz", ".tgz")
MOST_BYTES = 2**28  # of a picture in an archive, which is held in memory


class StrictTarInfo(tarfile.TarInfo):
    """The header of a member; a damaged one is an error, where tarfile takes all but the first for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the mark at the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


@dataclass
class ImageFinder:
    """Finds pictures below files, folders, patterns and tar archives, in a fixed order.

    In folders and archives, hidden files and those without a picture's suffix are skipped; what is named is not.
    """

    recursive: bool
    """Whether folders in folders are searched."""
    skipped: int = 0
    """Hidden or unknown files and folders passed by so far."""

    def below(self, paths: Iterable[str], lines: Iterable[str]) -> Iterator[ImageSource]:
        """The pictures below each path in turn; for "-" those below the lines."""
        for path in paths:
            yield from self._at(lines if path == "-" else [path])

    def _at(self, paths: Iterable[str]) -> Iterator[ImageSource]:
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

    def _in_folder(self, folder: str, above: tuple[str, ...]) -> Iterator[ImageSource]:
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

    def _in_tar(self, path: str) -> Iterator[ImageSource]:
        try:
            with tarfile.open(path, "r|*", tarinfo=StrictTarInfo) as archive:
                for member in archive:
                    archive.members.clear()  # type: ignore[attr-defined]  # or it keeps them all
                    parts = member.name.removeprefix("./").split("/")
                    is_picture = os.path.splitext(parts[-1].lower())[1] in SUFFIXES
                    is_there = member.isfile() or member.islnk() or member.issym()
                    if is_picture and is_there and not any(part.startswith(".") for part in parts):
                        yield self._member(archive, member, f"{path}/{'/'.join(parts)}")
                    elif not member.isdir():
                        self.skipped += 1
        except Exception as error:  # whatever a broken archive makes tarfile trip over
            yield ImageReadError(path, f"the archive is damaged: {' '.join(str(error).split())}")

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> ImageSource:
        if not member.isfile():
            return ImageReadError(name, f"a link, to {member.linkname}: in archives they are not followed")
        if member.size > MOST_BYTES:
            return ImageReadError(name, f"of a file in an archive {MOST_BYTES} bytes are read, this has {member.size}")
        content = archive.extractfile(member)
        assert content is not None  # a file
        return ImageBytes(content.read(), name)


def load_image(item: ImageSource) -> Image.Image:
    """The picture that was found.

    Raises:
        ImageReadError: It cannot be read, or the search has found that there is none.
    """
    if isinstance(item, ImageReadError):
        raise item
    return read_image(item)


def subsample(items: Sequence[Any], limit: int) -> Sequence[Any]:
    """At most so many of them, spread evenly."""
    return items[:: max(1, -(-len(items) // limit))]


def display_name(item: ImageSource) -> str:
    """What stands in its record."""
    return os.fspath(item.path if isinstance(item, ImageReadError) else name_of(item))
