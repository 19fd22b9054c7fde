"""A session whose time is over ends then, and not when the schedule next looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django_q.models import Schedule

from executions.kernel import background
from executions.sessions import control, maintenance
from executions.sessions.ending import LAST_SAVE_SECONDS
from executions.sessions.maintenance import Ends
from executions.sessions.models import Session
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import saved, write
from tests.support.sessions import URL, aged, cell, opened, row

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Those of a process that serves, looked at by the test in place of a thread."""
    found = Ends()
    found.is_on = True
    monkeypatch.setattr(found._loop, "start", lambda: None)
    monkeypatch.setattr(control, "ends", found)
    monkeypatch.setattr(maintenance, "ends", found)
    yield found
    assert background.wait_for_keyed_work()


def over(ends: Ends, session: dict[str, object]) -> None:
    """Have the moment of its end have come."""
    ends._moments = dict.fromkeys(ends._moments, (0.0, 0))


def test_unused_for_its_time_it_sleeps(alice: Caller, ends: Ends) -> None:
    session = opened(alice, idle_seconds=30)
    cell(alice, session, write("f", "kept"))
    pause = ends.look()
    assert pause is not None
    assert 0 < pause <= 30.1
    aged(session, used_at=30)
    over(ends, session)
    ends.look()
    assert background.wait_for_keyed_work()
    assert row(session).state == Session.State.ASLEEP


def test_as_old_as_it_may_be_it_is_closed(alice: Caller, ends: Ends) -> None:
    session = opened(alice, max_seconds=3)
    aged(session, created_at=3)
    over(ends, session)
    ends.look()
    assert background.wait_for_keyed_work()
    found = row(session)
    assert (found.state, found.closed_because) == (Session.State.CLOSED, "it was 3 s old")
    assert found.released_at is not None


def test_as_many_as_have_threads_end_at_once_and_each_is_saved_before(
    alice: Caller, charlie: Caller, ends: Ends, settings: Any
) -> None:
    settings.DELETE_S3_ON_CLEANUP = False
    sessions = [opened(alice, max_seconds=3) for _ in range(background.OF_ONE_TENANT)]
    sessions.append(opened(charlie, max_seconds=3))
    for sandbox in kept_here.sandboxes():
        (sandbox.folder / "late").write_text("kept")
    for session in sessions:
        aged(session, created_at=3)
        over(ends, session)
    began = time.monotonic()
    ends.look()
    assert background.wait_for_keyed_work(2 * LAST_SAVE_SECONDS)
    # None waits for a thread that another of them has.
    assert time.monotonic() - began < LAST_SAVE_SECONDS / 2
    for session in sessions:
        assert row(session).state == Session.State.CLOSED
        assert saved(session) == {"late": b"kept"}


def test_used_meanwhile_it_is_looked_at_when_its_time_is_over_again(
    alice: Caller, ends: Ends
) -> None:
    session = opened(alice, idle_seconds=30)
    over(ends, session)
    pause = ends.look()
    assert pause is not None
    assert 25 < pause <= 30.1
    assert row(session).state == Session.State.OPEN


def test_a_shorter_time_is_heeded_and_a_far_end_is_not_remembered(
    alice: Caller, ends: Ends
) -> None:
    session = opened(alice, idle_seconds=600, max_seconds=1800)
    assert ends.look() is None
    alice.client.patch(f"{URL}/{session['id']}", {"idle_seconds": 2})
    pause = ends.look()
    assert pause is not None
    assert pause <= 2.1


def test_what_ends_before_the_schedule_looks_again_is_expected(alice: Caller, ends: Ends) -> None:
    opened(alice, idle_seconds=600)
    near = opened(alice, idle_seconds=600)
    aged(near, used_at=595)
    maintenance.look_ahead()
    assert [str(pk) for pk in ends._moments] == [near["id"]]


def test_what_ends_while_a_slow_round_of_the_schedule_goes_on_is_expected(
    alice: Caller, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice, idle_seconds=600)
    aged(session, used_at=540)
    seen: list[str] = []
    monkeypatch.setattr(maintenance, "maintain", lambda: seen.extend(map(str, ends._moments)))
    Schedule.objects.create(name=maintenance.TASK, func=maintenance.TASK, next_run=None)
    assert maintenance.maintain_if_due()
    assert seen == [session["id"]]


def test_a_process_that_serves_nobody_has_no_thread_for_it(alice: Caller) -> None:
    opened(alice, idle_seconds=2)
    assert maintenance.ends.look() is None
