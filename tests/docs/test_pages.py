"""The Markdown of the pages: what a reader would not see."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_no_text_is_hidden_as_a_comment() -> None:
    """MyST reads a line that begins with a percent sign as a comment."""
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    assert len(pages) > 40
    lines = [line for page in pages for line in page.read_text().splitlines() if line.lstrip().startswith("% ")]
    assert lines == []
