"""docs/explanation/architecture.md: its files, names, packages and layers are those of the code."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/explanation/architecture.md").read_text()
STEPS = re.findall(r"^\d+\. .*(?:\n +.*)*", TEXT, re.M)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/.]+(?:/|\.py))`", TEXT))))
def test_the_paths_exist(path: str) -> None:
    assert (ROOT / "vitmha" / path).exists() or (ROOT / path).exists()


def definitions(file: Path) -> set[str]:
    """The functions and classes of a file, and CLASS.METHOD."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{getattr(child, 'name', '')}" for child in node.body)}
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_step_names_what_its_files_define(step: str) -> None:
    files = re.findall(r"`([\w/]+\.py)`", step)
    names = set(re.findall(r"`([^`]+)`", step)) - set(files)
    assert names
    assert names <= set.union(*(definitions(ROOT / "vitmha" / file) for file in files))


def test_every_package_is_listed() -> None:
    package = ROOT / "vitmha"
    packages = {path.parent.relative_to(package).as_posix() for path in package.rglob("*/__init__.py")}
    assert packages <= set(re.findall(r"^\| `([\w/]+)/` \|", TEXT, re.M))


def test_the_image_shows_the_layers_that_lint_imports_checks() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    boxes = re.findall(r'class="name" x="[\d.]+" y="(\d+)">(\w+)<', (ROOT / "docs/images/layers.svg").read_text())
    rows = [" | ".join(f"vitmha.{name}" for y, name in boxes if y == row) for row in dict(boxes)]
    assert rows == contract["layers"]
