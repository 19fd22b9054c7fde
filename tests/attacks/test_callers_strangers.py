"""Strangers who ask for much: for what is made anew for each, and for passwords to be checked.

What they cause is counted. Beside them stand a caller with a key and an administrator.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest
from django.contrib.auth.hashers import MD5PasswordHasher
from django.contrib.auth.models import User
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.test import Client
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer

from executions.doors.native.deferred import LATER, DeferredResponse
from executions.kernel.coroutines import wait_for
from sandbox_site import description as described
from sandbox_site import strangers
from sandbox_site.description import Description
from sandbox_site.strangers import (
    OF_ONE_ADDRESS,
    PASSWORDS_AT_ONCE,
    Places,
    Rate,
    TooMany,
    is_page,
)
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from tests.conftest import Caller
from tests.support import asgi

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

# A share of the size that a flood soon takes.
PAGES_AT_ONCE = 20
SCHEMA, LOGIN = "/api/schema", "/admin/login/"
PASSWORD = "correct horse"
ATTACKER, ELSEWHERE = "198.51.100.7", "203.0.113.9"


@pytest.fixture
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "pages", Rate(PAGES_AT_ONCE, PAGES_AT_ONCE))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that the description is built, of which none is there yet."""
    counted: list[int] = []
    get_schema = SchemaGenerator.get_schema

    def count(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return get_schema(*args, **kwargs)

    monkeypatch.setattr(SchemaGenerator, "get_schema", count)
    monkeypatch.setattr(described, "description", Description())
    return counted


def test_many_first_callers_have_the_description_built_once(builds: list[int]) -> None:
    ready = threading.Barrier(8)

    def ask(_: int) -> bytes:
        ready.wait(60)
        return described.description.document("yaml").content

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ask, range(8)))) == 1
    assert builds == [1]


def test_the_description_is_sent_from_memory_whatever_a_stranger_asks_for(
    builds: list[int],
) -> None:
    first = Client().get(SCHEMA)
    assert first.status_code == 200
    assert first["Content-Type"] == "application/vnd.oai.openapi; charset=utf-8"
    for query in ("", "?version=2", "?lang=de", "?a=b"):
        again = Client().get(SCHEMA + query, HTTP_ACCEPT_LANGUAGE="de", HTTP_HOST="localhost")
        assert again.content == first.content
        assert again["ETag"] == first["ETag"]
    as_json = Client().get(SCHEMA, {"format": "json"})
    assert as_json["ETag"] != first["ETag"]
    unchanged = Client().get(SCHEMA, HTTP_IF_NONE_MATCH=first["ETag"])
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert Client().get(SCHEMA, HTTP_IF_NONE_MATCH=as_json["ETag"]).status_code == 200
    assert builds == [1]
    # It is what would be made anew.
    schema = SchemaGenerator().get_schema(public=True)
    assert OpenApiJsonRenderer().render(schema, renderer_context={}) == as_json.content


def statuses(count: int, ask: Callable[[], Any]) -> list[int]:
    return [ask().status_code for _ in range(count)]


@pytest.mark.usefixtures("few_pages")
def test_a_flood_for_pages_is_refused_and_nobody_else_is(
    alice: Caller, admin_client: Client
) -> None:
    flood = statuses(2 * PAGES_AT_ONCE, lambda: Client().get(SCHEMA, REMOTE_ADDR=ATTACKER))
    assert flood[:PAGES_AT_ONCE] == [200] * PAGES_AT_ONCE
    # A few more have come free meanwhile.
    assert flood.count(429) > PAGES_AT_ONCE // 2
    for path in (SCHEMA, LOGIN, "/api/docs", "/admin/", "/nowhere"):
        refused = until_refused(path, ATTACKER)
        assert int(refused["Retry-After"]) >= 1
        assert refused["Cache-Control"] == "no-store"
    assert until_refused(SCHEMA, ATTACKER).json()["error"]["code"] == "SB008"
    assert "has sent too many requests" in until_refused(LOGIN, ATTACKER).content.decode()
    # Others at the same address, who are no strangers, and strangers at another.
    assert admin_client.get("/admin/", REMOTE_ADDR=ATTACKER).status_code == 200
    assert admin_client.get(SCHEMA, REMOTE_ADDR=ATTACKER).status_code == 200
    executions = alice.client.get("/api/v1/executions", REMOTE_ADDR=ATTACKER)
    assert executions.status_code == 200
    for path in ("/healthz", "/readyz"):
        assert Client().get(path, REMOTE_ADDR=ATTACKER).status_code == 200
    assert Client().get(SCHEMA, REMOTE_ADDR=ELSEWHERE).status_code == 200


def until_refused(path: str, address: str) -> Any:
    """The first refusal. On a slow machine the share grows while it is asked for."""
    for _ in range(20 * PAGES_AT_ONCE):
        answer = Client().get(path, REMOTE_ADDR=address)
        if answer.status_code == 429:
            return answer
    raise AssertionError(f"{path} was never refused")


@pytest.mark.usefixtures("few_pages")
def test_one_ipv6_client_has_one_share() -> None:
    for number in range(PAGES_AT_ONCE):
        Client().get("/nowhere", REMOTE_ADDR=f"2001:db8::{number + 1:x}")
    assert until_refused("/nowhere", "2001:db8::ffff").status_code == 429
    assert Client().get("/nowhere", REMOTE_ADDR="2001:db8:0:1::1").status_code == 404


def test_a_share_grows_again_and_addresses_without_number_take_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now)
    rate = Rate(3, 60)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(TooMany) as refusal:
        rate.take("a")
    assert refusal.value.wait == 1
    now += 1
    rate.take("a")
    with pytest.raises(TooMany):
        rate.take("a")
    for number in range(3 * strangers._MOST_KNOWN):
        rate.take(str(number))
    assert len(rate._left) == strangers._MOST_KNOWN


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One for each password that is hashed."""
    counted: list[str] = []
    encode = MD5PasswordHasher.encode

    def count(hasher: MD5PasswordHasher, password: str, salt: str) -> str:
        counted.append(salt)
        return encode(hasher, password, salt)

    monkeypatch.setattr(MD5PasswordHasher, "encode", count)
    return counted


def attempt(name: str, password: str, address: str) -> int:
    body = {"username": name, "password": password}
    return Client().post(LOGIN, body, REMOTE_ADDR=address).status_code


def test_made_up_names_have_few_passwords_hashed_and_an_administrator_gets_in(
    hashes: list[str],
) -> None:
    User.objects.create_superuser("ann", password=PASSWORD)
    hashes.clear()
    tries = 5 * PASSWORDS_AT_ONCE
    answers = [attempt(f"nobody-{number}", "guess", ATTACKER) for number in range(tries)]
    assert answers[:PASSWORDS_AT_ONCE] == [200] * PASSWORDS_AT_ONCE
    # Whatever came free meanwhile: each that was let in is one hash, and none was for a refusal.
    assert answers.count(429) > PASSWORDS_AT_ONCE
    assert len(hashes) == answers.count(200)
    assert attempt("ann", PASSWORD, ELSEWHERE) == 302


def test_passwords_are_checked_one_after_the_other_and_few_wait_of_one_address() -> None:
    places = Places()
    with held(places, ATTACKER):
        waiting = threading.Thread(target=enter, args=(places, ATTACKER))
        waiting.start()
        until(lambda: places._here[ATTACKER] == OF_ONE_ADDRESS)
        with pytest.raises(TooMany), places.taken(ATTACKER):
            pytest.fail("a third of one address was let in")
        other = threading.Thread(target=enter, args=(places, ELSEWHERE))
        other.start()
        until(lambda: places._here[ELSEWHERE] == 1)
    for thread in (waiting, other):
        thread.join(60)
        assert not thread.is_alive()
    assert not places._here


def test_who_waits_too_long_for_a_password_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PATIENCE_SECONDS", 0.01)
    places = Places()
    with held(places, ATTACKER), pytest.raises(TooMany), places.taken(ELSEWHERE):
        pytest.fail("two were let in at once")
    with places.taken(ELSEWHERE):
        pass


def enter(places: Places, address: str) -> None:
    with places.taken(address):
        pass


@contextmanager
def held(places: Places, address: str) -> Iterator[None]:
    with places.taken(address):
        yield


def until(condition: Callable[[], bool]) -> None:
    patience = threading.Event()
    for _ in range(6000):
        if condition():
            return
        patience.wait(0.01)
    raise AssertionError("it never came true")


def scope(path: str, session: str = "") -> dict[str, Any]:
    cookies = [(b"cookie", f"a=b; sessionid={session}".encode())] if session else []
    return asgi.scope(path, headers=cookies, client=(ATTACKER, 1))


def test_strangers_hold_no_thread_of_callers_administrators_and_monitors() -> None:
    """More of them than there are threads, with sessions that they have made up too."""
    over = threading.Event()
    strangers.sessions.note("of-an-administrator")

    def handler(environ: Any, start: Any) -> HttpResponse:
        if environ["PATH_INFO"] == LOGIN:
            over.wait(60)
        return HttpResponse(environ["PATH_INFO"])

    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)
    bridge = Bridge(cast("WSGIHandler", handler), 4, limits)

    async def asked(path: str, session: str = "") -> bytes:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await bridge(scope(path, session), receive, send)
        return b"".join(message.get("body", b"") for message in sent)

    async def play() -> None:
        flood = [
            asyncio.create_task(asked(LOGIN, "made-up" if number % 2 else ""))
            for number in range(40)
        ]
        try:
            async with asyncio.timeout(60):
                while bridge.open < len(flood):
                    await asyncio.sleep(0.01)
                for path in ("/api/v1/executions", "/healthz", "/metrics", "/api/admin/sandbox/x"):
                    assert await asked(path) == path.encode()
                assert await asked("/admin/", "of-an-administrator") == b"/admin/"
        finally:
            over.set()
            assert set(await asyncio.gather(*flood)) == {LOGIN.encode()}

    asyncio.run(play())


def test_work_that_waits_goes_on_for_a_person_whom_this_process_does_not_know_yet() -> None:
    """As in the first request after a start: it is served where strangers are."""
    awaited: Future[None] = Future()

    def handler(environ: Any, start: Any) -> HttpResponseBase:
        async def work() -> HttpResponseBase:
            await wait_for(awaited)
            return HttpResponse("done")

        later: DeferredResponse = environ[LATER]
        return later.take(work())

    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)
    bridge = Bridge(cast("WSGIHandler", handler), 4, limits)
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def play() -> None:
        page = scope("/admin/executions/execution/x/events", "of-another-process")
        asked = asyncio.create_task(bridge(page, receive, send))
        async with asyncio.timeout(60):
            while not bridge._waiting:
                await asyncio.sleep(0.01)
            awaited.set_result(None)
            await asked

    asyncio.run(play())
    assert b"".join(sent) == b"done"
    until(lambda: not bridge.open)


def test_a_session_is_known_once_somebody_was_signed_in_with_it(admin_client: Client) -> None:
    cookies = f"csrftoken=x; sessionid={admin_client.cookies['sessionid'].value}"
    assert not strangers.sessions.are_in(cookies)
    admin_client.get("/admin/")
    assert strangers.sessions.are_in(cookies)
    Client().get("/admin/", HTTP_COOKIE="sessionid=made-up")
    assert not strangers.sessions.are_in("sessionid=made-up")


def test_only_pages_are_counted() -> None:
    for path in ("/", "/admin/", "/api/schema", "/api/docs", LOGIN, "/static/x", "/nowhere"):
        assert is_page(path), path
    for path in ("/api/v1/executions", "/v1/execute", "/mcp", "/artifacts/x", "/files/x"):
        assert not is_page(path), path
    for path in ("/healthz", "/readyz", "/metrics", "/health", "/api/admin/sandbox/config"):
        assert not is_page(path), path
