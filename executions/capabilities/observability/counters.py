"""Counters of executions: what is counted of each end, added up when read, and counted anew."""

from __future__ import annotations

import fcntl
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Sum

from executions.capabilities.retention.service import records_erased_until
from executions.kernel.database import let_others_write, snapshot_read
from executions.runs.models import Execution, hour_of
from executions.runs.network import OUTCOMES
from executions.runs.statistics import (
    ALL_TIME,
    TENANT,
    Increment,
    Statistic,
    Sums,
    add,
    rows_since,
    sum_up,
)
from providers.network import NETWORK
from providers.services.breaker import ILL

# Upper bounds in seconds of the buckets of a duration; what is longer is in "+Inf".
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LABELS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
PHASES = ("queue", "start", "run", "total")
# Of a provider by the hour and in all: executions by status and error code, and its failures.
OUTCOME, FAULT = "outcome", "fault"
# By the hour: executions with a price, by latency, and failed attempts that another provider
# followed.
PRICED, LATENCY, LEFT = "priced", "latency", "left"
# In all: failed attempts, security events, attempts to reach a host, and the phases.
HOP, OBSERVED, REACHED = "hop", "observed", "reached"

_ILL = frozenset(entry.code for entry in ILL)
# Of one record; a route has a few steps.
_MOST_HOPS = 16
# What a provider says of one run beyond this is no figure to add up.
_MOST_ATTEMPTS = 2**31


def is_fault(execution: Execution) -> bool:
    """Whether the provider failed at it. What failed when code may have been running, or as the
    caller brought it about, never counts against a provider."""
    return (
        execution.status == Execution.Status.ERROR
        and execution.retryable
        and execution.error_code in _ILL
        and bool(execution.provider)
    )


def statistics(ended: Execution) -> Iterator[Increment]:
    """Return what is counted of an execution that has just ended."""
    assert ended.finished_at is not None  # noqa: S101  it has just ended
    provider, hour = ended.provider, hour_of(ended.finished_at)
    yield from _by_hour(ended, hour)
    cost = float(ended.cost or 0)
    yield Increment(OUTCOME, provider, ALL_TIME, _outcome(ended), amount=cost)
    if is_fault(ended):
        yield Increment(FAULT, provider, hour, ended.error_code)
        yield Increment(FAULT, provider, ALL_TIME, ended.error_code)
    for (name, code), number in _failed_hops(ended.hops or ()).items():
        yield Increment(HOP, name, ALL_TIME, code, number)
        if name != provider:
            yield Increment(LEFT, name, hour, code, number)
    for observed in (ended.observed or "").split():
        yield Increment(OBSERVED, provider, ALL_TIME, observed)
    reached = ended.meta.get(NETWORK) or {}
    for outcome in OUTCOMES:
        if tried := reached.get(outcome):
            yield Increment(REACHED, provider, ALL_TIME, outcome, min(tried, _MOST_ATTEMPTS))
    for phase in PHASES:
        milliseconds = getattr(ended, f"{phase}_ms")
        if milliseconds is not None:
            seconds = max(0.0, milliseconds / 1000)
            label = LABELS[bisect_left(BOUNDS, seconds)]
            yield Increment(phase, provider, ALL_TIME, label, amount=seconds)


def _by_hour(ended: Any, hour: datetime) -> Iterator[Increment]:
    """What is counted again from records. `ended` has the columns of one."""
    cost = float(ended.cost or 0)
    yield Increment(OUTCOME, ended.provider, hour, _outcome(ended), amount=cost)
    if ended.cost is not None:
        yield Increment(PRICED, ended.provider, hour)
    if ended.total_ms is not None:
        yield Increment(LATENCY, ended.provider, hour, str(bucket_of(ended.total_ms)))


def _outcome(ended: Any) -> str:
    return f"{ended.status} {ended.error_code}".rstrip()


def _failed_hops(hops: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter(
        (str(hop["provider"])[:64], str(hop.get("code") or "")[:8])
        for hop in hops[:_MOST_HOPS]
        if hop.get("outcome") == "failed"
    )


_GROWTH = 1.1
_LAST_BUCKET = 200


def bucket_of(milliseconds: float) -> int:
    """The bucket of a latency: 0 below one millisecond, then one for each growth by a tenth."""
    if milliseconds < 1:
        return 0
    return min(_LAST_BUCKET, 1 + int(math.log(milliseconds, _GROWTH)))


def milliseconds_of(bucket: int) -> float:
    """The middle of a bucket, in milliseconds."""
    return 0.5 if bucket == 0 else float(_GROWTH ** (bucket - 0.5))


def latencies(since: datetime) -> dict[str, list[tuple[int, int]]]:
    """Return the (bucket, count) of each provider, of what ended from an hour on."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    rows = rows_since(since, LATENCY).values_list("name", "label")
    for provider, bucket, number in rows.annotate(number=Sum("count")):
        found[provider].append((int(bucket), number))
    return found


def percentiles(histogram: Iterable[tuple[int, int]], *wanted: float) -> list[float | None]:
    """Latencies in milliseconds below which `wanted` parts of all lie; None where there are none.

    `histogram` is (bucket, count), in any order.
    """
    sorted_buckets = sorted(histogram)
    total = sum(number for _, number in sorted_buckets)
    found: list[float | None] = []
    for part in wanted:
        rank, seen, value = part * total, 0, None
        for bucket, number in sorted_buckets:
            seen += number
            if seen >= rank and total:
                value = milliseconds_of(bucket)
                break
        found.append(value)
    return found


_BATCH = 5000
# Rows that are corrected in one transaction.
_CORRECTED = 50
# Any number that no other lock of this database uses.
_POSTGRES_LOCK = 0x4EC0


class Recounting(Exception):
    """Two at once would both add what is missing."""


def recount() -> int:
    """Count everything anew. How many executions were counted.

    For records that came without being ended here, as from a restored table. What was counted of
    records that retention has erased since stays. Executions may end
    meanwhile: records and counts are read in one snapshot, without a lock, and what is wrong is
    added to the counts as they are then, some rows at a time. Raises Recounting when somebody
    else does it.
    """
    with _recounting_alone():
        with snapshot_read():
            sums = _count_records()
            corrections = _corrections(sums, _since())
        for start in range(0, len(corrections), _CORRECTED):
            with transaction.atomic():
                for correction in corrections[start : start + _CORRECTED]:
                    _correct(correction)
            let_others_write()
    return sum(count for (kind, *_), (count, _) in sums.items() if kind == TENANT)


def _since() -> datetime:
    """From when on all records are there. They end a while after they were made."""
    until = records_erased_until()
    if until is None:
        return ALL_TIME + timedelta(hours=1)
    return hour_of(until) + timedelta(days=2)


def _count_records() -> Sums:
    """What the rows of the hours should say of the executions that have ended."""
    columns = ("finished_at", "provider", "tenant_slug", "status", "error_code", "total_ms", "cost")
    rows = Execution.objects.filter(finished_at__isnull=False).order_by()
    records = rows.values_list(*columns, named=True).iterator(chunk_size=_BATCH)
    return sum_up(each for ended in records for each in _of_record(ended))


def _of_record(ended: Any) -> Iterator[Increment]:
    hour = hour_of(ended.finished_at)
    yield Increment(TENANT, ended.tenant_slug, hour, amount=float(ended.cost or 0))
    yield from _by_hour(ended, hour)


def _corrections(sums: Sums, since: datetime) -> list[Increment]:
    """What is added to the rows; it may be less than nothing. In the order of `add`.

    Faults are of the hours that alerts look at, and stay as they were counted. What was stored
    shows in no column of a record, and some of it is gone by now. What was used of a quota stays
    used.
    """
    rows = rows_since(since, TENANT, OUTCOME, PRICED, LATENCY)
    names = ("kind", "name", "hour", "label", "count", "amount")
    stored: Sums = {row[:4]: row[4:] for row in rows.values_list(*names).iterator()}
    found = []
    for key in sums.keys() | stored.keys():
        (count, amount), (count_now, amount_now) = (
            each.get(key, (0, 0.0)) for each in (sums, stored)
        )
        is_wrong = count != count_now or abs(amount - amount_now) > 1e-9
        if is_wrong and key[2] >= since:
            found.append(Increment(*key, count - count_now, amount - amount_now))
    return sorted(found)


def _correct(correction: Increment) -> None:
    kind, name, hour, label, count, amount = correction
    rows = Statistic.objects.filter(kind=kind, name=name, hour=hour, label=label)
    if not rows.update(count=F("count") + count, amount=F("amount") + amount) and count > 0:
        add([correction])
    # Of a tenant without executions in that hour it may still say that it stored something.
    if kind != TENANT:
        rows.filter(count=0).delete()


@contextmanager
def _recounting_alone() -> Iterator[None]:
    """Of one database, or, where it is a file, of the host it is on."""
    message = "The executions are already being counted. Wait until this has ended."
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_lock(%s)", [_POSTGRES_LOCK])
            if not cursor.fetchone()[0]:
                raise Recounting(message)
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [_POSTGRES_LOCK])
        return
    lock = Path(settings.DATA_DIR) / "run" / "recount.lock"
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Recounting(message) from error
        yield
