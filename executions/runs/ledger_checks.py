"""Verifying the ledger because somebody asked for it in the admin: one at a time, in a worker.

A row says how far it is and what came of it, so that whoever looks sees the same, on any host. It
names the process that reads; what a process did not finish that has ended is over too.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from functools import partial
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django_q.tasks import async_task

from executions.kernel.background import run_once_in_background
from executions.ledger.checkpoints import newest_line, where
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import LedgerCheck, LedgerEntry, Verification
from executions.ledger.verification import verify
from executions.runs import heartbeat
from executions.runs.models import Process
from providers.services.kept import Kept

logger = logging.getLogger(__name__)

TASK = "executions.tasks.check_ledger"
TELL_SECONDS = 1.0
KEPT_FINDINGS = 20
_LONGEST = 300
State = LedgerCheck.State


class _Lost(Exception):
    """Somebody found this process dead and closed its reading."""


def ask(by: str) -> LedgerCheck | None:
    """Have the ledger verified; None where that is under way already."""
    try:
        with transaction.atomic():
            check = LedgerCheck.objects.create(
                active_key=LedgerCheck.ONE, asked_by=by[:150], asked_at=timezone.now()
            )
    except IntegrityError:
        return None
    # Without it the next minute's turn of the schedule begins it.
    transaction.on_commit(partial(_queue, check.pk))
    return check


def _queue(pk: int) -> None:
    try:
        async_task(TASK)
    except Exception:
        # Whatever a broker raises.
        logger.warning("verification %s waits for the schedule", pk, exc_info=True)


def begin_waiting() -> None:
    """Have a thread of this process read what waits, and close what was left unfinished."""
    close_left()
    check = under_way()
    if check and (
        check.state == State.WAITING or check.process_id == heartbeat.current_process_id()
    ):
        run_once_in_background("ledger check", _carry_out_alone)


def _carry_out_alone() -> None:
    """Nobody else reads in this process: what it is said to read broke off without being closed,
    as where the database was away just then."""
    left = LedgerCheck.objects.filter(
        state=State.RUNNING, process_id=heartbeat.current_process_id()
    )
    problem = "The result of the verification could not be stored. Run the verification again."
    if _end(left, State.FAILED, problem=problem):
        logger.warning("a verification that this process had left unfinished was closed")
    carry_out()


def close_left() -> int:
    """Close what is read by a process that has ended. How many there were."""
    alive = Process.objects.filter(ended_at=None).values("pk")
    left = LedgerCheck.objects.filter(active_key=LedgerCheck.ONE, state=State.RUNNING)
    return _end(
        left.exclude(process_id__in=alive),
        State.FAILED,
        problem="The process of the verification has ended. Run the verification again.",
    )


def carry_out() -> LedgerCheck | None:
    """Read the ledger for whoever waits for it; None where nobody does, or another reads it."""
    mine = heartbeat.current_process_id()
    check = LedgerCheck.objects.filter(active_key=LedgerCheck.ONE, state=State.WAITING).first()
    if check is None or mine is None:
        return None
    claimed = LedgerCheck.objects.filter(pk=check.pk, state=State.WAITING)
    newest = LedgerEntry.objects.values_list("sequence", flat=True).first()
    if not claimed.update(
        state=State.RUNNING, process_id=mine, started_at=timezone.now(), total=newest or 0
    ):
        return None
    own = LedgerCheck.objects.filter(pk=check.pk, state=State.RUNNING, process_id=mine)
    try:
        found = verify(report=_Telling(own))
    except _Lost:
        logger.warning("%s was closed before it was complete", check)
    except LedgerUnavailable as error:
        _end(own, State.FAILED, problem=error.message[:500])
    except Exception as error:
        # Not its text, which may quote rows.
        _end(own, State.FAILED, problem=f"{type(error).__name__}; see the server's log.")
        raise
    else:
        _end(own, State.INTACT if found.is_intact else State.NOT_INTACT, **_figures(found))
    check.refresh_from_db()
    return check


class _Telling:
    """Writes how far it is, about once a second."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._told_at = time.monotonic()

    def __call__(self, found: Verification) -> None:
        now = time.monotonic()
        if now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        if not self._own.update(**_figures(found)):
            raise _Lost


def _figures(found: Verification) -> dict[str, Any]:
    told = [str(finding)[:_LONGEST] for finding in found.findings[:KEPT_FINDINGS]]
    return {
        "entries": found.entries,
        "executions": found.executions,
        "rows": found.rows,
        "unproven": found.unproven,
        "checkpoints": found.checkpoints,
        "findings": len(found.findings) + found.omitted,
        "first_findings": told,
    }


def _end(chosen: Any, state: LedgerCheck.State, **values: Any) -> int:
    ended: int = chosen.update(state=state, active_key=None, finished_at=timezone.now(), **values)
    return ended


def last_told() -> LedgerCheck | None:
    """The newest that said whether the ledger is intact."""
    return LedgerCheck.objects.filter(state__in=(State.INTACT, State.NOT_INTACT)).first()


def under_way() -> LedgerCheck | None:
    """What waits or is read now."""
    return LedgerCheck.objects.filter(active_key=LedgerCheck.ONE).first()


def ledger_state() -> dict[str, Any]:
    """What is known of the ledger: `last` verification, the one that is `under_way` with its
    `percent`, how many entries there are, and when the newest line of the checkpoints was
    written, or why that is not known (`checkpoint_problem`)."""
    check = under_way()
    newest = LedgerEntry.objects.values_list("sequence", flat=True).first() or 0
    sequence, written, problem = _newest_line()
    return {
        "last": last_told(),
        "broke_off": _broke_off(),
        "under_way": check,
        "percent": min(100, 100 * check.entries // max(1, check.total)) if check else 0,
        "newest": newest,
        "checkpoint": written,
        "checkpoint_behind": newest - sequence,
        "checkpoint_problem": problem,
    }


def _broke_off() -> LedgerCheck | None:
    """The newest of all, where it came to no end."""
    newest = LedgerCheck.objects.first()
    return newest if newest is not None and newest.state == State.FAILED else None


def _line() -> tuple[int, datetime | None, str]:
    if not where():
        return 0, None, "Checkpoints are turned off."
    try:
        line = newest_line()
    except LedgerUnavailable as error:
        return 0, None, error.message
    return (*line, "") if line else (0, None, "No checkpoint yet.")


# The file may be far away, and grows for years.
_newest_line = Kept(_line, seconds=30.0)


def uncheckpointed_since(newest: int) -> datetime | None:
    """When the oldest entry after this one was entered; None where there is none."""
    later = LedgerEntry.objects.filter(sequence__gt=newest).order_by("sequence")
    return later.values_list("at", flat=True).first()
