"""E2B's SDKs as they were published, each walking through all of its methods against the door."""

from __future__ import annotations

import pytest

from tests.e2b_sdks.published import NEWEST, SDKS, Walk, walk
from tests.e2b_sdks.table import PAGE, columns, columns_of_page, held, table
from tests.support.site import Site

CHOSEN = {"the newest": NEWEST, "all": SDKS}


@pytest.fixture(scope="module", params=["the newest", pytest.param("all", marks=pytest.mark.slow)])
def walks(request: pytest.FixtureRequest, streaming_site: Site) -> list[Walk]:
    return walk(streaming_site, CHOSEN[request.param])


def test_every_method_was_called(walks: list[Walk]) -> None:
    for each in walks:
        assert each.called == each.methods, each.sdk.name


def test_the_versions_are_those_that_are_promised(walks: list[Walk]) -> None:
    assert [each.versions for each in walks] == [each.sdk.versions for each in walks]


def test_what_is_not_there_says_so(walks: list[Walk]) -> None:
    """And nothing else is refused."""
    held(walks)


def test_the_page_has_what_came_of_it(walks: list[Walk]) -> None:
    """RENEW=table writes it, where all are walked through."""
    text = PAGE.read_text(encoding="utf-8")
    if len(walks) == len(SDKS):
        assert table(walks) in text
    found = columns_of_page(text)
    for name, marks in columns(walks).items():
        assert found[name] == marks
