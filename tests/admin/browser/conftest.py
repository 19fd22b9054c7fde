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

__all__ = ("browser", "caller", "complaints", "contexts", "other_page", "own_page", "page")
