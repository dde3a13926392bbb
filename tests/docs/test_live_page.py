"""The live page of the demo: it lies where the demo links to it, and shows what the demo says."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from page_browser import click_patch, opened

from docs.generate import write_live_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.browser
def test_the_live_page_shows_what_the_demo_says(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("horse.png", "red_car.png"):
        shutil.copy(DOCS / "images" / "cifar10" / name, tmp_path / "images")
    write_live_page(tmp_path / "images", tmp_path / "live")
    links = set(re.findall(r"(?:href=\"|:target: )(live/[\w.]+)", (DOCS / "demo.md").read_text()))
    assert links == {"live/page.html"}
    page = opened(browser, tmp_path / "live" / "page.html", viewport={"width": 390, "height": 844})
    assert page.locator(".head").count() == 36
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator('.head[data-head="13"]').click()
    for row, column in ((2, 3), (5, 6)):
        click_patch(page, "#stage", row, column, (8, 8))
        text = page.locator("body").inner_text()
        assert f"From the patch at row {row}, column {column}: most to patch at row {row - 1}, column {column}" in text
    page.select_option("#image", "1")
    page.wait_for_selector('html[data-ready="1"]')
    assert "Prediction: truck" in page.locator("body").inner_text()
    page.get_by_label("zero-ablated").check()
    assert "Prediction with layer 2 head 1 zero-ablated: automobile" in page.locator("body").inner_text()
    assert page.errors == []
