"""Work for sessions in the background: saves behind the answer, ends on time, and a schedule.

The workers look every SANDBOX_REAPER_INTERVAL (`maintain`): they renew, save, put to sleep and end
sessions, and name those whose time is over before they look again (`look_ahead`). A process that
opens or changes a session has a thread end it on time; the thread is there only while an end is
near, and asks the database only then. Nothing else is remembered in a process: what it leaves
undone when it dies is in the database, and the schedule takes it up.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django_q.models import Schedule

from executions.kernel import background
from executions.kernel.background import after_answer
from executions.kernel.coroutines import run_sync, wait_for
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.sessions.background_commands import record_unfollowed
from executions.sessions.capacity import TIRED, suspend
from executions.sessions.ending import (
    DUE,
    busy,
    close_if_due,
    end_leftovers,
    fail,
    in_background,
    mark_lost,
    release,
    save_before_end,
    save_before_end_in_thread,
)
from executions.sessions.models import Session
from executions.sessions.queries import expires_at
from executions.sessions.session_sandbox import (
    LEASE_SECONDS,
    apply_network,
    call_sandbox,
    collect_attempts,
    is_gone,
)
from executions.sessions.storage import drafts
from executions.sessions.storage.carry_over import clean_ended
from executions.sessions.storage.file_saves import Saved, save
from providers.errors import ConnectionFailed, KeptSandboxLost, RateLimited, SandboxError
from providers.leases import lease_of, wakes_in_force
from providers.sandbox import KeptSandbox
from providers.threads import Loop
from providers.waiting import within

logger = logging.getLogger(__name__)


# How far ahead a process has ends in mind: longer than the schedule's longest pause.
AHEAD_SECONDS = 90.0
# What is busy when its time is over, or cannot be saved, is looked at again; then by the schedule.
AGAIN_SECONDS, AGAIN_TIMES = 1.0, 3
# The database compares by its own clock, in which the moment must have passed.
_BEHIND_SECONDS = 0.02


class Ends:
    """The sessions whose ends are near, each with when to look, by time.monotonic()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moments: dict[UUID, tuple[float, int]] = {}
        self._loop = Loop("session-ends", self.look)
        self.is_on = False

    def expect(self, sessions: Iterable[Session]) -> None:
        """Look at each when its time is over, where that is soon."""
        if not self.is_on:
            return
        for session in sessions:
            self._expect_in(session.pk, _seconds_left(session), 0)
        self._go_on()

    def look(self) -> float | None:
        """End what is due. The seconds until the next one is, or None where none is near."""
        now = time.monotonic()
        with self._lock:
            due = {pk: n for pk, (when, n) in self._moments.items() if when <= now}
            for pk in due:
                del self._moments[pk]
        if due:
            living = Session.objects.filter(pk__in=list(due), closed_at=None).defer("env")
            for session in living:
                left = _seconds_left(session)
                if left <= 0:
                    end_soon(session)
                    if due[session.pk] >= AGAIN_TIMES:
                        continue
                self._expect_in(session.pk, max(left, 0), due[session.pk] + 1 if left <= 0 else 0)
        with self._lock:
            if not self._moments:
                return None
            return max(0.0, min(when for when, _ in self._moments.values()) - time.monotonic())

    def _expect_in(self, pk: UUID, seconds: float, times: int) -> None:
        if seconds > AHEAD_SECONDS:
            return
        pause = AGAIN_SECONDS if times else max(0.0, seconds) + _BEHIND_SECONDS
        with self._lock:
            self._moments[pk] = (time.monotonic() + pause, times)

    def _go_on(self) -> None:
        with self._lock:
            if not self._moments:
                return
        try:
            self._loop.start()
        except RateLimited as error:
            # The schedule ends them.
            logger.warning("sessions may end late: %s", error.message)
        self._loop.wake()


ends = Ends()


def end_on_time() -> None:
    """Have this process end sessions on time. For one that serves, as it starts."""
    ends.is_on = True


def look_ahead() -> None:
    """Have in mind what ends before the schedule looks again: a slow sandbox holds that up."""
    if not ends.is_on:
        return
    until = timezone.now() + timedelta(seconds=AHEAD_SECONDS)
    living = Session.objects.filter(closed_at=None, ref__isnull=False)
    near = living.only("pk", "state", "used_at", "created_at", "idle_seconds", "max_seconds")
    ends.expect(each for each in near.iterator() if expires_at(each) <= until)


def end_soon(session: Session) -> None:
    """Put it to sleep or close it in a thread for that, if it is to."""
    pk = session.pk
    background.submit_keyed(("sleep", pk), session.tenant_slug, lambda: _end(pk))


def _end(pk: UUID) -> None:
    session = Session.objects.filter(TIRED | DUE, pk=pk).first()
    if session is None or busy([pk]):
        return
    try:
        if Session.objects.filter(TIRED, pk=pk).exists():
            suspend(pk, f"it was unused for {session.idle_seconds} s", only_if=TIRED)
            return
        save_before_end_in_thread(session)
        if close_if_due(pk, is_saved=True):
            session.refresh_from_db()
            run_sync(release(session))
            end_leftovers(session)
    except SandboxError as error:
        logger.warning("session %s could not be ended on time: %s", pk, error.message)


def _seconds_left(session: Session) -> float:
    return (expires_at(session) - timezone.now()).total_seconds()


# An answer waits so long for its save, which then goes on behind it.
ANSWER_SECONDS = 60.0
# A save takes as much of the web process as a cell. Cells that follow each other share one.
SAVE_DELAY_SECONDS = 0.1


def save_soon(
    session_id: UUID, tenant_slug: str, *, first: bool = False, delay_seconds: float = 0.0
) -> Future[Saved | None]:
    """A save of the session that begins after this; None where it could not be saved now, which
    its workspace says, and the schedule tries again.
    """
    return background.submit_keyed(
        session_id,
        tenant_slug,
        lambda: save_now(session_id),
        first=first,
        delay_seconds=delay_seconds,
    )


async def save_after_run(execution: Execution, session: Session) -> None:
    """Save what is to be saved when something has run in a session; `execution` says whether it
    was."""
    execution.files_saved = False
    saved = await save_changes(session)
    if saved is not None:
        execution.files_saved = saved.is_complete
        execution.changed_files = saved.changed


async def save_changes(session: Session) -> Saved | None:
    """Save the session's changes after the answer, with those of the next requests that come
    within SAVE_DELAY_SECONDS; or before it, if `saves` says so, and return the result."""
    if session.saves == Session.Saves.NEVER or session.ref is None:
        return None
    pk, tenant = session.pk, session.tenant_slug
    if session.saves != Session.Saves.ANSWER:
        after_answer(lambda: save_soon(pk, tenant, delay_seconds=SAVE_DELAY_SECONDS))
        return None
    awaited = within(ANSWER_SECONDS, save_soon(pk, tenant, first=True))
    with active_runs.cancel_on_shutdown(awaited):
        await wait_for(awaited)
    if awaited.cancelled() or awaited.exception() is not None:
        return None
    return awaited.result()


def save_now(session_id: UUID) -> Saved | None:
    """Save the session as `save_soon` does, in this thread. A sandbox that is found to be gone is
    noted."""
    session = Session.objects.defer("env").filter(pk=session_id).first()
    if session is None:
        return None
    try:
        return save(session)
    except KeptSandboxLost as error:
        mark_lost(session, error.message)
    except Conflict:
        # It has ended or sleeps: there is nothing to be saved.
        return None
    except SandboxError as error:
        logger.warning("session %s was not saved: %s", session_id, error.message)
    except Exception:
        logger.exception("session %s was not saved", session_id)
    return None


_AT_ONCE = 500
# What one renewal may take, and how long a provider must have kept us waiting to be left alone.
RENEWAL_SECONDS = 20.0
SILENT_SECONDS = 10.0
# Longer than a route of several providers takes, each of which may take CREATE_SECONDS.
OPENING_SECONDS = 900
# What is unsaved for so long is not being saved by who ran it; and how long is waited for saving.
UNSAVED_SECONDS = 60
# How long a session must have been unused to move from a host that is drained.
MOVE_SECONDS = 60
SAVING_SECONDS = 30.0


def maintain() -> int:
    """Renew what is living, close what is over age, release what is left of the rest; save what
    nobody saves, and put to sleep what nobody uses.

    How many were closed or lost.
    """
    # First: whatever holds up the rest must not cost anybody his sandbox.
    ended = renew_living()
    ended += close_due()
    ended += close_never_opened()
    record_unfollowed()
    release_ended()
    save_unsaved()
    suspend_unused()
    move_from_drained()
    clean_ended()
    drafts.collect()
    return ended


def close_due() -> int:
    """Close what is over one of its ages, with its files saved. How many were.

    One after the other, for so long together: the rest has its turn the next time.
    """
    until, closed = time.monotonic() + SAVING_SECONDS, 0
    for session in _each(Session.objects.filter(DUE).defer("env")):
        if time.monotonic() >= until:
            break
        # What is busy goes on, and would keep the others waiting each time.
        if not busy([session.pk]):
            run_sync(save_before_end(session))
            closed += close_if_due(session.pk, is_saved=True)
    return closed


def _each(sessions: QuerySet[Session]) -> Iterator[Session]:
    """All of them, so many read at a time: what stays as it is keeps no other from its turn."""
    rows = sessions.order_by("pk")
    page = list(rows[:_AT_ONCE])
    while page:
        yield from page
        page = list(rows.filter(pk__gt=page[-1].pk)[:_AT_ONCE])


def save_unsaved() -> int:
    """Save what a process that died, or a storage that was away, left unsaved. How many were.

    One after the other, and no more after one that took long: another minute comes.
    """
    before = Now() - timedelta(seconds=UNSAVED_SECONDS)
    left = Session.objects.filter(
        ~Q(saves=Session.Saves.NEVER),
        state=Session.State.OPEN,
        ref__isnull=False,
        tenant__isnull=False,
        unsaved_since__lt=before,
    )
    return _one_by_one(left, lambda session: save_soon(session.pk, session.tenant_slug))


def suspend_unused() -> int:
    """Put to sleep what was unused for its time. How many."""
    return _one_by_one(
        Session.objects.filter(TIRED),
        lambda session: background.submit_keyed(
            ("sleep", session.pk), session.tenant_slug, lambda: _suspend_or_log(session)
        ),
    )


def move_from_drained() -> int:
    """Put to sleep what is unused at a host that is drained or was removed; it wakes at another.

    How many. What is never saved stays until its own end, and so does what has a command in the
    background until that ends.
    """
    leaving = _leaving()
    return _one_by_one(
        Session.objects.filter(
            _MOVABLE, pk__in=random.sample(leaving, min(len(leaving), _AT_ONCE))
        ),
        lambda session: background.submit_keyed(
            ("sleep", session.pk), session.tenant_slug, lambda: _move_or_log(session)
        ),
    )


_MOVABLE = (
    Q(state=Session.State.OPEN, ref__isnull=False, tenant__isnull=False)
    & ~Q(saves=Session.Saves.NEVER)
    & Q(used_at__lt=Now() - timedelta(seconds=MOVE_SECONDS))
)


def _leaving() -> list[UUID]:
    """Those of the movable sessions that cannot stay, by the configurations in force."""
    found: list[UUID] = []
    living = Session.objects.filter(_MOVABLE)
    for provider_id in living.order_by().values_list("provider", flat=True).distinct():
        if not wakes_in_force(provider_id):
            continue
        try:
            with lease_of(provider_id) as lease:
                found += [
                    session.pk
                    for session in _each(living.filter(provider=provider_id).only("ref"))
                    if lease.provider.standing_of(str(session.ref)) != "stays"
                ]
        except SandboxError as error:
            logger.warning("the hosts of %s are not known: %s", provider_id, error.message)
    return found


def _move_or_log(session: Session) -> bool:
    try:
        if in_background(session):
            return False
        return suspend(session.pk, "its host is drained", only_if=_MOVABLE)
    except SandboxError as error:
        logger.warning("session %s cannot move: %s", session.pk, error.message)
        return False


def _suspend_or_log(session: Session) -> bool:
    try:
        because = f"it was unused for {session.idle_seconds} s"
        return suspend(session.pk, because, only_if=TIRED)
    except SandboxError as error:
        logger.warning("session %s cannot sleep: %s", session.pk, error.message)
        return False


def _one_by_one(sessions: QuerySet[Session], begin: Callable[[Session], Future[Any]]) -> int:
    """Side by side, as many as there are threads for, and waited for so long together.

    Others each time: those that cannot be dealt with must not keep the rest from their turn.
    """
    some = sessions.defer("env", "ref").order_by("?")[:_AT_ONCE]
    begun = [begin(session) for session in some]
    done, _ = wait(begun, SAVING_SECONDS)
    return sum(bool(each.exception() is None and each.result()) for each in done)


def close_never_opened() -> int:
    """Close those that nobody has opened in all this time, whoever lives. How many.

    They would keep their name and their room until they are idle. Who opens one after that finds it
    closed, and ends its sandbox. Those of a process that died are closed as soon as it is found.
    """
    long_ago = Now() - timedelta(seconds=OPENING_SECONDS)
    # One that sleeps has no sandbox either, and was opened.
    left = Session.objects.filter(
        state=Session.State.OPEN, ref__isnull=True, created_at__lt=long_ago
    )
    closed = 0
    for pk in list(left.values_list("pk", flat=True)[:_AT_ONCE]):
        with transaction.atomic():
            # It may have been opened meanwhile.
            session = left.select_for_update().defer("env").filter(pk=pk).first()
            if session is not None:
                fail(session, "it was not opened in time")
                closed += 1
    return closed


class _Silent:
    """Providers that have let us wait: they are left alone until the next time.

    One after the other is asked, and one that hangs must not cost the sandboxes of the rest.
    """

    def __init__(self) -> None:
        self._providers: set[tuple[str, int | None]] = set()

    def __contains__(self, session: Session) -> bool:
        return (session.provider, session.config_version) in self._providers

    @contextmanager
    def measure(self, session: Session) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            if time.monotonic() - began >= SILENT_SECONDS:
                self._providers.add((session.provider, session.config_version))


def release_ended() -> int:
    """Have the providers end the sandboxes of sessions that have ended. How many have."""
    released = 0
    left = Session.objects.filter(closed_at__isnull=False, released_at=None)
    silent = _Silent()
    for session in _each(left):
        if session not in silent:
            with silent.measure(session):
                run_sync(release(session))
            released += 1
        end_leftovers(session)
    return released


def renew_living() -> int:
    """Have the providers keep the sandboxes of open sessions. How many were found to be lost."""
    lost = 0
    living = Session.objects.filter(state=Session.State.OPEN, ref__isnull=False)
    silent = _Silent()
    for session in _each(living):
        if session in silent:
            continue
        try:
            with silent.measure(session):
                run_sync(call_sandbox(session, _renew, bool, RENEWAL_SECONDS))
                if session.network is not None:
                    # The lists around its own may have changed.
                    run_sync(apply_network(session, RENEWAL_SECONDS))
                    run_sync(collect_attempts(session, RENEWAL_SECONDS))
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            lost += 1
        except ConnectionFailed as error:
            if is_gone(session, wait=True):
                mark_lost(session, "its host was removed, and does not answer")
                lost += 1
            else:
                logger.warning("session %s could not be renewed: %s", session.pk, error.message)
        except SandboxError as error:
            logger.warning("session %s could not be renewed: %s", session.pk, error.message)
    return lost


def _renew(kept: KeptSandbox) -> None:
    kept.renew(LEASE_SECONDS)


TASK = "executions.tasks.tend_sessions"
LOOK_SECONDS = 1.0


def maintain_if_due() -> bool:
    """Tend the sessions unless somebody has within SANDBOX_REAPER_INTERVAL. Whether this did."""
    now = timezone.now()
    interval = timedelta(seconds=settings.SANDBOX_REAPER_INTERVAL)
    due = Schedule.objects.filter(
        # A time that lies further ahead was meant for a longer interval.
        Q(next_run__lte=now) | Q(next_run__gt=now + interval) | Q(next_run=None),
        name=TASK,
    )
    # Of several one wins; those that look too early write nothing.
    if not due.exists() or not due.update(next_run=now + interval):
        return False
    # First: what one tenant's sandboxes hold up must not make the ends of others late.
    look_ahead()
    maintain()
    return True


def maintain_in_background(goes_on: Callable[[], bool]) -> None:
    """Have a thread of this process look whether it is due, until it does not go on."""

    def look() -> float:
        maintain_if_due()
        return LOOK_SECONDS

    # What it does is done again by another: nobody waits for it at the end.
    Loop("tending", look, goes_on=goes_on).start()
