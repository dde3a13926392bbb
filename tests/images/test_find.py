"""Images are found in directories, patterns and archives; what cannot be read is reported."""

import gzip
import io
import os
import shutil
import socket
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image

import vitmha.cli.classify
import vitmha.images.find
import vitmha.inference.classifier
import vitmha.inference.engines
from vitmha.images import ImageBytes, ImageReadError, read_image
from vitmha.images.find import ImageFinder, display_name, each_image


def noise(file: Path) -> Path:
    """Writes an image of more than 1000 bytes, so that an archive can be cut inside of it."""
    to_pil_image(torch.randint(256, (3, 20, 30), dtype=torch.uint8)).save(file)
    return file


def archived(archive: Path) -> list[str]:
    """The names of what a search finds in an archive, with the reason of those that cannot be read."""
    items = list(ImageFinder(recursive=False).below([str(archive)], ()))
    names = [display_name(item).removeprefix(f"{archive}/") for item in items]
    return [
        f"{n}: {item.reason}" if isinstance(item, ImageReadError) else n for n, item in zip(names, items, strict=True)
    ]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_corrupt_archive_is_reported_and_its_readable_members_are_found(tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "whole.tar", mode, format=tarfile.GNU_FORMAT) as archive:
        for name in ("1.png", "2.png", "3.png"):
            archive.add(noise(tmp_path / "03.png"), name)
    with tarfile.open(tmp_path / "whole.tar") as archive:
        second = archive.getmember("2.png").offset
    content = (tmp_path / "whole.tar").read_bytes()
    if mode == "w:gz":
        content = gzip.decompress(content)
    turned = bytearray(content)
    turned[second + 3] ^= 1
    place = tmp_path / "a.tar"
    for corrupt, reason in (
        (bytes(turned), "bad checksum"),
        (content[:second], "empty header"),
        (content[: second + 100], "truncated header"),
        (content[: second + 600], "unexpected end of data"),
    ):
        place.write_bytes(gzip.compress(corrupt) if mode == "w:gz" else corrupt)
        assert archived(place) == ["1.png", f"{place}: the archive is corrupt: {reason}"]
    place.write_bytes(content)
    assert archived(place) == ["1.png", "2.png", "3.png"]


def test_links_and_large_files_in_archives_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1.png", "4.png"):
        shutil.copy(noise(tmp_path / "03.png"), tmp_path / name)
    (tmp_path / "2.png").hardlink_to(tmp_path / "1.png")
    (tmp_path / "3.png").symlink_to("1.png")
    (tmp_path / "5.png").write_bytes(bytes(9999))
    monkeypatch.setattr(vitmha.images.find, "MAX_MEMBER_BYTES", 9998)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(1, 6):
            archive.add(tmp_path / f"{i}.png", f"{i}.png")
    assert archived(tmp_path / "a.tar") == [
        "1.png",
        "2.png: a link to 1.png; links in archives are not followed",
        "3.png: a link to 1.png; links in archives are not followed",
        "4.png",
        "5.png: too large: 9999 bytes; files in archives may have at most 9998",
    ]


def write_zip(file: Path, image: Path) -> None:
    """Writes a zip archive of three images, not in the order of their names, and of what is not read."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("z/2.png", "z/1.png", "notes.txt", "__MACOSX/z/._1.png", "z/deep/3.png"):
            archive.write(image, name)
        archive.mkdir("empty.png")


def test_zip_archives_are_read_as_tar_archives(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip", noise(tmp_path / "x.png"))
    finder = ImageFinder(recursive=False)
    images = list(finder.below([str(tmp_path)]))
    assert [display_name(image).removeprefix(f"{tmp_path}/a.zip/") for image in images[:3]] == [
        "z/2.png",
        "z/1.png",
        "z/deep/3.png",
    ]
    assert finder.skipped == 2
    assert read_image(images[0]) == read_image(images[3])  # of x.png itself


def test_each_unreadable_member_of_a_zip_archive_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = noise(tmp_path / "x.png").read_bytes()
    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_STORED) as archive:
        for name in ("corrupt.png", "secret.png", "right.png"):
            archive.writestr(name, content)
        archive.writestr(link, "right.png")
        archive.writestr("bomb.png", bytes(len(content) + 1), zipfile.ZIP_DEFLATED)
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[raw.index(b"IDAT") + 9] ^= 1
    for header, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        second = raw.index(header, raw.index(header) + 1)
        raw[second + flags] |= 1  # encrypted
    (tmp_path / "a.zip").write_bytes(raw)
    monkeypatch.setattr(vitmha.images.find, "MAX_MEMBER_BYTES", len(content))
    assert archived(tmp_path / "a.zip") == [
        "corrupt.png: corrupt in the archive: Bad CRC-32 for file 'corrupt.png'",
        "secret.png: encrypted; extract the archive with its password first",
        "right.png",
        "link.png: a link; links in archives are not followed",
        f"bomb.png: too large: {len(content) + 1} bytes; files in archives may have at most {len(content)}",
    ]
    (tmp_path / "a.zip").write_bytes(raw[:-30])
    assert archived(tmp_path / "a.zip") == [f"{tmp_path}/a.zip: the archive is corrupt: File is not a zip file"]


@pytest.mark.parametrize("name", ["a.png", "a.tar", "a.zip"])
def test_special_files_are_refused_without_waiting(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).symlink_to(tmp_path / "pipe")
    for paths in ([str(tmp_path / "in" / name)], [str(tmp_path / "in")]):
        [found] = ImageFinder(recursive=False).below(paths)
        with pytest.raises(ImageReadError, match=f"{name}: Is a pipe, expected an image file"):
            vitmha.images.find.load_image(found)
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.png")
        with pytest.raises(ImageReadError, match=r"s.png: Is a socket, expected an image file"):
            read_image("s.png")
    with pytest.raises(ImageReadError, match="/dev/zero: Is a device, expected an image file"):
        read_image("/dev/zero")


def test_a_url_is_answered_with_a_hint() -> None:
    for url in ("https://example.org/cat.jpg?size=3", "s3://bucket/cat.jpg"):
        [found] = ImageFinder(recursive=False).below([url])
        with pytest.raises(ImageReadError, match="a URL: download the file first, and pass its path"):
            read_image(found)


def test_paths_in_which_nothing_is_found_are_kept(tmp_path: Path) -> None:
    noise(tmp_path / "a.png")
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    noise(tmp_path / "classes" / "cat" / "b.png")
    with zipfile.ZipFile(tmp_path / "none.zip", "w"):
        pass
    paths = [str(tmp_path / name) for name in ("a.png", "classes", "none.zip", "missing.png", "c*")]
    finder = ImageFinder(recursive=False)
    assert [display_name(image) for image in finder.below(paths)] == [paths[0], paths[3]]
    assert finder.empty == [paths[1], paths[2], paths[1]]  # the pattern is that of the directory
    finder = ImageFinder(recursive=True)
    assert list(finder.below([paths[1]]))
    assert finder.empty == []


def test_each_image_yields_single_images(tmp_path: Path) -> None:
    noise(tmp_path / "a.png")
    noise(tmp_path / "b.png")
    directory, file, image = str(tmp_path), tmp_path / "a.png", Image.new("RGB", (3, 5))
    content = ImageBytes(file.read_bytes(), "x")
    both = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    batch, pixels = torch.zeros(2, 3, 5, 7, dtype=torch.uint8), np.zeros((5, 7, 3), np.uint8)
    for images, expected in (
        (str(file), [str(file)]),
        (file, [file]),
        ("nowhere/a.png", ["nowhere/a.png"]),
        (directory, both),
        (tmp_path, both),
        (f"{tmp_path}/?.png", both),
        (image, [image]),
        (content, [content]),
        ([tmp_path, file], [*both, file]),
        (np.array(both), both),
        (np.array(both, dtype=object), both),
        (iter(both), both),
        ([], []),
    ):
        assert list(each_image(images)) == expected
    for images, shapes in (
        (pixels, [(5, 7, 3)]),
        (pixels[..., 0], [(5, 7)]),
        (np.stack([pixels] * 3), [(5, 7, 3)] * 3),
        (batch, [(3, 5, 7)] * 2),
        (batch[0], [(3, 5, 7)]),
        ([batch, pixels], [(3, 5, 7), (3, 5, 7), (5, 7, 3)]),
        (iter(batch), [(3, 5, 7)] * 2),
    ):
        assert [tuple(image.shape) for image in each_image(images)] == shapes
    (tmp_path / "empty").mkdir()
    [error] = each_image(tmp_path / "empty")
    assert str(error) == f"{tmp_path}/empty: no image files found in it; subdirectories are not searched"


@pytest.mark.parametrize(
    ("images", "found"),
    [
        (None, "NoneType"),
        (7, "int"),
        (b"content", "bytes: for the content of a file use PIL.Image.open or vitmha.images.ImageBytes"),
        (io.BytesIO(b"content"), "BytesIO: for the content of a file use"),
        ({"pixel_values": torch.zeros(1, 3, 5, 7)}, "dict: pass the images only, without labels"),
        ([None], "NoneType"),
        ([["a.png"]], "list"),
        ([(torch.zeros(2, 3, 5, 7), torch.zeros(2))], "tuple: pass the images only, without labels"),
    ],
)
def test_what_is_not_an_image_is_a_type_error(images: object, found: str) -> None:
    with pytest.raises(TypeError, match=f"expected a path, a PIL image, an array or a tensor, .*, got {found}"):
        list(each_image(images))
