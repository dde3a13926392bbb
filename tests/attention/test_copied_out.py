"""The attention directory works on its own, copied into another project under another name."""

import shutil
import subprocess
import sys
from pathlib import Path

import vitmha.attention

SCRIPT = """
import sys

sys.modules["vitmha"] = None  # importing it raises ImportError
import torch
from copied import KVCache, MultiHeadAttention

attention, x = MultiHeadAttention(24, 3).eval(), torch.randn(2, 5, 24)
cache = KVCache(5)
with torch.no_grad():
    y = torch.cat([attention(token, is_causal=True, cache=cache) for token in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(y, attention(x, is_causal=True))
    assert attention.attention_weights(x).shape == (2, 3, 5, 5)
assert not [name for name in sys.modules if name.startswith("vitmha.")]
heavy = {"lightning", "torchvision", "timm", "PIL", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def test_attention_runs_copied_into_another_package(tmp_path: Path) -> None:
    shutil.copytree(Path(vitmha.attention.__file__).parent, tmp_path / "copied")
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
