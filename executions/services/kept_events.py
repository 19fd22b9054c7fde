"""Events of runs in the database, for those who follow one from another process or after its end.

Only what somebody may want there is written: the runs that are followed elsewhere, in batches while
they last, and those whose client may come back, at their end. The record has the same for good.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import reduce
from operator import or_
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connection
from django.db.models import Max, Q
from django.db.models.functions import Now

from executions.kernel.batches import delete_in_batches
from executions.kernel.text import from_json
from executions.models.execution_event import ExecutionEvent
from executions.services.live import Entry, EventLog

logger = logging.getLogger(__name__)

# How often what has come meanwhile is written.
WRITE_SECONDS = 0.1
# How long after the end it is kept.
KEPT = timedelta(minutes=1)
_BATCH_BYTES = 256 * 1024
# Of one statement.
_EXECUTIONS_AT_ONCE = 100


def write(log: EventLog) -> None:
    """Write what was not written yet. Raises what the database does."""
    with log.writing:
        while log.execution_id is not None:
            entries, _ = log.read(log.written, _BATCH_BYTES)
            if not entries:
                return
            ExecutionEvent.objects.create(
                execution_id=log.execution_id,
                first=entries[0].seq,
                last=entries[-1].seq,
                # Not `to_json`: what it has bounded is a little deeper within an event.
                bodies=json.dumps(
                    [entry.body() for entry in entries], ensure_ascii=False, separators=(",", ":")
                ),
            )
            log.written = entries[-1].seq


def write_rest(log: EventLog) -> None:
    """Write the end of what is kept. The run matters more: it is told where it cannot be."""
    _writer.leave(log)
    if not log.is_kept:
        return
    try:
        write(log)
    except DatabaseFailure as failure:
        logger.warning("events of execution %s are not kept: %s", log.execution_id, failure)
    except Exception:
        logger.exception("events of execution %s cannot be kept", log.execution_id)


def place_of(execution_id: UUID, after: int) -> int:
    """Behind which place the rows have the events that follow `after`.

    A place is the number of a row's first event, by which rows are found through an index.
    """
    if not after:
        return 0
    rows = ExecutionEvent.objects.filter(execution=execution_id, first__lte=after)
    first = rows.order_by("-first").values_list("first", flat=True).first()
    return 0 if first is None else first - 1


def latest_places(places: Mapping[UUID, int]) -> dict[UUID, int]:
    """The last place of each execution that has rows behind the place that is given for it."""
    found: dict[UUID, int] = {}
    wanted = list(places.items())
    for start in range(0, len(wanted), _EXECUTIONS_AT_ONCE):
        some = wanted[start : start + _EXECUTIONS_AT_ONCE]
        behind = reduce(or_, (Q(execution=pk, first__gt=place) for pk, place in some))
        rows = ExecutionEvent.objects.filter(behind).order_by()
        found.update(rows.values_list("execution_id").annotate(Max("first")))
    return found


def read_behind(execution_id: UUID, place: int) -> tuple[int, Sequence[Entry]]:
    """The next row's place and its events; nothing, and the same place, where there is none."""
    rows = ExecutionEvent.objects.filter(execution=execution_id, first__gt=place)
    row = rows.order_by("first").values_list("first", "bodies").first()
    if row is None:
        return place, []
    return row[0], [Entry.of_body(body) for body in from_json(row[1])]


def are_kept(execution_id: UUID) -> bool:
    return ExecutionEvent.objects.filter(execution=execution_id).exists()


def forget_old() -> int:
    """Remove those of executions that ended long enough ago. How many rows."""
    old = ExecutionEvent.objects.filter(execution__finished_at__lt=Now() - KEPT)
    return delete_in_batches(old)


def follow(log: EventLog) -> None:
    """Write the events of a run while it lasts: somebody follows it elsewhere."""
    log.is_kept = True
    _writer.take(log)


class _Writer:
    """One thread that writes for all runs that are followed, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: set[EventLog] = set()
        self._is_working = False

    def take(self, log: EventLog) -> None:
        with self._lock:
            if log.has_ended:
                return
            self._logs.add(log)
            if not self._is_working:
                try:
                    threading.Thread(target=self._work, name="events", daemon=True).start()
                    self._is_working = True
                except RuntimeError as error:
                    # Whoever follows asks again.
                    logger.error("no thread for events: %s", error)

    def leave(self, log: EventLog) -> None:
        with self._lock:
            self._logs.discard(log)

    def _work(self) -> None:
        nothing = threading.Event()
        try:
            while logs := self._left():
                close_old_connections()
                for log in logs:
                    try:
                        write(log)
                    except DatabaseFailure as failure:
                        logger.info("events wait for the database: %s", failure)
                    except Exception:
                        # Of one run alone: the others are written on.
                        logger.exception("events of %s cannot be written", log.execution_id)
                        self.leave(log)
                nothing.wait(WRITE_SECONDS)
        except BaseException:
            with self._lock:
                self._is_working = False
            raise
        finally:
            connection.close()

    def _left(self) -> list[EventLog]:
        with self._lock:
            self._is_working = bool(self._logs)
            return list(self._logs)


_writer = _Writer()


def _start_afresh() -> None:
    """The parent's thread is not in the child."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_start_afresh)
