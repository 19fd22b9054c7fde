"""What cannot have a thread now has one later: nothing stays locked, and nothing is told twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from executions.capabilities.policies import capability
from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.ledger.checkpoints import AsyncWriter
from executions.runs import event_log, heartbeat, journal
from executions.runs.event_log import EventLog
from executions.runs.heartbeat import Heartbeat
from executions.runs.journal import start as start_journal
from executions.runs.models import Process
from executions.runs.requests import run_limits
from executions.sessions import file_events
from executions.sessions.models import Session
from providers import waiting
from providers.errors import ProviderUnavailable, RateLimited
from providers.manager import ProviderManager
from providers.models import CircuitBreaker, ProviderHealth
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.reclaim import end_later
from providers.services import breaker, health, probing
from providers.services.probing import _start as start_probe
from providers.threads import Loop
from tests.support.managers import configure, eventually, leased
from tests.support.routing import make_route
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.manager_fixtures"]

pytestmark = pytest.mark.one_database


@contextmanager
def no_thread_left() -> Iterator[None]:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_saving() -> None:
    saver = background.Executor("saver", threads=8, of_one=3)
    with no_thread_left():
        kept = [saver.submit("alice", lambda: "saved", key=number) for number in range(9)]
    kept.append(saver.submit("bob", lambda: "saved", key="another"))
    assert [future.result(60) for future in kept] == ["saved"] * 10


def test_what_comes_while_a_thread_is_there_waits_for_that() -> None:
    opens = threading.Event()
    executor = background.Executor("two", threads=2, of_one=1)
    calls = [executor.submit("alice", lambda: opens.wait(60))]
    with no_thread_left():
        calls.append(executor.submit("bob", lambda: True))
    opens.set()
    assert [each.result(60) for each in calls] == [True, True]


def test_a_process_that_nobody_can_follow_takes_no_place() -> None:
    execution = uuid4()
    with no_thread_left():
        log = EventLog(run_limits())
        assert not event_log.begin("alice", execution, bool, bool, log)
    assert (event_log.has(execution), event_log.shares.of("alice")) == (False, 0)


def test_a_folder_that_nobody_can_watch_takes_no_place() -> None:
    with no_thread_left(), pytest.raises(RateLimited, match="thread"):
        run_sync(file_events.watch_folder(Session(tenant_slug="alice"), ""))
    assert file_events._listeners.of("alice") == 0


def test_work_that_nobody_waits_for() -> None:
    done = threading.Event()
    with no_thread_left():
        assert background.run_once_in_background("counting", done.set) is None
    assert background.run_once_in_background("counting", done.set)
    assert done.wait(60)


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "process_figures", lambda: {"found": 1})
    monkeypatch.setattr(heartbeat, "_latest", {})
    with no_thread_left():
        assert heartbeat.latest_figures() == {}
    wait_until(lambda: heartbeat.latest_figures() == {"found": 1}, seconds=60)


def test_checkpoints() -> None:
    """The commit goes on, and the next entry has it written."""
    written: list[int] = []

    def write(point: Any, previous: Any) -> bool:
        written.append(point.sequence)
        return True

    behind = AsyncWriter(write, every=1000)
    with no_thread_left():
        behind.note(SimpleNamespace(sequence=1), None)
    behind.note(SimpleNamespace(sequence=2), None)
    wait_until(lambda: written == [2], seconds=60)


def test_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = threading.Event()
    monkeypatch.setattr(journal, "_loop", Loop("journal", worked.set))
    with no_thread_left():
        start_journal()
    assert not worked.is_set()
    start_journal()
    assert worked.wait(60)


@pytest.mark.django_db(transaction=True)
def test_a_lease_that_nobody_would_renew_is_not_taken() -> None:
    keeper = Heartbeat(beat_seconds=0.02, look_seconds=0.01)
    with no_thread_left(), pytest.raises(RateLimited, match="thread"):
        keeper.take()
    lease = keeper.take()
    wait_until(lambda: Process.objects.get(pk=lease).beat > 1, seconds=60)
    keeper.stop()


def test_deadlines() -> None:
    deadlines = waiting._Deadlines()
    first, second = Future[None](), Future[None]()
    with no_thread_left():
        deadlines.add(0.01, waiting._Awaited(first))
    deadlines.add(0.02, waiting._Awaited(second))
    for future in (first, second):
        with pytest.raises(DeadlinePassed):
            future.result(60)


def test_deadlines_go_on_after_the_end_of_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = waiting._Deadlines()
    broken, future = waiting._Awaited(Future()), Future[None]()
    monkeypatch.setattr(broken, "give_up", lambda: 1 / 0)
    deadlines.add(0.0, broken)
    assert deadlines._thread is not None
    deadlines._thread.join(60)
    deadlines.add(0.01, waiting._Awaited(future))
    with pytest.raises(DeadlinePassed):
        future.result(60)


def test_a_wait_for_what_was_cancelled_ends() -> None:
    source = Future[None]()
    waiter = waiting.within(3600, source)
    assert source.cancel()
    with pytest.raises(CancelledError):
        waiter.result(60)


def test_a_call_to_a_service_is_not_made() -> None:
    with no_thread_left(), pytest.raises(RateLimited, match="thread"):
        call_within(5, lambda: pytest.fail("it was made"))


def test_a_look_at_code_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "look", lambda code, rules: ("looked", []))
    with no_thread_left():
        for _ in range(capability.OF_ONE_TENANT + 1):
            with pytest.raises(RateLimited, match="thread"):
                capability.submit_look("1", {}, "alice")
    assert capability.submit_look("1", {}, "alice").result(60) == ("looked", [])


def test_what_could_not_be_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with no_thread_left(), caplog.at_level(logging.WARNING):
        end_later(lambda: True, "sandbox-1")
    assert [record.sandbox for record in caplog.records] == ["sandbox-1"]  # type: ignore[attr-defined]


@pytest.mark.django_db
def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = threading.Event()
    monkeypatch.setattr(probing, "_decide", lambda provider_id: decided.set())
    monkeypatch.setattr(probing, "_start", start_probe)
    with no_thread_left():
        assert not probing.doubt("ill")
    CircuitBreaker.objects.update(probed_at=None)
    assert probing.doubt("ill")
    assert decided.wait(60)
    probing._end("ill")


@pytest.mark.django_db
def test_checks_of_providers(services: object) -> None:
    """None is taken out of service for it, and each is looked at again."""
    make_route("e2b", "aliyun_codeinterpreter")
    with no_thread_left():
        for _ in range(breaker.THRESHOLD + 1):
            assert health.check_all() == 0
    said = ProviderHealth.objects.values_list("message", flat=True)
    assert all("no thread left" in message for message in said)
    assert not CircuitBreaker.objects.exclude(state="closed", failed_checks=0).exists()
    assert health.check_all() == 2


@pytest.mark.django_db(transaction=True)
def test_a_start_that_nobody_waits_for(probe: Any) -> None:
    manager = ProviderManager(check_seconds=0, retry_seconds=0)
    configure()
    refused = pytest.raises(ProviderUnavailable, match="thread")
    with no_thread_left(), refused, manager.lease(wait=False):
        pass
    assert leased(manager)[0] == 1
    manager.close()


@pytest.mark.django_db(transaction=True)
def test_a_provider_that_was_replaced_is_closed(manager: ProviderManager, probe: Any) -> None:
    configure()
    leased(manager)
    former = probe.started[0]
    with no_thread_left():
        configure(size=9)
        assert eventually(lambda: leased(manager)[0] == 2)
    assert former in probe.closed
