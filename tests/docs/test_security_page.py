"""docs/security.md names tests; each of them is there."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

_ROW = re.compile(r"^\|(?:[^|\n]+\|)+?(?P<tests>[^|\n]+)\|$", re.MULTILINE)
_NAMED = re.compile(r"`(test_\w+\.py)`((?::? *,? *`\w+`)*)")


def _named() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "security.md").read_text()
    named = []
    for row in _ROW.finditer(text):
        for file, parts in _NAMED.findall(row["tests"]):
            named += [(file, part) for part in re.findall(r"`(\w+)`", parts)] or [(file, "")]
    return named


def test_the_page_names_tests() -> None:
    assert len(_named()) > 60


@pytest.mark.parametrize(("file", "part"), _named())
def test_what_the_page_names_is_there(file: str, part: str) -> None:
    found = list(ROOT.glob(f"tests/**/{file}"))
    assert len(found) == 1
    assert re.search(rf"def test_\w*{part}", found[0].read_text())
