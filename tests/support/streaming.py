"""Reading streams of events from a running service, event by event."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import require
from tests.support.processes import Service
from tests.support.site import EXECUTIONS, Site, running_site

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


@pytest.fixture(scope="session")
def streaming_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with few threads and short deadlines, for all tests of streams."""
    require("bwrap")
    limits = {"WEB_THREADS": "8", "SANDBOX_MAX_RUNNING": "64", "WEB_SEND_SECONDS": "4"}
    with running_site(tmp_path_factory.mktemp("streams"), **limits) as running:
        yield running


class Events:
    """The events of one answer, each read when it is asked for."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        line = self.answer.readline()
        if not line:
            raise StopIteration
        event: dict[str, Any] = json.loads(line)
        return event


@contextmanager
def streamed(
    service: Service,
    path: str,
    key: str,
    body: Any = None,
    accept: str = NDJSON,
    seconds: float = 60,
) -> Iterator[Events]:
    """What is answered to a POST of `body`, or to a GET without one; then the client leaves."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=seconds)
    headers = {"X-API-Key": key, "Accept": accept, "Content-Type": "application/json"}
    content = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, content, headers)
    answer = connection.getresponse()
    try:
        yield Events(answer)
    finally:
        connection.close()
        answer.close()


def running_stream(site: Site, body: dict[str, Any], query: str = "", **options: str) -> Any:
    return streamed(site.service, EXECUTIONS + query, site.alice, body, **options)
