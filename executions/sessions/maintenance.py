"""What the workers do for sessions every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django_q.models import Schedule

from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.sessions.background_commands import follow_the_unattended
from executions.sessions.due import look_ahead
from executions.sessions.ending import (
    DUE,
    busy,
    close_if_due,
    end_leftovers,
    fail,
    mark_lost,
    release,
    saved_last,
)
from executions.sessions.models import Session
from executions.sessions.session_sandbox import LEASE_SECONDS, call_sandbox
from executions.sessions.storage import drafts
from executions.sessions.storage.background_saves import save_soon
from executions.sessions.storage.carry_over import clean_ended
from executions.sessions.storage.suspend import TIRED, suspend
from providers.errors import KeptSandboxLost, SandboxError
from providers.sandbox import KeptSandbox
from providers.threads import Loop

logger = logging.getLogger(__name__)

_AT_ONCE = 500
# What one renewal may take, and how long a provider must have kept us waiting to be left alone.
RENEWAL_SECONDS = 20.0
SILENT_SECONDS = 10.0
# Longer than a route of several providers takes, each of which may take CREATE_SECONDS.
OPENING_SECONDS = 900
# What is unsaved for so long is not being saved by who ran it; and how long is waited for saving.
UNSAVED_SECONDS = 60
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
    follow_the_unattended()
    release_ended()
    save_left()
    rest_unused()
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
            run_sync(saved_last(session))
            closed += close_if_due(session.pk, is_saved=True)
    return closed


def _each(sessions: QuerySet[Session]) -> Iterator[Session]:
    """All of them, so many read at a time: what stays as it is keeps no other from its turn."""
    rows = sessions.order_by("pk")
    page = list(rows[:_AT_ONCE])
    while page:
        yield from page
        page = list(rows.filter(pk__gt=page[-1].pk)[:_AT_ONCE])


def save_left() -> int:
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


def rest_unused() -> int:
    """Put to sleep what was unused for its time. How many."""
    return _one_by_one(
        Session.objects.filter(TIRED),
        lambda session: background.submit_keyed(
            ("sleep", session.pk), session.tenant_slug, lambda: _rested(session)
        ),
    )


def _rested(session: Session) -> bool:
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
    def noting(self, session: Session) -> Iterator[None]:
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
            with silent.noting(session):
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
            with silent.noting(session):
                run_sync(call_sandbox(session, _renew, bool, RENEWAL_SECONDS))
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            lost += 1
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
