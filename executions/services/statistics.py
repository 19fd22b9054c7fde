"""Counting executions as they end, so that a million of them are read as a few hundred rows.

The counts are kept by the transaction that ends an execution: they are exact, lag behind nothing,
and need no worker. Latencies are kept as a histogram whose buckets grow by a tenth, so that a
percentile read from it is at most 5 % off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.db.models import Model
from django.utils import timezone

from executions.models import (
    Execution,
    ExecutionCount,
    ExecutionLatency,
    ExecutionTenantCount,
)

_GROWTH = 1.1
_LAST_BUCKET = 200
_BATCH = 5000

_HAS_COST = any(field.name == "cost" for field in Execution._meta.get_fields())


def bucket_of(milliseconds: float) -> int:
    """The bucket of a latency: 0 below one millisecond, then one for each growth by a tenth."""
    if milliseconds < 1:
        return 0
    return min(_LAST_BUCKET, 1 + int(math.log(milliseconds, _GROWTH)))


def milliseconds_of(bucket: int) -> float:
    """The middle of a bucket, in milliseconds."""
    return 0.5 if bucket == 0 else float(_GROWTH ** (bucket - 0.5))


def count(execution: Execution, stored_bytes: int = 0) -> None:
    """Count an execution that has just ended. Call it in the transaction that ended it.

    `stored_bytes` is what is kept of it.
    """
    assert execution.finished_at is not None  # noqa: S101  it has just ended
    hour = connection.ops.adapt_datetimefield_value(_hour(execution.finished_at))
    cost = _cost(execution)
    # One statement each, which no other process can come between. Always in this order: two
    # transactions that took the rows in different orders would wait for each other for ever.
    with connection.cursor() as cursor:
        outcome = (hour, execution.provider, execution.status, execution.error_code, 1, cost)
        cursor.execute(_COUNT, outcome)
        cursor.execute(_TENANT, (hour, execution.tenant_slug, 1, cost, stored_bytes))
        if execution.total_ms is not None:
            bucket = bucket_of(execution.total_ms)
            cursor.execute(_LATENCY, (hour, execution.provider, bucket, 1))


def count_stored(tenant_slug: str, stored_bytes: int) -> None:
    """Count what is stored of an execution that has yet to run, in the transaction that does."""
    hour = connection.ops.adapt_datetimefield_value(_hour(timezone.now()))
    with connection.cursor() as cursor:
        cursor.execute(_TENANT, (hour, tenant_slug, 0, 0, stored_bytes))


def ensure_counted() -> None:
    """Count what ended before there were counts. Does nothing where there are some."""
    if not ExecutionCount.objects.exists():
        recount()


def recount() -> int:
    """Count everything anew, in one transaction. How many executions were counted.

    For records that came without being ended here, as from a restored table.
    """
    columns = ["finished_at", "provider", "tenant_slug", "status", "error_code", "total_ms"]
    if _HAS_COST:
        columns.append("cost")
    tables: dict[type[Model], Counter[tuple[Any, ...]]] = {model: Counter() for model in _KEYS}
    costs: Counter[tuple[Any, ...]] = Counter()
    counted = 0
    with transaction.atomic():
        rows = Execution.objects.filter(finished_at__isnull=False).order_by().only(*columns)
        for execution in rows.iterator(chunk_size=_BATCH):
            assert execution.finished_at is not None  # noqa: S101  filtered
            counted += 1
            facts = {name: getattr(execution, name) for name in columns}
            facts |= {"hour": _hour(execution.finished_at)}
            if execution.total_ms is not None:
                facts["bucket"] = bucket_of(execution.total_ms)
            for model, keys in _KEYS.items():
                if "bucket" in keys and "bucket" not in facts:
                    continue
                key = tuple(facts[name] for name in keys)
                tables[model][key] += 1
                costs[(model, *key)] += _cost(execution)  # type: ignore[assignment]
        # What was stored shows in no column of a record, and some of it is gone by now.
        stored = {
            (row.hour, row.tenant_slug): row.stored_bytes
            for row in ExecutionTenantCount.objects.filter(stored_bytes__gt=0)
        }
        tables[ExecutionTenantCount].update(dict.fromkeys(stored, 0))
        for model, keys in _KEYS.items():
            model._default_manager.all().delete()
            found = (
                model(
                    **dict(zip(keys, key, strict=True)),
                    count=number,
                    **({} if model is ExecutionLatency else {"cost": costs[(model, *key)]}),
                    **(
                        {"stored_bytes": stored.get(key, 0)}
                        if model is ExecutionTenantCount
                        else {}
                    ),
                )
                for key, number in tables[model].items()
            )
            model._default_manager.bulk_create(found, batch_size=100)
    return counted


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


def _hour(moment: datetime) -> datetime:
    return timezone.localtime(moment, timezone.get_fixed_timezone(0)).replace(
        minute=0, second=0, microsecond=0
    )


def _cost(execution: Execution) -> float:
    return float(getattr(execution, "cost", None) or 0)


_KEYS: dict[type[Model], tuple[str, ...]] = {
    ExecutionCount: ("hour", "provider", "status", "error_code"),
    ExecutionTenantCount: ("hour", "tenant_slug"),
    ExecutionLatency: ("hour", "provider", "bucket"),
}


def _upsert(model: type[Model], *sums: str) -> str:
    """One row more, or more in the row that is there. Every part is a name from our own models."""
    table, keys = model._meta.db_table, _KEYS[model]
    names = ", ".join((*keys, *sums))
    places = ", ".join(["%s"] * (len(keys) + len(sums)))
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in sums)
    return (
        f"INSERT INTO {table} ({names}) VALUES ({places}) "  # noqa: S608
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {added}"
    )


_COUNT = _upsert(ExecutionCount, "count", "cost")
_TENANT = _upsert(ExecutionTenantCount, "count", "cost", "stored_bytes")
_LATENCY = _upsert(ExecutionLatency, "count")
