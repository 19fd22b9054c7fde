"""Codex's protocol over a real socket: processes and files of a session, each with its record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.codex_door import Client, capability_path, opened
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site


@pytest.fixture(scope="module")
def path(streaming_site: Site) -> str:
    return capability_path(streaming_site)


@pytest.fixture(scope="module")
def client(streaming_site: Site, path: str) -> Iterator[Client]:
    """One that the tests of this module share."""
    with opened(streaming_site, path) as made:
        yield made


def last_record(site: Site) -> dict[str, object]:
    (found,) = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    record: dict[str, object] = ask(
        site.service, "GET", f"{EXECUTIONS}/{found['id']}", key=site.alice
    ).json
    return record


def test_a_process_is_an_execution_with_thread_and_tool_call(
    streaming_site: Site, client: Client
) -> None:
    told = {"threadId": "0199a7b2-7c4f-7000-8000-000000000001", "toolCallId": "call_1"}
    assert client.run("a", "echo said; echo wrong >&2; exit 3", metadata=told) == (3, "said\n")
    assert client.output("a", "stderr") == "wrong\n"
    record = last_record(streaming_site)
    assert (record["language"], record["exit_code"]) == ("bash", 3)
    assert (record["agent"], record["conversation"]) == ("tests", told["threadId"])
    assert record["request_id"] == "call_1"
    assert record["receipt"]
