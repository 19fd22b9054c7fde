"""What a service that is stopping says, takes and refuses."""

from __future__ import annotations

import asyncio
import errno
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import HttpResponse
from django.test import Client

from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.requests import Caller as RecordCaller
from executions.runs.requests import ExecutionRequest
from executions.runs.service import execute_sync
from providers import draining, registry
from providers.manager import manager
from sandbox_site import health
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from sandbox_site.web.listener import turn_away
from tests.conftest import Caller, require
from tests.support.asgi import scope
from tests.support.held import opened
from tests.support.provider_package import Packages
from tests.support.raw_http import Answer, ask, connect, read, request
from tests.support.running import activate, run, run_queued
from tests.support.site import EXECUTIONS, Prepared, Site, prepare, serving

pytestmark = pytest.mark.one_database


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets how far this process has stopped, and has it serve again afterwards."""
    return lambda name: monkeypatch.setattr(draining, "_own", getattr(draining, name))


def test_readiness_says_what_is_missing(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Client().get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert Client().post("/readyz").status_code == 405
    monkeypatch.setitem(health.NEEDED, "disk", lambda: False)
    missing = Client().get("/readyz")
    assert missing.status_code == 503
    assert missing.json() == {"status": "unavailable", "reasons": ["disk"]}
    assert Client().get("/healthz").status_code == 200


def test_readiness_says_that_it_is_stopping_and_health_does_not(
    db: None, step: Callable[[str], None]
) -> None:
    step("_DRAINING")
    stopping = Client().get("/readyz")
    assert (stopping.status_code, stopping.json()) == (503, {"status": "draining"})
    assert Client().get("/healthz").status_code == 200


def test_while_it_says_so_all_is_served_and_then_new_executions_are_refused(
    scripted: object, alice: Caller, step: Callable[[str], None]
) -> None:
    step("_DRAINING")
    first = run(alice, "pass", idempotency_key="once")
    assert first.status_code == 200
    step("_CLOSED")
    for mode in ("sync", "async"):
        refused = run(alice, "pass", mode=mode)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "SB009"
        assert refused.json()["id"] is None
        assert int(refused["Retry-After"]) > 0
    # What became of an earlier request is told all the same.
    assert run(alice, "pass", idempotency_key="once").json()["id"] == first.json()["id"]
    assert Execution.objects.count() == 1


def asked_of_bridge(before_body: Callable[[], None]) -> bytes:
    """The body of the answer to a request, of which the body comes after `before_body`."""
    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)

    def handler(environ: Any, start: Any) -> HttpResponse:
        return HttpResponse("refused" if draining.refuses_new() else "taken")

    async def receive() -> dict[str, Any]:
        before_body()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asked = scope(EXECUTIONS, method="POST", headers=[(b"content-length", b"2")])
    asyncio.run(Bridge(cast("WSGIHandler", handler), 4, limits)(asked, receive, send))
    return bytes(sent[-1]["body"])


def test_a_request_whose_headers_came_in_time_is_taken(step: Callable[[str], None]) -> None:
    assert asked_of_bridge(lambda: step("_CLOSED")) == b"taken"
    assert asked_of_bridge(lambda: None) == b"refused"


HANGING = """
import threading
from providers.base import Health, SandboxInstance, SandboxProvider
from providers.values import ExecutionResult

asked = []
began = threading.Event()
ended = threading.Event()


class Hanging(SandboxProvider):
    id = "hanging"
    name = "Hanging"
    isolation = "namespaces"

    def initialize(self, config):
        return True

    def create_instance(self, template="python", *, owner=""):
        asked.append("create")
        if template == "nodejs":
            began.set()
            ended.wait(60)
        return SandboxInstance("1", self.id, "running", {"runtime": "none"})

    def execute_code(self, *args, **options):
        asked.append("execute")
        began.set()
        ended.wait(60)
        return ExecutionResult("", "", 0, 0.0)

    def destroy_instance(self, instance_id):
        asked.append("destroy")
        return True

    def health_check(self):
        return Health(True)

    def get_supported_languages(self):
        return ["python", "nodejs"]
"""


@pytest.fixture
def hanging(
    transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A provider that answers when it is let go; its module."""
    name = "hanging_provider"
    packages = Packages(tmp_path / "packages", monkeypatch)
    packages.install("hanging", {"hanging": f"{name}:Hanging"}, {name: HANGING})
    activate("hanging", {})
    module = import_module(name)
    module.asked.clear()
    module.began.clear()
    module.ended.clear()
    yield module
    module.ended.set()
    manager.close()
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.parametrize(
    ("language", "asked", "retryable"),
    [("python", ["create", "execute", "destroy"], False), ("nodejs", ["create"], True)],
)
def test_a_run_at_a_provider_that_does_not_answer_is_ended_too(
    hanging: Any,
    alice: Caller,
    step: Callable[[str], None],
    language: str,
    asked: list[str],
    retryable: bool,
) -> None:
    outcomes = []

    def carry_out() -> None:
        wanted = ExecutionRequest("pass", language=language, timeout=60)
        outcomes.append(execute_sync(wanted, RecordCaller.of_key(alice.api_key)))
        connections.close_all()

    caller = threading.Thread(target=carry_out)
    caller.start()
    assert hanging.began.wait(60)
    step("_SERVING")  # so that what follows is undone
    active_runs.end_all(30)
    caller.join(60)
    assert active_runs.count() == 0
    (outcome,) = outcomes
    record = Execution.objects.get()
    assert (record.status, record.error_code, record.retryable) == ("error", "SB009", retryable)
    assert outcome.error is not None
    assert outcome.error.started is not retryable
    assert "stopped" in record.error_message
    # Nobody waits for the sandbox's end but the end of the process.
    assert active_runs.wait_for_ends(30)
    assert hanging.asked == asked


def test_what_a_stopping_worker_has_not_handed_over_is_queued_again(
    hanging: Any, alice: Caller, step: Callable[[str], None]
) -> None:
    queued = opened(alice, "async", language="nodejs", timeout=60)

    def carry_out() -> None:
        run_queued()
        connections.close_all()

    worker = threading.Thread(target=carry_out)
    worker.start()
    assert hanging.began.wait(60)
    step("_SERVING")  # so that what follows is undone
    active_runs.end_all(30)
    worker.join(60)
    waiting = Execution.objects.get()
    assert (waiting.pk, waiting.status, waiting.process_id) == (queued.pk, "queued", None)
    assert hanging.asked == ["create"]


def test_whoever_has_connected_gets_in_and_nobody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as late:
        address = listener.getsockname()
        listener.setblocking(False)
        with socket.create_connection(address) as early:
            turn_away(listener)
            late.setblocking(False)
            late.connect_ex(address)
            accepted, peer = listener.accept()
            with accepted:
                assert peer == early.getsockname()
                early.sendall(b"asked")
                accepted.settimeout(30)
                assert accepted.recv(5) == b"asked"
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.close()
        # It asks again after a second, and is refused.
        poll = select.poll()
        poll.register(late, select.POLLOUT)
        assert poll.poll(30_000)
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def wait_for_readiness(site: Site, status: int) -> Answer:
    deadline = time.monotonic() + 60
    while (answer := ask(site.service, "GET", "/readyz")).status != status:
        assert time.monotonic() < deadline
    return answer


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    require("bwrap")
    return prepare(tmp_path / "data")


def test_while_it_says_so_whoever_comes_is_served(prepared: Prepared, tmp_path: Path) -> None:
    code = {"code": "print(6 * 7)"}
    # Longer than this test, however busy the machine is: nothing in it ends by itself.
    limits = {"SHUTDOWN_DELAY_SECONDS": "300", "WEB_CONCURRENCY": "2"}
    with serving(prepared, tmp_path / "log", **limits) as site:
        assert wait_for_readiness(site, 200).json == {"status": "ready"}
        kept = connect(site.service, request("GET", "/healthz"))
        assert "connection" not in read(kept).headers

        site.service.process.send_signal(signal.SIGTERM)
        draining_answer = wait_for_readiness(site, 503)
        assert draining_answer.json == {"status": "draining"}
        assert draining_answer.headers["connection"] == "close"
        assert ask(site.service, "GET", "/healthz").status == 200
        answer = ask(site.service, "POST", EXECUTIONS, code, key=site.charlie)
        assert answer.json["stdout"] == "42\n"
        kept.sendall(request("POST", EXECUTIONS, code, key=site.alice))
        answer = read(kept)
        assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_connections_are_served_to_their_end(prepared: Prepared, tmp_path: Path) -> None:
    limits = {"WEB_CONCURRENCY": "2", "WEB_HEADER_SECONDS": "2", "WEB_BODY_SECONDS": "50"}
    with serving(prepared, tmp_path / "log", **limits) as site:
        whole = request("POST", EXECUTIONS, {"code": "print(6 * 7)"}, key=site.alice)
        quiet = connect(site.service, request("GET", "/healthz"))
        assert "connection" not in read(quiet).headers
        half_body = connect(site.service, whole[:-5])
        half_head, never = connect(site.service, whole[:30]), connect(site.service)

        site.service.process.send_signal(signal.SIGTERM)
        wait_until_closed(site)
        # Nobody is let in any more, and who was sending is heard.
        half_body.sendall(whole[-5:])
        answer = read(half_body)
        assert (answer.status, answer.json["stdout"]) == (200, "42\n"), answer
        assert read(half_head).status == 408
        assert read(quiet).status == 0
        assert read(never).status == 0
        ended, _ = site.service.wait_for_end()
    assert ended == 0, site.service.output


def wait_until_closed(site: Site) -> None:
    """Until nobody is let in. Whoever was let in before is answered, or let go of."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            connect(site.service).close()
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError("it goes on letting new connections in")
