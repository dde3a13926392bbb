"""README.md: its Python examples run, and the files and configs that it names exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_python_examples_run_and_give_the_shapes_they_name() -> None:
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
    assert names["labels"] == [str(i) for i in names["sequences"][0].tolist() if i != 10][: len(names["labels"])]


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)", TEXT))
def test_linked_files_exist(path: str) -> None:
    assert path.startswith("https://") or (ROOT / path).is_file()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"--config ([\w/.]+)", TEXT))))
def test_configs_of_the_commands_exist(name: str) -> None:
    paths = [ROOT / name, ROOT / f"configs/{name}.yaml", ROOT / f"configs/overlays/{name}.yaml"]
    assert name.isupper() or any(path.is_file() for path in paths)
