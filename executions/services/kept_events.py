"""Events of runs in the database, for those who follow one from another process or after its end.

Only what somebody may want there is written: the runs that are followed elsewhere, in batches while
they last, and those whose client may come back, at their end. The record has the same for good.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connection
from django.db.models.functions import Now

from executions.models import ExecutionEvent
from executions.services.batches import delete_in_batches
from executions.services.live import Entry, EventLog
from executions.text import from_json

logger = logging.getLogger(__name__)

# How often what has come meanwhile is written.
WRITE_SECONDS = 0.1
# How long after the end it is kept.
KEPT = timedelta(minutes=1)
_BATCH_BYTES = 256 * 1024


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


def read(execution_id: UUID, after: int) -> Sequence[Entry]:
    """Some of what follows `after`, in order; nothing where there is nothing yet."""
    row = ExecutionEvent.objects.filter(execution=execution_id, last__gt=after)
    bodies = row.order_by("first").values_list("bodies", flat=True).first()
    found = [] if bodies is None else from_json(bodies)
    return [Entry.of_body(body) for body in found if body["seq"] > after]


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
