"""README.md: what it says is there, and what it shows runs."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_python_blocks_run_and_give_the_shapes_they_name() -> None:
    names: dict[str, torch.Tensor] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, names)
    assert names["weights"].shape == (2, 6, 1, 33)
    assert names["grid"].shape == (2, 6, 1, 4, 8)
    assert names["y"].shape == (2, 5, 96)
    torch.testing.assert_close(names["w"].sum(-1), torch.ones(2, 8, 1))
    torch.testing.assert_close(torch.cat(names["steps"], dim=1), names["y"])
    assert names["attention"].num_heads == 6
    assert names["sequences"].shape == (2, 6)
    assert names["words"] == [str(i) for i in names["sequences"][0].tolist() if i != 10][: len(names["words"])]


def test_layout_names_every_source_file_and_nothing_else() -> None:
    tree = TEXT.split("## How the code is laid out")[1].split("```")[1]
    named = set(re.findall(r"[\w/]+\.py|\w+/", tree))
    paths = [path for path in (ROOT / "vitmha").rglob("*.py") if path.parent.name != "cli"]  # a file for each word
    files = {path.name for path in paths} - {"__init__.py", "embed_fashion_mnist.py"}
    assert {name for name in named if name.endswith(".py")} == files | {"train.py"}
    assert all((ROOT / name).is_dir() or (ROOT / "vitmha" / name).is_dir() for name in named if name.endswith("/"))


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)|--config (configs/\w+\.yaml)", TEXT))
def test_linked_files_are_there(path: tuple[str, str]) -> None:
    target = path[0] or path[1]
    assert target.startswith("https://") or (ROOT / target).is_file()
