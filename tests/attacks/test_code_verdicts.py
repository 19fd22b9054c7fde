"""Code that makes its failure look like the provider's, to take that from everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from providers.leases import close_all
from providers.models import CircuitBreaker
from providers.runtime.launchers.docker_engine import End
from providers.runtime.pool.hardening import Hardening
from providers.services import save_config
from providers.values import SANDBOX_ENDED, ExecutionResult
from tests.conftest import Caller, require
from tests.support.docker_engine import Containers
from tests.support.pool_service import running
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import LOCAL, run
from tests.support.sandboxes import Local

pytestmark = pytest.mark.one_database

FORK_BOMB = "import os\nwhile True: os.fork()"
QUIET_FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
THREAD_BOMB = """
import _thread, time
while True:
    try: _thread.start_new_thread(time.sleep, (60,))
    except RuntimeError: pass
"""
MEMORY_BOMB = "held = []\nwhile True: held.append(bytearray(8 << 20))"
FORKED_MEMORY_BOMB = "import os\nfor _ in range(5): os.fork()\n" + MEMORY_BOMB

CLOSED_FOLDER = """
import os
os.mkdir("artifacts/closed")
for name in ("artifacts/closed/x", "artifacts/sound.txt"):
    open(name, "w").write("x")
os.chmod("artifacts/closed", 0o444)
"""
FORGED_ADVICE = """
import json, os, struct
for remarks in (float("nan"), [[1, 2]], {}, [[1, "\\ud800", "x"]], "x" * 200_000):
    text = json.dumps({"type": "advice", "remarks": remarks, "parts": []}).encode()
    os.write(4, struct.pack(">I", len(text)) + text)
"""
STARVED_SUPERVISOR = "import resource\nresource.prlimit(1, resource.RLIMIT_AS, (0, 0))"


@pytest.mark.django_db
def test_fork_bombs_push_nobody_from_gvisor_to_bubblewrap(
    alice: Caller, charlie: Caller, tmp_path: Path, doubted: list[str]
) -> None:
    """The route has a weaker provider behind the strong one, for when that is out."""
    require("runsc")
    save_config("local", {"launcher": "gvisor", "gvisor_platform": "ptrace", "pool_size": 1})
    try:
        with running(tmp_path / "log") as pool:
            save_config("self_managed", {"endpoint": pool.url, "pool_size": 1})
            make_route("local", "self_managed")
            for code in (FORK_BOMB, FORK_BOMB, FORK_BOMB, QUIET_FORK_BOMB):
                answer = run(alice, code, timeout=15).json()
                assert answer["status"] in ("failed", "out_of_memory", "timed_out"), answer
                assert hops(last_execution()) == ["local served"]
            answer = run(charlie, "print('undisturbed')").json()
    finally:
        close_all()
    assert (answer["provider"], answer["isolation"]) == ("local", "gvisor")
    assert answer["stdout"] == "undisturbed\n"
    assert not CircuitBreaker.objects.exclude(failures=0, state="closed").exists()


@pytest.mark.django_db
@pytest.mark.parametrize("code", [CLOSED_FOLDER, FORGED_ADVICE, STARVED_SUPERVISOR])
def test_what_breaks_the_supervisor_opens_no_breaker(
    alice: Caller, charlie: Caller, code: str
) -> None:
    require("bwrap")
    save_config("local", LOCAL)
    make_route("local")
    try:
        for _ in range(4):
            answer = run(alice, code).json()
            assert answer["status"] in ("succeeded", "failed"), answer
            assert SANDBOX_ENDED not in last_execution().meta
        assert run(charlie, "print(1)").json()["stdout"] == "1\n"
    finally:
        close_all()
    assert not CircuitBreaker.objects.exclude(failures=0, state="closed").exists()


def under_local_gvisor(local: Local, code: str) -> ExecutionResult:
    return local.survive(code, timeout=60)


def assert_memory(result: ExecutionResult) -> None:
    assert (result.out_of_memory, result.timed_out, result.exit_code) == (True, False, None)


# With the seconds it may take: those of which the last two are bounded by nothing else.
FORK_BOMBS = [(FORK_BOMB, 8), (FORK_BOMB, 8), (QUIET_FORK_BOMB, 2), (THREAD_BOMB, 2)]

TOO_MANY = "It had more processes or threads than it may have"
UNCOUNTED = "The engine saw it end with exit code 2"


def assert_bounded(result: ExecutionResult) -> None:
    """Ended for memory, time or its number, or by the program's own error at that limit."""
    if result.out_of_memory or result.timed_out:
        return
    if result.exit_code == 137:
        assert result.metadata[SANDBOX_ENDED] == TOO_MANY
    else:
        assert result.exit_code == 1
        assert "BlockingIOError" in result.stderr or "Resource temporarily" in result.stderr


def test_memory_bombs_under_gvisor_are_told_as_such_every_time(gvisor: Local) -> None:
    for code in (MEMORY_BOMB, MEMORY_BOMB, FORKED_MEMORY_BOMB):
        assert_memory(under_local_gvisor(gvisor, code))


def test_fork_bombs_under_gvisor_are_told_as_such_every_time(gvisor: Local) -> None:
    for code, seconds in FORK_BOMBS:
        assert_bounded(gvisor.run(code, timeout=seconds))


@pytest.mark.slow
def test_memory_bombs_in_containers_under_gvisor_are_told_too(under_gvisor: Containers) -> None:
    for code in (MEMORY_BOMB, MEMORY_BOMB, FORKED_MEMORY_BOMB):
        assert_memory(under_gvisor.run(code, timeout=30))


@pytest.mark.slow
def test_fork_bombs_in_containers_under_gvisor_are_told_too(under_gvisor: Containers) -> None:
    for code, seconds in FORK_BOMBS:
        assert_bounded(under_gvisor.run(code, timeout=seconds))


def test_a_container_that_reaches_the_engines_limit_is_told_as_such(
    under_gvisor: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole kernel ends then, and takes along the group in which that is counted. A host that
    is too busy to read the group before sees the end alone, so there are several tries."""
    few = {**under_gvisor.launcher._hardening.settings, "extra_processes": 64}
    monkeypatch.setattr(under_gvisor.launcher, "_hardening", Hardening(few))
    ends = []
    while TOO_MANY not in ends and len(ends) < 6:
        result = under_gvisor.run(FORK_BOMB, timeout=20, memory_bytes=1 << 30)
        assert result.exit_code == 137
        ends.append(result.metadata.get(SANDBOX_ENDED))
    assert set(ends) <= {TOO_MANY, UNCOUNTED}
    assert TOO_MANY in ends


def test_memory_is_told_where_the_engine_did_not_notice(under_gvisor: Containers) -> None:
    """It notes the reason only where it learned of it before the end."""
    sandbox = under_gvisor.start()
    guest: Any = sandbox._guest
    end_of = guest._ask_the_engine

    async def unaware() -> End:
        await end_of()
        return End(False, 2)

    guest._ask_the_engine = unaware
    try:
        assert_memory(under_gvisor.run_in(sandbox, MEMORY_BOMB, timeout=30))
    finally:
        under_gvisor.loop.call(sandbox.destroy())


@pytest.mark.parametrize("code", [CLOSED_FOLDER, FORGED_ADVICE, STARVED_SUPERVISOR])
def test_containers_survive_what_breaks_a_supervisor(containers: Containers, code: str) -> None:
    result = containers.run(code)
    assert SANDBOX_ENDED not in result.metadata
    assert result.exit_code == (1 if code is STARVED_SUPERVISOR else 0), result.stderr


def test_without_our_filter_the_supervisor_is_out_of_reach_all_the_same(engine: Any) -> None:
    containers = Containers("runc", filter_system_calls=False)
    try:
        result = containers.run(STARVED_SUPERVISOR)
        assert (result.exit_code, "PermissionError" in result.stderr) == (1, True)
        assert containers.run("import resource; print(1)").stdout == "1\n"
    finally:
        containers.close()
