"""Real processes that are killed or stopped while they run something, and what others do then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from executions.ledger.models import LedgerEntry
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution, Process
from executions.runs.orphaned_runs import Watcher
from tests.conftest import Caller, require
from tests.support.held import opened
from tests.support.processes import ROOT
from tests.support.provider_fixtures import LOCAL
from tests.support.running import activate
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

# What manage.py does, on the database of the test.
COMMAND = """
import sys
from django.conf import settings
settings.DATABASES["default"]["NAME"] = sys.argv.pop(1)
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
SLEEPS = "import time; print('began', flush=True); time.sleep(120)"

Started = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    processes = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(connection.settings_dict["NAME"]), *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SLEEPS)
    return str(path)


def running() -> Execution:
    """The execution whose code a process has handed over, once its lease was renewed with it."""
    handed_over = Execution.objects.filter(status="running", pending__isnull=True)
    wait_until(handed_over.filter(process__beat__gte=1).exists, seconds=60)
    return handed_over.get()


def closed(execution: Execution) -> bool:
    execution.refresh_from_db()
    return not execution.is_open


@pytest.fixture
def survivor() -> Iterator[Heartbeat]:
    """Another process, with the intervals of the service."""
    keeper = Heartbeat()
    keeper.begin(Process.Kind.WEB)
    yield keeper
    keeper.stop()


def assert_lost(execution: Execution, kind: str, pid: int) -> None:
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert execution.meta["process"].startswith(f"{kind}, instance ")
    assert execution.meta["process"].endswith(f", pid {pid}")
    assert execution.retryable is False
    assert LedgerEntry.objects.filter(execution_id=execution.pk).count() == 1


def test_what_a_killed_command_ran_is_closed_by_a_process_that_lives(
    local_active: None, start: Started, script: str, survivor: Heartbeat
) -> None:
    victim = start("execute", script, "--timeout", "120")
    execution = running()

    victim.kill()
    wait_until(lambda: closed(execution), seconds=60)

    assert_lost(execution, "command", victim.pid)
    dead = Process.objects.get(pid=victim.pid)
    assert dead.ended_at is not None
    assert Process.objects.get(ended_at=None).pk == survivor.mine()


def test_what_a_killed_worker_ran_is_closed_and_its_fellow_goes_on(
    local_active: None, start: Started, alice: Caller
) -> None:
    """The fellow closes it, which has nothing to run itself, and no task is needed for it."""
    opened(alice, "async", code=SLEEPS, timeout=120)
    start("qcluster", Q_WORKERS="2", Q_THREADS="1")
    execution = running()
    assert execution.process is not None
    victim = execution.process.pid

    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: closed(execution), seconds=60)

    assert_lost(execution, "worker", victim)
    assert Process.objects.filter(kind="worker", ended_at=None).exists()


def test_what_a_killed_worker_had_only_taken_is_run_by_the_next_one(
    db: None, start: Started, alice: Caller, charlie: Caller
) -> None:
    """One sandbox, and two who were promised it: of the second nothing is handed over."""
    require("bwrap")
    activate("local", LOCAL | {"pool_size": 1, "max_sandboxes": 1})
    begun = opened(alice, "async", code=SLEEPS, timeout=120)
    start("qcluster", Q_WORKERS="1", Q_THREADS="4")
    assert running().pk == begun.pk
    waits = opened(charlie, "async", code="print('ran')")
    taken = Execution.objects.filter(pk=waits.pk, status="running", pending__isnull=False)
    wait_until(taken.exists, seconds=60)
    victim = taken.select_related("process").get().process
    assert victim is not None

    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: closed(begun) and closed(waits), seconds=60)

    assert_lost(begun, "worker", victim.pid)
    assert (waits.status, waits.stdout, waits.retryable) == ("succeeded", "ran\n", False)
    assert LedgerEntry.objects.filter(execution_id=waits.pk).count() == 1


def test_a_process_that_was_stopped_ends_what_it_ran_when_it_goes_on(
    local_active: None, start: Started, script: str
) -> None:
    stopped = start("execute", script, "--timeout", "120")
    execution = running()
    first = execution.process_id
    stopped.send_signal(signal.SIGSTOP)
    try:
        watcher = Watcher(dead_seconds=3, held_seconds=3, gap_seconds=60)
        wait_until(lambda: watcher.look(None) == 1, seconds=60)
        wait_until(lambda: closed(execution), seconds=60)
        assert_lost(execution, "command", stopped.pid)
    finally:
        stopped.send_signal(signal.SIGCONT)
    output, _ = stopped.communicate(timeout=300)

    assert stopped.returncode == 125, output
    assert b"this process lost its lease" in output
    recorded = Execution.objects.get()
    assert (recorded.status, recorded.error_message) == ("error", execution.error_message)
    assert LedgerEntry.objects.filter(execution_id=execution.pk).count() == 1
    # It may have ended before it took another; if it took one, it gave that back.
    others = Process.objects.filter(pid=stopped.pid).exclude(pk=first)
    assert not others.filter(ended_at=None).exists()


def test_a_command_that_ends_gives_its_lease_back(
    local_active: None, start: Started, tmp_path: Path
) -> None:
    path = tmp_path / "short.py"
    path.write_text("print('short')")
    ends = start("execute", str(path))

    output, _ = ends.communicate(timeout=300)

    assert output.endswith(b"short\n"), output
    assert Process.objects.get(pid=ends.pid).ended_at is not None


def test_workers_that_are_told_to_stop_give_their_leases_back(start: Started) -> None:
    cluster = start("qcluster", Q_WORKERS="2", Q_THREADS="1")
    workers = Process.objects.filter(kind="worker", beat__gte=1)
    wait_until(lambda: workers.count() == 2, seconds=60)

    cluster.send_signal(signal.SIGTERM)
    output, _ = cluster.communicate(timeout=300)

    assert workers.filter(ended_at__isnull=False).count() == 2, output
    assert b"a process died" not in output


FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


@pytest.mark.parametrize("skew", ["-300", "+300"])
def test_a_sweeper_whose_clock_is_off_closes_nothing_that_lives(
    start: Started, alice: Caller, survivor: Heartbeat, skew: str, monkeypatch: Any
) -> None:
    require("faketime")
    survivor.take()
    monkeypatch.setattr("executions.runs.heartbeat._heartbeat", survivor)
    running, queued = opened(alice, timeout=1), opened(alice, "async")

    sweeper = start(
        "end_stale_executions",
        LD_PRELOAD=str(FAKETIME),
        FAKETIME=skew,
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    output, _ = sweeper.communicate(timeout=300)

    assert output == b"0 ended\n"
    for execution in (running, queued):
        assert not closed(execution)
