"""A connection that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.codex_door import Client, capability_path, opened
from tests.support.site import Site


@pytest.fixture(scope="module")
def path(streaming_site: Site) -> str:
    return capability_path(streaming_site)


@pytest.fixture(scope="module")
def client(streaming_site: Site, path: str) -> Iterator[Client]:
    with opened(streaming_site, path) as made:
        yield made
