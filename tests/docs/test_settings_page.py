"""docs/settings.md is made from the declarations, and is kept so that a change shows in the diff."""

from __future__ import annotations

import os
import re

from sandbox_site.settings_page import page
from sandbox_site.settings_table import GROUPS, SETTINGS
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "settings.md"
MOST_COMMON = 25


def test_the_page_is_the_one_that_the_declarations_make() -> None:
    text = page()
    if os.environ.get("RENEW") == "settings":
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8"), (
        "RENEW=settings on this test writes the page anew"
    )


def test_each_setting_has_one_row_and_the_common_ones_come_first() -> None:
    rows = re.findall(r"^\| `([A-Z0-9_]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(SETTINGS)
    common = [setting.name for setting in SETTINGS.values() if setting.is_common]
    assert rows[: len(common)] == common
    assert len(common) <= MOST_COMMON


def test_each_setting_says_what_it_means_in_a_row_of_its_own() -> None:
    for setting in SETTINGS.values():
        assert setting.meaning.strip() == setting.meaning != "", setting.name
        assert not {"|", "\n"} & set(setting.meaning + setting.shown), setting.name
    assert len({group.title for group in GROUPS}) == len(GROUPS)
