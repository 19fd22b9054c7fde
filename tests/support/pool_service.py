"""Starting the real pool service for a test, and talking to it."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.required import require

CODE = "print('ran')"
# In a process that is found by its command line.
SLEEP = "import subprocess\nprint('begun', flush=True)\nsubprocess.run(['sleep', '60'])"


# `manage.py` with constants of its modules, which are given as JSON, set to other values.
_WITH_CONSTANTS = """
import importlib, json, runpy, sys
for name, value in json.loads(sys.argv.pop(1)).items():
    module, _, constant = name.rpartition(".")
    found = importlib.import_module(module)
    getattr(found, constant)
    setattr(found, constant, value)
sys.argv[0] = "manage.py"
runpy.run_path("manage.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: Mapping[str, str]


class PoolService:
    """A running `manage.py pool`."""

    def __init__(self, service: Service, token: str = "", data_dir: Path = Path()) -> None:
        self.service = service
        self.data_dir = data_dir
        self.url = service.url
        self.token = token

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, **headers: str
    ) -> Answer:
        """One request. `body` is sent as JSON, or as it is when it is bytes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        request.add_header("Content-Type", "application/json")
        if given := self.token if token is None else token:
            request.add_header("Authorization", f"Bearer {given}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return _answer(answer.status, answer.read(), answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.read(), error.headers)

    def create(self, template: str = "python", owner: str = "alice") -> str:
        answer = self.ask("POST", "/v1/instances", {"template": template, "owner": owner})
        assert answer.status == 201, answer
        return str(answer.body["instance_id"])

    def run(self, instance_id: str, code: str = CODE, **job: Any) -> Answer:
        body = {"language": "python", "timeout": 60, "code": code, **job}
        return self.ask("POST", f"/v1/instances/{instance_id}/run", body)

    def ragflow(self, code: str, **body: Any) -> Answer:
        """RAGFlow's request."""
        encoded = base64.b64encode(code.encode()).decode()
        return self.ask("POST", "/run", {"code_b64": encoded, "language": "python", **body})

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/v1/stats").body
        return found

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60) -> None:
        """Until the service's figures fulfil the condition."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)

    def wait_until_it_sleeps(self) -> None:
        """Until the code SLEEP has begun: a sandbox counts as busy before it has any."""
        self.service.find(lambda line: line == "sleep 60")

    def wait_until_healthy(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while True:
            assert self.service.process.poll() is None, self.service.output
            try:
                if self.ask("GET", "/healthz").status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < deadline, self.service.output
            time.sleep(0.02)

    def terminate(self) -> tuple[int, float]:
        """Exit code and seconds after a SIGTERM."""
        self.service.look()
        self.service.process.send_signal(signal.SIGTERM)
        return self.service.wait_for_end()


def _answer(status: int, content: bytes, headers: Any) -> Answer:
    return Answer(status, json.loads(content) if content else None, dict(headers))


def manage(constants: Mapping[str, object] | None) -> list[str]:
    """The command of `manage.py`, with module constants by their full names, set as they are
    given: a time that would be waited for is as short as a test can have it.
    """
    if constants is None:
        return [sys.executable, "manage.py"]
    return [sys.executable, "-c", _WITH_CONSTANTS, json.dumps(constants)]


def running(
    log: Path,
    *arguments: str,
    port: int | None = None,
    data_dir: Path | None = None,
    constants: Mapping[str, object] | None = None,
    **extra: str,
) -> AbstractContextManager[PoolService]:
    """`manage.py pool` with these arguments and this environment, healthy."""
    command = [*manage(constants), "pool", "--launcher", "bubblewrap"]
    return _running(log, [*command, *arguments], port, data_dir or log.parent / "data", extra)


def running_as(log: Path, command: list[str]) -> AbstractContextManager[PoolService]:
    """A command that is `manage.py pool` in other circumstances, healthy."""
    return _running(log, command, None, log.parent / "data", {})


@contextmanager
def _running(
    log: Path, command: list[str], port: int | None, data_dir: Path, extra: Mapping[str, str]
) -> Iterator[PoolService]:
    require("bwrap")
    port = port or free_port()
    environment = clean_environment(data_dir, PORT=str(port), **extra)
    command = [*command, "--port", str(port)]
    with started(command, environment, ROOT, log) as service:
        pool = PoolService(service, extra.get("POOL_TOKEN", ""), data_dir)
        pool.wait_until_healthy()
        yield pool


@contextmanager
def over_docker(
    port: int, log: Path, constants: Mapping[str, object] | None = None, **extra: str
) -> Iterator[PoolService]:
    """`manage.py pool` with containers of the engine that DOCKER_HOST names, healthy."""
    environment = clean_environment(
        log.parent / "data",
        PORT=str(port),
        DOCKER_HOST=os.environ["DOCKER_HOST"],
        SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1",
        **extra,
    )
    command = [*manage(constants), "pool", "--launcher", "docker", "--port", str(port)]
    with started(command, environment, ROOT, log) as service:
        pool = PoolService(service)
        pool.wait_until_healthy(60)
        yield pool


def assert_error(answer: Answer, status: int, code: str, **expected: Any) -> None:
    assert answer.status == status, answer
    assert answer.body["error"]["code"] == code
    assert set(answer.body["error"]) == {"code", "message", "field", "started", "retry_after"}
    for name, value in expected.items():
        assert answer.body["error"][name] == value


@contextmanager
def provider_of(endpoint: str, **config: Any) -> Iterator[SelfManagedProvider]:
    provider = SelfManagedProvider()
    chosen = SelfManagedProvider.check_config({"endpoint": endpoint, "pool_size": 2, **config})
    provider.initialize(chosen)
    try:
        yield provider
    finally:
        provider.close()


def name_of(sandbox: KeptSandbox) -> str:
    """What its service calls a kept sandbox, without its host."""
    return sandbox.ref.rpartition(".")[2]


def disconnected_run(pool: PoolService, instance_id: str, code: str) -> socket.socket:
    """A connection that has sent a run and does not read the answer."""
    body = json.dumps({"code": code, "language": "python", "timeout": 60}).encode()
    host, port = pool.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"POST /v1/instances/{instance_id}/run HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection
