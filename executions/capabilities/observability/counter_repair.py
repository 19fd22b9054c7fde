"""Counting anew what `counters` counts as it happens, while it goes on happening."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Model

from executions.capabilities.observability.counters import ADD, HAS_COST, KEYS, bucket_of
from executions.capabilities.observability.models import ExecutionCount, ExecutionLatency
from executions.capabilities.retention.service import records_erased_until
from executions.kernel.database import let_others_write, snapshot_read
from executions.runs.models import Execution, ExecutionTenantCount, hour_of

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
