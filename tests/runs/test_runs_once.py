"""Whatever fails in a provider's life, code runs once, and what it has done is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executions.runs.models import Execution
from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.e2b.provider import E2BProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
    before_the_code,
)
from providers.leases import close_all, lease_of
from providers.local.provider import LocalProvider
from providers.manager import manager
from providers.models import CircuitBreaker
from providers.remote.base import RemoteProvider
from providers.services import breaker, save_config
from tests.conftest import Caller
from tests.runs.outside import Outside, PoolProxy, pool_service
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.notebook import Notebook
from tests.support.remote_providers import aliyun_config, e2b_config
from tests.support.routing import last_execution, make_route
from tests.support.running import run
from tests.support.service_here import services
from tests.support.wire_server import WireServer

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

# What hangs comes last: the waits are shorter from there on.
FAULTS = ("401", "404", "429", "500", "503", "cut", "bad_json", "hang")
RAN = ("lost", "dead", "truncated", "ran 401", "ran 404", "ran 429", "ran 503")
AT_THE_RUN = (*RAN, *FAULTS)


@dataclass
class World:
    """Every service, each with code that is seen from outside, and a file that counts its runs."""

    outside: Outside
    e2b: E2BServer
    aliyun: AgentRunServer
    pool: PoolProxy


@pytest.fixture
def world(
    db: None, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    settings.SANDBOX_LOCAL_UNISOLATED = True
    settings.MINIMUM_ISOLATION = "none"
    settings.DATA_DIR = tmp_path / "data"
    settings.DATA_DIR.mkdir()
    monkeypatch.setattr(Notebook, "outside", tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("providers.remote.sandbox.COLLECT_SECONDS", 3)
    monkeypatch.setattr("providers.self_managed.client.SLACK_SECONDS", 10.0)
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))
    manager.close()
    with pool_service(tmp_path) as url:
        e2b, aliyun = E2BServer(), AgentRunServer()
        pool = PoolProxy(url)
        save_config("e2b", e2b_config(e2b))
        save_config("aliyun_codeinterpreter", aliyun_config(aliyun))
        save_pool_config(pool, queue_timeout=10)
        save_config("local", {"launcher": "bubblewrap", "pool_size": 1})
        yield World(Outside(tmp_path), e2b, aliyun, pool)
        close_all()
        manager.close()
        for server in (e2b, aliyun, pool):
            server.close()


def save_pool_config(pool: PoolProxy, queue_timeout: int) -> None:
    given = {"endpoint": pool.url, "pool_size": 1, "max_retries": 1}
    save_config("self_managed", {**given, "queue_timeout": queue_timeout})


def shorten_waits(monkeypatch: pytest.MonkeyPatch, provider: str, *, is_other_next: bool) -> None:
    """Wait only briefly for the provider that hangs, and for the next one as long as it needs."""
    monkeypatch.setattr("providers.self_managed.client.SLACK_SECONDS", 2.0)
    seconds = 1 if is_other_next else 3
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", seconds)
    next_one = (
        E2BProvider if provider == "aliyun_codeinterpreter" else AliyunCodeInterpreterProvider
    )
    open_sandbox = next_one.open

    def open_patiently(self: RemoteProvider, *args: Any) -> Any:
        monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 30)
        return open_sandbox(self, *args)

    monkeypatch.setattr(next_one, "open", open_patiently)


SERVERS = {"e2b": "e2b", "aliyun_codeinterpreter": "aliyun", "self_managed": "pool"}

LIVES = [
    ("e2b", "create", FAULTS),
    ("e2b", "MakeDir", FAULTS),
    ("e2b", "write", FAULTS),
    ("e2b", "execute", AT_THE_RUN),
    ("e2b", "ListDir", FAULTS),
    ("e2b", "read", FAULTS),
    ("e2b", "kill", FAULTS),
    ("aliyun_codeinterpreter", "create", FAULTS),
    ("aliyun_codeinterpreter", "upload", FAULTS),
    ("aliyun_codeinterpreter", "execute", AT_THE_RUN),
    ("aliyun_codeinterpreter", "delete", FAULTS),
    ("self_managed", "create", FAULTS),
    ("self_managed", "run", AT_THE_RUN),
    ("self_managed", "destroy", FAULTS),
]

# No such folder, and a file that holds what no JSON is.
PLAUSIBLE = (("ListDir", "404"), ("read", "bad_json"))

FILES = [{"path": "given", "content_base64": "eA=="}]


# Of the services whose code is not ours one is tried at every step, the other at the run.
SLOW = [life for life in LIVES if life[0] == "aliyun_codeinterpreter" and life[1] != "execute"]


@pytest.mark.parametrize(
    ("provider", "operation", "faults"),
    [pytest.param(*life, marks=pytest.mark.slow if life in SLOW else ()) for life in LIVES],
    ids=lambda value: value if type(value) is str else "",
)
def test_code_runs_once_whatever_fails(
    world: World,
    alice: Caller,
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    operation: str,
    faults: tuple[str, ...],
) -> None:
    others = [name for name in ("aliyun_codeinterpreter", "e2b") if name != provider]
    make_route(provider, others[0])
    server: WireServer = getattr(world, SERVERS[provider])
    is_run = operation in ("execute", "run")
    if (provider, operation) == ("self_managed", "create"):
        # A client keeps how long it waits for a sandbox.
        monkeypatch.setattr("providers.self_managed.client.SLACK_SECONDS", 1.0)
        save_pool_config(world.pool, queue_timeout=1)
    for fault in faults:
        # Where the run hangs its time is waited for.
        seconds = 2 if is_run else 30
        if fault == "hang":
            is_other_next = not is_run and operation not in ("ListDir", "read")
            shorten_waits(monkeypatch, provider, is_other_next=is_other_next)
        CircuitBreaker.objects.all().delete()
        breaker.forget()
        server.fail(operation, *[fault] * 3)
        body = {"files": FILES, "timeout": seconds, "idempotency_key": f"key {fault}"}
        first = run(alice, world.outside.code(), **body).json()
        execution = last_execution()
        again = run(alice, world.outside.code(), **body).json()
        server._ordered.clear()
        runs = world.outside.taken()
        told = (fault, first, execution.hops)
        assert runs <= 1, told
        for answer in (first, again):
            if answer.get("status") == "succeeded":
                assert (runs, answer["stdout"]) == (1, "done\n"), told
        if is_run:
            assert execution.provider == provider, told
            assert not execution.retryable, told
        else:
            # Before the run another one serves, and after it there is a result.
            assert first.get("status") == "succeeded", told
        if operation in ("ListDir", "read"):
            assert execution.provider == "e2b", told
            is_plausible = (operation, fault) in PLAUSIBLE
            assert is_plausible != bool(execution.meta.get("artifacts_skipped")), told


def test_what_was_collected_before_a_failure_is_kept(world: World, alice: Caller) -> None:
    make_route("e2b")
    world.e2b.fail("read", "429")
    code = world.outside.code("with open('artifacts/other.txt', 'w') as file: file.write('x')")
    answer = run(alice, code).json()
    assert (answer["status"], answer["stdout"]) == ("succeeded", "done\n")
    assert [artifact["name"] for artifact in answer["artifacts"]] == ["other.txt"]
    [[name, reason]] = last_execution().meta["artifacts_skipped"]
    assert (name, reason[:5]) == ("left.txt", "SB008")


def test_a_sandbox_that_dies_before_the_code_costs_nothing(
    world: World, alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    make_route("local", "e2b")
    with lease_of("local") as lease:
        provider = lease.provider
        assert isinstance(provider, LocalProvider)
        create = provider.submit_open

        def create_and_kill(*args: Any, **options: Any) -> Any:
            future = create(*args, **options)
            future.result(60)
            service = services[settings.DATA_DIR]
            (sandbox,) = service.pool._busy
            os.kill(sandbox._guest._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            service.loop.call(_ended(sandbox))
            return future

        monkeypatch.setattr(provider, "submit_open", create_and_kill)
        answer = run(alice, world.outside.code()).json()
    assert (answer["status"], answer["provider"]) == ("succeeded", "e2b")
    assert world.outside.taken() == 1


async def _ended(sandbox: Any) -> None:
    await sandbox.closed


def test_a_sandbox_that_dies_with_the_code_is_that_runs_end(world: World, alice: Caller) -> None:
    make_route("local", "e2b")
    code = world.outside.code("import os, signal", "os.kill(os.getppid(), signal.SIGKILL)")
    answer = run(alice, code, idempotency_key="k").json()
    assert (answer["status"], answer["provider"]) == ("failed", "local")
    assert run(alice, code, idempotency_key="k").json()["id"] == answer["id"]
    assert world.outside.taken() == 1


ERRORS: list[SandboxError] = [
    ConnectionFailed("x"),
    RateLimited("x"),
    ProviderUnavailable("x"),
    InvalidConfiguration("x"),
]


def raising(error: BaseException) -> Any:
    def action() -> Any:
        raise error

    return action


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_a_provider_that_says_nothing_of_it_is_taken_to_have_started(
    liar: Liar, world: World, alice: Caller, error: SandboxError
) -> None:
    """An error has `started` False unless somebody thinks of it, and that is no proof."""
    make_route("liar", "e2b")
    error.started = False
    liar.does("run", raising(error))
    assert run(alice, world.outside.code()).status_code >= 400
    assert (last_execution().provider, last_execution().retryable) == ("liar", False)
    assert world.outside.taken() == 0


def test_a_provider_that_proves_that_nothing_ran_is_believed(
    liar: Liar, world: World, alice: Caller
) -> None:
    make_route("liar", "e2b")

    def refuse() -> None:
        with before_the_code():
            raise ConnectionFailed("no room for its files")

    liar.does("run", refuse)
    assert run(alice, world.outside.code()).json()["provider"] == "e2b"
    assert world.outside.taken() == 1
    assert Execution.objects.count() == 1
