"""Over a pool service that stands by itself: what it keeps is found again after web processes and
it itself have ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import require
from tests.doors.codex.test_codex_approvals import approval_of, decide
from tests.doors.codex.test_codex_attacked import make_key
from tests.doors.codex.test_codex_recovery import (
    answers,
    begun,
    elsewhere,
    text_of,
    web_processes,
    write,
)
from tests.support import pool_service
from tests.support.codex_door import Client, capability_path
from tests.support.pool_service import PoolService
from tests.support.processes import free_port
from tests.support.site import Site, prepare, serving
from tests.support.waiting import wait_until


@pytest.fixture
def pool_and_site(tmp_path: Path) -> Iterator[tuple[PoolService, Site]]:
    require("bwrap")
    for name in ("pool", "again"):
        (tmp_path / name).mkdir()
    port = free_port()
    with ExitStack() as held:
        pool = held.enter_context(pool_service.running(tmp_path / "pool" / "log", port=port))
        provider = ("self_managed", {"endpoint": f"http://127.0.0.1:{port}", "pool_size": 2})
        own = {"POOL_PORT": str(port), "WEB_CONCURRENCY": "2"}
        prepared = prepare(tmp_path / "data", None, provider, POOL_PORT=str(port))
        yield pool, held.enter_context(serving(prepared, tmp_path / "log", **own))


@pytest.fixture
def again() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def test_processes_in_a_pool_service_are_found_again_and_end_with_it(
    pool_and_site: tuple[PoolService, Site], tmp_path: Path, again: ExitStack
) -> None:
    pool, site = pool_and_site
    path = capability_path(site)
    client, session_id, last = begun(site, path, "second")
    client.start("sleeps", "sleep", "300")
    make_key(site, "asking", "asking", {"ask_always": True, "draft": False})
    asking = Client(site.service, capability_path(site, "asking", "asking"))
    asking_session = asking.initialize()
    asking.start("waits", "echo", "approved")
    approval = approval_of(asking, "waits")
    for pid in web_processes(site):
        os.kill(pid, signal.SIGKILL)
    client.close()
    asking.close()
    wait_until(lambda: answers(site), 60)

    other = elsewhere(site, path, session_id)
    read = other.call("process/read", processId="reads", afterSeq=last)
    assert (read["chunks"], read["exited"]) == ([], False)
    write(other, "reads", "again\n", "2")
    assert other.output("reads") == "got again\n"
    assert other.wait_for("process/exited", "reads")["exitCode"] == 7

    # Nobody is there when it is approved: it starts once its client is.
    decide(site, approval, approve=True)
    asked = elsewhere(site, capability_path(site, "asking", "asking"), asking_session)
    asked.call("process/read", processId="waits")
    assert asked.output("waits") == "approved\n"
    asked.close()

    other.call("process/read", processId="sleeps")
    pool.service.process.kill()
    pool.service.process.wait(60)
    # Another one in its place knows nothing of what was in it.
    again.enter_context(pool_service.running(tmp_path / "again" / "log", port=pool.service.port))
    assert other.wait_for("process/exited", "sleeps")["exitCode"] == 137
    read = other.call("process/read", processId="sleeps")
    assert read["closed"]
    assert read["failure"]
    assert read["failure"] in text_of(read)
    other.close()
