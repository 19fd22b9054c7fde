"""Ends of sessions on time: whoever opens or changes one has a thread look when its time is over.

The schedule looks every SANDBOX_REAPER_INTERVAL (`tending`), and names those whose time is over
before it looks again (`look_ahead`). What a process that ended had in mind is the schedule's. A
thread is there only while an end is near, and asks the database only then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from uuid import UUID

from django.utils import timezone

from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.sessions.ending import DUE, busy, close_if_due, end_leftovers, release, save_last
from executions.sessions.models import Session
from executions.sessions.queries import expires_at
from executions.sessions.storage.suspend import TIRED, suspend
from providers.errors import RateLimited, SandboxError
from providers.threads import Loop

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
            self._expect_in(session.pk, _left(session), 0)
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
                left = _left(session)
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


def begin() -> None:
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
        save_last(session)
        if close_if_due(pk, is_saved=True):
            session.refresh_from_db()
            run_sync(release(session))
            end_leftovers(session)
    except SandboxError as error:
        logger.warning("session %s could not be ended on time: %s", pk, error.message)


def _left(session: Session) -> float:
    return (expires_at(session) - timezone.now()).total_seconds()
