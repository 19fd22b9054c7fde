"""Counters of executions: kept at each end of a run, added up when read, and counted anew."""

from __future__ import annotations

import fcntl
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Model

from executions.capabilities.observability.models import (
    ExecutionCount,
    ExecutionLatency,
    ExecutionTotal,
)
from executions.capabilities.retention.service import records_erased_until
from executions.kernel.database import let_others_write, snapshot_read
from executions.runs.admission import ADD_USE
from executions.runs.models import Execution, ExecutionTenantCount, hour_of
from providers.services.breaker import ILL

# Upper bounds in seconds of the buckets of a duration; what is longer is in "+Inf".
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LABELS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
PHASES = ("queue", "start", "run", "total")
OUTCOME, FAULT, HOP, OBSERVED = "outcome", "fault", "hop", "observed"

_ILL = frozenset(entry.code for entry in ILL)
# Of one record; a route has a few steps.
_MOST_HOPS = 16


def is_fault(execution: Execution) -> bool:
    """Whether the provider failed at it. What failed when code may have been running, or as the
    caller brought it about, never counts against a provider."""
    return (
        execution.status == Execution.Status.ERROR
        and execution.retryable
        and execution.error_code in _ILL
        and bool(execution.provider)
    )


def add(cursor: Any, execution: Execution, cost: float) -> None:
    """Add an execution that has just ended, in the transaction that ended it."""
    provider = execution.provider
    rows: list[tuple[str, str, str, int, float]] = []
    # By kind, provider and label, in one order for everybody: who held one row and waited for
    # another would otherwise meet somebody who does it the other way round.
    if is_fault(execution):
        rows.append((FAULT, provider, execution.error_code, 1, 0.0))
    if execution.hops:
        rows += _hops(execution.hops)
    for observed in sorted((execution.observed or "").split()):
        rows.append((OBSERVED, provider, observed, 1, 0.0))
    label = f"{execution.status} {execution.error_code}".rstrip()
    rows.append((OUTCOME, provider, label, 1, cost))
    for phase, milliseconds in (
        ("queue", execution.queue_ms),
        ("run", execution.run_ms),
        ("start", execution.start_ms),
        ("total", execution.total_ms),
    ):
        if milliseconds is not None:
            seconds = max(0.0, milliseconds / 1000)
            rows.append((phase, provider, LABELS[bisect_left(BOUNDS, seconds)], 1, seconds))
    cursor.execute(_upsert_totals(len(rows)), [value for row in rows for value in row])


def left_for_another(execution: Execution) -> list[tuple[str, str, int]]:
    """Provider, error code and number of the hops that failed and went on to another provider."""
    rows = _hops(execution.hops) if execution.hops else []
    return [
        (provider, code, count)
        for _, provider, code, count, _ in rows
        if provider != execution.provider
    ]


def _hops(hops: list[dict[str, Any]]) -> list[tuple[str, str, str, int, float]]:
    found = Counter(
        (str(hop["provider"])[:64], str(hop.get("code") or "")[:8])
        for hop in hops[:_MOST_HOPS]
        if hop.get("outcome") == "failed"
    )
    return [
        (HOP, provider, code, number, 0.0) for (provider, code), number in sorted(found.items())
    ]


@lru_cache(maxsize=32)
def _upsert_totals(number: int) -> str:
    """For so many rows. Every name is from our own model."""
    table = ExecutionTotal._meta.db_table
    places = ", ".join(["(%s, %s, %s, %s, %s)"] * number)
    return (
        f"INSERT INTO {table} (kind, provider, label, count, amount) VALUES {places}"  # noqa: S608
        " ON CONFLICT (kind, provider, label) DO UPDATE SET"
        f" count = {table}.count + excluded.count, amount = {table}.amount + excluded.amount"
    )


_GROWTH = 1.1
_LAST_BUCKET = 200

# In the place of a status: a row that counts no execution, but what went on to another provider.
LEFT = "left"

HAS_COST = any(field.name == "cost" for field in Execution._meta.get_fields())


def bucket_of(milliseconds: float) -> int:
    """The bucket of a latency: 0 below one millisecond, then one for each growth by a tenth."""
    if milliseconds < 1:
        return 0
    return min(_LAST_BUCKET, 1 + int(math.log(milliseconds, _GROWTH)))


def milliseconds_of(bucket: int) -> float:
    """The middle of a bucket, in milliseconds."""
    return 0.5 if bucket == 0 else float(_GROWTH ** (bucket - 0.5))


def count(execution: Execution) -> None:
    """Count an execution that has just ended. Call it in the transaction that ended it."""
    assert execution.finished_at is not None  # noqa: S101  it has just ended
    hour = connection.ops.adapt_datetimefield_value(hour_of(execution.finished_at))
    cost = _cost(execution)
    # One statement each, which no other process can come between. Always in this order: two
    # transactions that took the rows in different orders would wait for each other for ever.
    with connection.cursor() as cursor:
        outcome = (hour, execution.provider, execution.status, execution.error_code, 1, cost)
        priced = int(execution.cost is not None)
        cursor.execute(_COUNT, (*outcome, int(is_fault(execution)), priced, 0))
        # Behind every row of an outcome, which these are none of, and in one order: see above.
        for provider, code, number in left_for_another(execution):
            key = (hour, provider, LEFT, code)
            cursor.execute(_COUNT, (*key, 0, 0, 0, 0, number))
        if execution.total_ms is not None:
            bucket = bucket_of(execution.total_ms)
            cursor.execute(_LATENCY, (hour, execution.provider, bucket, 1))
        add(cursor, execution, cost)


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


def _cost(execution: Execution) -> float:
    return float(getattr(execution, "cost", None) or 0)


# What the rows of each table are told apart by.
KEYS: dict[type[Model], tuple[str, ...]] = {
    # As an end takes them: the core counts the tenant's use before the rest.
    ExecutionTenantCount: ("hour", "tenant_slug"),
    ExecutionCount: ("hour", "provider", "status", "error_code"),
    ExecutionLatency: ("hour", "provider", "bucket"),
}


def _upsert(model: type[Model], *sums: str) -> str:
    """One row more, or more in the row that is there. Every part is a name from our own models."""
    table, keys = model._meta.db_table, KEYS[model]
    names = ", ".join((*keys, *sums))
    places = ", ".join(["%s"] * (len(keys) + len(sums)))
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in sums)
    return (
        f"INSERT INTO {table} ({names}) VALUES ({places}) "  # noqa: S608
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {added}"
    )


_COUNT = _upsert(ExecutionCount, "count", "cost", "faults", "priced", "went_on")
_LATENCY = _upsert(ExecutionLatency, "count")
# Inserts a row of each table, or adds to the one that is there.
ADD: dict[type[Model], str] = {
    ExecutionCount: _COUNT,
    ExecutionTenantCount: ADD_USE,
    ExecutionLatency: _LATENCY,
}


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
            counted, counts = _count_records()
            since = _since()
            corrections = [each for each in _corrections(counts) if each.key[0] >= since]
        for start in range(0, len(corrections), _CORRECTED):
            with transaction.atomic():
                for correction in corrections[start : start + _CORRECTED]:
                    correction.apply()
            let_others_write()
    return counted


def _since() -> datetime:
    """From when on all records are there. They end a while after they were made."""
    until = records_erased_until()
    if until is None:
        return datetime.min.replace(tzinfo=UTC)
    return hour_of(until) + timedelta(days=2)


@dataclass(frozen=True)
class _Correction:
    """What is added to the row of this key; it may be less than nothing."""

    model: type[Model]
    key: tuple[Any, ...]
    count: int
    cost: float
    priced: int

    def apply(self) -> None:
        names = KEYS[self.model]
        rows = self.model._default_manager.filter(**dict(zip(names, self.key, strict=True)))
        more: dict[str, Any] = {"count": F("count") + self.count}
        if self.model is not ExecutionLatency:
            more["cost"] = F("cost") + self.cost
        if self.model is ExecutionCount:
            more["priced"] = F("priced") + self.priced
        if not rows.update(**more) and self.count > 0:
            self._add()
        # What was stored shows in no column of a record, and some of it is gone by now. What was
        # used of a quota stays used. Faults are of the hours that alerts look at, and stay as they
        # were counted.
        stores = {"stored_bytes": 0, "used_ms": 0} if self.model is ExecutionTenantCount else {}
        rows.filter(count=0, **stores).delete()

    def _add(self) -> None:
        sums: list[float] = [self.count]
        if self.model is not ExecutionLatency:
            sums.append(self.cost)
        if self.model is ExecutionTenantCount:
            sums += [0, 0]
        elif self.model is not ExecutionLatency:
            # Faults, what has a price, and what was left for another.
            sums += [0, self.priced, 0]
        hour = connection.ops.adapt_datetimefield_value(self.key[0])
        with connection.cursor() as cursor:
            cursor.execute(ADD[self.model], [hour, *self.key[1:], *sums])


class _Sums(NamedTuple):
    number: int = 0
    cost: float = 0.0
    priced: int = 0


_Counts = dict[tuple[Any, ...], _Sums]


def _count_records() -> tuple[int, dict[type[Model], _Counts]]:
    """How many executions have ended, and what the rows of each table should say of them."""
    columns = ["finished_at", "provider", "tenant_slug", "status", "error_code", "total_ms"]
    if HAS_COST:
        columns.append("cost")
    counts: dict[type[Model], _Counts] = {model: {} for model in KEYS}
    counted = 0
    rows = Execution.objects.filter(finished_at__isnull=False).order_by().values(*columns)
    for facts in rows.iterator(chunk_size=_BATCH):
        counted += 1
        facts["hour"] = hour_of(facts["finished_at"])
        if facts["total_ms"] is not None:
            facts["bucket"] = bucket_of(facts["total_ms"])
        cost = float(facts.get("cost") or 0)
        for model, names in KEYS.items():
            if "bucket" in names and "bucket" not in facts:
                continue
            key = tuple(facts[name] for name in names)
            sums = counts[model].get(key, _Sums())
            counts[model][key] = _Sums(
                sums.number + 1, sums.cost + cost, sums.priced + (facts.get("cost") is not None)
            )
    return counted, counts


def _corrections(counts: dict[type[Model], _Counts]) -> list[_Correction]:
    """What the tables lack, or have too much of."""
    found = []
    for model, right in counts.items():
        has_cost = model is not ExecutionLatency
        sums = ("count", *(("cost",) if has_cost else ()))
        if model is ExecutionCount:
            sums += ("priced",)
        keys = KEYS[model]
        stored: _Counts = {}
        for row in model._default_manager.order_by().values_list(*keys, *sums).iterator():
            key, values = row[: len(keys)], row[len(keys) :]
            stored[key] = _Sums(*values)
        for key in right.keys() | stored.keys():
            should, is_now = right.get(key, _Sums()), stored.get(key, _Sums())
            cost = should.cost - is_now.cost if has_cost else 0.0
            priced = should.priced - is_now.priced if model is ExecutionCount else 0
            if should.number != is_now.number or priced or abs(cost) > 1e-9:
                found.append(_Correction(model, key, should.number - is_now.number, cost, priced))
    # In the order in which an execution that ends takes its rows, so that neither waits for ever.
    return sorted(found, key=lambda each: (list(KEYS).index(each.model), each.key))


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
