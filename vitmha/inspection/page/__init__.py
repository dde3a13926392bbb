"""One HTML page to explore every head of a model."""

from vitmha.inspection.page.page import EpochAttention, PageImage, PageResult, check_page, write_page

__all__ = ["EpochAttention", "PageImage", "PageResult", "check_page", "write_page"]
