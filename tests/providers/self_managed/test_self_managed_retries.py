"""The self_managed provider tries again what provably did not start, and nothing else."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from providers.errors import ConnectionFailed, ProviderUnavailable, SandboxError
from providers.isolation import IsolationUnmet
from providers.self_managed.hosts import Hosts
from tests.support.pool_service import provider_of
from tests.support.processes import free_port


@dataclass
class Scripted:
    """A server that does to its nth connection what the script says, and counts them."""

    script: Callable[[int, bytes], bytes | None]
    requests: list[bytes] = field(default_factory=list)

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(1 << 16)
                self.requests.append(request)
                if answer := self.script(len(self.requests), request):
                    connection.sendall(answer)

    def count(self, what: bytes) -> int:
        return sum(what in request.split(b"\r\n")[0] for request in self.requests)


def http(status: str, body: str) -> bytes:
    content = body.encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


PUSHED = http("200 OK", '{"languages": ["python"], "healthy": true}')
CREATED = http("201 Created", '{"instance_id": "i", "runtime": "runc", "template": "python"}')


def test_a_refused_connection_is_tried_as_often_as_configured() -> None:
    attempts: list[float] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") == "connect":
            attempts.append(time.monotonic())

    sys.setprofile(count)
    try:
        with (
            pytest.raises(ConnectionFailed) as raised,
            provider_of(f"http://127.0.0.1:{free_port()}", max_retries=2),
        ):
            pass
    finally:
        sys.setprofile(None)
    assert len(attempts) == 3
    assert raised.value.code == "SB003"
    assert "manage.py pool" in raised.value.message
    assert (raised.value.started, raised.value.may_fall_back) == (False, True)


def test_a_creation_whose_connection_breaks_is_tried_again() -> None:
    def script(number: int, request: bytes) -> bytes | None:
        if request.startswith(b"PUT"):
            return PUSHED
        return None if number < 4 else CREATED

    with Scripted(script) as url, provider_of(url, max_retries=3) as provider:
        assert provider.create_instance("python").instance_id == "i"


def test_creations_end_with_the_last_retry() -> None:
    server = Scripted(lambda _, request: PUSHED if request.startswith(b"PUT") else None)
    with server as url, provider_of(url, max_retries=2) as provider:
        with pytest.raises(ProviderUnavailable) as raised:
            provider.create_instance("python")
        assert raised.value.started is False
    assert server.count(b"POST /v1/instances ") == 3


@pytest.mark.parametrize(
    "answer",
    [
        None,
        http("500 Internal Server Error", "oops"),
        http("200 OK", '{"stdout": "half a result"}'),
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"no HTTP at all\r\n\r\n",
    ],
)
def test_a_run_that_may_have_started_is_never_tried_again(answer: bytes | None) -> None:
    def script(number: int, request: bytes) -> bytes | None:
        if request.startswith(b"PUT"):
            return PUSHED
        return answer if b"/run" in request.split(b"\r\n")[0] else CREATED

    server = Scripted(script)
    with server as url, provider_of(url, max_retries=3) as provider:
        instance = provider.create_instance("python")
        with pytest.raises(ProviderUnavailable) as raised:
            provider.execute_code(instance.instance_id, "print(1)", "python")
    assert (raised.value.code, raised.value.started) == ("SB009", True)
    assert server.count(b"/run") == 1


def test_a_run_that_provably_did_not_start_is_tried_again() -> None:
    refusal = http(
        "503 Service Unavailable",
        '{"error": {"code": "SB009", "message": "It is gone.", "started": false}}',
    )
    result = (
        '{"stdout": "ran", "stderr": "", "exit_code": 0, "execution_time": 0.1, "metadata": {}, '
        '"stdout_truncated": false, "stderr_truncated": false, "timed_out": false, '
        '"out_of_memory": false, "has_result": false, "result": null, "outputs": [], '
        '"output_order": null, "exception": null, '
        '"artifacts": []}'
    )
    runs: list[bytes] = []

    def script(number: int, request: bytes) -> bytes | None:
        if request.startswith(b"PUT"):
            return PUSHED
        if b"/run" not in request.split(b"\r\n")[0]:
            return CREATED
        runs.append(request)
        return refusal if len(runs) < 3 else http("200 OK", result)

    server = Scripted(script)
    with server as url, provider_of(url, max_retries=3) as provider:
        instance = provider.create_instance("python")
        answer = provider.execute_code(instance.instance_id, "print(1)", "python")
    assert answer.stdout == "ran"
    assert server.count(b"/run") == 3
    assert server.count(b"POST /v1/instances ") == 3


@pytest.mark.parametrize("code", ["SB004", "SB008", "SB009"])
def test_the_service_s_errors_keep_their_codes(code: str) -> None:
    error = f'{{"error": {{"code": "{code}", "message": "m", "started": false, "retry_after": 7}}}}'

    def script(_: int, request: bytes) -> bytes:
        return PUSHED if request.startswith(b"PUT") else http("503 Service Unavailable", error)

    server = Scripted(script)
    with (
        server as url,
        provider_of(url, max_retries=1) as provider,
        pytest.raises(SandboxError) as raised,
    ):
        provider.create_instance("python")
    assert (raised.value.code, raised.value.message) == (code, "m")
    assert raised.value.retry_after == 7
    # Of a full pool more attempts make it only fuller.
    assert server.count(b"POST /v1/instances ") == (1 if code == "SB008" else 2)


def test_gvisor_that_is_required_is_checked_in_every_instance() -> None:
    server = Scripted(lambda _, request: PUSHED if request.startswith(b"PUT") else CREATED)
    with (
        server as url,
        provider_of(url, require_gvisor=True) as provider,
        pytest.raises(ProviderUnavailable) as raised,
    ):
        provider.create_instance("python")
    assert "require_gvisor" in raised.value.message
    assert server.count(b"DELETE /v1/instances/i") == 1


@pytest.mark.parametrize(
    "weaker", ['"runtime": "runc"', '"runtime": "gvisor", "sharing": "tenant"']
)
def test_what_takes_the_place_of_a_lost_instance_is_isolated_as_that_was(weaker: str) -> None:
    """The caller has looked at the first one, and relies on it."""
    refusal = http(
        "503 Service Unavailable",
        '{"error": {"code": "SB009", "message": "It is gone.", "started": false}}',
    )
    created = ['"runtime": "gvisor", "sharing": "execution"', weaker]

    def script(number: int, request: bytes) -> bytes | None:
        line = request.split(b"\r\n")[0]
        if b"POST /v1/instances " in line:
            return http("201 Created", f'{{"instance_id": "i", "template": "x", {created.pop(0)}}}')
        return refusal if b"/run" in line else PUSHED

    server = Scripted(script)
    with server as url, provider_of(url, max_retries=3) as provider:
        instance = provider.create_instance("python")
        assert instance.metadata == {
            "runtime": "gvisor", "isolation": "gvisor", "sharing": "execution",
        }  # fmt: skip
        with pytest.raises(IsolationUnmet) as caught:
            provider.execute_code(instance.instance_id, "print(1)", "python")
    assert not caught.value.started
    assert server.count(b"/run") == 1
    assert server.count(b"DELETE") == 1


@pytest.mark.parametrize(("floor", "asked"), [("namespaces", False), ("gvisor", True)])
def test_the_service_is_asked_for_what_the_deployment_demands(
    settings: Any, floor: str, asked: bool
) -> None:
    settings.MINIMUM_ISOLATION = floor
    with Scripted(lambda _, request: PUSHED) as url, provider_of(url) as provider:
        backend = provider._backend
        assert isinstance(backend, Hosts)
        assert backend.all[0].client.config["require_gvisor"] is asked
