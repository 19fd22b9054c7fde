"""Single runs through the pool service, told while they run."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from providers.errors import ProviderUnavailable
from providers.runtime.service import operations
from providers.sandbox import Sandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Event, Job, RunLimits, SandboxSpec
from tests.support.pool_service import PoolService, provider_of

pytest_plugins = ["tests.support.pool_fixtures"]

WAITS = "import time\nprint('early', flush=True)\ntime.sleep(60)"
SHOWS = "import sys\nprint('é')\nprint('err', file=sys.stderr)\ndisplay(7)\nNone"


@pytest.fixture
def provider(pool: PoolService) -> Iterator[SelfManagedProvider]:
    with provider_of(pool.url) as opened:
        yield opened


@pytest.fixture
def sandbox(provider: SelfManagedProvider) -> Iterator[Sandbox]:
    opened = provider.open(SandboxSpec("python"), "alice")
    yield opened
    opened.close()


def job(code: str, timeout: float = 10, output_bytes: int = 100_000) -> Job:
    return Job(code, "python", timeout, limits=RunLimits(output_bytes=output_bytes))


def text(events: list[Event], stream: str) -> str:
    return b"".join(event.data for event in events if event.type == stream).decode()


def test_what_is_put_out_comes_before_the_end_and_closing_ends_the_run(sandbox: Sandbox) -> None:
    events: list[Event] = []
    came = threading.Event()

    def emit(event: Event) -> None:
        events.append(event)
        came.set()

    running = sandbox.submit_run(job(WAITS), emit)
    assert came.wait(60)
    assert not running.done()
    assert text(events, "stdout") == "early\n"
    sandbox.close()
    with pytest.raises(ProviderUnavailable) as failed:
        running.result(60)
    assert failed.value.started


def test_the_result_is_what_was_told(sandbox: Sandbox) -> None:
    events: list[Event] = []
    result = sandbox.run(job(SHOWS), events.append)

    assert (text(events, "stdout"), text(events, "stderr")) == ("é\n", "err\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("é\n", "err\n", 0)
    told = [event.output for event in events if event.type == "output"]
    assert told == list(result.outputs)
    assert len(told) == 1


def test_a_flood_is_told_up_to_the_limit(sandbox: Sandbox) -> None:
    events: list[Event] = []
    result = sandbox.run(job("print('x' * 20_000_000)", output_bytes=50_000), events.append)

    assert result.stdout_truncated
    assert text(events, "stdout") == result.stdout == "x" * 50_000


def test_what_is_refused_tells_nothing(sandbox: Sandbox) -> None:
    sandbox.run(job("pass"))
    events: list[Event] = []
    with pytest.raises(ProviderUnavailable) as refused:
        sandbox.run(job("print(1)"), events.append)
    assert refused.value.started
    assert events == []


def test_a_service_that_tells_nothing_meanwhile_is_told_of_at_the_end(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the version before does, which knows nothing of what is asked for."""
    monkeypatch.setattr(operations, "MEDIA_TYPE", "application/x-unheard-of")
    events: list[Event] = []
    result = sandbox.run(job(SHOWS), events.append)

    assert text(events, "stdout") == result.stdout == "é\n"


def test_a_client_that_leaves_ends_its_run(pool: PoolService) -> None:
    instance_id = pool.create()
    body = json.dumps({"code": WAITS, "language": "python", "timeout": 60}).encode()
    host, port = pool.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            f"POST /v1/instances/{instance_id}/run HTTP/1.1\r\nHost: {host}\r\n"
            f"Accept: {operations.MEDIA_TYPE}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        received = b""
        while b"early" not in received:
            received += (piece := connection.recv(4096))
            assert piece, received
        assert pool.stats()["busy"] == 1
    pool.wait_for(lambda stats: stats["busy"] == 0)
