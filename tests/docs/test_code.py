"""The code in README.md and in the pages of docs/: commands and Python are run, or at least checked by the parsers.

A block marked `bash` or `python` is run, a page from top to bottom in a directory of its own that holds `clothes/`
(train/CLASS and val/CLASS), `photos/` and `cat.jpg`. A block marked `shell` needs what is not here, such as several
GPUs: its `vitmha` commands are only checked. A `{code-block}` with a caption is the file of that name, which the
blocks after it use. Tutorials are notebooks, which the build of the site runs.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from docs.generate import COMMANDS, parser_of
from vitmha.cli.fit_check import check_call
from vitmha.data import FashionMNISTMini

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not {"tutorials", "_build"} & set(page.parts)]
FENCE = re.compile(r"^```(?:(bash|shell|python)|\{code-block\} \w+\n:caption: (\S+)\n)\n(.*?)^```", re.M | re.S)
# The name of the Docker image is that of the command, or that with a tag.
CALL = re.compile(r"(?:^|[|&;] *|--no-python |^docker run .* )(vitmha(?::\w+)? [^|;&<>#]*)")
# Of each page (language, code) of its blocks; in place of the language, a file's name.
BLOCKS = {page: [(kind or file, code) for kind, file, code in FENCE.findall(page.read_text())] for page in PAGES}
BLOCKS = {page: blocks for page, blocks in BLOCKS.items() if blocks}


def names(pages: list[Path]) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture
def page_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which the code of a page runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    images = FashionMNISTMini().read(train=False)[0][:, 0].numpy()  # 200 of each class
    for name, first in {"bag": 1600, "boot": 1800, "sandal": 1000, "trouser": 200}.items():
        for i in range(first, first + 30):
            directory = tmp_path / "clothes" / ("train" if i < first + 20 else "val") / name
            directory.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[i]).save(directory / f"{i}.png")
    (tmp_path / "photos").mkdir()
    for i in range(3):
        Image.fromarray(images[i]).convert("RGB").resize((80, 60)).save(tmp_path / "photos" / f"{i}.jpg")
    Image.fromarray(images[3]).convert("RGB").resize((90, 70)).save(tmp_path / "cat.jpg")
    bin_dir = tmp_path / ".bin"
    bin_dir.mkdir()
    overlay = Path(__file__).with_name("short.yaml")
    (bin_dir / "vitmha").write_text(
        f"""#!/bin/sh
[ "$*" = fit ] && set -- fit --config quickstart
[ "$1" = fit ] && set -- "$@" --config {overlay}
exec {sys.executable} -m vitmha "$@"
"""
    )
    (bin_dir / "vitmha").chmod(0o755)
    (bin_dir / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would lose its environment
    (bin_dir / "python").chmod(0o755)
    (tmp_path / "train.py").write_text((ROOT / "train.py").read_text())
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


def run_page(page: Path) -> None:
    variables = {"__name__": "__main__"}
    for language, code in BLOCKS[page]:
        if language == "python":
            exec(compile(code, str(page), "exec"), variables)
        elif language == "bash":
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True)
            assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        elif language != "shell":
            Path(language).write_text(code)


@pytest.mark.parametrize("page", names([p for p in BLOCKS if "bash" not in dict(BLOCKS[p])]))
def test_the_python_of_a_page_runs(page: Path, page_dir: Path) -> None:
    run_page(page)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("page", names([p for p in BLOCKS if "bash" in dict(BLOCKS[p])]))
def test_the_commands_of_a_page_run(page: Path, page_dir: Path) -> None:
    run_page(page)


def commands_of(page: Path) -> list[str]:
    """Every call of `vitmha` in the blocks of a page and in README.md's table of tasks."""
    code = "".join(code for language, code in BLOCKS[page] if language in ("bash", "shell"))
    lines = code.replace("\\\n", " ").splitlines()
    cells = re.findall(r"\| `(vitmha [^`|]*)`", page.read_text()) if page.name == "README.md" else []
    return cells + [call for line in lines for call in CALL.findall(line)]


@pytest.mark.parametrize("page", names(list(BLOCKS)))
def test_the_parsers_accept_the_commands_of_a_page(page: Path, page_dir: Path, capsys: pytest.CaptureFixture) -> None:
    for name, code in BLOCKS[page]:
        if name not in ("bash", "shell", "python"):
            Path(name).write_text(code)
    for call in commands_of(page):
        args = [arg for arg in shlex.split(call)[1:] if not arg.startswith("$")]
        if args[0] in ("fit", "validate", "test"):
            # What the commands before it would have written is not there.
            args = [arg for i, arg in enumerate(args) if "--ckpt_path" not in args[max(i - 1, 0) : i + 1]]
            if len(args) == 1:  # the config is that of the checkpoint
                continue
            accepts = check_call
            options = (args[1:], args[0])
        elif args[0].startswith("--"):
            continue
        else:
            command = " ".join(args[:2]) if " ".join(args[:2]) in COMMANDS else args[0]
            accepts, options = parser_of(command).parse_args, (args[len(command.split()) :],)
        answer = _exit_status(accepts, *options)
        assert answer in (None, 0), f"{call}: {capsys.readouterr().err}"


def _exit_status(function: Callable[..., Any], *args: Any) -> Any:
    """The status with which a call ends the process; None if it returns."""
    try:
        function(*args)
    except SystemExit as end:
        return end.code
    return None
