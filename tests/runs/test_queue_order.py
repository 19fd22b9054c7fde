"""Whose queued execution is next: by turns between tenants, within their bounds, each once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from executions.runs.models import Execution
from executions.runs.queue import claim_next
from executions.runs.worker import Runner
from executions.tenants.quotas import tenant_lock
from tests.conftest import Caller
from tests.support.held import bounded, ended, opened
from tests.support.running import run_queued

pytestmark = pytest.mark.database


def served(number: int) -> list[str]:
    """Whose were run, when each ends before the next is taken."""
    names = []
    for _ in range(number):
        execution = claim_next()
        assert execution is not None
        names.append(execution.tenant_slug)
        ended(execution)
    return names


def test_another_tenants_first_job_waits_for_one_and_not_for_sixty(
    alice: Caller, charlie: Caller
) -> None:
    for _ in range(60):
        opened(alice, "async")
    served(1)
    for _ in range(3):
        opened(charlie, "async")

    assert served(7) == [*(["elsewhere", "wonderland"] * 3), "wonderland"]


def test_of_several_processes_each_makes_a_newcomer_wait_for_one(
    alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[dict[str, int]] = [{}, {}, {}]
    order = []

    def serve(turns: dict[str, int]) -> None:
        monkeypatch.setattr("executions.runs.queue._turns", turns)
        order.extend(served(1))

    for _ in range(30):
        opened(alice, "async")
    for turns in processes:
        serve(turns)
    for _ in range(6):
        opened(charlie, "async")
    for turns in processes * 4:
        serve(turns)

    waited_for = order[3:].index("elsewhere")
    assert waited_for <= len(processes)
    assert order[3:].count("elsewhere") == 6


def test_who_runs_least_is_served_first(alice: Caller, charlie: Caller) -> None:
    for _ in range(4):
        opened(alice, "async")
        opened(charlie, "async")
    for _ in range(2):
        opened(alice, "sync")

    claimed = [claim_next() for _ in range(4)]

    names = [execution.tenant_slug for execution in claimed if execution]
    assert names[:2] == ["elsewhere", "elsewhere"]
    assert sorted(names[2:]) == ["elsewhere", "wonderland"]


def test_a_tenants_own_are_run_in_their_order_and_each_once(alice: Caller) -> None:
    queued = [opened(alice, "async").pk for _ in range(5)]

    claimed = [claim_next() for _ in range(6)]

    assert [execution.pk if execution else None for execution in claimed] == [*queued, None]


def test_what_is_beyond_the_bound_waits_for_its_room(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    bounded(alice, max_running=2)
    running = [opened(alice) for _ in range(2)]
    waiting = opened(alice, "async")
    other = opened(charlie, "async")

    outcome = run_queued()

    assert outcome is not None
    assert outcome.execution.pk == other.pk
    assert run_queued() is None
    waiting.refresh_from_db()
    assert waiting.status == "queued"
    ended(running[0])
    done = run_queued()
    assert done is not None
    assert (done.execution.pk, done.execution.status) == (waiting.pk, "succeeded")


def test_a_request_that_cannot_be_read_ends_and_holds_up_nobody(
    scripted: object, alice: Caller, charlie: Caller, settings: Any
) -> None:
    unreadable = opened(alice, "async")
    settings.FERNET_KEYS = ["another key entirely"]
    fine = opened(charlie, "async")

    for _ in range(2):
        run_queued()

    unreadable.refresh_from_db(fields=["status", "error_code"])
    assert (unreadable.status, unreadable.error_code) == ("error", "SB009")
    assert Execution.objects.defer("pending").get(pk=fine.pk).status == "succeeded"


def test_of_a_workers_threads_one_tenant_has_at_most_half() -> None:
    runner = Runner(4, lambda: True)
    took = []
    for tenant in ("a", "a", "a", "b", "b", "c", "d"):
        if runner.may_serve(tenant):
            runner._count(tenant, 1)
            took.append(tenant)

    assert took == ["a", "a", "b", "c"]
    assert Runner(1, lambda: True).may_serve("a")


def test_the_disk_that_is_full_is_not_filled_from_the_queue(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(alice, "async")
    monkeypatch.setattr("executions.runs.queue.disk_problem", lambda: "full")
    assert run_queued() is None
    monkeypatch.undo()
    assert run_queued() is not None


def steps_of(call: Callable[[], object]) -> int:
    """Instructions of SQLite's virtual machine, which are the same however busy the machine is."""
    steps = itertools.count()

    def count() -> int:
        next(steps)
        return 0

    connection.ensure_connection()
    connection.connection.set_progress_handler(count, 1)
    try:
        call()
    finally:
        connection.connection.set_progress_handler(None, 1)
    return next(steps)


@pytest.mark.only_on("sqlite")
def test_a_look_costs_the_same_however_many_wait(
    alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "providers.services.settings_cache.KEPT_SECONDS", 3600
    )  # or it looks up bounds
    for caller in (alice, charlie):
        bounded(caller, max_running=0, max_queued=1000)
        opened(caller, "async")
    claim_next()  # what it keeps is looked up
    with_two = steps_of(claim_next)
    for _ in range(100):
        opened(alice, "async")
        opened(charlie, "async")

    assert steps_of(claim_next) <= with_two * 1.1


@pytest.mark.only_on("sqlite")
def test_a_look_costs_the_same_however_many_wait_for_a_later_time(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.services.settings_cache.KEPT_SECONDS", 3600)
    bounded(alice, max_queued=1000)
    later = timezone.now() + timedelta(days=1)
    for number in range(101):
        Execution.objects.filter(pk=opened(alice, "async").pk).update(run_at=later)
        if number == 0:
            claim_next()
            with_one = steps_of(claim_next)

    assert steps_of(claim_next) <= with_one * 1.1
    # Those of a time that has come take their turn by priority, as the others do.
    now, low = opened(alice, "async"), opened(alice, "async")
    Execution.objects.filter(pk=low.pk).update(priority=Execution.Priority.LOW)
    come = Execution.objects.filter(run_at=later).order_by("pk").first()
    assert come is not None
    Execution.objects.filter(pk=come.pk).update(run_at=timezone.now() - timedelta(minutes=1))
    taken = [claimed.pk for _ in range(4) if (claimed := claim_next()) is not None]
    assert taken == [come.pk, now.pk, low.pk]


@pytest.mark.only_on("postgresql")  # SQLite has one writer, whoever it is for
@pytest.mark.django_db(transaction=True)
def test_a_tenant_that_another_process_is_busy_with_holds_up_no_other(
    alice: Caller, charlie: Caller
) -> None:
    hers, other = opened(alice, "async"), opened(charlie, "async")
    for _ in range(2):
        opened(charlie)  # so that hers is next
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with tenant_lock(alice.tenant.slug):
            is_held.set()
            may_end.wait(60)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    try:
        first = claim_next()
    finally:
        may_end.set()
        holder.join(60)
    second = claim_next()

    assert [first and first.pk, second and second.pk] == [other.pk, hers.pk]


@pytest.mark.django_db(transaction=True)
def test_a_workers_threads_run_everything_without_being_woken(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    """As when a broker loses its tasks, or room is made by another process."""
    bounded(alice, max_running=1)
    held = opened(alice)
    for caller in (alice, charlie):
        for _ in range(3):
            opened(caller, "async")
    succeeded = Execution.objects.filter(status="succeeded")
    with running_threads(4):
        wait_for(lambda: succeeded.filter(tenant=charlie.tenant).count() == 3)
        assert not succeeded.filter(tenant=alice.tenant).exists()
        ended(held)
        wait_for(lambda: succeeded.count() == 7)


@contextmanager
def running_threads(number: int) -> Iterator[None]:
    """A worker's, which end with the context as they would with their process."""
    going_on = threading.Event()
    going_on.set()
    runner = Runner(number, going_on.is_set)
    runner.start()
    started = runner._workers
    try:
        yield
    finally:
        going_on.clear()
        for thread in started:
            thread.join(60)
    assert not any(thread.is_alive() for thread in started)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
