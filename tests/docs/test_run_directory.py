"""docs/reference/run_directory.md lists the columns of heads.csv."""

import re
from pathlib import Path

import torch

from vitmha import create_model
from vitmha.inspection import HeadMetrics

TEXT = (Path(__file__).parents[2] / "docs/reference/run_directory.md").read_text()


def test_every_column_of_heads_csv_is_listed() -> None:
    metrics = HeadMetrics(create_model("vit_mini", num_classes=3, image_size=16, patch_size=8, depth=1).eval())
    metrics.update(torch.randn(1, 3, 16, 16))
    table = TEXT.split("Columns of `heads.csv`")[1].split("Formulas")[0]
    listed = {name for cell in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert listed == {"epoch", "step", *metrics.records()[0]}
