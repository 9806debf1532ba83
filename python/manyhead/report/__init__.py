"""The HTML pages of `manyhead profile --html` and `manyhead compare --html`: page.py writes them."""

from .page import write_compare_page, write_profile_page

__all__ = ["write_compare_page", "write_profile_page"]
