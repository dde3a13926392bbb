"""One HTML page to explore every head of a model."""

from vitmha.inspection.page.page import Epoch, Findings, Shown, check_page, write_page

__all__ = ["Epoch", "Findings", "Shown", "check_page", "write_page"]
