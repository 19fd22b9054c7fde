"""Fetching in tests: a batch as a whole, and servers of this machine that it may connect to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executions.capabilities.fetching.service import Fetched, NotFetched, fetch_files
from executions.kernel.http import Bounds, Reason
from tests.support.web_server import WebServer


@dataclass(frozen=True)
class Came:
    """A fetched file with its content, which is gone with the batch otherwise."""

    file: Fetched
    content: bytes


def allow(settings: Any, *servers: WebServer) -> None:
    """As an operator does who names single services of this machine."""
    settings.URL_ALLOWED_NETWORKS = [f"127.0.0.1:{server.port}" for server in servers]


def fetch(
    urls: Sequence[str], bounds: Bounds | None = None, holder: str = "tenant"
) -> list[Came | NotFetched]:
    found: list[Came | NotFetched] = []
    with fetch_files(urls, holder, bounds=bounds) as results:
        for result in results:
            if isinstance(result, Fetched):
                found.append(Came(result, result.body.read()))
            else:
                found.append(result)
    return found


def fetch_one(url: str, bounds: Bounds | None = None) -> bytes | Reason:
    """The content, or why there is none."""
    [result] = fetch([url], bounds)
    return result.content if isinstance(result, Came) else result.reason
