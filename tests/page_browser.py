"""Opens the live page in a browser and uses the mouse there."""

from pathlib import Path
from typing import Any


def opened(browser: Any, file: Path, **options: Any) -> Any:
    """The loaded page; console messages and network requests are collected as errors."""
    page = browser.new_page(**options)
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.errors.append(request.url) if request.url.startswith("http") else None)
    page.goto(f"file://{file}")
    page.wait_for_selector("html[data-ready]")
    return page


def click_patch(page: Any, where: str, row: int, column: int, grid: tuple[int, int]) -> None:
    box = page.locator(where).bounding_box()
    x, y = (column + 0.5) / grid[1] * box["width"], (row + 0.5) / grid[0] * box["height"]
    page.locator(where).click(position={"x": x, "y": y})


def hover_patch(page: Any, where: str, row: int, column: int, grid: tuple[int, int]) -> float:
    box = page.locator(where).bounding_box()
    x, y = (column + 0.5) / grid[1] * box["width"], (row + 0.5) / grid[0] * box["height"]
    page.locator(where).hover(position={"x": x, "y": y})
    return float(page.locator("#readout").get_attribute("data-value"))
