"""A download of which nothing comes holds no thread: others are served meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import RequestFactory

from executions.doors.native.deferred import LATER, DeferredResponse, Placeholder
from executions.sessions import session_sandbox
from providers.manager import manager
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.asgi import scope
from tests.support.sessions import URL, in_thread, opened, wait_for

SILENT, OTHER = "/api/v1/silent", "/api/v1/other"


@pytest.mark.parametrize(("streams", "seconds"), [(8, 0), (200, 0.01)])
def test_streams_that_have_nothing_leave_their_thread_to_others(
    streams: int, seconds: float
) -> None:
    """Also where they are so many that to ask each of them takes all the time there is."""
    over = threading.Event()

    def nothing_yet() -> Iterator[bytes]:
        while not over.wait(seconds):
            yield b""
        yield b"something"

    def handler(environ: Any, start: Any) -> HttpResponseBase:
        if environ["PATH_INFO"] == SILENT:
            return StreamingHttpResponse(nothing_yet())
        return HttpResponse("served")

    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)
    bridge = Bridge(cast("WSGIHandler", handler), 2, limits)

    async def asked(path: str) -> bytes:
        sent: list[dict[str, Any]] = []
        began.setdefault(path, asyncio.Event())

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            began[path].set()
            sent.append(message)

        await bridge(scope(path), receive, send)
        return b"".join(message.get("body", b"") for message in sent)

    began: dict[str, asyncio.Event] = {}

    async def play() -> None:
        silent = [asyncio.create_task(asked(SILENT)) for _ in range(streams)]
        began[SILENT] = asyncio.Event()
        try:
            async with asyncio.timeout(20):
                await began[SILENT].wait()
                assert await asked(OTHER) == b"served"
        finally:
            over.set()
            assert set(await asyncio.gather(*silent)) == {b"something"}

    asyncio.run(play())


@pytest.mark.usefixtures("kept_here")
def test_what_a_sandbox_does_not_say_of_a_file_is_waited_for_without_a_thread(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    said = threading.Event()
    for name in ("stat", "list"):
        monkeypatch.setattr(sandbox.files, name, lambda *_: said.wait(120) and None)
    answers: list[Any] = []
    paths = ("files/content?path=f", "files/archive")

    asking = RequestFactory(headers={"X-API-Key": alice.key_text}).get

    def ask() -> None:
        for path in paths:
            asked = asking(f"{URL}/{session['id']}/{path}", **{LATER: DeferredResponse()})
            answers.append(WSGIHandler().get_response(asked))

    thread = in_thread(ask)
    thread.join(60)
    said.set()
    thread.join()
    assert [type(each) for each in answers] == [Placeholder, Placeholder]


@pytest.mark.usefixtures("kept_here")
def test_a_tenant_has_a_share_of_the_files_that_are_sent(
    alice: Caller, bob: Caller, charlie: Caller, settings: Any
) -> None:
    settings.PROVIDER_WAITS = 24
    # What other tests did not read to its end counts until it is collected.
    gc.collect()
    mine, other = opened(alice), opened(charlie)
    for caller, session in ((alice, mine), (charlie, other)):
        url = f"{URL}/{session['id']}/files/content?path=f"
        caller.client.put(url, b"0123456789", content_type="application/octet-stream")

    def ask(caller: Caller, session: dict[str, Any], what: str = "content?path=f") -> Any:
        return caller.client.get(f"{URL}/{session['id']}/files/{what}")

    unread = [ask(alice, mine), ask(alice, mine, "archive"), ask(bob, mine)]
    assert [each.status_code for each in unread] == [200, 200, 200]
    for what in ("content?path=f", "archive"):
        refused = ask(bob, mine, what)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    assert b"".join(ask(charlie, other).streaming_content) == b"0123456789"
    unread.pop().close()
    assert b"".join(ask(alice, mine).streaming_content) == b"0123456789"
    assert ask(alice, mine).status_code == 200
    unread.clear()


@pytest.mark.usefixtures("kept_here")
def test_who_leaves_a_file_gives_back_its_place_when_its_thread_comes_free(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PROVIDER_WAITS = 16
    gc.collect()
    session = opened(alice)
    url = f"{URL}/{session['id']}/files/content?path=f"
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "f").write_bytes(b"0123456789")
    said = threading.Event()
    read = sandbox.files.read

    def silent(*given: Any) -> Iterator[bytes]:
        assert said.wait(120)
        yield from read(*given)

    monkeypatch.setattr(sandbox.files, "read", silent)
    slug = alice.tenant.slug

    def ask() -> Any:
        return alice.client.get(url)

    try:
        for _ in range(2):
            answer = ask()
            assert next(iter(answer.streaming_content)) == b""
            answer.close()
        assert session_sandbox._streams._taken[slug] == 2
        assert manager._slot is not None
        assert manager._slot.users == 2
        assert ask().status_code == 429
    finally:
        said.set()
    wait_for(lambda: slug not in session_sandbox._streams._taken)
    assert manager._slot.users == 0
    assert b"".join(ask().streaming_content) == b"0123456789"
