"""axe-core finds nothing on any page of the admin, in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.support.query_budgets import BUDGETS

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
ONLY_FAULTS = {"resultTypes": ["violations"]}
EVERYTHING_BUT_CONTRAST = {
    "runOnly": {"type": "tag", "values": RULES},
    "rules": {
        # The theme's heading over the boxes that remove a row of an inline.
        "empty-table-header": {"enabled": False},
        "color-contrast": {"enabled": False},
    },
}
ONLY_CONTRAST = {"runOnly": ["color-contrast"]}
# Put into a page by a script, and no pages.
PIECES = {
    "/admin/pool/",
    "/admin/figures/?range=7d",
    "/admin/executions/ledgercheck/state/",
}


# The same on every page, and more of it than of most pages' own: it is looked at once.
MENU = "#nav-sidebar"

# A colour that is on its way to another is neither of both.
STILL = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { transition: none !important; animation: none !important; }");
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
}"""

# Texts by all that their contrast depends on: their own colour, size and weight, and what is
# painted behind them. One that is not seen, or is disabled, is not looked at by axe.
CONTRAST = """([theme, known, options, excluded]) => {
  document.documentElement.classList.toggle("dark", theme === "dark");
  const grounds = new Map([[null, ""]]);
  const ground = element => {
    if (!grounds.has(element)) {
      const style = getComputedStyle(element);
      const own = [
        style.backgroundColor === "rgba(0, 0, 0, 0)" ? "" : style.backgroundColor,
        style.backgroundImage === "none" ? "" : style.backgroundImage,
        style.opacity === "1" ? "" : style.opacity,
        ["static", "relative"].includes(style.position) ? "" : style.position,
      ].join("");
      const behind = ground(element.parentElement);
      grounds.set(element, own ? `${behind} / ${own}` : behind);
    }
    return grounds.get(element);
  };
  const isText = node => node.nodeType === Node.TEXT_NODE && node.data.trim();
  const isDisabled = element => element.closest("[disabled], [aria-disabled=true]")
    || element.closest("label")?.control?.disabled;
  const looks = new Set(known), unknown = [];
  for (const element of document.body.querySelectorAll("*")) {
    const isSeen = element.checkVisibility({opacityProperty: true, visibilityProperty: true})
      && element.getClientRects().length;
    const hasText = element.matches("input, select, textarea")
      || [...element.childNodes].some(isText);
    if (!isSeen || !hasText || isDisabled(element) || excluded && element.closest(excluded))
      continue;
    const style = getComputedStyle(element);
    const look = [
      style.color, style.fontSize, style.fontWeight, style.textShadow, element.localName,
      ground(element),
    ].join(" | ");
    if (!known.includes(look)) {
      looks.add(look);
      unknown.push(element);
    }
  }
  const none = {violations: []};
  return (unknown.length ? axe.run({include: unknown}, options) : Promise.resolve(none))
    .then(({violations}) => ({violations, looks: [...looks]}));
}"""


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("tests.support.query_budgets.MANY", 2)
        yield


def described(violations: list[dict[str, Any]]) -> list[str]:
    """What is wrong, and where: the rule and the first elements."""
    return [
        f"{each['id']}: {' | '.join(str(node['target'][0]) for node in each['nodes'][:3])}"
        for each in violations
    ]


def found(page: Page, rules: dict[str, Any], excluded: str) -> list[str]:
    result = page.evaluate(
        "([context, options]) => axe.run(context, options)",
        [{"exclude": [[excluded]]} if excluded else {"include": [["html"]]}, ONLY_FAULTS | rules],
    )
    return described(result["violations"])


def opened(page: Page, address: str) -> None:
    page.goto(address)
    page.evaluate(STILL)
    page.evaluate(Axe().axe_script)


def test_no_page_of_the_admin_has_a_fault_that_axe_finds(
    page: Page, few_rows: None, names: dict[str, Any]
) -> None:
    """Every rule on every page, but the contrast only of texts that look like none before."""
    wrong = {}
    looks: dict[str, list[str]] = {"light": [], "dark": []}
    for template in sorted(set(BUDGETS["pages"]) - PIECES):
        opened(page, template.format(**names))
        excluded = "" if template == "/admin/" else MENU
        faults = found(page, EVERYTHING_BUT_CONTRAST, excluded)
        for theme in looks:
            options = ONLY_FAULTS | ONLY_CONTRAST
            result = page.evaluate(CONTRAST, [theme, looks[theme], options, excluded])
            looks[theme] = result["looks"]
            faults += [f"{theme} {each}" for each in described(result["violations"])]
        if faults:
            wrong[template] = faults
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(looks.values())


@pytest.mark.slow
def test_no_text_of_any_page_is_hard_to_read(
    page: Page, few_rows: None, names: dict[str, Any]
) -> None:
    wrong = {}
    for template in sorted(set(BUDGETS["pages"]) - PIECES):
        opened(page, template.format(**names))
        faults = []
        for theme in ("light", "dark"):
            page.evaluate(
                "is_dark => document.documentElement.classList.toggle('dark', is_dark)",
                theme == "dark",
            )
            excluded = "" if template == "/admin/" else MENU
            faults += [f"{theme} {each}" for each in found(page, ONLY_CONTRAST, excluded)]
        if faults:
            wrong[template] = faults
    assert not wrong, json.dumps(wrong, indent=1)
