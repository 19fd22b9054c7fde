"""Callers who hold what others need: connections, streams, and answers that nobody reads.

Over the real servers of `manage.py up`, with few places. Who is refused is told so, and others are
served meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.raw_http import Answer, ask, connect, read, request
from tests.support.site import EXECUTIONS, Site, running_site, sleeper

CONNECTIONS = 64
STREAMS = CONNECTIONS // 8
LETTERS = 8_000_000
SPOOL = 128 * 1024 * 1024
NDJSON = "application/x-ndjson"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    limits = {
        "WEB_CONNECTIONS": str(CONNECTIONS),
        "WEB_HEADER_SECONDS": "60",
        "WEB_SPOOL_MB": str(SPOOL >> 20),
        "SANDBOX_MAX_BODY_BYTES": str(8 * 1024 * 1024),
        "SANDBOX_MAX_OUTPUT_KB": str(8 * 1024),
        "SANDBOX_EXEC_TIMEOUT_SECONDS": "240",
    }
    with running_site(tmp_path_factory.mktemp("connections"), **limits) as running:
        yield running


def assert_refused(answer: Answer, status: int, code: str) -> None:
    """With a body that says why, and when to try again."""
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert answer.json["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0


def assert_comes_true(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_idle_streams_of_one_tenant_leave_the_rest_to_others(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        body = request("POST", EXECUTIONS, sleeper(200), key=site.alice, Accept=NDJSON)
        stack.enter_context(connect(site.service, body))
        site.wait_for_running(1)
        listed = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
        path = f"{EXECUTIONS}/{listed[0]['id']}/events"
        follow = request("GET", path, key=site.alice, Accept=NDJSON)
        streams = [
            stack.enter_context(connect(site.service, follow)) for _ in range(3 * CONNECTIONS)
        ]
        answers = [read(stream) for stream in streams]
        site.assert_serves_others()
    opened = [answer for answer in answers if answer.status == 200]
    assert 0 < len(opened) < STREAMS
    for answer in answers:
        if answer.status != 200:
            # There are more of them than connections.
            code = "SB009" if answer.status == 503 else "SB008"
            assert_refused(answer, 503 if answer.status == 503 else 429, code)
    # What is closed is free again.
    site.wait_for_running(0)
    again = request("POST", EXECUTIONS, {"code": "print(1)"}, key=site.alice, Accept=NDJSON)

    def is_served() -> bool:
        with connect(site.service, again) as connection:
            return read(connection).status == 200

    assert_comes_true(is_served)


def test_half_requests_of_one_address_close_its_own_and_not_a_neighbours(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        neighbour = stack.enter_context(
            socket.create_connection(("127.0.0.1", site.service.port), 30, ("127.0.0.2", 0))
        )
        neighbour.sendall(b"GET /admin/login/ HTTP/1.1\r\n")
        for _ in range(3 * CONNECTIONS):
            stack.enter_context(connect(site.service, b"GET / HTTP/1.1\r\n"))
        site.assert_serves_others()
        neighbour.sendall(b"Host: 127.0.0.1\r\n\r\n")
        assert read(neighbour).status == 200


def test_a_request_that_is_none_is_told_why(site: Site) -> None:
    for sent in (b"GET\r\n\r\n", b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 70_000):
        with connect(site.service, sent) as connection:
            answer = read(connection)
        assert answer.status in (400, 431)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["error"]["code"] == "bad_request"


def test_answers_that_nobody_reads_fill_no_memory(site: Site) -> None:
    code = {"code": f"print('x' * {LETTERS})"}
    made = ask(site.service, "POST", EXECUTIONS, code, key=site.alice).json
    others = ask(site.service, "POST", EXECUTIONS, code, key=site.charlie).json
    path = f"{EXECUTIONS}/{made['id']}"
    assert len(ask(site.service, "GET", path, key=site.alice).json["stdout"]) == LETTERS + 1
    at_first = _memory(site)
    sent = request("GET", path, key=site.alice)
    share = SPOOL // 2 // LETTERS
    with contextlib.ExitStack() as stack:
        unread, refused = [], []
        while not refused:
            connection = stack.enter_context(_narrow(site, sent))
            begun = connection.recv(12)
            (unread if begun.endswith(b"200") else refused).append(connection)
            assert len(unread) <= share
        # One after the other, so that what is in memory is what they hold.
        assert len(unread) == share
        assert_comes_true(lambda: _memory(site) - at_first < 3 * LETTERS)
        rest = refused[0].recv(4096)
        assert b'"SB008"' in rest, rest
        site.assert_serves_others()
        theirs = ask(site.service, "GET", f"{EXECUTIONS}/{others['id']}", key=site.charlie)
        assert len(theirs.json["stdout"]) == LETTERS + 1
        # What was done is answered, however much is not read.
        assert ask(site.service, "POST", EXECUTIONS, code, key=site.alice).status == 200

    def is_read_again() -> bool:
        return ask(site.service, "GET", path, key=site.alice).status == 200

    assert_comes_true(is_read_again)
    assert_comes_true(lambda: _memory(site) - at_first < 3 * LETTERS)


def test_many_readers_at_once_leave_no_memory_behind(site: Site) -> None:
    code = {"code": f"print('x' * {LETTERS})"}
    made = ask(site.service, "POST", EXECUTIONS, code, key=site.alice).json
    sent = request("GET", f"{EXECUTIONS}/{made['id']}", key=site.alice)
    at_first = _memory(site)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_narrow(site, sent)) for _ in range(3 * CONNECTIONS // 4)]
        statuses = {connection.recv(12)[-3:] for connection in held}
        assert statuses <= {b"200", b"429"}
        site.assert_serves_others()
    assert_comes_true(lambda: _memory(site) - at_first < 6 * LETTERS)


def test_events_of_a_large_record_come_whole(site: Site) -> None:
    code = {"code": f"print('x' * {LETTERS})"}
    body = request("POST", EXECUTIONS, code, key=site.alice, Accept=NDJSON, Connection="close")
    with connect(site.service, body) as connection:
        received = b""
        while piece := connection.recv(1 << 20):
            received += piece
    assert received.startswith(b"HTTP/1.1 200")
    # The output once as it came and once in the record, and nothing of either is lost.
    assert received.count(b"x" * 1000) >= 2 * (LETTERS // 65536)
    assert received.rstrip().endswith(b"0")


def _narrow(site: Site, sent: bytes) -> socket.socket:
    """A connection that takes as little as there is of what is not read."""
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", site.service.port))
    connection.sendall(sent)
    return connection


def _memory(site: Site) -> int:
    """What the web process holds: the largest of gunicorn's."""
    most = 0
    for pid in site.service.look():
        with contextlib.suppress(OSError):
            if b"gunicorn" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                most = max(most, pages * 4096)
    return most
