"""Files by URL: what comes of a list of them, over real connections."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.capabilities.fetching import service as fetching
from executions.capabilities.fetching.service import Fetched, NotFetched, fetch_files
from executions.kernel.http import Bounds, Reason
from executions.runs.admission import look_again_at_disk
from providers.errors import InvalidConfiguration, RateLimited
from tests.support.certificates import Authority
from tests.support.fetching import Came, allow, fetch, fetch_one
from tests.support.resolving import resolve_as
from tests.support.web_server import WebServer, answer, redirect


@pytest.fixture
def pages(settings: Any) -> Iterator[WebServer]:
    """A web server that may be fetched from."""
    with WebServer() as server:
        allow(settings, server)
        yield server


def came(result: object) -> Came:
    assert isinstance(result, Came), result
    return result


def did_not(result: object) -> NotFetched:
    assert isinstance(result, NotFetched)
    return result


def wait_until_nobody_holds_a_slot() -> None:
    deadline = time.monotonic() + 60
    while fetching.held() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fetching.held() == 0


def test_some_files_come_and_others_do_not(pages: WebServer) -> None:
    pages.pages["/data.csv"] = answer(b"a,b\n1,2\n")
    pages.pages["/empty"] = answer(b"")
    pages.pages["/named"] = answer(b"x", 'Content-Disposition: attachment; filename="../n.txt"')
    urls = [
        pages.url("/data.csv"),
        pages.url("/missing"),
        "ftp://files.example/",
        pages.url("/named"),
        pages.url("/empty"),
        pages.url("/data.csv"),
        pages.url("/data.csv?Content-Disposition=filename%3D%22my%20data.csv%22"),
    ]

    results = fetch(urls)

    files = {
        r.file.index: (r.file.name, r.content, r.file.size) for r in results if isinstance(r, Came)
    }
    assert files == {
        0: ("data.csv", b"a,b\n1,2\n", 8),
        3: ("n.txt", b"x", 1),
        4: ("empty", b"", 0),
        5: ("data-2.csv", b"a,b\n1,2\n", 8),
        6: ("my data.csv", b"a,b\n1,2\n", 8),
    }
    assert did_not(results[1]).reason is Reason.ANSWER
    assert "404" in did_not(results[1]).text
    assert did_not(results[2]).reason is Reason.URL
    assert did_not(results[2]).url == "ftp://files.example/"


def test_two_hundred_come_in_their_order_and_one_more_is_refused(pages: WebServer) -> None:
    for number in range(200):
        pages.pages[f"/{number}"] = answer(b"%d" % number)
    urls = [pages.url(f"/{number}") for number in range(200)]
    assert [came(result).content for result in fetch(urls)] == [b"%d" % n for n in range(200)]
    with pytest.raises(InvalidConfiguration) as caught:
        fetch([*urls, urls[0]])
    assert caught.value.field == "urls"
    assert fetch([]) == []


def test_a_request_says_nothing_but_what_is_asked_for(pages: WebServer) -> None:
    pages.pages["/a"] = redirect("/b?signature=1")
    pages.pages["/b"] = answer()
    [result] = fetch([pages.url("/a?token=x#part")])
    lines = pages.requests[0].decode().split("\r\n")
    assert lines[0] == "GET /a?token=x HTTP/1.1"
    assert sorted(line.partition(":")[0].lower() for line in lines[1:-2]) == sorted(
        ["host", "user-agent", "accept", "accept-encoding", "connection"]
    )
    assert f"Host: 127.0.0.1:{pages.port}" in lines
    assert "Accept-Encoding: identity" in lines
    assert pages.requests[1].startswith(b"GET /b?signature=1 HTTP/1.1\r\n")
    assert came(result).file.source == pages.url("/b")


def test_secrets_of_a_url_are_in_no_log_and_no_repr(
    pages: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pages.pages["/a"] = answer()
    results = fetch(
        [
            pages.url("/a?X-Amz-Signature=s3cret"),
            pages.url("/none?X-Amz-Signature=s3cret"),
            "https://user:s3cret@files.example/",
            "http://10.0.0.1/?s3cret",
            "http://nobody.invalid/?s3cret",
        ]
    )
    assert [isinstance(result, Came) for result in results] == [True, *[False] * 4]
    assert "s3cret" not in repr(results)
    assert "s3cret" not in caplog.text


def test_over_tls_the_name_is_asked_for_and_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    with WebServer(authority.issue(tmp_path, "files.example").server_context()) as server:
        allow(settings, server)
        server.pages["/"] = answer(b"over tls")
        resolve_as(monkeypatch, "files.example", ["127.0.0.1"])
        resolve_as(monkeypatch, "other.example", ["127.0.0.1"])
        assert fetch_one(server.url("/", "files.example")) is Reason.CERTIFICATE

        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert fetch_one(server.url("/", "files.example")) == b"over tls"
        assert server.server_names == ["files.example", "files.example"]
        assert f"Host: files.example:{server.port}".encode() in server.requests[0]
        [result] = fetch([server.url("/", "other.example")])
        assert did_not(result).reason is Reason.CERTIFICATE
        assert "other.example" in did_not(result).text
        assert fetch_one(server.url("/")) == b"over tls"
        assert server.server_names[-1] is None
        assert fetch_one(f"http://127.0.0.1:{server.port}/") is Reason.ANSWER


def test_a_server_without_tls_is_a_failed_connection(pages: WebServer) -> None:
    assert fetch_one(f"https://127.0.0.1:{pages.port}/") is Reason.CONNECTION


def test_each_address_is_tried_until_one_answers(
    pages: WebServer, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.URL_ALLOWED_NETWORKS = ["127.0.0.0/8"]
    resolve_as(monkeypatch, "two.example", ["127.0.0.2", "127.0.0.1"])
    pages.pages["/"] = answer()
    assert fetch_one(pages.url("/", "two.example")) == b"content"


def test_chunks_and_an_end_by_closing_are_read(pages: WebServer) -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    pages.pages["/chunks"] = (
        head + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\n"
    )
    pages.pages["/closed"] = b"HTTP/1.0 200 OK\r\n\r\nabcde"
    pages.pages["/early"] = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + answer(b"abcde")
    )
    for path in ("/chunks", "/closed", "/early"):
        assert fetch_one(pages.url(path)) == b"abcde"


def test_a_file_is_as_large_as_is_allowed_and_no_larger(pages: WebServer) -> None:
    bounds = Bounds(file_bytes=100_000)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pages.pages["/fits"] = answer(bytes(100_000))
    pages.pages["/announced"] = answer(bytes(100_001))
    pages.pages["/chunked"] = chunked + b"186a1\r\n" + bytes(100_001) + b"\r\n0\r\n\r\n"
    pages.pages["/closed"] = b"HTTP/1.0 200 OK\r\n\r\n" + bytes(100_001)
    assert fetch_one(pages.url("/fits"), bounds) == bytes(100_000)
    for path in ("/announced", "/chunked", "/closed"):
        assert fetch_one(pages.url(path), bounds) is Reason.TOO_LARGE


def test_all_files_together_have_a_bound_too(pages: WebServer) -> None:
    pages.pages["/"] = answer(bytes(40_000))
    pages.pages["/long"] = b"HTTP/1.0 200 OK\r\n\r\n" + bytes(40_000)
    bounds = Bounds(batch_bytes=100_000, threads=1)
    results = fetch([pages.url(path) for path in ("/", "/long", "/", "/long")], bounds)
    assert [isinstance(result, Came) for result in results] == [True, True, False, False]
    assert {did_not(result).reason for result in results[2:]} == {Reason.TOO_LARGE}
    assert "together" in did_not(results[2]).text


def test_a_body_is_closed_with_the_next_and_with_the_batch(pages: WebServer) -> None:
    pages.pages["/"] = answer()
    bodies = []
    with fetch_files([pages.url("/")] * 3, "tenant") as results:
        for result in results:
            assert isinstance(result, Fetched)
            assert all(body.closed for body in bodies)
            bodies.append(result.body)
            assert result.body.read() == b"content"
            if len(bodies) == 2:
                break
    assert all(body.closed for body in bodies)
    wait_until_nobody_holds_a_slot()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_leaving_early_asks_for_no_more_and_ends_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, scheme: str
) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    tls = authority.issue(tmp_path).server_context() if scheme == "https" else None
    begun, ended = threading.Event(), threading.Event()

    def never_ending(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        begun.set()
        try:
            connection.settimeout(None)
            connection.recv(1)
        finally:
            ended.set()

    with WebServer(tls) as server:
        allow(settings, server)
        server.pages["/"] = answer()
        server.pages["/slow"] = never_ending
        urls = [server.url("/"), server.url("/slow"), *[server.url("/")] * 198]
        bounds = Bounds(threads=2, pause_seconds=100)
        with pytest.raises(KeyError), fetch_files(urls, "tenant", bounds=bounds) as results:
            next(results)
            assert begun.wait(60)
            raise KeyError
        assert ended.wait(60)
        wait_until_nobody_holds_a_slot()
        assert server.connections < 20


def test_a_tenant_has_a_few_batches_at_once(pages: WebServer) -> None:
    pages.pages["/"] = answer()
    urls = [pages.url("/")]
    with fetch_files(urls, "one"), fetch_files(urls, "one"):
        with pytest.raises(RateLimited) as caught, fetch_files(urls, "one"):
            pass
        assert caught.value.retry_after
        assert isinstance(fetch(urls, holder="other")[0], Came)
    wait_until_nobody_holds_a_slot()
    assert isinstance(fetch(urls, holder="one")[0], Came)


def test_all_tenants_together_have_a_bound(pages: WebServer) -> None:
    held = [fetching.Slot(f"tenant {number}") for number in range(fetching.MOST)]
    try:
        with pytest.raises(RateLimited):
            fetch([pages.url("/")])
    finally:
        for slot in held:
            slot.release()
    assert fetch_one(pages.url("/")) is Reason.ANSWER


def test_no_file_is_taken_while_the_disk_is_nearly_full(pages: WebServer, settings: Any) -> None:
    pages.pages["/"] = answer()
    settings.DISK_RESERVE_MIB = 10**9
    look_again_at_disk()
    try:
        assert fetch_one(pages.url("/")) is Reason.NO_ROOM
    finally:
        settings.DISK_RESERVE_MIB = 0
        look_again_at_disk()
    assert fetch_one(pages.url("/")) == b"content"


def test_a_batch_that_cannot_begin_holds_nothing(pages: WebServer, settings: Any) -> None:
    def failing() -> Iterator[str]:
        yield "a"
        raise KeyError

    for _ in range(fetching.MOST_OF_ONE + 1):
        with pytest.raises(KeyError), fetch_files([], "one", taken=failing()):
            pass
    assert fetching.held() == 0
    settings.URL_ALLOWED_NETWORKS = ["no network"]
    for _ in range(fetching.MOST_OF_ONE + 1):
        with pytest.raises(ValueError, match="no network"), fetch_files([], "one"):
            pass
    assert fetching.held() == 0


def test_names_that_are_taken_are_not_given_again(pages: WebServer) -> None:
    pages.pages["/a.csv"] = answer()
    with fetch_files([pages.url("/a.csv")], "one", taken=["A.csv"]) as results:
        assert [result.name for result in results if isinstance(result, Fetched)] == ["a-2.csv"]


def test_who_leaves_while_another_thread_waits_for_a_file_wakes_that_thread(
    pages: WebServer,
) -> None:
    asked = threading.Event()

    def silent(_connection: socket.socket) -> None:
        asked.set()
        pages.closing.wait(60)

    pages.pages["/silent"] = silent
    with fetch_files([pages.url("/silent")] * 20, "tenant") as results:
        waiting = threading.Thread(target=lambda: next(results, None))
        waiting.start()
        assert asked.wait(60)
    waiting.join(60)
    assert not waiting.is_alive()
    wait_until_nobody_holds_a_slot()


def test_who_leaves_before_a_file_is_begun_gets_none() -> None:
    class LeftWhenRead(list[str]):
        def __iter__(self) -> Iterator[str]:
            for url in super().__iter__():
                fetching.__exit__(None, None, None)
                yield url

    fetching = fetch_files(LeftWhenRead(["https://files.example/x"]), "alice")
    assert next(fetching.__enter__(), None) is None
    wait_until_nobody_holds_a_slot()


def test_the_last_release_of_a_slot_holds_no_lock_while_it_gives_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shares have a lock of their own, under which the collector may release another slot."""
    free: list[bool] = []

    def other_thread_gets_it() -> None:
        free.append(fetching._lock.acquire(timeout=60))
        fetching._lock.release()

    def give_back(holder: str) -> None:
        thread = threading.Thread(target=other_thread_gets_it)
        thread.start()
        thread.join()

    slot = fetching.Slot("wonderland")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(fetching._slots, "give_back", give_back)
            slot.release()
    finally:
        fetching._slots.give_back("wonderland")
    assert free == [True]
