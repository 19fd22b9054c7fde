"""E2B's SDKs as they were published, each walking through all of its methods against the door."""

from __future__ import annotations

import pytest

from tests.e2b_sdks.published import SDKS, Walk, walk
from tests.e2b_sdks.table import PAGE, held, table
from tests.support.site import Site


@pytest.fixture(scope="module")
def walks(streaming_site: Site) -> list[Walk]:
    return walk(streaming_site)


def test_every_method_was_called(walks: list[Walk]) -> None:
    for each in walks:
        assert each.called == each.methods, each.sdk.name


def test_the_versions_are_those_that_are_promised(walks: list[Walk]) -> None:
    assert [each.versions for each in walks] == [each.versions for each in SDKS]


def test_what_is_not_there_says_so(walks: list[Walk]) -> None:
    """And nothing else is refused."""
    held(walks)


def test_the_page_has_what_came_of_it(walks: list[Walk]) -> None:
    """RENEW=table writes it."""
    assert table(walks) in PAGE.read_text(encoding="utf-8")
