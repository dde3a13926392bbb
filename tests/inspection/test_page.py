"""The page: what it stores, and, in a real browser, that it displays what the library computes."""

import base64
import copy
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import FAMILIES, built, facts_of, random_vit
from page_browser import click_patch, hover_patch, opened
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.images import Preprocessing
from vitmha.inspection import record_attention, relevance
from vitmha.inspection.ablation import ablate_each_head, mean_outputs
from vitmha.inspection.faithfulness import patch_maps
from vitmha.inspection.page.page import EpochAttention, PageImage, check_page, write_page
from vitmha.models.config import ViTConfig
from vitmha.models.vit import VisionTransformer
from vitmha.weights.load import load_model

NAMES = ("a cat", "a <dog>", "</script>", "a hen", "a pig", "a cow")


def random_model(std: float = 0.35, **fields: Any) -> VisionTransformer:
    """Two blocks of three heads over a grid of 3 x 5 patches, with preprocessing and class names, in eval mode."""
    sizes = {"image_size": (21, 55), "patch_size": (7, 11), "embed_dim": 36, "depth": 2, "num_classes": 6}
    model = random_vit(std, **{**sizes, **fields})
    half = (0.5,) * model.config.in_channels
    model.preprocessing = Preprocessing(image_size=model.layout.image_size, mean=half, std=half)
    model.class_names = NAMES if model.config.num_classes == 6 else None
    return model


def page_images(count: int = 1, size: tuple[int, int] = (21, 55), channels: int = 3) -> list[PageImage]:
    return [PageImage(name=f"image {i}.png", image=torch.randn(channels, *size)) for i in range(count)]


def stored(page: Path, blob: dict[str, Any]) -> dict[str, np.ndarray]:
    (text,) = re.findall(rf'id="blob-{blob["index"]}">(.*?)</script>', page.read_text(), re.DOTALL)
    content = base64.b64decode(text)
    return {
        name: np.frombuffer(content, part["dtype"], math.prod(part["shape"]), part["offset"]).reshape(part["shape"])
        for name, part in blob["sections"].items()
    }


def maps_of(model: VisionTransformer, image: Tensor) -> Tensor:
    """(all heads, tokens, tokens)."""
    with torch.no_grad(), record_attention(model, queries="all") as recorded:
        model(image[None])
    return torch.cat(recorded.maps, 1)[0]


@pytest.mark.parametrize(("head_dim", "kind"), [(8, "maps"), (7, "q")])
def test_maps_or_queries_and_keys_are_stored_whichever_is_smaller(head_dim: int, kind: str, tmp_path: Path) -> None:
    model, (page_image,) = random_model(head_dim=head_dim), page_images()
    write_page(tmp_path / "page.html", model, [page_image], title="m")
    assert model.layout.num_tokens == 16
    parts = stored(tmp_path / "page.html", facts_of(tmp_path / "page.html")["images"][0]["blob"])
    assert ("maps" in parts, "q" in parts) == (kind == "maps", kind == "q")


@pytest.mark.parametrize("fields", [{}, {"head_dim": 4, "num_kv_heads": 1}, {"pool": "mean", "head_dim": 4}])
def test_the_page_states_the_errors_of_its_storage(fields: dict[str, Any], tmp_path: Path) -> None:
    model, (page_image,) = random_model(**fields), page_images()
    error = write_page(tmp_path / "page.html", model, [page_image], title="m").error
    facts, maps = facts_of(tmp_path / "page.html"), maps_of(model, page_image.image)
    parts = stored(tmp_path / "page.html", facts["images"][0]["blob"])
    parts = {name: torch.from_numpy(values.astype(np.float32)) for name, values in parts.items()}
    if "maps" in parts:
        restored = (parts["maps"] / 255).square() * parts["maxima"][..., None]
    else:
        q, k = (parts[name] * parts[f"{name}_scale"][..., None] for name in "qk")
        restored = (q @ k.mT).softmax(-1)
    assert_close(float((restored - maps).abs().max()), error["probability"], rtol=1e-3, atol=1e-6)
    assert error["probability"] < 0.03
    assert error["variation"] < 0.01
    assert error["relevance"] < 0.05
    assert facts["error"] == error


def test_a_page_is_one_file_without_external_urls_and_holds_any_name(tmp_path: Path) -> None:
    model = random_model()
    page_image = PageImage(name='</script><b onload="x">&.png', image=torch.randn(3, 21, 55))
    write_page(tmp_path / "page.html", model, [page_image], title="<i>m</i>")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"""(src|href)=(?!["']?data:)|https?://|@import|url\(""", text)
    assert facts_of(tmp_path / "page.html")["images"][0]["name"] == page_image.name
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_control_characters_in_names_are_shown_as_text(tmp_path: Path) -> None:
    model, name, shown = random_model(), "a\x1b[31m\udce9", r"a\x1b[31m\udce9"
    model.class_names = tuple(f"{name}{i}" for i in range(6))
    page_image = PageImage(name=name, image=torch.randn(3, 21, 55))
    epochs = [EpochAttention(name=name, rows=torch.rand(1, 6, 16))]
    write_page(tmp_path / "x.html", model, [page_image], title=name, compare_to=(name, model), epochs=epochs)
    facts = facts_of(tmp_path / "x.html")
    image, labels = facts["images"][0], {f"{shown}{i}" for i in range(6)}
    assert [facts["title"], image["name"], facts["comparison"]["name"], *facts["epochs"]["names"]] == [shown] * 4
    assert {*image["labels"], *(ablated["top"] for ablated in image["ablations"]["mean"])} <= labels


def test_a_page_that_would_be_too_large_is_refused_before_the_work(tmp_path: Path) -> None:
    config = ViTConfig(image_size=1024, patch_size=8, embed_dim=384, depth=1, num_heads=6, num_classes=2)
    page_image = PageImage(name="x", image=torch.randn(3, 1024, 1024))
    model = VisionTransformer(config).eval()
    with pytest.raises(ValueError, match=r"would have \d+ MB, more than 50 MB: pass fewer images"):
        write_page(tmp_path / "x.html", model, [page_image] * 8, title="m")
    with pytest.raises(ValueError, match="at least one image"):
        write_page(tmp_path / "x.html", model, [], title="m")
    assert not list(tmp_path.iterdir())


def test_a_second_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compare_to must have the tokens of the model: expected .* of B"):
        write_page(
            tmp_path / "x.html",
            random_model(),
            page_images(),
            title="A",
            compare_to=("B", random_model(num_registers=1)),
        )
    with pytest.raises(
        ValueError, match="compare_to must have the input channels of the model: expected 3, got 1 of B"
    ):
        write_page(
            tmp_path / "x.html", random_model(), page_images(), title="A", compare_to=("B", random_model(in_channels=1))
        )


def test_the_number_of_epochs_that_fit_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, images_on_page = random_model(), page_images(2)
    write_page(tmp_path / "bare.html", model, images_on_page, title="m")
    monkeypatch.setattr("vitmha.inspection.page.page.MAX_BYTES", 25 * (tmp_path / "bare.html").stat().st_size)
    max_epochs = check_page(model, 2, None)
    epochs = [EpochAttention(name=f"epoch {i}", rows=torch.rand(2, 6, 16)) for i in range(max_epochs + max_epochs // 5)]
    write_page(tmp_path / "page.html", model, images_on_page, title="m", epochs=epochs[:max_epochs])
    with pytest.raises(ValueError, match="The page would have"):
        write_page(tmp_path / "page.html", model, images_on_page, title="m", epochs=epochs)


# In a browser.


@pytest.mark.browser
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_registers": 2, "num_kv_heads": 1, "head_dim": 6},
        {"distillation_token": True, "head_dim": 5},
        {"pool": "mean", "pos_embed": "sincos2d"},
        {"pool": "attention", "head_dim": 4},
    ],
    ids=["maps", "registers, grouped, queries and keys", "distilled", "mean", "attention pool"],
)
def test_the_displayed_weights_are_the_models(fields: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    model, images_on_page = random_model(**fields), page_images(2)
    error = write_page(tmp_path / "page.html", model, images_on_page, title="m").error
    page, prefix = opened(browser, tmp_path / "page.html"), model.layout.num_prefix_tokens
    for index, page_image in enumerate(images_on_page):
        page.select_option("#image", str(index))
        page.wait_for_selector(f'html[data-ready="{index}"]')
        maps = maps_of(model, page_image.image)
        readout = maps[:, 0] if model.layout.num_class_tokens else maps[:, prefix:].mean(1)
        page.locator("#queries button").first.click()
        for head, (row, column) in ((0, (0, 0)), (4, (2, 3)), (5, (1, 4))):
            page.locator(f'.head[data-head="{head}"]').click()
            key = model.layout.token_of(row, column)
            assert abs(hover_patch(page, "#large", row, column, (3, 5)) - readout[head, key]) <= error["probability"]
            click_patch(page, "#stage", row, column, (3, 5))
            for other in ((0, 4), (2, 0), (row, column)):
                displayed = hover_patch(page, "#stage", *other, (3, 5))
                assert abs(displayed - maps[head, key, model.layout.token_of(*other)]) <= error["probability"] + 1e-9
            page.locator("#queries button").first.click()
        for token in range(prefix):
            page.locator(f'#queries button[data-token="{token}"]').click()
            displayed = hover_patch(page, "#large", 2, 1, (3, 5))
            assert abs(displayed - maps[5, token, model.layout.token_of(2, 1)]) <= error["probability"] + 1e-9
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_keys_move_the_query_and_the_head(browser: Any, tmp_path: Path) -> None:
    model, (page_image,) = random_model(num_registers=1), page_images()
    write_page(tmp_path / "page.html", model, [page_image], title="m")
    page, maps = opened(browser, tmp_path / "page.html"), maps_of(model, page_image.image)
    page.focus("#stage")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)  # the first chooses the first patch; at the edge a key does nothing
    assert page.locator("#readout").inner_text().startswith("From the patch at row 2, column 0: most to")
    best = maps[0, model.layout.token_of(2, 0)].max()
    assert float(page.locator("#readout").get_attribute("data-value")) == pytest.approx(float(best), abs=0.01)
    page.keyboard.press("c")
    assert page.locator("#readout").inner_text().startswith("From the class token")
    page.keyboard.press("n")
    assert page.locator("#head-title").inner_text() == "Layer 0, head 1"
    page.keyboard.press("p")
    page.keyboard.press("p")
    assert page.locator("#head-title").inner_text() == "Layer 1, head 2"
    page.keyboard.press("a")
    assert page.locator("[value=zero]").is_checked()
    page.locator('.head[data-head="1"]').focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.head") == "4"
    assert page.locator("#head-title").inner_text() == "Layer 1, head 1"
    assert page.locator("#prediction caption").get_attribute("aria-live") == "polite"
    assert page.locator("#prediction caption").inner_text().startswith("Prediction with layer 1 head 1 zero-ablated: ")
    page.keyboard.press("a")
    assert page.locator("#prediction caption").inner_text().startswith("Prediction: ")
    assert page.get_attribute("#stage", "aria-label").endswith("c selects the class token.")
    page.focus("#large")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#readout").inner_text().startswith("class token → patch at row 1, column 2: ")
    displayed = float(page.locator("#readout").get_attribute("data-value"))
    assert displayed == pytest.approx(float(maps[4, 0, model.layout.token_of(1, 2)]), abs=0.01)
    page.keyboard.press("n")  # the patch stays
    displayed = float(page.locator("#readout").get_attribute("data-value"))
    assert displayed == pytest.approx(float(maps[5, 0, model.layout.token_of(1, 2)]), abs=0.01)
    page.focus("#sort")
    assert page.locator("#readout").inner_text().startswith("From the class token")
    unnamed = "[...document.querySelectorAll('button, canvas[role], select')].filter((e) => !e.ariaLabel && "
    assert page.evaluate(f"{unnamed} !e.textContent.trim() && !e.labels?.length).length") == 0
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_up_and_down_move_to_the_nearest_head_of_the_next_row(browser: Any, tmp_path: Path) -> None:
    model = random_model(depth=3)
    model.blocks[1].attn.prune_heads([0, 2])
    write_page(tmp_path / "page.html", model, page_images(), title="m")
    page = opened(browser, tmp_path / "page.html")

    def walk(first: int, *keys: str) -> int:
        page.locator(f'.head[data-head="{first}"]').focus()
        for key in keys:
            page.keyboard.press(key)
        return int(page.evaluate("document.activeElement.dataset.head"))

    assert walk(2, "ArrowDown") == 3  # layers of 3, 1 and 3 heads
    assert walk(3, "ArrowDown") == 4
    assert walk(6, "ArrowUp") == 3
    assert walk(0, "ArrowRight", "ArrowRight", "ArrowRight") == 3
    assert walk(0, "ArrowUp") == 0
    page.select_option("#sort", "entropy")
    page.evaluate("document.getElementById('heads').style.gridTemplateColumns = 'repeat(4, 60px)'")
    order = [int(head.get_attribute("data-head")) for head in page.locator(".head").all()]
    assert walk(order[6], "ArrowUp") == order[2]  # rows of 4 and 3
    assert walk(order[3], "ArrowDown") == order[6]
    assert page.errors == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("fields", [{"num_registers": 1}, {"pool": "mean"}])
def test_a_model_without_a_head_is_explained_by_the_norm_of_its_features(
    fields: dict[str, Any], browser: Any, tmp_path: Path
) -> None:
    model, (page_image,) = random_model(num_classes=0, **fields), page_images()
    found = write_page(tmp_path / "page.html", model, [page_image], title="m")
    assert found.faithfulness is None
    page, prefix = opened(browser, tmp_path / "page.html"), model.layout.num_prefix_tokens
    with record_attention(model, queries="all", gradients=True) as recorded:
        length = model(page_image.image[None]).square().sum().sqrt()
    gradients = torch.cat(recorded.gradients(length), 1)[0]
    expected = (torch.cat(recorded.maps, 1)[0] * gradients).clamp_min(0)
    page.select_option("#view", "relevance")
    assert page.locator("#view option:checked").inner_text() == "relevance for the norm of the features"
    captions = [caption.inner_text() for caption in page.locator("#all-layers figcaption").all()]
    assert captions[1] == "all layers: relevance for the norm of the features"
    click_patch(page, "#stage", 1, 3, (3, 5))
    page.locator('.head[data-head="4"]').click()
    displayed = hover_patch(page, "#large", 2, 1, (3, 5))
    assert abs(displayed - float(expected[4, prefix + 8, prefix + 11])) < 0.02 * float(expected.max())
    stated = relevance(model, page_image.image[None], lambda features: features.norm())[:, prefix:]
    assert_close(torch.tensor(facts_of(tmp_path / "page.html")["images"][0]["all_layers"]["relevance"]), stated[0])
    token = "class token" if prefix else "mean over all patches"
    assert page.get_attribute("#stage", "aria-label").endswith(f"c selects the {token}.")
    assert not page.locator("#ablation").is_visible()
    page.keyboard.press("a")
    assert page.locator("[value=none]").is_checked()
    assert page.locator("#trust").inner_text() == "Attention is not by itself an explanation."
    assert page.errors == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize(
    "fields",
    [{}, {"in_channels": 1}, {"depth": 1}, {"num_classes": 4}],
    ids=["pruned", "grayscale", "one layer", "unnamed"],
)
def test_pages_of_unusual_models_display_the_models_weights(
    fields: dict[str, Any], browser: Any, tmp_path: Path
) -> None:
    model, (page_image,) = random_model(**fields), page_images(channels=fields.get("in_channels", 3))[:1]
    if not fields:
        model.blocks[0].attn.prune_heads(range(3))
        model.blocks[1].attn.prune_heads([1])
    error = write_page(tmp_path / "page.html", model, [page_image], title="m").error
    page, maps = opened(browser, tmp_path / "page.html"), maps_of(model, page_image.image)
    assert page.locator(".head").count() == len(maps)
    for head, values in enumerate(maps):
        page.locator(f'.head[data-head="{head}"]').click()
        key = model.layout.token_of(1, 3)
        assert abs(hover_patch(page, "#large", 1, 3, (3, 5)) - values[0, key]) <= error["probability"] + 1e-9
    with torch.no_grad():
        best = model(page_image.image[None])[0].softmax(-1).max(-1)
    name = str(int(best.indices)) if model.class_names is None else NAMES[best.indices]
    assert page.locator("#prediction th").first.inner_text() == name
    value = float(page.locator("#prediction td:nth-child(3)").first.get_attribute("data-value"))
    assert value == pytest.approx(float(best.values), rel=1e-4)
    ablated = torch.cat(ablate_each_head(model, page_image.image[None]))[:, 0].softmax(-1)
    page.check("[value=zero]")
    value = float(page.locator("#prediction td:nth-child(3)").first.get_attribute("data-value"))
    assert value == pytest.approx(float(ablated[-1, best.indices]), rel=1e-4)
    assert page.errors == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("replacement", ["zero", "mean"])
def test_an_ablated_head_shows_the_true_prediction(replacement: Any, browser: Any, tmp_path: Path) -> None:
    model, images_on_page = random_model(std=0.25), page_images(2)
    write_page(tmp_path / "page.html", model, images_on_page, title="m")
    page = opened(browser, tmp_path / "page.html")
    images = torch.stack([page_image.image for page_image in images_on_page])
    means = mean_outputs(model, [images]) if replacement == "mean" else None
    ablated = torch.cat(ablate_each_head(model, images, means)).softmax(-1)
    with torch.no_grad():
        before, classes = model(images).softmax(-1).topk(5)
    page.select_option("#image", "1")
    page.wait_for_selector('html[data-ready="1"]')

    def read() -> tuple[list[str], list[float]]:
        lines = page.locator("#prediction tr")
        names = lines.locator("th").all_inner_texts()
        return names, [float(cell.get_attribute("data-value")) for cell in lines.locator("td:nth-child(3)").all()]

    assert read() == ([NAMES[i] for i in classes[1]], pytest.approx(before[1].tolist(), rel=1e-4))
    for head in (0, 2, 4):
        page.locator(f'.head[data-head="{head}"]').click()
        page.check(f"[value={replacement}]")
        assert read()[1] == pytest.approx(ablated[head, 1, classes[1]].tolist(), rel=1e-4)
        best = NAMES[ablated[head, 1].argmax()]
        assert (
            page.locator("caption")
            .inner_text()
            .startswith(f"Prediction with layer {head // 3} head {head % 3} {replacement}-ablated: {best}")
        )
    page.check("[value=none]")
    assert read()[1] == pytest.approx(before[1].tolist(), rel=1e-4)
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_views_display_what_the_library_computes(browser: Any, tmp_path: Path) -> None:
    model, other, (page_image,) = random_model(), random_model(), page_images()
    write_page(tmp_path / "page.html", model, [page_image], title="A", compare_to=("B", other))
    page = opened(browser, tmp_path / "page.html")
    with record_attention(model, queries="all", gradients=True, value_norms=True) as recorded:
        logits = model(page_image.image[None])
    gradients = torch.cat(recorded.gradients(logits.max()), 1)[0]
    maps, norms = torch.cat(recorded.maps, 1)[0], torch.cat(recorded.value_norms, 1)[0]
    other_maps, facts = maps_of(other, page_image.image), facts_of(tmp_path / "page.html")
    expected = {
        "value": (maps * norms[:, None]).detach(),
        "relevance": (maps * gradients).clamp_min(0),
        "second": other_maps[facts["comparison"]["partner"]],
        "difference": other_maps[facts["comparison"]["partner"]] - maps,
        "same index": other_maps - maps,
    }
    ends = {}
    for view, values in expected.items():
        if view == "same index":
            page.uncheck("#partner")
        else:
            page.select_option("#view", view)
            ends[view] = page.locator("#legend-high").inner_text()
        for head, query, key in ((0, 0, (1, 2)), (3, 8, (2, 4)), (5, 15, (0, 0))):
            page.locator(f'.head[data-head="{head}"]').click()
            if query:
                click_patch(page, "#stage", (query - 1) // 5, (query - 1) % 5, (3, 5))
            else:
                page.locator("#queries button").first.click()
            displayed = hover_patch(page, "#large", *key, (3, 5))
            true = float(values[head, query, model.layout.token_of(*key)])
            assert abs(displayed - true) < 0.02 * float(values.abs().max()), (view, head, query)
    page.check("#partner")
    page.select_option("#view", "raw")
    assert page.locator("#legend-high").inner_text() == ends["second"] != ends["difference"]  # one scale for both
    layer, head = divmod(facts["comparison"]["partner"][5], 3)
    assert (
        f"paired with layer {layer} head {head} of the second model," in page.locator("#head-description").inner_text()
    )
    assert "The second model is B." in page.locator("#summary").inner_text()
    assert page.errors == []
    page.close()


def test_the_second_model_gets_the_same_pixels_in_its_own_normalization(tmp_path: Path) -> None:
    model, (page_image,) = random_model(), page_images()
    other = copy.deepcopy(model)
    model.preprocessing = Preprocessing(image_size=model.layout.image_size, mean=(0.5,) * 3, std=(0.5,) * 3)
    other.preprocessing = Preprocessing(image_size=model.layout.image_size, mean=(0.3,) * 3, std=(0.2,) * 3)
    # (x - 0.3) / 0.2 is 2.5 (x - 0.5) / 0.5 + 1: the patch embedding undoes it.
    with torch.no_grad():
        patches = other.patch_embed.proj
        patches.bias -= patches.weight.sum((1, 2, 3)) / 2.5
        patches.weight /= 2.5
    write_page(tmp_path / "page.html", model, [page_image], title="A", compare_to=("B", other))
    assert max(facts_of(tmp_path / "page.html")["comparison"]["same_index"]) < 1e-6


@pytest.mark.browser
def test_relevance_for_an_untrained_head_is_called_zero(browser: Any, tmp_path: Path) -> None:
    model = random_model()
    nn.init.zeros_(model.head.weight)
    write_page(tmp_path / "page.html", model, page_images(), title="m")
    page = opened(browser, tmp_path / "page.html")
    assert "no map is best" in page.locator("#trust").inner_text()
    captions = page.locator("#all-layers figcaption").all_inner_texts()
    assert captions == ["all layers: rollout", "all layers: relevance for the predicted class (zero everywhere)"]
    assert page.locator("#legend-high").inner_text() != "zero everywhere"
    page.select_option("#view", "relevance")
    assert page.locator("#legend-high").inner_text() == "zero everywhere"
    assert page.locator("#readout").inner_text() == "From the class token: zero everywhere."
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_heads_are_sorted_by_any_metric_with_a_shared_scale_or_not(browser: Any, tmp_path: Path) -> None:
    model, (page_image,) = random_model(), page_images()
    write_page(tmp_path / "page.html", model, [page_image], title="m")
    page, facts = opened(browser, tmp_path / "page.html"), facts_of(tmp_path / "page.html")

    def order() -> list[int]:
        return [int(head.get_attribute("data-head")) for head in page.locator(".head").all()]

    assert order() == list(range(6))
    for key in ("entropy", "distance", "sink_mass", "offset_mass"):
        page.select_option("#sort", key)
        numbers = [head[key] for head in facts["metrics"]]
        assert order() == sorted(range(6), key=lambda f: -numbers[f])
    page.select_option("#sort", "effect")
    shifts = [
        abs(ablated["p"][0] - facts["images"][0]["probabilities"][0])
        for ablated in facts["images"][0]["ablations"]["mean"]
    ]
    assert order() == sorted(range(6), key=lambda f: -shifts[f])

    maps = maps_of(model, page_image.image)[:, 0, 1:]
    page.locator('.head[data-head="2"]').click()
    assert page.locator("#legend-high").inner_text().startswith("≥ ")
    page.uncheck("#clip")
    top = float(page.locator("#legend-high").inner_text())
    assert top == pytest.approx(float(maps.max()), rel=0.06)
    page.uncheck("#shared")
    assert float(page.locator("#legend-high").inner_text()) == pytest.approx(float(maps[2].max()), rel=0.06)
    page.check("#clip")
    assert float(page.locator("#legend-high").inner_text().split()[1]) < float(maps[2].max())
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_everything_else_that_the_page_says_of_a_head_is_the_librarys(browser: Any, tmp_path: Path) -> None:
    model, other, (page_image,) = random_model(), random_model(), page_images()
    write_page(tmp_path / "page.html", model, [page_image], title="m", compare_to=("B", other))
    page, facts = opened(browser, tmp_path / "page.html"), facts_of(tmp_path / "page.html")
    page.select_option("#sort", "drift")
    order = [int(head.get_attribute("data-head")) for head in page.locator(".head").all()]
    assert order == sorted(range(6), key=lambda f: -facts["comparison"]["drift"][f])

    assert page.locator("#trust").inner_text() == facts["trust"]
    assert "Attention is not by itself an explanation" in facts["trust"]
    assert f"is at most {facts['error']['probability']:.2g}" in page.locator("#storage").inner_text()

    page.locator('.head[data-head="4"]').click()
    page.locator("details summary").click()
    rows = [row.inner_text().split("\t") for row in page.locator("#metrics tr").all()]
    found, expected = dict(rows), facts["metrics"][4]
    for name in ("entropy", "distance", "sink_mass"):
        assert float(found[name.replace("_", " ")]) == pytest.approx(expected[name], rel=6e-3)

    prefix = maps_of(model, page_image.image)[4, 0, : model.layout.num_prefix_tokens].sum()
    width = page.locator('.head[data-head="4"] .prefix i').evaluate("bar => parseFloat(bar.style.width)")
    assert width == pytest.approx(100 * float(prefix), abs=1.0)

    click_patch(page, "#large", 1, 2, (3, 5))
    assert "row 1, column 2" in page.locator("#readout").inner_text()

    captions = [caption.inner_text() for caption in page.locator("#all-layers figcaption").all()]
    assert captions == ["all layers: rollout", "all layers: relevance for the predicted class"]
    label = int(model(page_image.image[None]).argmax())
    maps = patch_maps(model, page_image.image[None], [label])
    for canvas, name in zip(page.locator("#all-layers canvas").all(), ("rollout", "relevance"), strict=True):
        # The brightest patch has the largest value: red, green and blue increase together on this scale.
        light = canvas.evaluate(
            "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((_, i) => i % 4 === 1)"
        )
        assert len(light) == 15
        assert light.index(max(light)) == int(maps[name][0].argmax())
    assert page.errors == []
    page.close()


@pytest.mark.browser
def test_the_slider_shows_the_rows_of_each_epoch(browser: Any, tmp_path: Path) -> None:
    model, images_on_page = random_model(), page_images(2)
    rows = torch.rand(3, 2, 6, 16)
    rows = rows / rows.sum(-1, keepdim=True)
    epochs = [EpochAttention(name=f"epoch {i}", rows=epoch_rows) for i, epoch_rows in enumerate(rows)]
    write_page(tmp_path / "page.html", model, images_on_page, title="m", epochs=epochs)
    page = opened(browser, tmp_path / "page.html")
    page.select_option("#image", "1")
    page.wait_for_selector('html[data-ready="1"]')
    page.locator('.head[data-head="4"]').click()
    for epoch in (0, 2):
        page.locator("#epoch").fill(str(epoch))
        assert page.locator("#epoch-name").inner_text() == f"epoch {epoch}"
        assert hover_patch(page, "#large", 1, 3, (3, 5)) == pytest.approx(float(rows[epoch, 1, 4, 9]), abs=1e-3)
    page.locator("#epoch").fill("3")
    expected = maps_of(model, images_on_page[1].image)[4, 0, 9]
    assert hover_patch(page, "#large", 1, 3, (3, 5)) == pytest.approx(float(expected), abs=0.01)
    assert page.errors == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_dark_and_light_follow_the_system_and_the_button(scheme: Any, browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", random_model(), page_images(), title="m")
    page = opened(browser, tmp_path / "page.html", color_scheme=scheme)
    backs = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
    page.click("#theme")
    backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    dark, light = "rgb(19, 19, 24)", "rgb(250, 250, 250)"
    assert backs == ([dark, light] if scheme == "dark" else [light, dark])
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "HF DINOv3"])  # which load_model refuses
def test_a_page_of_every_family_displays_the_weights_of_its_own_package(
    family: str, browser: Any, tmp_path: Path
) -> None:
    reference, images, prefix = built(family)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    grid = (images.shape[2] // 8, images.shape[3] // 8)
    model = reference if family.startswith("ours") else load_model(reference, image_size=tuple(images.shape[2:]))
    error = write_page(tmp_path / "page.html", model, [PageImage(name="x", image=images[0])], title=family).error
    page, maps = opened(browser, tmp_path / "page.html"), maps_of(reference, images[0])
    largest = 0.0
    for head in (0, 5):
        page.locator(f'.head[data-head="{head}"]').click()
        click_patch(page, "#stage", 2, 1, grid)
        displayed = hover_patch(page, "#large", 1, 3, grid)
        largest = max(largest, abs(displayed - float(maps[head, prefix + 2 * grid[1] + 1, prefix + grid[1] + 3])))
    assert largest <= error["probability"] + 1e-5
    assert page.errors == []
    page.close()
    sys.stdout.write(f"\n{family}: recorded, equal to the explicit softmax, page opens and is off by {largest:.1e}\n")


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "fields", "seconds", "megabytes"),
    [
        ("ViT-B/16 at 224", {"embed_dim": 768, "depth": 12, "num_heads": 12, "image_size": (224, 224)}, 1, 9),
        (
            "ViT-S/14 at 518 with registers",
            {
                "embed_dim": 384,
                "depth": 12,
                "num_heads": 6,
                "image_size": (518, 518),
                "patch_size": 14,
                "num_registers": 4,
            },
            2,
            50,
        ),
    ],
)
def test_large_pages_are_small_enough_and_answer_in_time(
    size: str,
    fields: dict[str, Any],
    seconds: int,
    megabytes: int,
    browser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(std=0.03, **{"patch_size": 16, "mlp_dim": None, "num_classes": 1000, **fields})
    # Hundreds of forward passes of the model would measure nothing of the page.
    heads = model.config.num_heads
    monkeypatch.setattr("vitmha.inspection.page.page.ablate_each_head", lambda *_: [torch.randn(heads, 1, 1000)] * 12)
    monkeypatch.setattr("vitmha.inspection.page.page.faithfulness", lambda *_, **__: None)
    error = write_page(tmp_path / "page.html", model, page_images(1, fields["image_size"]), title=size).error
    assert (tmp_path / "page.html").stat().st_size < megabytes * 1e6
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # other processes do not count

    def cpu_seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    before = cpu_seconds()
    page.goto(f"file://{tmp_path / 'page.html'}")
    page.wait_for_selector("html[data-ready]")
    opened = cpu_seconds()
    page.evaluate("() => chooseQuery(prefix + 7)")
    opening, click = opened - before, cpu_seconds() - opened
    weight = (tmp_path / "page.html").stat().st_size / 1e6
    sys.stdout.write(f"\n{size}: {weight:.2f} MB, CPU seconds: opening {opening:.3f}, a click {click:.3f}; {error}\n")
    assert 0 < click < seconds
    assert 0 < opening < seconds
    page.close()
