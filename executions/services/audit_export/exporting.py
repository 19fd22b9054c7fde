"""One exporter at a time, and a cursor that only moves over what has arrived.

The entries are committed in the order of their numbers, because each is made under the ledger's
lock until its transaction has ended: whoever reads on from a number has left out none.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.db.models import DateTimeField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now

from executions.ledger.models import LedgerEntry
from executions.models.audit_export import AuditExport
from executions.services.audit_export import otlp, syslog
from sandbox_site import draining
from sandbox_site.observability import AuditDestination

logger = logging.getLogger(__name__)

BATCH = 200
# One entry may be larger, and is then a batch by itself.
BATCH_BYTES = 512 * 1024
# Longer than a batch may take, so that nobody else begins meanwhile.
LEASE = timedelta(seconds=90)
LONGEST_RETRY = timedelta(minutes=1)
LOOK_SECONDS = 1.0
# A turn ends before the schedule begins the next one.
TURN_SECONDS = 50.0

_SEND: dict[str, Callable[[Sequence[LedgerEntry], AuditDestination], None]] = {
    "syslog": syslog.send,
    "otlp": otlp.send,
}


def export_for(seconds: float | None = None) -> int:
    """Send what there is, and what comes within so many seconds, or a turn. How many have arrived.

    Ends at once where somebody else does it, or nothing is to be sent to.
    """
    destination = settings.AUDIT_EXPORT
    if destination is None:
        return 0
    me = f"{socket.gethostname()[:24]} {os.getpid()} {uuid4().hex[:12]}"
    AuditExport.objects.get_or_create(destination=destination.name)
    ends = time.monotonic() + (TURN_SECONDS if seconds is None else seconds)
    sent = 0
    try:
        while _holds(destination, me):
            arrived = _export_batch(destination, me)
            sent += arrived
            left = ends - time.monotonic()
            if left <= 0 or draining.is_draining():
                break
            if not arrived:
                time.sleep(min(LOOK_SECONDS, left))
    finally:
        _rows(destination).filter(holder=me).update(holder="", held_until=None)
    return sent


def _rows(destination: AuditDestination) -> QuerySet[AuditExport]:
    return AuditExport.objects.filter(destination=destination.name)


def _from_now(span: timedelta) -> ExpressionWrapper[Any]:
    """By the database's clock, which all hosts share."""
    return ExpressionWrapper(Now() + span, output_field=DateTimeField())


def _holds(destination: AuditDestination, me: str) -> bool:
    """Take the lease, or renew it; False while another has it."""
    is_free = Q(holder=me) | Q(held_until=None) | Q(held_until__lt=Now())
    rows = _rows(destination).filter(is_free)
    return bool(rows.update(holder=me, held_until=_from_now(LEASE)))


def _export_batch(destination: AuditDestination, me: str) -> int:
    """How many have arrived: none where there are none, or the collector is to be left alone."""
    is_time = Q(retry_at=None) | Q(retry_at__lte=Now())
    row = _rows(destination).filter(is_time).first()
    if row is None:
        return 0
    entries = _next(row.sequence)
    if not entries:
        return 0
    if entries[0].sequence != row.sequence + 1:
        logger.critical(
            "ALERT: the ledger has no entry %d; the collector gets the next existing entry",
            row.sequence + 1,
            extra={"alert": "ledger_gap"},
        )
    mine = _rows(destination).filter(holder=me, sequence=row.sequence)
    try:
        _SEND[destination.kind](entries, destination)
    except Exception as error:
        # Whatever it is, also an entry that somebody has made unreadable, is told and tried again.
        wait = min(timedelta(seconds=2 ** min(row.tries, 10)), LONGEST_RETRY)
        problem = f"{type(error).__name__}: {error}"[:500]
        mine.update(tries=row.tries + 1, retry_at=_from_now(wait), problem=problem)
        logger.warning("the collector of the ledger has not taken a batch: %s", problem)
        return 0
    moved = mine.update(
        sequence=entries[-1].sequence, sent_at=Now(), tries=0, retry_at=None, problem=""
    )
    return len(entries) if moved else 0


def _next(after: int) -> list[LedgerEntry]:
    """The entries that come next, of bounded number and size."""
    found: list[LedgerEntry] = []
    size = 0
    rows = LedgerEntry.objects.filter(sequence__gt=after).order_by("sequence")
    for entry in rows[:BATCH]:
        size += len(entry.statement)
        if found and size > BATCH_BYTES:
            break
        found.append(entry)
    return found
