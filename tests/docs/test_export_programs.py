"""The programs of docs/guides/export.md, which run an exported model without vitmha."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.docs.test_code import BLOCKS, ROOT
from vitmha.images import Preprocessing, read_image

PROGRAM, *RUNS, _ = [code for language, code in BLOCKS[ROOT / "docs/guides/export.md"] if language == "python"]


def test_they_import_no_package_but_the_engine_numpy_and_pillow() -> None:
    imported = set()
    for node in ast.walk(ast.parse("\n".join([PROGRAM, *RUNS]))):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"json", "pathlib", "numpy", "PIL", "onnxruntime", "openvino"}


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(41, 29), (23, 67)])
@pytest.mark.parametrize(
    "preprocessing",
    [
        Preprocessing(image_size=(17, 13), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        Preprocessing(image_size=(17, 13), mean=(0.3,), std=(0.7,), interpolation="bilinear", crop_pct=0.9),
        Preprocessing(image_size=(11, 19), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.875, crop_mode="squash"),
    ],
)
def test_they_prepare_an_image_as_vitmha_does(
    preprocessing: Preprocessing,
    size: tuple[int, int],
    orientation: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exported_onnx").mkdir()
    config = {"class_names": [], "preprocessing": vars(preprocessing)}
    Path("exported_onnx/config.json").write_text(json.dumps(config))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save("image.png", exif=exif)

    program: dict[str, Any] = {}
    exec(PROGRAM, program)
    np.testing.assert_allclose(
        program["read"]("image.png")[0], preprocessing(read_image("image.png")), rtol=0, atol=1e-6
    )
