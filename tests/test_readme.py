"""README.md: it is short, its links lead somewhere, and its example gives the shapes that it names.

tests/docs/test_code.py runs its code.
"""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_it_has_at_most_130_lines() -> None:
    assert len(TEXT.splitlines()) <= 130


def test_the_example_gives_the_shapes_it_names() -> None:
    names: dict[str, torch.Tensor] = {}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0], names)
    assert names["weights"].shape == (2, 6, 1, 33)
    assert names["grid"].shape == (2, 6, 1, 4, 8)
    torch.testing.assert_close(names["weights"].sum(-1), torch.ones(2, 6, 1))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_linked_files_exist(path: str) -> None:
    assert path.startswith("https://") or (ROOT / path).is_file()
