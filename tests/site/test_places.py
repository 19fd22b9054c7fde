"""Shares of the web server: places for requests, streams, and answers that are not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from executions.doors.native.authentication import PLACE
from executions.doors.native.deferred import (
    MOST_IN_MEMORY_BYTES,
    NDJSON,
    PIECE_BYTES,
    Document,
    EventStream,
    stream,
)
from providers.errors import RateLimited
from sandbox_site.client_address import counted_address, read_networks
from sandbox_site.web.admission import Limits
from sandbox_site.web.body import Refused
from sandbox_site.web.bridge import Bridge
from sandbox_site.web.places import Kind, Place, Places, spare_of
from sandbox_site.web.threads import HandlerThreads
from tests.support.asgi import scope

MOST = 80
LARGE = 10 * MOST_IN_MEMORY_BYTES
KEY = b"cfd_a-key"


def filled(places: Places, count: int, tenant: str = "") -> list[Place]:
    taken = []
    for number in range(count):
        place = places.enter(Kind.USUAL, "" if tenant else f"192.0.2.{number}")
        if tenant:
            place.give_to(tenant)
        taken.append(place)
    return taken


def test_a_tenant_has_its_share_of_the_places_and_no_more() -> None:
    places = Places(MOST, 1000)
    taken = filled(places, MOST // 4, "greedy")
    one_more = places.enter(Kind.USUAL, "192.0.2.1")
    with pytest.raises(RateLimited):
        one_more.give_to("greedy")
    one_more.give_to("other")
    taken.pop().leave()
    places.enter(Kind.USUAL, "192.0.2.1").give_to("greedy")


def test_a_key_that_is_known_counts_for_its_tenant_at_once() -> None:
    places = Places(MOST, 1000)
    first = places.enter(Kind.USUAL, "192.0.2.1", KEY)
    assert first.owner == "@192.0.2.1"
    first.know_key("greedy")
    taken = [places.enter(Kind.USUAL, "192.0.2.1", KEY) for _ in range(MOST // 4)]
    assert {place.owner for place in taken} == {"greedy"}
    with pytest.raises(Refused) as refused:
        places.enter(Kind.USUAL, "192.0.2.1", KEY)
    assert refused.value.status == 429
    # Whoever is at the same address with another key is not counted with it.
    places.enter(Kind.USUAL, "192.0.2.1", b"cfd_another").give_to("other")


def test_who_shows_no_key_has_the_share_of_an_address() -> None:
    places = Places(MOST, 1000)
    for _ in range(MOST // 2):
        places.enter(Kind.USUAL, "192.0.2.1")
    with pytest.raises(Refused) as refused:
        places.enter(Kind.USUAL, "192.0.2.1")
    assert refused.value.status == 429
    places.enter(Kind.USUAL, "192.0.2.2")


def test_probes_and_the_admin_have_places_when_all_others_are_taken() -> None:
    places = Places(MOST, 1000)
    taken = filled(places, MOST)
    with pytest.raises(Refused) as refused:
        places.enter(Kind.USUAL, "198.51.100.1")
    assert (refused.value.status, refused.value.retry_after) == (503, 5)
    apart = spare_of(MOST) // 2
    for kind in (Kind.PROBE, Kind.ADMIN):
        spare = [places.enter(kind, f"198.51.100.{number}") for number in range(apart)]
        with pytest.raises(Refused):
            places.enter(kind, "198.51.100.200")
        spare.pop().leave()
        places.enter(kind, "198.51.100.200")
    for place in taken:
        place.leave()
        place.leave()
    assert len(filled(places, MOST)) == MOST


def test_one_address_cannot_take_all_that_is_for_the_admin() -> None:
    places = Places(MOST, 1000)
    filled(places, MOST)
    for _ in range(spare_of(MOST) // 4):
        places.enter(Kind.ADMIN, "198.51.100.1")
    with pytest.raises(Refused):
        places.enter(Kind.ADMIN, "198.51.100.1")
    places.enter(Kind.ADMIN, "198.51.100.2")


def test_streams_have_a_share_of_their_own() -> None:
    places = Places(MOST, 1000)
    taken = filled(places, MOST // 8 + 1, "greedy")
    for place in taken[1:]:
        place.begin_stream()
        place.begin_stream()
    with pytest.raises(RateLimited):
        taken[0].begin_stream()
    (other,) = filled(places, 1, "other")
    other.begin_stream()
    taken[1].leave()
    taken[0].begin_stream()


def test_work_does_not_begin_for_a_stream_that_is_refused() -> None:
    request = HttpRequest()
    request.META[PLACE], *others = filled(Places(MOST, 1000), MOST // 8 + 1, "greedy")
    for place in others:
        place.begin_stream()
    begun: list[str] = []

    def work() -> Any:
        begun.append("work")

    with pytest.raises(RateLimited):
        stream(request, work, EventStream(NDJSON))
    assert not begun


def test_unread_answers_have_a_share_and_what_was_done_is_answered_all_the_same() -> None:
    places = Places(MOST, 1000)
    first, second = filled(places, 2, "greedy")
    first.hold_answer(400, is_lost_else=False)
    with pytest.raises(Refused) as refused:
        second.hold_answer(200, is_lost_else=False)
    assert refused.value.status == 429
    second.hold_answer(200, is_lost_else=True)
    # Then the next request is refused, before anything is done for it.
    third = places.enter(Kind.USUAL, "192.0.2.1")
    with pytest.raises(RateLimited):
        third.give_to("greedy")
    (other,) = filled(places, 1, "other")
    other.hold_answer(300, is_lost_else=False)
    for place in (first, second):
        place.leave()
        place.hold_answer(10_000, is_lost_else=True)
    third.give_to("greedy")
    # One is let through, however large.
    third.hold_answer(600, is_lost_else=False)


def test_behind_a_trusted_proxy_the_forwarded_address_counts(settings: Any) -> None:
    settings.TRUSTED_PROXIES = read_networks(["10.0.0.0/8"])
    proxy = {"REMOTE_ADDR": "10.0.0.1"}
    assert counted_address({**proxy, "HTTP_X_FORWARDED_FOR": "192.0.2.7"}) == "192.0.2.7"
    # The proxy's own address stands for many.
    assert counted_address(proxy) == ""
    forged = {"REMOTE_ADDR": "192.0.2.9", "HTTP_X_FORWARDED_FOR": "192.0.2.7"}
    assert counted_address(forged) == "192.0.2.9"
    settings.TRUSTED_PROXIES = []
    assert counted_address(forged) == "192.0.2.9"
    first, second = ({"REMOTE_ADDR": f"2001:db8::{number}"} for number in (1, 2))
    assert counted_address(first) == counted_address(second) == "2001:db8::"


def test_a_full_service_refuses_with_a_body_and_serves_health_and_the_admin() -> None:
    over = asyncio.Event()

    def handler(environ: Any, start: Any) -> HttpResponseBase:
        if environ["PATH_INFO"] == "/api/v1/silent":
            return StreamingHttpResponse(silent())
        return HttpResponse("served")

    def silent() -> Iterator[bytes]:
        while not over.is_set():
            yield b""

    bridge = Bridge(cast("WSGIHandler", handler), 4, Limits(1000, 1000, 10, connections=16))

    async def play() -> None:
        began = asyncio.Semaphore(0)
        silent = []
        for number in range(16):
            asked = {**scope("/api/v1/silent"), "client": (f"192.0.2.{number}", 1)}
            silent.append(asyncio.create_task(answered(bridge, asked, began)))
            await began.acquire()
        try:
            status, body = await answered(bridge, scope("/api/v1/other"))
            assert (status, json.loads(body)["error"]["code"]) == (503, "SB009")
            for path in ("/healthz", "/readyz", "/metrics", "/admin/login/"):
                assert await answered(bridge, scope(path)) == (200, b"served")
        finally:
            over.set()
            await asyncio.gather(*silent)
        assert await answered(bridge, scope("/api/v1/other")) == (200, b"served")

    asyncio.run(play())


def test_a_large_answer_is_sent_in_pieces_and_its_response_keeps_nothing() -> None:
    given: list[HttpResponse] = []
    content = bytes(range(256)) * (LARGE // 256)

    def handler(environ: Any, start: Any) -> HttpResponseBase:
        given.append(HttpResponse(content))
        return given[-1]

    bridge = Bridge(cast("WSGIHandler", handler), 4, Limits(1000, 8 * LARGE, 10))

    async def play() -> None:
        reads = asyncio.Semaphore(0)
        first = asyncio.create_task(answered(bridge, scope("/api/v1/large"), reads=reads))
        while not (given and given[0].content == b""):
            await asyncio.sleep(0.01)
        # An eighth for who shows no key: the first holds it, and another is told so.
        status, body = await answered(bridge, scope("/api/v1/large"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "SB008")
        assert given[1].content == b""
        for _ in range(LARGE // PIECE_BYTES):
            reads.release()
        assert await first == (200, content)
        assert (await answered(bridge, scope("/api/v1/large")))[1] == content

    asyncio.run(play())


@pytest.mark.parametrize("size", [10, PIECE_BYTES, PIECE_BYTES + 1, LARGE])
def test_a_stream_ends_with_a_document_of_any_size(size: int) -> None:
    events = EventStream(NDJSON)
    held: list[int] = []
    events.count(held.append)
    record = json.dumps({"stdout": "x" * size}).encode()
    events.end({"type": "done", "execution": Document(record)})
    assert held == [0, len(record)]
    received, more = b"", True
    while more:
        body, more = events.take()
        assert len(body) <= 2 * PIECE_BYTES
        received += body
    told = json.loads(received)
    assert told == {"seq": 1, "type": "done", "execution": {"stdout": "x" * size}}
    assert events.take() == (b"", False)


def test_who_leaves_a_stream_leaves_no_file() -> None:
    late, early = EventStream(NDJSON), EventStream(NDJSON)
    documents = [Document(b"x" * LARGE), Document(b"x" * LARGE)]
    late.end({"type": "done", "execution": documents[0]})
    late.leave()
    early.leave()
    early.end({"type": "done", "execution": documents[1]})
    assert [document.read() for document in documents] == [b"", b""]


def test_owners_take_turns_for_new_jobs() -> None:
    handlers = HandlerThreads(1, {"api": 1})
    order: list[str] = []

    async def play() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def first() -> None:
            for number in range(3):
                handlers.submit(
                    "api", lambda name=f"greedy {number}": order.append(name), owner="greedy"
                )  # type: ignore[misc]
            handlers.submit("api", lambda: order.append("other"), owner="other")
            handlers.submit("api", lambda: loop.call_soon_threadsafe(done.set), owner="greedy")

        handlers.submit("api", first)
        await asyncio.wait_for(done.wait(), 60)

    asyncio.run(play())
    assert order == ["greedy 0", "other", "greedy 1", "greedy 2"]


async def answered(
    bridge: Bridge,
    asked: dict[str, Any],
    began: asyncio.Semaphore | None = None,
    reads: asyncio.Semaphore | None = None,
) -> tuple[int, bytes]:
    """Status and body. The reader takes a piece for each place in `reads`."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        assert len(message.get("body", b"")) <= PIECE_BYTES
        sent.append(message)
        if began is not None and "status" in message:
            began.release()
        if reads is not None and "body" in message:
            await reads.acquire()

    await bridge(asked, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
