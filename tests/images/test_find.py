"""Images are found in directories, patterns and archives; what cannot be read is reported."""

import gzip
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torchvision.transforms.v2.functional import to_pil_image

import vitmha.cli.classify
import vitmha.images.find
import vitmha.inference.classifier
import vitmha.inference.engines
from vitmha.images import ImageReadError
from vitmha.images.find import ImageFinder, display_name


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
        "5.png: 9999 bytes; files in archives may have at most 9998",
    ]
