"""axe-core finds nothing on any page of the admin, in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.support.query_budgets import BUDGETS, names

__all__ = ("names",)

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
# Put into a page by a script, and no pages.
PIECES = {
    "/admin/pool/",
    "/admin/figures/?range=7d",
    "/admin/executions/ledgercheck/state/",
}


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("tests.support.query_budgets.MANY", 4)
        yield


# The same on every page, and more of it than of most pages' own.
MENU = {"exclude": [["#nav-sidebar"]]}


def found(page: Page, **only: Any) -> list[str]:
    """What is wrong, and where: the rule and the first elements. The menu is looked at once."""
    context = None if page.url.endswith("/admin/") else MENU
    results = Axe().run(page, context=context, options={"resultTypes": ["violations"], **only})
    return [
        f"{each['id']}: {' | '.join(str(node['target'][0]) for node in each['nodes'][:3])}"
        for each in results.response["violations"]
    ]


def test_no_page_of_the_admin_has_a_fault_that_axe_finds(
    page: Page, few_rows: None, names: dict[str, Any]
) -> None:
    wrong = {}
    for template in set(BUDGETS["pages"]) - PIECES:
        page.goto(template.format(**names))
        faults = found(
            page,
            runOnly={"type": "tag", "values": RULES},
            # The theme's heading over the boxes that remove a row of an inline.
            rules={"empty-table-header": {"enabled": False}},
        )
        page.evaluate("document.documentElement.classList.add('dark')")
        faults += [f"dark {each}" for each in found(page, runOnly=["color-contrast"])]
        if faults:
            wrong[template] = faults
    assert not wrong, json.dumps(wrong, indent=1)
