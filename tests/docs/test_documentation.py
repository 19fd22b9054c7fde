"""What the pages of the documentation link to and name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import get_commands

from providers.errors import CODES
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
FOLDERS = (DOCS, ROOT / "examples", ROOT / "clients")
PAGES = sorted([*ROOT.glob("*.md"), *(page for each in FOLDERS for page in each.rglob("*.md"))])
GUIDES = ("quick-start", "concepts", "api-guide", "operations", "auditors-guide")
# Of the environment, and of others that the pages speak of.
FOREIGN = frozenset(
    (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "CAP_DAC_OVERRIDE",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SYS_ADMIN",
        "CODE_EXEC_PYTHON_BIN",
        "HTTPS_PROXY",
        "LD_PRELOAD",
        "SSL_CERT_FILE",
        "TIME_WAIT",
    )
)

_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


def prose_of(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in _HEADING.findall(prose_of(page))
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_page_of_ours_leads_there(page: Path) -> None:
    for link in _LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_the_index_lists_every_page() -> None:
    listed = set(_LINK.findall(prose_of(DOCS / "README.md")))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(pages - listed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_and_command_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\bSB\d+\b", text)) <= set(CODES)
    commands = set(re.findall(r"manage\.py (?:\\\n *)?([a-z]\w*)", text))
    assert sorted(commands - set(get_commands())) == []


def test_every_variable_that_is_named_is_one_of_the_project() -> None:
    sources = [ROOT / "Makefile"]
    for folder in (
        "sandbox_site",
        "executions",
        "providers",
        "deploy",
        "examples",
        "clients",
        "bundle",
    ):
        sources += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in ("", ".py", ".sh", ".yaml")
        ]
    known = FOREIGN | {f"SANDBOX_KEEP_{data.upper()}_DAYS" for data in settings.SANDBOX_KEEP_DAYS}
    for path in sources:
        if path.is_file():
            known |= set(_NAME.findall(path.read_text(encoding="utf-8", errors="replace")))
    unknown: dict[str, list[str]] = {}
    for page in PAGES:
        quoted = " ".join(re.findall(r"`([^`\n]+)`", prose_of(page)))
        # What ends in _FILE may be read by the same line as the name before it.
        named = {name for name in _NAME.findall(quoted) if name.removesuffix("_FILE") not in known}
        if missing := sorted(named - known):
            unknown[page.name] = missing
    assert unknown == {}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_variable_of_a_guide_is_in_the_settings(guide: str) -> None:
    listed = set(_NAME.findall((DOCS / "settings.md").read_text(encoding="utf-8")))
    quoted = " ".join(re.findall(r"`([^`\n]+)`", prose_of(DOCS / f"{guide}.md")))
    assert sorted(set(_NAME.findall(quoted)) - listed) == []
