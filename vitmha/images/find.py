"""Finds images in files, directories, glob patterns and tar archives."""

import glob
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vitmha.images.decode import SUFFIXES, ImageBytes, ImageReadError, Source, read_image, source_name

# An image to read, or the error that explains why it cannot be read.
ImageSource = Source | ImageReadError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_MEMBER_BYTES = 2**28  # of an image in an archive, which is held in memory


class StrictTarInfo(tarfile.TarInfo):
    """A member's header that raises `tarfile.ReadError` if it is corrupt; tarfile would end the archive there."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the regular end of the archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


@dataclass
class ImageFinder:
    """Finds images below files, directories, glob patterns and tar archives, in a fixed order.

    In directories and archives, hidden files and files without an image suffix are skipped. A file that is listed by
    name is always returned, whatever its suffix.

    Example:
        >>> finder = ImageFinder(recursive=True)
        >>> for source in finder.below(["photos/", "scans.tar", "extra/*.png"]):  # doctest: +SKIP
        ...     image = load_image(source)
    """

    recursive: bool
    """Search subdirectories too."""
    skipped: int = 0
    """Number of hidden or unknown files and directories skipped so far."""

    def below(self, paths: Iterable[str], lines: Iterable[str] = ()) -> Iterator[ImageSource]:
        """Yields the images of each path in turn. What cannot be read is yielded as an `ImageReadError`.

        Args:
            paths: Files, directories, glob patterns and tar archives; "-" stands for `lines`.
            lines: More paths, for example the lines of standard input.
        """
        for path in paths:
            yield from self._below(lines if path == "-" else [path])

    def _below(self, paths: Iterable[str]) -> Iterator[ImageSource]:
        for path in paths:
            if os.path.isdir(path):
                yield from self._in_directory(path, ())
            elif path.lower().endswith(TAR_SUFFIXES) and os.path.isfile(path):
                yield from self._in_tar(path)
            elif glob.has_magic(path) and not os.path.lexists(path):
                matches = sorted(glob.glob(path, recursive=True))
                yield from self._below(matches) if matches else [path]
            else:
                yield path

    def _in_directory(self, directory: str, parents: tuple[str, ...]) -> Iterator[ImageSource]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            yield ImageReadError(directory, str(error.strerror))
            return
        real_path = os.path.realpath(directory)
        for entry in entries:
            name = entry.name.lower()
            if name.startswith(".") or real_path in parents:  # a link that leads back up
                self.skipped += 1
            elif os.path.isdir(entry.path):
                if self.recursive:
                    yield from self._in_directory(entry.path, (*parents, real_path))
                else:
                    self.skipped += 1
            elif name.endswith(TAR_SUFFIXES):
                yield from self._in_tar(entry.path)
            elif os.path.splitext(name)[1] in SUFFIXES and (os.path.isfile(entry.path) or entry.is_symlink()):
                yield entry.path
            else:
                self.skipped += 1

    def _in_tar(self, path: str) -> Iterator[ImageSource]:
        try:
            with tarfile.open(path, "r|*", tarinfo=StrictTarInfo) as archive:
                for member in archive:
                    archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all of them
                    parts = member.name.removeprefix("./").split("/")
                    is_image = os.path.splitext(parts[-1].lower())[1] in SUFFIXES
                    is_file = member.isfile() or member.islnk() or member.issym()
                    if is_image and is_file and not any(part.startswith(".") for part in parts):
                        yield self._member(archive, member, f"{path}/{'/'.join(parts)}")
                    elif not member.isdir():
                        self.skipped += 1
        except Exception as error:  # a corrupt archive makes tarfile raise almost anything
            yield ImageReadError(path, f"the archive is corrupt: {' '.join(str(error).split())}")

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> ImageSource:
        if not member.isfile():
            return ImageReadError(name, f"a link to {member.linkname}; links in archives are not followed")
        if member.size > MAX_MEMBER_BYTES:
            return ImageReadError(name, f"{member.size} bytes; files in archives may have at most {MAX_MEMBER_BYTES}")
        content = archive.extractfile(member)
        assert content is not None  # a file
        return ImageBytes(content.read(), name)


def load_image(source: ImageSource) -> Image.Image:
    """Reads an image that `ImageFinder` found.

    Raises:
        ImageReadError: The image cannot be read, or `source` is such an error.
    """
    if isinstance(source, ImageReadError):
        raise source
    return read_image(source)


def subsample(items: Sequence[Any], limit: int) -> Sequence[Any]:
    """Returns at most `limit` of the items, evenly spaced.

    Example:
        >>> subsample(range(10), 4)
        range(0, 10, 3)
    """
    return items[:: max(1, -(-len(items) // limit))]


def display_name(source: ImageSource) -> str:
    """The path or name of an image in records and messages."""
    return os.fspath(source.path if isinstance(source, ImageReadError) else source_name(source))
