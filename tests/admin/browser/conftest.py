"""A browser and its pages, which this folder's tests share."""

from __future__ import annotations

from tests.support.browser import (
    browser,
    caller,
    complaints,
    contexts,
    other_page,
    own_page,
    page,
)
from tests.support.query_budgets import names

__all__ = ("browser", "caller", "complaints", "contexts", "names", "other_page", "own_page", "page")
