import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import full_disk

from vitmha.atomic import atomic_files, atomic_path


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_replaces_the_old_one_and_no_temporary_file_remains(tmp_path: Path, fsync: bool) -> None:
    target = tmp_path / "new directory" / "x.txt"
    for content in ("first", "second"):
        with atomic_path(target, fsync=fsync) as partial:
            assert partial.parent == target.parent
            partial.write_text(content)
        assert target.read_text() == content
        assert list(target.parent.iterdir()) == [target]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")
    with atomic_path(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"


def test_fsync_flushes_the_complete_file_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, flushed = tmp_path / "x.txt", []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.fstat(file).st_size, target.exists())))
    with atomic_path(target, fsync=True) as partial:
        partial.write_text("four")
    assert flushed == [(4, False)]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_started", [True, False])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException, is_started: bool) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")

    def write() -> None:
        with atomic_path(target) as partial:
            if is_started:
                partial.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_is_created_with_its_content_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "shards"

    def write(is_complete: bool) -> None:
        with atomic_path(target) as partial:
            partial.mkdir()
            (partial / "a.txt").write_text("a")
            if not is_complete:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(is_complete=False)
    assert list(target.parent.iterdir()) == []
    write(is_complete=True)
    assert (target / "a.txt").read_text() == "a"
    assert list(target.parent.iterdir()) == [target]


def test_a_killed_process_leaves_the_old_file_and_a_named_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")
    script = """
import os, signal, sys
from vitmha.atomic import atomic_files, atomic_path
with atomic_path(sys.argv[1]) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script, str(target)], env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
    (other,) = (path for path in tmp_path.iterdir() if path != target)
    assert other.name.startswith(".x.txt.")
    assert other.suffix == ".partial"
    with atomic_path(target) as partial:
        partial.write_text("new")
    assert target.read_text() == "new"


def test_nothing_heavy_is_imported() -> None:
    script = "import sys, vitmha.atomic; print(sorted({'torch', 'numpy', 'PIL'} & {*sys.modules}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout
    assert printed == "[]\n"


def test_an_error_of_the_disk_has_the_name_of_the_file(tmp_path: Path) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")
    with pytest.raises(OSError, match="File too large") as error, full_disk(), atomic_path(target) as partial:
        partial.write_bytes(bytes(9000))
    assert error.value.filename == str(target)
    assert (target.read_text(), [*tmp_path.iterdir()]) == ("old", [target])


def test_several_files_are_replaced_together_and_others_stay(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_files(tmp_path / "report") as partial:
            (partial / "a.txt").write_text(content)
            (partial / "b.txt").write_text(content)
        (tmp_path / "report" / "other.txt").write_text("other")
        assert {file.name: file.read_text() for file in (tmp_path / "report").iterdir()} == {
            "a.txt": content,
            "b.txt": content,
            "other.txt": "other",
        }


def test_of_several_files_none_is_replaced_if_one_cannot_be_written(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        with atomic_files(directory) as partial:
            (partial / "a.txt").write_text("new")
            (partial / "b.txt").write_bytes(bytes(9000))

    (tmp_path / "a.txt").write_text("old")
    for directory in (tmp_path, tmp_path / "report"):
        with pytest.raises(OSError, match="File too large") as error, full_disk():
            write(directory)
        assert error.value.filename == str(directory)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.txt": "old"}
