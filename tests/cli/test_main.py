"""cli/__init__.py: the command `vitmha`, its commands and its exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import ROOT, refused

import vitmha
from vitmha.cli import COMMANDS, main


def test_an_unknown_command_is_refused_with_the_nearest_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["clasify"], capsys) == "error: unknown command clasify (did you mean classify?)"
    assert refused(["zzz"], capsys) == f"error: unknown command zzz; choose from {', '.join(COMMANDS)}"
    assert refused(["--versoin"], capsys) == "error: unknown option --versoin (did you mean --version?)"


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused([], capsys) == f"error: choose a command: {', '.join(COMMANDS)}"


def test_help_lists_every_command_and_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"^ +{name} ", printed, re.MULTILINE)] == []
    with pytest.raises(SystemExit, match="0"):
        main(["help"])
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match="0"):
        main(["help", "configs"])
    assert capsys.readouterr().out.startswith("usage: vitmha configs ")
    assert refused(["help", "clasify"], capsys) == "error: unknown command clasify (did you mean classify?)"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"vitmha {vitmha.__version__}\n"


def test_a_name_in_a_message_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["fit", "\x1b]0;title\x07.yaml"], capsys).isprintable()
    assert refused(["\x1b[2J"], capsys).startswith(r"error: unknown command \x1b[2J; choose from ")


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["configs"],
        ["fit", "--help"],
        ["fit", "--data", "ImageFolder", "--help"],
        ["validate"],
        ["fit", "leaves"],
        ["fit", "--config", "quickstart", "--lr", "3"],
    ],
)
def test_help_and_wrong_calls_are_answered_without_importing_torch(args: list[str]) -> None:
    code = "import sys, vitmha.cli\ntry: vitmha.cli.main(sys.argv[1:])\n"
    code += "finally: print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


def test_a_name_in_an_error_is_shown_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["shard", str(tmp_path / "a\x1b]0;title\x07b"), "--output", str(tmp_path / "shards")]
    assert refused(args, capsys).startswith(f"error: root {tmp_path}/a\\x1b]0;title\\x07b does not exist")


def test_the_module_runs_as_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vitmha", "--version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == f"vitmha {vitmha.__version__}\n"
