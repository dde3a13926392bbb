"""export.py: the files run in their engines without the package, and nothing stays of an export that went wrong.

The run-time type checks of the tests stand in the way of torch.export: models are traced in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import vitmha.inference.export
from vitmha.cli import main
from vitmha.images import Preprocessing, read_image
from vitmha.inference.engines import load_openvino
from vitmha.inference.export import export_model
from vitmha.models.config import pair
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer, create_model
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

ROOT = Path(__file__).parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "groups": {
        **{"pool": "attention", "num_heads": 6, "num_kv_heads": 2, "pos_embed": "rope", "num_registers": 3},
        **{"qk_norm": True, "mlp": "swiglu", "layer_scale_init": 0.7, "backend": "explicit", "depth": 1},
    },
    "distilled": {"distillation_token": True, "num_registers": 2, "qkv_bias": False, "depth": 1},
    "mean": {"pool": "mean", "fc_norm": True, "pos_embed": "sincos2d", "mlp": "quick_gelu", "num_classes": 0},
    "both": {"pool": "cls_mean", "pre_norm": True, "pos_embed": "rope_dinov3", "mlp": "gelu_tanh", "backend": "math"},
}
PREPROCESSING = Preprocessing(
    image_size=(21, 55), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), interpolation="bilinear", crop_pct=0.875
)
# A program that uses config.json and the engine, without this package.
FOREIGN = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime
from PIL import Image

directory, image = Path(sys.argv[1]), Image.open(sys.argv[2]).convert("RGB")
session = onnxruntime.InferenceSession(directory / "model.onnx")
config = json.loads((directory / "config.json").read_text())
told = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
assert {name: told[name] for name in config} == config
wanted = config["preprocessing"]
(height, width), crop = wanted["image_size"], wanted["crop_pct"]
rows, columns = int(height / crop), int(width / crop)
if rows * image.width >= columns * image.height:
    columns = rows * image.width // image.height
else:
    rows = columns * image.height // image.width
image = image.resize((columns, rows), Image.Resampling[wanted["interpolation"].upper()])
top, left = round((rows - height) / 2), round((columns - width) / 2)
pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255
normalized = ((pixels - wanted["mean"]) / wanted["std"]).astype(np.float32).transpose(2, 0, 1)
[logits] = session.run([config["output"]["name"]], {config["input"]["name"]: normalized[None]})
assert not {"torch", "vitmha"} & set(sys.modules)
print(json.dumps({"logits": logits[0].tolist(), "label": config["class_names"][logits[0].argmax()]}))
"""


def small_model(name: str) -> VisionTransformer:
    """A model with random weights everywhere, class names and preprocessing; some of its heads are pruned."""
    sizes = {"image_size": (21, 55), "patch_size": (7, 11), "embed_dim": 24, "depth": 2, "mlp_dim": 31}
    model = create_model("vit_tiny", **{**sizes, "num_classes": 5, **MODELS[name]})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if name == "groups":
        model.blocks[0].attn.prune_heads({0})  # one group has fewer heads than the other
    if name == "mean":
        model.blocks[0].attn.prune_heads(range(model.blocks[0].attn.num_heads))  # a layer without attention
        model.blocks[1].attn.prune_heads({0, 2})
    if model.config.num_classes:
        model.class_names = tuple(f"class {i}" for i in range(5))
    model.preprocessing = PREPROCESSING
    return model.eval()


def run(code: str, *args: object, expected: int = 0) -> str:
    """Runs a Python program and returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NNCF_CI": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == expected, ended.stdout + ended.stderr
    return ended.stdout


def export_all(directory: Path, calls: list[tuple[str, str]]) -> str:
    """`vitmha export` of (model, format) in one process, to directory/NAME/FORMAT; for int8 with calibration images."""
    for name in {name for name, _ in calls}:
        torch.manual_seed(0)
        save_model(small_model(name), directory / name / "model")
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (64, 3, 8, 3), dtype=np.uint8)):
        (directory / "images" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels).resize((80, 30), Image.Resampling.BICUBIC)
        image.save(directory / "images" / str(i % 2) / f"{i}.png")
    args = [
        ["export", "--model", f"{directory}/{name}/model", "--output", f"{directory}/{name}/{made}", "--format", made]
        for name, made in calls
    ]
    args = [each + ["--calibration-data", f"{directory}/images"] * each[-1].endswith("int8") for each in args]
    code = "import json, sys; from vitmha.cli import main\nfor call in json.loads(sys.argv[1]): main(call)"
    return run(code, json.dumps(args))


def input_batches() -> list[Tensor]:
    """Batches of several sizes."""
    return [torch.randn(count, 3, 21, 55) for count in (1, 2, 5)]


def are_installed(*modules: str) -> bool:
    return all(find_spec(module) for module in modules)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with NAME/model and its exports, and what the command printed."""
    directory, calls = tmp_path_factory.mktemp("exported"), [("distilled", "torch")]
    if are_installed("onnxscript", "onnxruntime"):
        calls += [("groups", "onnx")]
    if are_installed("onnxscript", "openvino", "nncf"):
        calls += [("groups", "openvino-int8")]
    return directory, export_all(directory, calls)


@pytest.fixture
def onnx(exported: tuple[Path, str]) -> Path:
    """As `exported`, where ONNX could be exported."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    return exported[0]


# Engines run in processes of their own: their threads and the workers of a DataLoader, which other tests fork, do not
# get on.
ENGINES = {
    "torch": """
model = torch.export.load(file).module()
outputs = [model(batch) for batch in batches]
""",
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(file)
outputs = [torch.from_numpy(session.run(None, {"images": batch.numpy()})[0]) for batch in batches]
facts = [[each.name, each.shape, each.type] for each in (*session.get_inputs(), *session.get_outputs())]
""",
    "openvino": """
import openvino
model = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
outputs = [torch.from_numpy(model(batch.numpy())[0].copy()) for batch in batches]
""",
}
AROUND = """
import json, sys, torch
file, place, facts = sys.argv[1], sys.argv[2], None
batches = torch.load(place)
{engine}
assert "vitmha" not in sys.modules
torch.save(outputs, place)
print(json.dumps(facts))
"""


def run_in(engine: str, file: Path, batches: list[Tensor]) -> tuple[list[Tensor], Any]:
    """The outputs of an exported file, and what the engine says of it."""
    place = file.parent.parent / "batches"
    torch.save(batches, place)
    facts = json.loads(run(AROUND.format(engine=ENGINES[engine]), file, place))
    return torch.load(place), facts


def assert_runs_as_onnx(directory: Path) -> None:
    """The file gives the model's outputs in batches of any size."""
    model, batches = load_model(directory / "model"), input_batches()
    outputs, [taken, given] = run_in("onnx", directory / "onnx" / "model.onnx", batches)
    assert taken == ["images", ["batch", 3, 21, 55], "tensor(float)"]
    name, width = ("logits", model.config.num_classes) if model.config.num_classes else ("features", 24)
    assert given[:2] == [name, ["batch", width]]
    for batch, theirs in zip(batches, outputs, strict=True):
        assert_close(theirs, model(batch).detach(), rtol=1e-5, atol=1e-5)


def test_onnx_gives_the_outputs_of_the_model_in_batches_of_any_size(onnx: Path) -> None:
    assert sorted(file.name for file in (onnx / "groups" / "onnx").iterdir()) == ["config.json", "model.onnx"]
    assert_runs_as_onnx(onnx / "groups")


def test_a_program_without_this_package_classifies_an_image_with_the_directory(onnx: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (13, 41, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((410, 130), Image.Resampling.BICUBIC).save(tmp_path / "photo.png")
    model = load_model(onnx / "groups" / "model")
    prediction = json.loads(run(FOREIGN, onnx / "groups" / "onnx", tmp_path / "photo.png"))
    logits = model(PREPROCESSING(read_image(tmp_path / "photo.png"))[None])[0].detach()
    assert_close(torch.tensor(prediction["logits"]), logits, rtol=1e-5, atol=1e-5)
    assert prediction["label"] == model.class_names[logits.argmax()]


def test_the_file_contains_no_local_path(onnx: Path) -> None:
    content = (onnx / "groups" / "onnx" / "model.onnx").read_bytes()
    assert str(ROOT).encode() not in content
    assert b"site-packages" not in content


def test_config_json_is_that_of_the_model_with_inputs_and_outputs(onnx: Path) -> None:
    ours, theirs = (json.loads((onnx / "groups" / name / "config.json").read_text()) for name in ("model", "onnx"))
    assert theirs.pop("input") == {"name": "images", "shape": ["batch", 3, 21, 55]}
    assert theirs.pop("output") == {"name": "logits", "shape": ["batch", 5]}
    assert theirs == {**ours, "architecture": {**ours["architecture"], "backend": "explicit"}}


def assert_runs_as_torch(directory: Path) -> None:
    model, batches = load_model(directory / "model"), input_batches()
    outputs, _ = run_in("torch", directory / "torch" / "model.pt2", batches)
    for batch, theirs in zip(batches, outputs, strict=True):
        assert_close(theirs, model(batch), rtol=1e-5, atol=1e-5)


def assert_runs_as_openvino(directory: Path, batches: list[Tensor], tolerance: float) -> None:
    model = load_model(directory.parent / "model")
    outputs, _ = run_in("openvino", directory / "model.xml", batches)
    for batch, theirs in zip(batches, outputs, strict=True):
        assert_close(theirs, model(batch).detach(), rtol=0, atol=tolerance)


def test_int8_is_close_to_the_model_and_smaller(onnx: Path) -> None:
    pytest.importorskip("nncf")
    directory = onnx / "groups" / "openvino-int8"
    images = torch.stack([PREPROCESSING(read_image(file)) for file in (onnx / "images").glob("*/*.png")])
    batches = [images, images.repeat(3, 1, 1, 1), *images.split(1)]
    (some, many, *single), _ = run_in("openvino", directory / "model.xml", batches)
    expected = load_model(onnx / "groups" / "model")(images)
    assert 1e-3 < (some - expected).norm() / expected.norm() < 0.2  # 0.015 to 0.11 over 14 random models
    assert_close(many, torch.cat(single).repeat(3, 1), rtol=0, atol=1e-4)
    weights = sum(parameter.nbytes for parameter in small_model("groups").parameters())
    assert weights / 4 < (directory / "model.bin").stat().st_size < weights / 2


CLASSIFY = """
import json, sys
from vitmha import Classifier
directory, *files = sys.argv[1:]
predictions = list(Classifier(directory, batch_size=4).classify(files, all_probabilities=True))
print(json.dumps([prediction.all_probabilities.tolist() for prediction in predictions]))
for args in ({"engine": "compile"}, {"precision": "int8"}):
    try:
        Classifier(directory, **args)
    except ValueError as error:
        print(error)
try:
    next(Classifier(directory).classify(files, attention=True))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.ci
def test_classify_takes_an_openvino_directory(onnx: Path) -> None:
    pytest.importorskip("nncf")
    directory, files = onnx / "groups" / "openvino-int8", sorted((onnx / "images").glob("*/*.png"))
    images = torch.stack([PREPROCESSING(read_image(file)) for file in files])
    [outputs], _ = run_in("openvino", directory / "model.xml", [images])
    found, *refused = run(CLASSIFY, directory, *files).splitlines()
    assert_close(torch.tensor(json.loads(found)), outputs.softmax(1), rtol=0, atol=1e-5)
    assert refused == [
        *[f"{directory} was exported to OpenVINO: remove engine 'compile' and precision 'int8'."] * 2,
        "Embeddings and attention maps require engine 'torch', got 'openvino'.",
    ]


def test_a_corrupt_openvino_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.xml").touch()
    with pytest.raises(ValueError, match=r"config\.json is not a valid vitmha config: .* No such file"):
        load_openvino(tmp_path)


def test_the_command_prints_the_comparison(exported: tuple[Path, str]) -> None:
    directory, printed = exported
    assert f"{directory}/distilled/torch: config.json, model.pt2, 0." in printed
    lines = [line for line in printed.splitlines() if line.startswith("Compared on")]
    differ = r"outputs differ by at most \d\.\de[+-]\d\d, the largest is [\d.]+"
    for line in lines:
        assert re.fullmatch(
            rf"Compared on (9 random|32) images: {differ}; the predicted class is the same for \d+ of them\.", line
        )
    assert len(lines) == len(list(directory.glob("*/*/config.json"))) - len(list(directory.glob("*/model")))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch", "onnx", "openvino"])
def test_every_kind_of_model_runs_in_every_format(tmp_path: Path, file_format: str) -> None:
    for module in {"onnx": ["onnxruntime", "onnxscript"], "openvino": ["openvino", "onnxscript"]}.get(file_format, []):
        pytest.importorskip(module)
    export_all(tmp_path, [(name, file_format) for name in MODELS])
    for name in MODELS:
        if file_format == "onnx":
            assert_runs_as_onnx(tmp_path / name)
        elif file_format == "torch":
            assert_runs_as_torch(tmp_path / name)
        else:
            assert_runs_as_openvino(tmp_path / name / file_format, input_batches(), 1e-5)


def refused(args: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the message of a call that is refused and writes nothing."""
    monkeypatch.setattr(sys, "argv", ["vitmha"])
    before = sorted(Path().rglob("*"))
    model, *rest = args.split()
    output = ["--output", rest.pop(0)] if rest else []
    with pytest.raises(SystemExit) as ended:
        main(["export", "--model", model, *output, *rest])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert sorted(Path().rglob("*")) == before
    return line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model, one without preprocessing, one with a decoder, an empty directory."""
    monkeypatch.chdir(tmp_path)
    model = small_model("distilled")
    save_model(model, "model")
    model.preprocessing = None
    save_model(model, "plain")
    save_model(EncoderDecoder(small_model("both").config, DecoderConfig(max_length=2, num_heads=3)), "reader")
    Path("empty").mkdir()
    Path("images").mkdir()
    Image.new("RGB", (60, 30), "red").save("images/a.png")
    Path("broken").mkdir()
    Path("broken/a.png").write_text("text")
    return tmp_path


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.9
def test_the_input_size_of_the_exported_model_can_be_chosen(tmp_path: Path) -> None:
    save_model(small_model("both"), tmp_path / "model")
    model = load_model(tmp_path / "model")
    height, width = (2 * side for side in pair(model.config.image_size))
    args = ["export", "--model", f"{tmp_path}/model", "--output", f"{tmp_path}/out", "--format", "torch"]
    args += ["--image-size", str(height), str(width)]
    run("import json, sys; from vitmha.cli import main; main(json.loads(sys.argv[1]))", json.dumps(args))
    images, resized = torch.randn(2, 3, height, width), load_model(tmp_path / "model", image_size=(height, width))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert_close(program(images), resized.eval()(images), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["preprocessing"]["image_size"] == [height, width]


def test_a_full_disk_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    save_model(small_model("both"), tmp_path / "model")
    args = ["export", "--model", f"{tmp_path}/model", "--output", f"{tmp_path}/out", "--format", "torch"]
    code = """import json, resource, sys
from vitmha.cli import main
sys.stderr = sys.stdout
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
main(json.loads(sys.argv[1]))"""
    assert run(code, json.dumps(args), expected=2).splitlines()[-1] == f"error: {tmp_path}/out: File too large"
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("model new --format onx", "argument --format: invalid choice: 'onx' (choose from "),
        ("model empty", "empty already exists; choose another output directory."),
        ("model model/config.json", "model/config.json cannot be created or written to:"),
        ("nowhere new", "nowhere: no such file or directory"),
        ("reader new", "The model is an encoder-decoder (a sequence model); only classifiers can be exported."),
        (
            "model new --format openvino-int8",
            "--format openvino-int8 is calibrated on images: add --calibration-data DIR",
        ),
        (
            "model new --format openvino-int8 --calibration-data images",
            "--format openvino-int8 needs at least 64 images, of which every second one calibrates; got 1.",
        ),
        ("model new --calibration-data empty", "--calibration-data empty: no image files found"),
        ("model new --calibration-data nowhere", "--calibration-data nowhere: no image files found"),
        ("model new --calibration-data broken", "broken/a.png: not an image in a format that Pillow reads"),
        ("plain new --calibration-data broken", "The model has no preprocessing"),
        ("model new --calibration-dat empty", "unknown option --calibration-dat (did you mean --calibration-data?)"),
        ("model", "the following arguments are required: --output"),
    ],
)
def test_a_wrong_call_gets_one_message_and_leaves_nothing(
    args: str, message: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitmha.inference.export, "find_spec", lambda module: module)
    assert message in refused(args, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("file_format", "message"),
    [
        ("onnx", "onnx needs onnxscript and onnxruntime: pip install 'vitmha[onnx]'."),
        ("openvino", "openvino needs onnxscript and openvino: pip install 'vitmha[openvino]'."),
        ("openvino-int8", "openvino-int8 needs onnxscript and openvino and nncf: pip install 'vitmha[openvino]'."),
    ],
)
def test_an_engine_that_is_not_installed_is_named_with_its_extra(
    file_format: str, message: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitmha.inference.export, "find_spec", lambda module: None)
    args = f"model new --format {file_format} --calibration-data images"
    assert message in refused(args, capsys, monkeypatch)


@pytest.mark.parametrize(("shift", "rounded"), [(0.1, False), (torch.nan, False), (torch.nan, True)])
def test_a_file_that_computes_something_else_is_refused_and_removed(
    shift: float, rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("distilled")

    def write(program: object, directory: Path, *_: object) -> object:
        (directory / "model.bin").write_text("half")
        return lambda images: model(images) + shift * (len(images) > 1)

    monkeypatch.setattr(vitmha.inference.export, "export_program", lambda model: None)
    monkeypatch.setattr(vitmha.inference.export, "_write_torch", write)
    monkeypatch.setattr(vitmha.inference.export, "_write_openvino", write)
    monkeypatch.setattr(vitmha.inference.export, "find_spec", lambda module: module)
    call = ("openvino-int8", torch.randn(64, 3, 21, 55)) if rounded else ("torch",)
    with pytest.raises(ValueError, match=r"differs from the model's by (0\.1|nan), more than .*: nothing was written"):
        export_model(model, tmp_path / "a" / "b", *call)
    assert list(tmp_path.iterdir()) == []


def test_the_model_given_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("groups").double().train()
    seen = []
    monkeypatch.setattr(vitmha.inference.export, "export_program", seen.append)
    monkeypatch.setattr(vitmha.inference.export, "_write_torch", lambda *_: seen[0])
    report = export_model(model, tmp_path / "new", "torch")
    assert (report.num_images, report.max_abs_difference, report.top1_agreement) == (9, 0, 1)
    assert model.training
    assert model.head.weight.dtype == torch.float64
    assert [block.attn.backend for block in model.blocks] == ["explicit"]
    assert [block.attn.backend for block in seen[0].blocks] == ["auto"]
