"""Callers who hold the service up: half requests, long runs, answers that nobody reads.

Over the real servers of `manage.py up`. What shows that nobody was held up is the order in which
things happen, and not how long they take.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import require
from tests.support.processes import free_port, web_server
from tests.support.raw_http import ask, connect, head, read, request
from tests.support.site import EXECUTIONS, Site, prepare, running_site, serving, sleeper

THREADS = 16
SPOOL = 32 * 1024 * 1024
# As /proc/net/tcp has it.
TCP_ESTABLISHED = "01"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    limits = {
        "WEB_THREADS": str(THREADS),
        # Far more than one tenant may have is what is tried here.
        "SANDBOX_MAX_RUNNING": "64",
        "SANDBOX_EXEC_TIMEOUT_SECONDS": "60",
        "SESSION_QUEUE_TIMEOUT": "60",
        "WEB_HEADER_SECONDS": "4",
        "WEB_BODY_SECONDS": "4",
        "WEB_SEND_SECONDS": "4",
        "WEB_SPOOL_MB": str(SPOOL >> 20),
        "SANDBOX_MAX_BODY_BYTES": str(8 * 1024 * 1024),
    }
    with running_site(tmp_path_factory.mktemp("serving"), **limits) as running:
        yield running


@contextmanager
def held(site: Site, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(site.service, sent)) for _ in range(count)]


def readable(connections: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that have something to read, as soon as there is one."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select(seconds)}
    return [connection for connection in connections if connection.fileno() in ready]


def running(site: Site) -> list[str]:
    """The executions of alice that run."""
    path = f"{EXECUTIONS}?status=running&limit=100"
    listed = ask(site.service, "GET", path, key=site.alice).json["results"]
    return [each["id"] for each in listed]


def cancel_running(site: Site) -> None:
    """All of alice's."""
    for each in running(site):
        cancelled = ask(site.service, "POST", f"{EXECUTIONS}/{each}/cancel", {}, key=site.alice)
        assert cancelled.status == 200, cancelled.body


def assert_all_open(connections: list[socket.socket]) -> None:
    assert readable(connections, 0) == []


def test_half_headers_hold_nobody_up_and_are_told_so(site: Site) -> None:
    with held(site, 4 * THREADS, b"POST /api/v1/executions HTTP/1.1\r\nHost: x\r\n") as slow:
        site.assert_serves_others()
        assert [read(connection).status for connection in slow] == [408] * len(slow)


def test_bodies_of_one_byte_hold_nobody_up_and_are_told_so(site: Site) -> None:
    started_body = head("POST", EXECUTIONS, 1000, key=site.alice) + b"{"
    with held(site, 4 * THREADS, started_body) as slow:
        site.assert_serves_others()
        answers = [read(connection) for connection in slow]
    assert {answer.status for answer in answers} == {408}
    assert answers[0].json["error"]["code"] == "request_timeout"


def test_a_body_that_trickles_is_not_waited_for(site: Site) -> None:
    with connect(site.service, head("POST", EXECUTIONS, 1000, key=site.alice)) as connection:
        began = time.monotonic()
        while not readable([connection], 0.5):
            connection.sendall(b" ")
            assert time.monotonic() - began < 30
        assert read(connection).status == 408


def test_headers_without_end_are_refused(site: Site) -> None:
    with connect(site.service, b"GET /healthz HTTP/1.1\r\n") as connection:
        for number in range(60):
            connection.sendall(f"X-{number}: {'x' * 2000}\r\n".encode())
            if readable([connection], 0.01):
                break
        assert read(connection).status == 431


def test_an_address_holds_the_longest_path_and_where_its_list_goes_on(site: Site) -> None:
    session = ask(site.service, "POST", "/api/v1/sessions", {}, key=site.charlie).json["id"]
    path = "/".join(["x", *["x" * 255] * 15, "x" * 254])
    assert len(path) == 4096
    encoded = "".join(f"%{ord(each):02X}" for each in path)
    after = "".join(f"%25{ord(each):02X}" for each in path)

    for query in (f"path={encoded}", f"path={encoded}&depth=32&after={after}"):
        url = f"/api/v1/sessions/{session}/files?{query}"
        answer = ask(site.service, "GET", url, key=site.charlie)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")

    endless = f"/api/v1/sessions/{session}/files?path={encoded * 4}"
    assert ask(site.service, "GET", endless, key=site.charlie).status == 414


def test_an_answer_to_head_has_no_body(site: Site) -> None:
    for path in ("/admin/login/", "/static/admin/css/base.css"):
        with connect(site.service, head("HEAD", path, 0, Connection="close")) as connection:
            received = b""
            while piece := connection.recv(65536):
                received += piece
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"\r\n\r\n")
    assert "no-body response" not in site.service.output


def test_long_runs_of_one_tenant_hold_nobody_up(site: Site) -> None:
    body = request("POST", EXECUTIONS, sleeper(50), key=site.alice)
    # More than there are threads, and within what one tenant may have running.
    with held(site, THREADS + 4, body) as slow:
        site.wait_for_running(len(slow))
        site.assert_serves_others()
        assert_all_open(slow)
        cancel_running(site)
        answers = [read(connection) for connection in slow]
    assert {answer.status for answer in answers} == {200}
    assert {answer.json["status"] for answer in answers} == {"cancelled"}
    # What the middleware sets is on answers that come later too.
    assert {answer.headers["x-frame-options"] for answer in answers} == {"DENY"}
    assert all(answer.headers["x-request-id"] for answer in answers)


def test_long_runs_by_another_api_hold_nobody_up(site: Site) -> None:
    # One conversation: the first of them waits for a file, and the others for their turn.
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('slept')"
    body = {"user_id": "a", "code": code}
    with held(site, THREADS + 4, request("POST", "/v1/execute", body, key=site.alice)) as slow:
        deadline = time.monotonic() + 60
        while not site.running():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        site.assert_serves_others()
        assert_all_open(slow)
        [session] = ask(site.service, "GET", "/api/v1/sessions", key=site.alice).json["results"]
        path = f"/api/v1/sessions/{session['id']}/files/content?path=go"
        put = ask(site.service, "PUT", path, {}, key=site.alice)
        assert put.status in (200, 201), put.body
        answers = [read(connection) for connection in slow]
    assert {answer.json["output"] for answer in answers} == {"slept\n"}
    assert all(answer.headers["x-execution-id"] for answer in answers)


def test_a_run_whose_caller_has_left_is_carried_out_and_recorded(site: Site) -> None:
    # Longer than the server leaves a request after its client has gone.
    connect(site.service, request("POST", EXECUTIONS, sleeper(6), key=site.alice)).close()
    site.wait_for_running(1)
    site.wait_for_running(0)
    listed = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    assert listed[0]["status"] == "succeeded"
    assert listed[0]["timings"]["run_ms"] >= 6000


def test_answers_that_nobody_reads_hold_nobody_up_and_are_broken_off(site: Site) -> None:
    size = 9 * 1024 * 1024
    code = f"import os; open('artifacts/large', 'wb').write(os.urandom({size}))"
    made = ask(site.service, "POST", EXECUTIONS, {"code": code}, key=site.alice)
    path = urlsplit(made.json["artifacts"][0]["url"]).path
    with held(site, 2 * THREADS, request("GET", path, key=site.alice)) as unread:
        for connection in unread:
            # The answer has begun; its rest waits for the reader.
            assert connection.recv(16).startswith(b"HTTP/1.1 200")
        site.assert_serves_others()
        deadline = time.monotonic() + 60
        while open_of(site, unread):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        received = [_drained(connection) for connection in unread]
    assert max(received) < size
    whole = ask(site.service, "GET", path, key=site.alice)
    assert (whole.status, len(whole.body)) == (200, size)


def test_a_large_body_is_read_only_for_a_valid_key(site: Site) -> None:
    large = 4 * 1024 * 1024
    for key in ("", "cfd_of-nobody"):
        with connect(site.service, head("POST", EXECUTIONS, large, key=key)) as connection:
            # Answered before a byte of it was sent.
            assert read(connection).status == 401
    with connect(site.service, head("POST", "/admin/login/", large)) as connection:
        assert read(connection).status == 413


def test_what_a_view_refuses_unseen_is_not_read(site: Site) -> None:
    too_large = head("POST", EXECUTIONS, 9 * 1024 * 1024, key=site.alice)
    with connect(site.service, too_large) as connection:
        assert read(connection).status == 413
    chunked = head("POST", EXECUTIONS, 0, key=site.alice, Transfer_Encoding="chunked")
    with connect(site.service, chunked) as connection:
        assert read(connection).status == 400


def test_a_client_that_sends_on_gets_to_read_why_it_was_refused(site: Site) -> None:
    large = 4 * 1024 * 1024
    with connect(site.service, head("POST", EXECUTIONS, large)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b" " * large)
        assert read(connection).status == 401


def test_one_tenant_cannot_fill_what_bodies_are_kept_in(site: Site) -> None:
    share = SPOOL // 2
    body = head("POST", EXECUTIONS, share * 3 // 8, key=site.alice)
    with held(site, 3, body) as slow:
        # Whichever is looked at last.
        refused = readable(slow, 20)
        answer = read(refused[0])
        assert (answer.status, answer.json["error"]["code"]) == (429, "SB008")
        assert int(answer.headers["retry-after"]) > 0
        code = "pass #" + "x" * 500_000
        others = ask(site.service, "POST", EXECUTIONS, {"code": code}, key=site.charlie)
        assert others.status == 200, others.body
    # What is not sent any more is free again.
    deadline = time.monotonic() + 60
    while True:
        again = ask(
            site.service, "POST", EXECUTIONS, {"code": "", "x": "y" * 4_000_000}, key=site.alice
        )
        if again.status == 400:
            break
        assert time.monotonic() < deadline, again.body
        time.sleep(0.2)


def test_too_many_connections_close_the_ones_that_have_owed_longest(tmp_path: Path) -> None:
    require("bwrap")
    limits = {"WEB_CONNECTIONS": "40", "WEB_HEADER_SECONDS": "60", "PORT": str(free_port())}
    prepared, command = prepare(tmp_path / "data"), web_server(limits["PORT"])
    with (
        serving(prepared, tmp_path / "log", command, **limits) as site,
        held(site, 100, b"GET /") as slow,
    ):
        site.assert_serves_others()
        # 503 where nothing was read yet, and no answer where it had sent nothing.
        assert {read(connection).status for connection in slow[:50]} <= {408, 503, 0}
        assert_all_open(slow[-20:])


def test_ending_the_service_leaves_no_run_open(tmp_path: Path) -> None:
    require("bwrap")
    with running_site(tmp_path, SHUTDOWN_GRACE_SECONDS="1") as site:
        body = request("POST", EXECUTIONS, sleeper(60), key=site.alice)
        with held(site, 2, body) as staying:
            connect(site.service, body).close()
            site.wait_for_running(3)
            site.service.process.send_signal(signal.SIGTERM)
            code, _ = site.service.wait_for_end()
            assert code == 0, site.service.output
            assert site.running() == 0
            del staying


def test_a_replay_in_the_admin_waits_without_a_thread(site: Site) -> None:
    made = ask(site.service, "POST", EXECUTIONS, sleeper(2), key=site.alice).json
    session = _signed_in(site)
    path = f"/admin/executions/execution/{made['id']}/replay"
    page = ask(site.service, "GET", path, Cookie=session)
    assert page.status == 200
    form = f"csrfmiddlewaretoken={_token(page.body)}&provider=local".encode()
    sent = head("POST", path, 0, Cookie=session).removesuffix(b"\r\n")
    sent += b"Content-Type: application/x-www-form-urlencoded\r\n"
    sent += f"Content-Length: {len(form)}\r\n\r\n".encode() + form
    with held(site, 2 * THREADS, sent) as slow:
        site.wait_for_running(len(slow))
        site.assert_serves_others()
        answers = [read(connection) for connection in slow]
    assert {answer.status for answer in answers} == {302}
    assert all("?with=" in answer.headers["location"] for answer in answers)


def open_of(site: Site, connections: list[socket.socket]) -> set[int]:
    """The ports of those that the server has not closed. At this end it shows only behind what was
    sent before."""
    ours = {connection.getsockname()[1] for connection in connections}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if int(local.partition(":")[2], 16) == site.service.port and state == TCP_ESTABLISHED:
            found.add(int(remote.partition(":")[2], 16))
    return found & ours


def _drained(connection: socket.socket) -> int:
    total = 0
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            total += len(piece)
    return total


def _signed_in(site: Site) -> str:
    """The cookies of the administrator that `bootstrap` has made."""
    text = (site.data_dir / "credentials.txt").read_text()
    password = next(
        line.partition("=")[2] for line in text.splitlines() if line.startswith("ADMIN_PASSWORD")
    )
    page = ask(site.service, "GET", "/admin/login/")
    cookie = page.headers["set-cookie"].split(";")[0]
    form = f"csrfmiddlewaretoken={_token(page.body)}&username=admin&password={password}".encode()
    sent = head("POST", "/admin/login/?next=/admin/", 0, Cookie=cookie).removesuffix(b"\r\n")
    sent += b"Content-Type: application/x-www-form-urlencoded\r\n"
    sent += f"Content-Length: {len(form)}\r\n\r\n".encode() + form
    cookies = {}
    with connect(site.service, sent) as connection:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
    for line in received.partition(b"\r\n\r\n")[0].decode().split("\r\n"):
        if line.lower().startswith("set-cookie: "):
            name, _, value = line[12:].split(";")[0].partition("=")
            cookies[name] = value
    assert "sessionid" in cookies, received
    return "; ".join(f"{name}={value}" for name, value in cookies.items())


def _token(page: bytes) -> str:
    return page.partition(b'name="csrfmiddlewaretoken" value="')[2].partition(b'"')[0].decode()
