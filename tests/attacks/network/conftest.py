"""The proxy of sandboxes, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.attacks.network.proxied import Proxied, proxying


@pytest.fixture
def proxied(caplog: pytest.LogCaptureFixture) -> Iterator[Proxied]:
    """At its end nothing has failed inside the proxy that its code does not expect."""
    with proxying() as found:
        yield found
    failures = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert not failures, [each.getMessage() for each in failures]
