"""Many executions over three providers that fail at random, and every one accounted for."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection

from executions.runs.models import Execution
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.service import execute_sync
from providers.errors import CreationFailed
from providers.local.provider import LocalProvider, LocalSandbox
from providers.models import CircuitBreaker
from providers.services import breaker, save_config
from providers.values import Emit, Job, SandboxSpec
from tests.conftest import Caller as ApiCaller
from tests.conftest import require
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.routing import make_route
from tests.support.wire_server import WireServer, eventually

EXECUTIONS = 400
CALLERS = 8
FAULTS = {
    "create": ("401", "429", "500", "503", "cut", "truncated", "bad_json"),
    "execute": ("404", "429", "500", "503", "cut", "truncated", "bad_json", "lost", "dead"),
    "kill": ("500",),
    "delete": ("500",),
}
TERMINAL = {"succeeded", "failed", "error"}


class Moody:
    """Fails one request in `one_in`, with whatever fault the operation knows."""

    def __init__(self, seed: int, one_in: int = 8) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._one_in = one_in
        self.ordered = 0

    def __call__(self, operation: str) -> str | None:
        with self._lock:
            if operation not in FAULTS or self._random.randrange(self._one_in):
                return None
            self.ordered += 1
            return self._random.choice(FAULTS[operation])


class CountedLocal:
    """The local provider, counting what it is handed, and failing to start now and then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executed: Counter[str] = Counter()
        self.served = 0
        moods = random.Random(3)
        lock = threading.Lock()
        open_one = LocalProvider.submit_open
        run = LocalSandbox.submit_run

        def counted_open(provider: LocalProvider, spec: SandboxSpec, owner: str) -> Any:
            if owner and not moods.randrange(8):
                raise CreationFailed("A fault of the test.")
            return open_one(provider, spec, owner)

        def counted_run(sandbox: LocalSandbox, job: Job, emit: Emit | None = None) -> Any:
            # What the servers run in here begins with the kernel, and they count it themselves.
            if job.code.startswith("print('run-token-"):
                with lock:
                    self.executed[job.code.split("'")[1].removeprefix("run-token-")] += 1
            return run(sandbox, job, emit)

        monkeypatch.setattr(LocalProvider, "submit_open", counted_open)
        monkeypatch.setattr(LocalSandbox, "submit_run", counted_run)


def settle(server: WireServer) -> None:
    server.fault = lambda operation: None


@pytest.mark.only_on("postgresql")
@pytest.mark.django_db(transaction=True)
def test_many_executions_with_random_faults(
    alice: ApiCaller,
    e2b_server: E2BServer,
    aliyun_server: AgentRunServer,
    services: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("bwrap")
    # So often that it is no chance any more whether one of the tries meets no fault.
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.2, 1.0, 2.0, 4.0))
    # Out of service for so long that the others get their share, and back again all the time.
    monkeypatch.setattr(breaker, "RETRY_AFTER", breaker.RETRY_AFTER / 50)
    save_config("local", {"launcher": "bubblewrap", "pool_size": 2, "queue_timeout": 30})
    make_route("e2b", "aliyun_codeinterpreter", "local", strategy="weighted")
    local = CountedLocal(monkeypatch)
    e2b_server.fault, aliyun_server.fault = Moody(1), Moody(2)
    caller = Caller(alice.tenant, alice.api_key)

    def execute(number: int) -> str:
        try:
            request = ExecutionRequest(f"print('run-token-{number}')", timeout=30)
            return str(execute_sync(request, caller).execution.pk)
        finally:
            connection.close()

    with ThreadPoolExecutor(CALLERS) as threads:
        ids = list(threads.map(execute, range(EXECUTIONS)))

    assert len(set(ids)) == EXECUTIONS
    records = list(Execution.objects.all())
    assert {str(record.pk) for record in records} == set(ids)
    assert {record.status for record in records} <= TERMINAL
    assert all(record.finished_at for record in records)

    ran = e2b_server.executed + aliyun_server.executed + local.executed
    assert max(ran.values()) == 1, [token for token, times in ran.items() if times > 1]
    succeeded = [record for record in records if record.status == "succeeded"]
    for record in succeeded:
        token = record.code.split("'")[1].removeprefix("run-token-")
        assert (record.stdout, ran[token]) == (f"run-token-{token}\n", 1)
        assert record.hops[-1] == {
            **record.hops[-1],
            "provider": record.provider,
            "outcome": "served",
        }
    for record in records:
        if record.retryable:
            assert ran[record.code.split("'")[1].removeprefix("run-token-")] == 0

    assert e2b_server.fault.ordered + aliyun_server.fault.ordered > 40  # type: ignore[attr-defined]
    by_provider = Counter(record.provider for record in succeeded)
    assert set(by_provider) == {"e2b", "aliyun_codeinterpreter", "local"}
    assert len(succeeded) > EXECUTIONS / 2
    assert any(len(record.hops) > 1 for record in succeeded)
    assert CircuitBreaker.objects.filter(provider_id="e2b").exists()

    for server in (e2b_server, aliyun_server):
        settle(server)
    from providers.leases import close_all

    close_all()
    assert eventually(lambda: not e2b_server.sandboxes and not aliyun_server.sandboxes, 60), (
        [sandbox.metadata for sandbox in e2b_server.sandboxes.values()],
        list(aliyun_server.sandboxes),
    )
    print(f"\n{by_provider}, {Counter(record.status for record in records)}")
