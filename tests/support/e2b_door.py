"""E2B's own SDKs, unmodified, against a running service: told where it is, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
import pytest
from e2b_code_interpreter import Sandbox

from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site


@pytest.fixture(scope="module")
def door(streaming_site: Site) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_URL", streaming_site.service.url)
        patch.setenv("E2B_SANDBOX_URL", streaming_site.service.url)
        patch.setenv("E2B_API_KEY", streaming_site.alice)
        yield streaming_site


@pytest.fixture(scope="module")
def sandbox(door: Site) -> Iterator[Sandbox]:
    """One that the tests of a module share."""
    with opened(envs={"OF_SANDBOX": "1"}) as made:
        yield made


@contextmanager
def opened(**options: object) -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=300, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.kill()


def native_of(sandbox: Sandbox) -> str:
    """The same session at the native API."""
    return f"/api/v1/sessions/{UUID(sandbox.sandbox_id)}"


def headers_of(sandbox: Sandbox, port: int = 49983, **others: str) -> dict[str, str]:
    """What the SDK sends with each call of a sandbox."""
    return {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": str(port),
        "X-Access-Token": str(sandbox._envd_access_token),
        **others,
    }


def post(site: Site, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    # Without TLS there are no certificates to be loaded for each call.
    return httpx.post(
        f"{site.service.url}{path}", content=content, headers=headers, timeout=60, verify=False
    )


def envelope(body: object, length: int | None = None, flags: int = 0) -> bytes:
    """A message of Connect; `length` is what it says of itself."""
    content = json.dumps(body).encode()
    return (
        bytes([flags]) + (len(content) if length is None else length).to_bytes(4, "big") + content
    )


def records(site: Site, limit: int = 5) -> list[dict[str, object]]:
    """The tenant's last executions, as the native API tells of them."""
    answer = ask(site.service, "GET", f"{EXECUTIONS}?limit={limit}", key=site.alice)
    found: list[dict[str, object]] = answer.json["results"]
    return found
