"""The Chinese README is the English one in another language: its headings, blocks and links."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)]+)\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose_of(name: str) -> str:
    return _BLOCK.sub("", text_of(name))


def own_links(name: str) -> list[str]:
    """Where it leads, but for the other README."""
    found = _LINK.findall(prose_of(name))
    return [link for link in found if link not in (ENGLISH, CHINESE)]


@pytest.mark.parametrize(("name", "other"), [(ENGLISH, CHINESE), (CHINESE, ENGLISH)])
def test_each_leads_to_the_other_at_its_top(name: str, other: str) -> None:
    first = text_of(name).splitlines()[0]
    assert _LINK.findall(first) == [other]


def test_their_headings_have_the_same_levels_in_the_same_order() -> None:
    english, chinese = (
        re.findall(r"^(#+) .+", prose_of(name), re.MULTILINE) for name in (ENGLISH, CHINESE)
    )
    assert chinese == english
    assert len(english) > 5


def test_their_blocks_are_the_same_to_the_letter() -> None:
    english, chinese = (_BLOCK.findall(text_of(name)) for name in (ENGLISH, CHINESE))
    assert chinese == english
    assert len(english) > 5


def test_they_lead_to_the_same_pages() -> None:
    assert own_links(CHINESE) == own_links(ENGLISH)
    for link in own_links(CHINESE):
        if not link.startswith("http"):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_what_is_named_in_one_is_named_in_the_other() -> None:
    english, chinese = (
        set(re.findall(r"`([^`\n]+)`", prose_of(name))) for name in (ENGLISH, CHINESE)
    )
    assert chinese == english
