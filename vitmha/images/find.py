"""Finds images in files, directories, glob patterns, and tar and zip archives."""

import glob
import os
import stat
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError
from vitmha.images.decode import (
    SUFFIXES,
    ImageBytes,
    ImageReadError,
    Source,
    check_regular_file,
    read_image,
    source_name,
)

# An image to read, or the error that explains why it cannot be read.
ImageSource = Source | ImageReadError

ZIP_SUFFIX = ".zip"
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ZIP_SUFFIX)
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
    """Finds images below files, directories, glob patterns, and tar and zip archives, in a fixed order.

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
    empty: list[str] = field(default_factory=list)
    """Paths that were listed and in which no image was found; "-" for a list without a path."""

    def below(self, paths: Iterable[str], lines: Iterable[str] = ()) -> Iterator[ImageSource]:
        """Yields the images of each path in turn. What cannot be read is yielded as an `ImageReadError`.

        Args:
            paths: Files, directories, glob patterns and archives; "-" stands for `lines`.
            lines: More paths, for example the lines of standard input.
        """
        for path in paths:
            yield from self._from_list(path, lines) if path == "-" else self._below([path])

    def _from_list(self, name: str, lines: Iterable[str]) -> Iterator[ImageSource]:
        is_empty = True
        for line in lines:
            is_empty = False
            yield from self._below([line])
        if is_empty:
            self.empty.append(name)

    def _below(self, paths: Iterable[str]) -> Iterator[ImageSource]:
        for path in paths:
            is_pattern = glob.has_magic(path) and not os.path.lexists(path)
            if is_pattern and (matches := sorted(glob.glob(path, recursive=True))):
                yield from self._below(matches)
                continue
            is_empty = True
            for image in self._in_path(path):
                is_empty = False
                yield image
            if is_empty:
                self.empty.append(path)

    def _in_path(self, path: str) -> Iterator[ImageSource]:
        if os.path.isdir(path):
            yield from self._in_directory(path, ())
        elif path.lower().endswith(ARCHIVE_SUFFIXES) and os.path.isfile(path):
            yield from self._in_archive(path)
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
            elif name.endswith(ARCHIVE_SUFFIXES):
                yield from self._in_archive(entry.path)
            elif os.path.splitext(name)[1] in SUFFIXES and (os.path.isfile(entry.path) or entry.is_symlink()):
                yield entry.path
            else:
                self.skipped += 1

    def _in_archive(self, path: str) -> Iterator[ImageSource]:
        try:
            check_regular_file(path)
            yield from self._in_zip(path) if path.lower().endswith(ZIP_SUFFIX) else self._in_tar(path)
        except OSError as error:
            yield ImageReadError(path, error.strerror or _one_line(error))
        except UserError as error:
            yield ImageReadError(path, str(error))
        except Exception as error:  # a corrupt archive makes tarfile and zipfile raise almost anything
            yield ImageReadError(path, f"the archive is corrupt: {_one_line(error)}")

    def _in_tar(self, path: str) -> Iterator[ImageSource]:
        with tarfile.open(path, "r|*", tarinfo=StrictTarInfo) as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all of them
                is_file = member.isfile() or member.islnk() or member.issym()
                if is_file and _is_image(member.name):
                    yield _tar_member(archive, member, f"{path}/{member.name.removeprefix('./')}")
                elif not member.isdir():
                    self.skipped += 1

    def _in_zip(self, path: str) -> Iterator[ImageSource]:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.is_dir() and _is_image(member.filename):
                    yield _zip_member(archive, member, f"{path}/{member.filename.removeprefix('./')}")
                elif not member.is_dir():
                    self.skipped += 1


def each_image(images: object) -> Iterator[ImageSource]:
    """Yields single images: of one image, a directory, a batch, or an iterable of any of these.

    Args:
        images: A path, whose images are found as `ImageFinder` does without `recursive`; a Pillow image; an array or
            tensor, which with four axes is a batch; an `ImageBytes` or `ImageReadError`; or an iterable of these.

    Returns:
        An iterator that yields an `ImageReadError` for a directory or archive without an image.

    Raises:
        TypeError: Something else; for an element of an iterable when it is reached.

    Example:
        >>> [image.shape for image in each_image(np.zeros((2, 3, 5, 3)))]
        [(3, 5, 3), (3, 5, 3)]
    """
    if isinstance(images, np.ndarray) and images.dtype.kind in "OU":  # paths, for example a column of a table
        images = images.tolist()
    if isinstance(images, ImageSource):
        return _singles(images)
    if isinstance(images, bytes | bytearray | dict) or hasattr(images, "read") or not _is_iterable(images):
        raise TypeError(_wrong_type(images))
    return chain.from_iterable(map(_singles, images))  # type: ignore[call-overload]


def _singles(image: object) -> Iterator[ImageSource]:
    if not isinstance(image, ImageSource):
        raise TypeError(_wrong_type(image))
    if isinstance(image, Path | str):
        finder = ImageFinder(recursive=False)
        for found in finder._below([os.fspath(image)]):  # not `below`, to which "-" is a list
            yield image if found == os.fspath(image) else found
        if finder.empty:
            yield ImageReadError(image, "no image files found in it; subdirectories are not searched")
    elif isinstance(image, np.ndarray | Tensor) and image.ndim == 4:
        yield from image
    else:
        yield image


def _is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def _wrong_type(value: object) -> str:
    hint = ""
    if isinstance(value, bytes | bytearray) or hasattr(value, "read"):
        hint = ": for the content of a file use PIL.Image.open or vitmha.images.ImageBytes"
    elif isinstance(value, dict | tuple):
        hint = ": pass the images only, without labels"
    return (
        f"expected a path, a PIL image, an array or a tensor, or an iterable of these, got {type(value).__name__}{hint}"
    )


def _is_image(name: str) -> bool:
    """Whether a member of an archive is an image by its suffix, and neither hidden nor in a hidden directory."""
    parts = name.removeprefix("./").split("/")
    return os.path.splitext(parts[-1].lower())[1] in SUFFIXES and not any(part.startswith(".") for part in parts)


def _tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> ImageSource:
    if not member.isfile():
        return ImageReadError(name, f"a link to {member.linkname}; links in archives are not followed")
    if member.size > MAX_MEMBER_BYTES:
        return _too_large(name, member.size)
    content = archive.extractfile(member)
    assert content is not None  # a file
    return ImageBytes(content.read(), name)


def _zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> ImageSource:
    if stat.S_ISLNK(member.external_attr >> 16):
        return ImageReadError(name, "a link; links in archives are not followed")
    if member.flag_bits & 1:
        return ImageReadError(name, "encrypted; extract the archive with its password first")
    if member.file_size > MAX_MEMBER_BYTES:
        return _too_large(name, member.file_size)
    try:
        with archive.open(member) as file:
            return ImageBytes(file.read(MAX_MEMBER_BYTES), name)
    except Exception as error:  # a corrupt member makes zipfile raise almost anything
        return ImageReadError(name, f"corrupt in the archive: {_one_line(error)}")


def _too_large(name: str, size: int) -> ImageReadError:
    return ImageReadError(name, f"too large: {size} bytes; files in archives may have at most {MAX_MEMBER_BYTES}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
