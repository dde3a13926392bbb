"""vitmha inspect: page, metrics and figures from the command line, and its answers to wrong calls."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import facts_of, full_disk, train
from PIL import Image
from torch import nn

from vitmha.cli import main
from vitmha.images import Preprocessing, read_image
from vitmha.inspection import HeadMetrics, head_divergence, record_attention
from vitmha.inspection.faithfulness import faithfulness, patch_maps
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import SaveModelCallback
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


def save_random_model(directory: Path, seed: int = 0, **fields: int) -> Path:
    torch.manual_seed(seed)
    config = {"num_classes": 3, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_dim": 17, "patch_size": 4} | fields
    model = VisionTransformer(ViTConfig(image_size=(8, 12), **config)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.preprocessing = Preprocessing(image_size=(8, 12), mean=(0.5,) * 3, std=(0.5,) * 3)
    save_model(model, directory)
    return directory


def write_image(file: Path, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *map(str, args)])
    return int(exit_.value.code or 0)


def test_everything_is_written_and_agrees_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_image(tmp_path / f"p{i}.png", i) for i in range(2)]
    out = tmp_path / "out"
    assert run(*files, "--model", save_random_model(tmp_path / "m", num_registers=1), "--output", out) == 0
    each = {f"image_{i}.{suffix}" for i in range(2) for suffix in ("png", "svg", "npz")}
    both = {f"divergence.{suffix}" for suffix in ("npz", "png")}
    one = {"page.html", "heads.json", "heads.csv", "heads.png", "faithfulness.json"}
    assert {file.name for file in out.iterdir()} == {*one, *both, *each}
    model = load_model(tmp_path / "m")
    image = model.preprocessing(read_image(files[1]))
    with torch.no_grad(), record_attention(model) as recorded:
        model(image[None])
    with np.load(out / "image_1.npz") as kept:
        np.testing.assert_allclose(kept["rows"], torch.cat(recorded.maps, 1)[0, :, 0].numpy(), rtol=1e-6)
        assert list(zip(kept["layers"], kept["heads"], strict=True)) == [(i, j) for i in range(2) for j in range(3)]
        assert json.loads(str(kept["layout"]))["num_registers"] == 1
        assert json.loads(str(kept["render"]))["cmap"] == "magma"
        with torch.no_grad():
            label = int(model(image[None]).argmax())
        for name, values in patch_maps(model, image[None], [label]).items():
            np.testing.assert_allclose(kept[name.replace("-", "_")], values[0].numpy(), rtol=1e-4, atol=1e-7)
    images = torch.stack([model.preprocessing(read_image(file)) for file in files])
    measured = json.loads((out / "faithfulness.json").read_text())
    expected = faithfulness(model, images, steps=10)
    assert measured["num_images"] == 2
    for test, curves in (("deletion", expected.deletion_curves), ("insertion", expected.insertion_curves)):
        assert {name: pytest.approx(curve, rel=1e-4) for name, curve in curves.items()} == measured[test]["curves"]
    assert measured["deletion"]["auc"] == pytest.approx(expected.deletion, rel=1e-4)
    with np.load(out / "divergence.npz") as kept:
        np.testing.assert_allclose(kept["divergence"], head_divergence(model, images).numpy(), atol=1e-6)
        assert kept["heads"].tolist() == [3, 3]
    facts = json.loads((out / "heads.json").read_text())
    assert [head["entropy"] for head in facts["heads"]] == [
        head["entropy"] for head in facts_of(out / "page.html")["metrics"]
    ]
    assert [image["name"] for image in facts_of(out / "page.html")["images"]] == ["p0.png", "p1.png"]
    printed = capsys.readouterr().out
    assert "page.html" in printed
    assert facts["heads"][0]["role"] in printed


def test_data_gives_metrics_over_class_directories_that_are_not_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(6):
        (tmp_path / "all" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        write_image(tmp_path / "all" / "ab"[i % 2] / f"{i}.png", i)
    args = [write_image(tmp_path / "p.png"), "--model", save_random_model(tmp_path / "m"), "--output", tmp_path / "out"]
    assert run(*args, "--data", tmp_path / "all") == 0
    model = load_model(tmp_path / "m")
    files = sorted((tmp_path / "all").glob("*/*.png"))
    metrics = HeadMetrics(model)
    images = torch.stack([model.preprocessing(read_image(file)) for file in files])
    metrics.update(images, torch.tensor([0, 0, 0, 1, 1, 1]))
    facts = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert facts["num_images"] == 6
    expected = metrics.values()["class_selectivity"].flatten().tolist()
    assert [head["class_selectivity"] for head in facts["heads"]] == pytest.approx(expected, abs=1e-5)
    (tmp_path / "all" / "a" / "bad.png").write_bytes(b"not an image")
    assert run(*args, "--data", tmp_path / "all") == 1
    assert "bad.png: not an image" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["num_images"] == 6
    assert run(*args[:-1], tmp_path / "fresh", "--data", tmp_path / "none") == 2
    assert "is not a directory of class directories" in capsys.readouterr().err
    assert not (tmp_path / "fresh").exists()


def test_a_second_model_is_compared_to_the_first(tmp_path: Path) -> None:
    out, file = tmp_path / "out", write_image(tmp_path / "p.png")
    first, second = save_random_model(tmp_path / "a"), save_random_model(tmp_path / "b", seed=1)
    assert run(file, "--model", first, "--compare-to", second, "--output", out) == 0
    comparison = facts_of(out / "page.html")["comparison"]
    assert comparison["name"] == str(second)
    assert sorted(comparison["partner"]) == list(range(6))
    written = json.loads((out / "comparison.json").read_text())
    partners = [head["paired_with"] for head in written["heads"]]
    assert [3 * layer + head for layer, head in partners] == comparison["partner"]
    assert [len(row) for row in written["layer_cka"]] == [2, 2]
    one, two = load_model(first), load_model(second)
    image = one.preprocessing(read_image(file))[None]
    maps = []
    for model in (one, two):
        with torch.no_grad(), record_attention(model) as recorded:
            model(image)
        maps.append(torch.cat(recorded.maps, 1)[0, :, 0])
    with np.load(out / "image_0_difference.npz") as kept:
        np.testing.assert_allclose(kept["rows"], (maps[1][comparison["partner"]] - maps[0]).numpy(), atol=1e-6)
        render = json.loads(str(kept["render"]))
    assert render["lowest"] == -render["highest"] < 0
    assert run(file, "--model", first, "--compare-to", first, "--output", out) == 0
    comparison = facts_of(out / "page.html")["comparison"]
    assert comparison["partner"] == list(range(6))
    assert max(comparison["drift"]) < 1e-6
    other = save_random_model(tmp_path / "c", num_registers=1)
    assert run(file, "--model", first, "--compare-to", other, "--output", tmp_path / "none") == 2
    assert not (tmp_path / "none").exists()


def test_a_run_directory_gives_its_images_its_epochs_and_an_animation(tmp_path: Path) -> None:
    train(tmp_path, [AttentionLogger(num_images=2), SaveModelCallback()])
    assert run(tmp_path, "--output", tmp_path / "out") == 0
    facts = facts_of(tmp_path / "out" / "page.html")
    assert facts["epochs"]["names"] == ["epoch 0", "epoch 1", "epoch 2"]
    assert [image["name"] for image in facts["images"]] == ["image 0", "image 1"]
    with Image.open(tmp_path / "out" / "epochs.gif") as animation:
        assert animation.n_frames == 3


def test_a_long_run_shows_as_many_epochs_as_fit_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, [AttentionLogger(num_images=1), SaveModelCallback()])
    monkeypatch.setattr("vitmha.cli.inspect.check_page", lambda *_: 2)
    assert run(tmp_path, "--output", tmp_path / "out") == 0
    assert "2 of the 3 epochs fit on the page; the animation has all of them." in capsys.readouterr().err
    assert facts_of(tmp_path / "out" / "page.html")["epochs"]["names"] == ["epoch 0", "epoch 2"]
    with Image.open(tmp_path / "out" / "epochs.gif") as animation:
        assert animation.n_frames == 3
    monkeypatch.setattr("vitmha.cli.inspect.check_page", lambda *_: 0)
    assert run(tmp_path, "--output", tmp_path / "out") == 0
    assert facts_of(tmp_path / "out" / "page.html")["epochs"] is None


def test_an_unfinished_run_is_inspected_from_its_last_checkpoint(tmp_path: Path) -> None:
    module = train(tmp_path, [AttentionLogger(num_images=1)], epochs=1)
    (tmp_path / "checkpoints").mkdir()
    module.trainer.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert run(tmp_path, "--output", tmp_path / "out") == 0
    facts = facts_of(tmp_path / "out" / "page.html")
    assert (facts["title"], facts["epochs"]["names"]) == (str(tmp_path / "checkpoints" / "last.ckpt"), ["epoch 0"])


def test_a_run_without_logged_attention_is_an_error_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, [AttentionLogger(every_n_epochs=0), SaveModelCallback()], epochs=1)
    assert not (tmp_path / "attention").exists()
    assert run(tmp_path, "--output", tmp_path / "out") == 2
    assert "holds no logged epoch: train with attention.every_n_epochs of at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_animation_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "attention").mkdir()
    assert run(tmp_path, "--animation", "mp4", "--output", tmp_path / "out") == 2
    assert "An .mp4 needs imageio and PyAV: pip install 'vitmha[video]', or write a .gif." in capsys.readouterr().err
    args = [write_image(tmp_path / "p.png"), "--model", save_random_model(tmp_path / "m"), "--output", tmp_path / "out"]
    assert run(*args, "--animation", "gif") == 2
    assert "--animation shows the epochs of a run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_earlier_output_is_removed_and_other_files_stay(tmp_path: Path) -> None:
    out, model = tmp_path / "out", save_random_model(tmp_path / "m")
    files = [write_image(tmp_path / f"p{i}.png", i) for i in range(2)]
    out.mkdir()
    kept = {"image_7.png", "image_cat.npz", "notes.json", "comparison.json"}
    for name in kept:
        (out / name).write_text("of the user")
    assert run(files[0], "--model", model, "--output", out) == 0
    alone = {file.name for file in out.iterdir()}
    assert kept < alone
    assert (
        run(*files, "--model", model, "--compare-to", save_random_model(tmp_path / "b", seed=1), "--output", out) == 0
    )
    (out / "epochs.gif").write_text("of a run")
    assert {"image_1.svg", "image_1_difference.npz"} < {file.name for file in out.iterdir()}
    assert run(files[0], "--model", model, "--output", out) == 0
    assert {file.name for file in out.iterdir()} == alone - {"comparison.json"}  # next to a page it is earlier output


def test_a_full_disk_is_one_line_and_leaves_the_earlier_output_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "out", save_random_model(tmp_path / "m")
    args = (write_image(tmp_path / "p.png"), "--model", model, "--output", out)
    assert run(*args) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with full_disk():
        assert run(*args) == 2
    assert f"error: {out}/page.html: File too large\n" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_any_file_name_can_be_drawn(tmp_path: Path) -> None:
    file = write_image(tmp_path / "a$5_$.png")
    assert run(file, "--model", save_random_model(tmp_path / "m"), "--output", tmp_path / "out") == 0
    assert "a$5_$.png" in (tmp_path / "out" / "page.html").read_text()


def test_an_unreadable_image_is_reported_and_the_others_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_image(tmp_path / "good.png"), tmp_path / "bad.png"
    bad.write_bytes(b"not an image")
    assert run(bad, good, "--model", save_random_model(tmp_path / "m"), "--output", tmp_path / "out") == 1
    assert f"{bad}: not an image" in capsys.readouterr().err
    assert len(facts_of(tmp_path / "out" / "page.html")["images"]) == 1


def test_a_page_that_would_be_too_large_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitmha.inspection.page.page.MAX_BYTES", 1000)
    assert (
        run(write_image(tmp_path / "p.png"), "--model", save_random_model(tmp_path / "m"), "--output", tmp_path / "out")
        == 2
    )
    assert "more than 0 MB: load the model with a smaller image_size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["p.png", "--output", "out"], "--model is required"),
        (["p.png", "--output", "out", "--model", "nothing"], "expected a directory with config.json"),
        (["none.png", "--output", "out", "--model", "m"], "No images found"),
        (["p.png", "--output", "out", "--model", "m", "--comapre-to", "m"], "did you mean --compare-to?"),
    ],
)
def test_wrong_calls_are_answered_in_one_line(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "p.png")
    save_random_model(tmp_path / "m")
    assert run(*args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
