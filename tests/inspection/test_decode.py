"""decode.js, which decodes the stored attention in the page, run in Node.js and compared with storage.py."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest
import torch
from builders import random_vit
from torch.testing import assert_close

from vitmha.inspection.page.storage import pack_attention, store
from vitmha.inspection.trace import class_target, trace

NODE = shutil.which("node")


def run_in_node(blob: str, table: dict[str, Any], expression: str) -> Any:
    code = files("vitmha.inspection.page").joinpath("decode.js").read_text()
    data = f"const data = decodeBlob({json.dumps(blob)}, {json.dumps(table['sections'])});"
    script = f"{code}\n{data}\nconsole.log(JSON.stringify({expression}));"
    run = subprocess.run([str(NODE), "-"], input=script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
@pytest.mark.parametrize("fields", [{}, {"head_dim": 2, "num_kv_heads": 1}, {"pool": "mean"}])
def test_rows_decoded_in_node_are_those_of_the_model(fields: dict[str, Any]) -> None:
    model = random_vit(**fields)
    traced = trace(model, torch.randn(1, 3, 8, 12), class_target(model))
    sections, error = pack_attention(model, traced)
    assert ("q" in sections) == (fields.get("head_dim") == 2)
    blobs: list[str] = []
    table = store(sections, blobs)
    tokens = model.layout.num_tokens
    weights = torch.cat([block.weights[0] for block in traced.blocks])
    values = [block.v[0].repeat_interleave(3 // block.v.shape[1], 0) for block in traced.blocks]
    gradients = torch.cat([block.grad_y[0] @ v.mT for block, v in zip(traced.blocks, values, strict=True)])
    one_head = "Array.from({length: tokens}, (_, t) => Array.from(row(data, f, t, tokens)))"
    rows = f"Array.from({{length: 9}}, (_, f) => {one_head})"
    decoded = run_in_node(blobs[0], table, f"((row, tokens) => {rows})(attentionRow, {tokens})")
    assert float((torch.tensor(decoded) - weights).abs().max()) <= error["probability"] + 1e-6
    decoded = torch.tensor(run_in_node(blobs[0], table, f"((row, tokens) => {rows})(relevanceRow, {tokens})"))
    expected = (weights * gradients).clamp_min(0)
    assert float((decoded - expected).norm() / expected.norm()) <= error["relevance"] + 1e-6
    if fields.get("pool") == "mean":
        pooled = run_in_node(blobs[0], table, f"Array.from(attentionRow(data, 4, POOLED, {tokens}))")
        assert_close(torch.tensor(pooled), weights[4, model.layout.patches].mean(0))
