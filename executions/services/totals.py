"""Running totals for `/metrics`: whoever is asked reads the same ones, and they only grow.

They are kept with the hourly counts, by the transaction that ends an execution, in one statement of
a few rows. So histograms are right over any number of processes and hosts, and a scrape reads a
row for each series, however long the history is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from functools import lru_cache
from typing import Any

from executions.models.statistic import ExecutionTotal
from executions.runs.models import Execution
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
    cursor.execute(_upsert(len(rows)), [value for row in rows for value in row])


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
def _upsert(number: int) -> str:
    """For so many rows. Every name is from our own model."""
    table = ExecutionTotal._meta.db_table
    places = ", ".join(["(%s, %s, %s, %s, %s)"] * number)
    return (
        f"INSERT INTO {table} (kind, provider, label, count, amount) VALUES {places}"  # noqa: S608
        " ON CONFLICT (kind, provider, label) DO UPDATE SET"
        f" count = {table}.count + excluded.count, amount = {table}.amount + excluded.amount"
    )
