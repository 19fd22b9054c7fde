"""Websites whose files are fetched by URL, and tenants who name them, against this process.

Bounds of time are a second here; each test would run for minutes if one of them did not hold.
"""

from __future__ import annotations

import gzip
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from executions.capabilities.fetching import service as fetching
from executions.capabilities.fetching.service import Fetched, NotFetched, fetch_files
from executions.kernel.http import Bounds, Reason
from tests.support.certificates import Authority
from tests.support.fetching import Came, allow, fetch, fetch_one
from tests.support.resolving import resolve_as
from tests.support.web_server import WebServer, answer, redirect

# For what never comes in time. Of what does, a busy machine would leave some.
HURRIED = Bounds(pause_seconds=0.4, file_seconds=0.8, batch_seconds=20)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# Far more than any of the bounds above, far less than what an endless answer would take.
SOON_SECONDS = 50.0


@pytest.fixture
def website(settings: Any) -> Iterator[WebServer]:
    with WebServer() as server:
        allow(settings, server)
        server.pages["/good"] = answer(b"good")
        yield server


@pytest.fixture(autouse=True)
def _everything_is_let_go_of() -> Iterator[None]:
    before = open_files()
    began = time.monotonic()
    yield
    wait_for(lambda: fetching.held() == 0 and fetching_threads() == 0)
    wait_for(lambda: open_files() <= before + 2)
    assert time.monotonic() - began < SOON_SECONDS


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fetching_threads() -> int:
    return sum(thread.name.startswith("fetching") for thread in threading.enumerate())


def open_files() -> int:
    """Connections over TCP, and files that are in no folder.

    What pools of other tests open and close meanwhile is neither.
    """
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    over_tcp = {f"socket:[{line.split()[9]}]" for line in lines}
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            found += target in over_tcp or target.endswith(" (deleted)")
    return found


def repeated(server: WebServer, piece: bytes, pause: float = 0, first: bytes = b"") -> Any:
    """Sends `first`, then `piece` again and again until the client has left."""

    def send(connection: socket.socket) -> None:
        connection.sendall(first)
        while not server.closing.wait(pause) if pause else not server.closing.is_set():
            connection.sendall(piece)

    return send


@pytest.mark.parametrize(
    ("first", "piece", "pause"),
    [
        pytest.param(b"", b"", 0.1, id="nothing at all"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.1, id="headers by single bytes"),
        pytest.param(b"H", b"", 0.1, id="half a status line"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.1, id="always about to answer"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x", 0.1, id="a trickled body"
        ),
        pytest.param(CHUNKED, b"1\r\nx\r\n", 0.1, id="trickled chunks"),
        pytest.param(CHUNKED + b"5\r\nhello", b"", 0.1, id="half a chunk"),
        pytest.param(CHUNKED + b"0\r\n", b"T: x\r\n", 0.1, id="trickled trailers"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n", b"x", 0.1, id="a body without an end"),
    ],
)
def test_a_slow_answer_ends_with_the_files_time(
    website: WebServer, first: bytes, piece: bytes, pause: float
) -> None:
    website.pages["/slow"] = repeated(website, piece, pause, first)
    assert fetch_one(website.url("/slow"), HURRIED) is Reason.TOO_SLOW


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 1000 + b"\r\n", id="headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536, id="one header"),
        pytest.param(b"", b"x" * 65536, id="a status line"),
        pytest.param(b"", b"\r\n", id="empty lines"),
        pytest.param(b"", b"HTTP/1.1 103 x\r\nLink: x\r\n\r\n", id="early hints"),
        pytest.param(CHUNKED + b"1;", b"x" * 65536, id="an extension of a chunk"),
        pytest.param(CHUNKED, b"1;" + b"x" * 60_000 + b"\r\nx\r\n", id="extensions of chunks"),
        pytest.param(CHUNKED + b"0\r\n", b"T: " + b"x" * 1000 + b"\r\n", id="trailers"),
        pytest.param(CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", id="chunks"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n", b"x" * 65536, id="a body"),
    ],
)
def test_what_never_ends_is_left_at_its_bound(
    website: WebServer, first: bytes, piece: bytes
) -> None:
    bounds = Bounds(file_bytes=4 * 1024 * 1024)
    website.pages["/endless"] = repeated(website, piece, first=first)
    assert fetch_one(website.url("/endless"), bounds) in (Reason.TOO_LARGE, Reason.ANSWER)


def test_single_bytes_at_full_speed_cost_little_processor_time(website: WebServer) -> None:
    website.pages["/pieces"] = repeated(website, b"1\r\nx\r\n" * 10_000, first=CHUNKED)
    results = fetch([website.url("/pieces")] * 20)
    assert all(isinstance(result, NotFetched) for result in results)
    assert "tiny pieces" in results[0].text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", id="too short"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n", id="a length in words"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", id="two lengths"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            id="coded twice",
        ),
        pytest.param(CHUNKED + b"zz\r\nx", id="a chunk of no size"),
        pytest.param(CHUNKED + b"-1\r\nx", id="a chunk of a negative size"),
        pytest.param(CHUNKED + b"5\r\nhello", id="chunks without an end"),
        pytest.param(CHUNKED + b"5\r\nhelloworld\r\n0\r\n\r\n", id="a chunk that is longer"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", id="another protocol"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", id="TLS"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", id="another turn"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n", id="NUL in a header"),
        pytest.param(answer(status="206 Partial Content"), id="a part"),
        pytest.param(answer(b"", status="304 Not Modified"), id="nothing new"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", id="no content"),
        pytest.param(answer(status="500 \xff\xfe"), id="an error"),
        pytest.param(answer(status="999 x"), id="no status"),
    ],
)
def test_a_wrong_answer_is_no_file(website: WebServer, page: bytes) -> None:
    website.pages["/wrong"] = page
    bad, good = fetch([website.url("/wrong"), website.url("/good")])
    assert isinstance(bad, NotFetched)
    assert bad.reason is Reason.ANSWER
    assert isinstance(good, Came)


@pytest.mark.parametrize("length", [50 * 1024 * 1024 + 1, 10**19, 10**20 - 1])
def test_a_length_beyond_all_bounds_is_refused_before_a_byte(
    website: WebServer, length: int
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()
    website.pages["/huge"] = repeated(website, b"", 0.1, head)
    assert fetch_one(website.url("/huge")) is Reason.TOO_LARGE


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_a_compressed_bomb_is_not_opened(website: WebServer, coding: str) -> None:
    bomb = gzip.compress(bytes(100 * 1024 * 1024), 1)
    website.pages["/bomb"] = answer(bomb, f"Content-Encoding: {coding}")
    [result] = fetch([website.url("/bomb")])
    assert isinstance(result, NotFetched)
    assert "compressed" in result.text
    website.pages["/bomb.gz"] = answer(bomb, "Content-Type: application/gzip")
    assert fetch_one(website.url("/bomb.gz")) == bomb


def test_the_bodies_of_redirects_and_errors_are_not_read(website: WebServer) -> None:
    for path, status in (("/moved", "302 Found\r\nLocation: /good"), ("/error", "500 x")):
        head = f"HTTP/1.1 {status}\r\nContent-Length: 99999999999\r\n\r\n".encode()
        website.pages[path] = repeated(website, bytes(65536), first=head)
    assert fetch_one(website.url("/moved")) == b"good"
    assert fetch_one(website.url("/error")) is Reason.ANSWER


def test_slow_redirects_share_the_time_of_one_file(website: WebServer) -> None:
    def after_a_while(connection: socket.socket) -> None:
        if not website.closing.wait(0.25):
            connection.sendall(redirect("/slow"))

    website.pages["/slow"] = after_a_while
    assert fetch_one(website.url("/slow"), HURRIED) is Reason.TOO_SLOW
    assert website.connections < 5


def test_a_handshake_without_end_ends_with_the_files_time(settings: Any) -> None:
    with WebServer() as server:
        allow(settings, server)

        # A ServerHello by single bytes, without end.
        def shake(connection: socket.socket) -> None:
            connection.sendall(b"\x16\x03\x03\x40\x00")
            while not server.closing.wait(0.1):
                connection.sendall(b"\x02")

        server.otherwise = shake
        url = f"https://127.0.0.1:{server.port}/"
        assert fetch_one(url, HURRIED) is Reason.TOO_SLOW


def test_hostile_locations_and_names_are_no_errors_of_ours(website: WebServer) -> None:
    for number, value in enumerate(
        ("http://[", "//", "\xff\xfe", "http://\xe4\xf6", "http:a", "?" * 60_000, "///", "%", "\\")
    ):
        website.pages[f"/{number}"] = redirect(value)
        assert isinstance(fetch_one(website.url(f"/{number}")), Reason)
    for header in (
        "filename*=UTF-8''%",
        "filename=\xff",
        'filename="' + '\\"' * 30_000,
        ";" * 60_000,
    ):
        website.pages["/named"] = answer(b"x", f"Content-Disposition: {header}")
        assert fetch_one(website.url("/named")) == b"x"


def test_a_large_file_takes_no_memory(website: WebServer) -> None:
    size = 300 * 1024 * 1024

    def large(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        piece = bytes(1024 * 1024)
        for _ in range(size // len(piece)):
            connection.sendall(piece)

    website.pages["/large"] = large
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bounds = Bounds(file_bytes=size)
    with fetch_files([website.url("/large")], "tenant", bounds=bounds) as results:
        [file] = [result.size for result in results if isinstance(result, Fetched)]
    assert file == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_many_urls_of_a_slow_host_hold_a_few_threads_for_a_bounded_time(
    website: WebServer,
) -> None:
    website.pages["/slow"] = repeated(website, b"x", 0.1, b"HTTP/1.0 200 OK\r\n\r\n")
    bounds = Bounds(pause_seconds=0.5, file_seconds=0.5, batch_seconds=1.5)
    threads = 0
    results = []
    with fetch_files([website.url("/slow")] * 200, "hostile", bounds=bounds) as coming:
        for result in coming:
            threads = max(threads, fetching_threads())
            results.append(result)
            # Others are served meanwhile.
            if len(results) == 1:
                assert isinstance(fetch([website.url("/good")], holder="other")[0], Came)
    assert len(results) == 200
    assert {result.reason for result in results if isinstance(result, NotFetched)} == {
        Reason.TOO_SLOW
    }
    assert threads <= bounds.threads + 1
    # By each thread one in half a second, and that of the others.
    assert website.connections <= 4 * bounds.threads + 1


def test_slow_urls_leave_the_other_threads_of_their_batch_to_others(website: WebServer) -> None:
    """Which go on until all of the others have been served."""

    def slow(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while len(served) < 50 and not website.closing.wait(0.1):
            connection.sendall(b"x")

    def good(connection: socket.socket) -> None:
        connection.sendall(answer(b"good"))
        served.append(None)

    served: list[None] = []
    website.pages |= {"/slow": slow, "/good": good}
    urls = [website.url("/slow"), *[website.url("/good")] * 50, website.url("/slow")]
    results = fetch(urls, Bounds(pause_seconds=20, file_seconds=20, batch_seconds=60, ahead=60))
    assert sum(isinstance(result, Came) for result in results[1:-1]) == 50
    assert len(served) == 50


def test_a_consumer_that_takes_its_time_has_few_files_waiting(website: WebServer) -> None:
    bounds = Bounds(ahead=4, threads=4)
    with fetch_files([website.url("/good")] * 100, "tenant", bounds=bounds) as results:
        next(results)
        wait_for(lambda: len(website.requests) >= 4)
        assert website.connections <= bounds.ahead + 1


def test_a_name_server_that_hangs_keeps_no_caller_and_no_more_than_its_threads(
    website: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's resolver cannot be broken off: its thread is counted until it has ended."""
    let_go = threading.Event()
    real = socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        if str(host).endswith("hanging.example"):
            let_go.wait(SOON_SECONDS)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    bounds = Bounds(file_seconds=0.5, batch_seconds=0.6)
    urls = [f"http://{number}.hanging.example/" for number in range(50)]
    try:
        for _ in range(fetching.MOST_OF_ONE):
            results = fetch(urls, bounds, holder="hostile")
            assert all(isinstance(result, NotFetched) for result in results)
        assert fetching_threads() <= fetching.MOST_OF_ONE * bounds.threads
        assert fetching.held() == fetching.MOST_OF_ONE
        assert isinstance(fetch([website.url("/good")], holder="other")[0], Came)
    finally:
        let_go.set()


def test_a_name_with_many_dead_addresses_is_tried_a_few_times(
    website: WebServer, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.URL_ALLOWED_NETWORKS = ["127.0.0.0/8"]
    addresses = [f"127.0.1.{number}" for number in range(1, 200)]
    resolve_as(monkeypatch, "many.example", [*addresses, "127.0.0.1"])
    assert fetch_one(website.url("/good", "many.example")) is Reason.CONNECTION


def test_a_tenant_gets_no_answer_out_of_a_service_of_this_machine(
    website: WebServer, settings: Any
) -> None:
    """What a tenant learns of a port is the same whether somebody listens there or not."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        settings.ALLOW_PRIVATE_URLS = True
        urls = [
            f"http://localhost:{port}/",
            "http://localhost:1234/",
            "http://127.0.0.1.nip.invalid/",
        ]
        texts = {result.text for result in fetch(urls) if isinstance(result, NotFetched)}
        assert len(texts) == 1
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_certificate_of_another_name_gets_no_request(
    tmp_path: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with WebServer(authority.issue(tmp_path, "evil.example").server_context()) as server:
        allow(settings, server)
        resolve_as(monkeypatch, "files.example", ["127.0.0.1"])
        assert fetch_one(server.url("/?token=x", "files.example")) is Reason.CERTIFICATE
        assert server.requests == []
