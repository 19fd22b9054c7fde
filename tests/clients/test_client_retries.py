"""The client sends again what may help, and nothing runs twice."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from cofferdam import NEVER, AsyncCofferdam, Cofferdam, Retries, StillRunning, Unreachable
from cofferdam.errors import (
    ConnectionLost,
    CreationFailed,
    InvalidRequest,
    InvalidSettings,
    ProviderNotInitialized,
    RateLimited,
    ServiceError,
    Unauthenticated,
    UnexpectedAnswer,
)

from tests.clients.breaking_proxy import Proxy, breaking_proxy
from tests.clients.refusals import refusal
from tests.support.processes import free_port
from tests.support.site import Site

QUICK = Retries(tries=3, seconds=20)


@pytest.fixture
def proxy(streaming_site: Site) -> Iterator[Proxy]:
    with breaking_proxy(streaming_site.service) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy, streaming_site: Site) -> Iterator[Cofferdam]:
    with Cofferdam(proxy.url, streaming_site.alice, retries=QUICK) as client:
        yield client


def claim() -> str:
    return uuid.uuid4().hex


def test_what_ran_while_its_answer_was_lost_is_told_and_not_run_again(
    proxy: Proxy, client: Cofferdam
) -> None:
    agent = claim()
    proxy.lose = 1
    execution = client.run("print('paid')", agent=agent)
    assert (execution.status, execution.stdout) == ("succeeded", "paid\n")
    assert proxy.requests == ["POST /api/v1/executions"] * 2
    assert [each.id for each in client.executions(agent=agent)] == [execution.id]


def test_a_command_whose_answer_was_lost_is_not_sent_again(proxy: Proxy, client: Cofferdam) -> None:
    with client.open_session() as session:
        sent = len(proxy.requests)
        proxy.lose = 1
        with pytest.raises(Unreachable) as told:
            session.command("echo once >> log")
        assert told.value.sent
        assert len(proxy.requests) == sent + 1
        assert session.files.read("log") == b"once\n"


def test_a_session_whose_answer_was_lost_is_not_opened_twice(
    proxy: Proxy, client: Cofferdam
) -> None:
    name = claim()
    proxy.lose = 1
    with pytest.raises(Unreachable):
        client.open_session(name=name)
    [found] = [each for each in client.sessions("open") if each.info.name == name]
    found.close()
    found.close()


def test_who_is_refused_comes_back_when_he_was_told_to(proxy: Proxy, client: Cofferdam) -> None:
    proxy.refusals = [refusal(429, "SB008", "1"), refusal(502, "SB003", "0")]
    assert client.run("print(1)").stdout == "1\n"
    assert len(proxy.requests) == 3
    # Nothing was opened by what was refused.
    proxy.refusals = [refusal(429, "SB008", "0")]
    with client.open_session() as session:
        assert session.info.state == "open"


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (refusal(429, "SB008", "3600"), RateLimited),
        (refusal(503, "SB001"), ProviderNotInitialized),
        (refusal(503, "SB009", ran=True), ServiceError),
        (refusal(400, "SB002"), InvalidRequest),
        (refusal(500, "internal_error"), ServiceError),
        ((200, {"Content-Type": "text/html"}, b"<html>"), UnexpectedAnswer),
        ((404, {}, b"no such host"), UnexpectedAnswer),
        # Of another host, to which the key would go.
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), UnexpectedAnswer),
    ],
    ids=["hours", "SB001", "ran", "SB002", "500", "html", "404", "redirect"],
)
def test_what_would_not_help_is_not_tried(
    told: Any, error: type[Exception], proxy: Proxy, client: Cofferdam
) -> None:
    proxy.refusals = [told]
    with pytest.raises(error):
        client.run("print(1)")
    assert len(proxy.requests) == 1


def test_tries_are_bounded(proxy: Proxy, client: Cofferdam, streaming_site: Site) -> None:
    proxy.refusals = [refusal(503, "SB004", "0")] * 5
    with pytest.raises(CreationFailed) as told:
        client.run("print(1)")
    assert (told.value.retry_after, told.value.status) == (0.0, 503)
    assert len(proxy.requests) == 3
    with (
        pytest.raises(CreationFailed),
        Cofferdam(proxy.url, streaming_site.alice, retries=NEVER) as once,
    ):
        once.run("print(1)")
    assert len(proxy.requests) == 4


def test_a_stream_that_breaks_is_taken_up_where_it_was(proxy: Proxy, client: Cofferdam) -> None:
    code = "import time\nfor n in range(4): print(n, flush=True); time.sleep(0.2)"
    proxy.break_after = 2
    with client.stream(code, detach=True) as events:
        told = [(event.seq, event.content) for event in events]
    assert b"".join(content for _, content in told) == b"0\n1\n2\n3\n"
    assert [seq for seq, _ in told] == sorted({seq for seq, _ in told})
    assert events.execution is not None
    assert events.execution.status == "succeeded"
    assert proxy.requests[1].startswith("GET /api/v1/executions/")


def test_following_goes_on_behind_the_number_that_was_given(
    proxy: Proxy, client: Cofferdam
) -> None:
    queued = client.submit("import time\nfor n in range(4): print(n, flush=True); time.sleep(0.2)")
    with client.follow(queued.id) as events:
        first = [next(events), next(events)]
    # It breaks before anything has come, and what came before does not come again.
    proxy.break_after = 0
    with client.follow(queued.id, after=events.after) as rest:
        told = [*first, *rest]
    assert b"".join(event.content for event in told) == b"0\n1\n2\n3\n"
    assert [event.type for event in told].count("started") == 1


def test_a_stream_that_is_not_detached_says_that_it_was_lost(
    proxy: Proxy, client: Cofferdam
) -> None:
    proxy.break_after = 1
    with pytest.raises(ConnectionLost) as told, client.stream("print(1)") as events:
        events.until_done()
    assert told.value.id is not None
    assert client.wait(told.value.id).status in ("succeeded", "cancelled")


def test_leaving_a_stream_cancels_its_run(streaming_site: Site) -> None:
    with Cofferdam(streaming_site.service.url, streaming_site.alice) as client:
        with client.stream("import time; print(1, flush=True); time.sleep(25)") as events:
            assert "stdout" in (event.type for event in events)
        assert events.id is not None
        assert client.wait(events.id).status == "cancelled"


def test_the_next_page_is_of_the_same_service(proxy: Proxy, client: Cofferdam) -> None:
    page = {"results": [], "next": "http://evil.example/api/v1/executions?cursor=abc&limit=1"}
    proxy.refusals = [(200, {"Content-Type": "application/json"}, json.dumps(page).encode())]
    with pytest.raises(InvalidRequest):
        list(client.executions())
    assert proxy.requests[1] == "GET /api/v1/executions?cursor=abc&limit=1"


def test_waiting_ends_and_names_what_goes_on(client: Cofferdam) -> None:
    queued = client.submit("import time; time.sleep(60)")
    with pytest.raises(StillRunning) as told:
        client.wait(queued.id, seconds=0.2)
    assert told.value.id == queued.id
    assert client.cancel(queued.id).status == "cancelled"


def test_nobody_there_and_wrong_settings_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COFFERDAM_API_KEY", raising=False)
    with Cofferdam(f"http://127.0.0.1:{free_port()}", "key", retries=NEVER) as client:
        with pytest.raises(Unreachable) as told:
            client.run("print(1)")
        assert not told.value.sent
    for url, key in (
        ("ftp://runs.example", "key"),
        ("runs.example", "key"),
        ("https://user:password@runs.example", "key"),
        ("https://runs.example", ""),
        ("https://runs.example", "two\nlines"),
        ("https://runs.example", None),
    ):
        with pytest.raises(InvalidSettings, match="COFFERDAM_"):
            Cofferdam(url, key)


def test_with_await_it_is_the_same(proxy: Proxy, streaming_site: Site) -> None:
    agent = claim()

    async def talk() -> None:
        proxy.lose = 1
        async with AsyncCofferdam(proxy.url, streaming_site.alice, retries=QUICK) as client:
            execution = await client.run("print(1)", agent=agent)
            assert [each.id async for each in client.executions(agent=agent)] == [execution.id]
            code = "import time\nfor n in range(4): print(n, flush=True); time.sleep(0.2)"
            proxy.break_after = 2
            async with client.stream(code, detach=True) as events:
                told = [event.content async for event in events]
            assert b"".join(told) == b"0\n1\n2\n3\n"
            # While the first goes on, the second is told that it is queued, and waits.
            slow, key = "import time; time.sleep(0.5); print(1)", claim()
            both = await asyncio.gather(
                client.run(slow, idempotency_key=key), client.run(slow, idempotency_key=key)
            )
            assert (both[0].id, both[0].stdout) == (both[1].id, "1\n")
            # Two at once, over one client.
            both = await asyncio.gather(client.run("print(1)"), client.run("print(2)"))
            assert [each.stdout for each in both] == ["1\n", "2\n"]
        async with AsyncCofferdam(proxy.url, "cfd_wrong") as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.languages()

    asyncio.run(talk())
