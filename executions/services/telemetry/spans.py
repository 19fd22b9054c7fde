"""The spans of a run, made of what its record says when it has ended.

A run may begin in a web process and end in a worker, and no thread is held while it waits. So
nothing is carried along: ids of spans follow from the execution's id, and whichever process ends
the record tells all of them. They hold ids, names of providers and outcomes; neither code, output,
arguments nor messages, which may repeat any of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from executions.runs.models import Execution

REQUEST, ADMISSION, EXECUTION = "request", "admission", "execution"
QUEUE, ATTEMPT, START, RUN, CLOSE = (
    *("queue", "provider attempt", "sandbox start"),
    *("sandbox run", "close"),
)
_SAMPLED = 1
_NANOSECONDS = 1_000_000_000
_MS = 1_000_000


@dataclass(frozen=True)
class Span:
    """One span. Ids are as OTLP has them, `parent` 0 for none; times in nanoseconds since 1970."""

    name: str
    trace: int
    id: int
    parent: int
    start: int
    end: int
    is_server: bool = False
    error: str = ""
    attributes: Mapping[str, str | int | bool] = field(default_factory=dict)


def is_sampled(execution: Execution) -> bool:
    """As its caller decided. Without a trace of the caller's, it has one of its own."""
    parent = execution.traceparent
    return parent is None or bool(int(parent[53:55], 16) & _SAMPLED)


def admission_spans(execution: Execution, began: int, recorded: int) -> Iterator[Span]:
    """Of one that was just recorded: how long that took, and of one that is queued its request,
    which has its answer."""
    yield _span(execution, ADMISSION, REQUEST, began, recorded)
    if execution.mode == Execution.Mode.ASYNC:
        yield _request(execution, began, recorded)


def ended_spans(execution: Execution) -> Iterator[Span]:
    """Of one that has ended, by its timings, which have milliseconds and no gaps."""
    end = _at(execution.finished_at or execution.created_at)
    begin = min(_at(execution.created_at), end)
    if execution.total_ms is not None:
        begin = end - _ns(execution.total_ms)
    if execution.mode != Execution.Mode.ASYNC:
        yield _request(execution, begin, end)
    yield _span(execution, EXECUTION, REQUEST, begin, end, **_outcome(execution))
    served = begin + _ns(execution.queue_ms) if execution.queue_ms is not None else end
    yield _span(execution, QUEUE, EXECUTION, begin, min(served, end))
    yield from _left(execution, begin, min(served, end))
    if execution.queue_ms is None:
        return
    attempt = f"{ATTEMPT} {execution.provider}"
    yield _span(
        execution,
        ATTEMPT,
        EXECUTION,
        served,
        end,
        key=attempt,
        **_outcome(execution),
    )
    if execution.start_ms is None:
        return
    started = served + _ns(execution.start_ms)
    yield _span(execution, START, attempt, served, started)
    if execution.run_ms is None:
        return
    ran = started + _ns(execution.run_ms)
    yield _span(execution, RUN, attempt, started, ran, **_outcome(execution))
    yield _span(execution, CLOSE, attempt, ran, max(ran, end))


def _left(execution: Execution, begin: int, until: int) -> Iterator[Span]:
    """Providers that were tried and left before the one that served, one after the other."""
    left = [hop for hop in execution.hops or () if hop.get("outcome") != "served"]
    at = max(begin, until - sum(_ns(hop.get("ms")) for hop in left))
    for number, hop in enumerate(left):
        following = at + _ns(hop.get("ms"))
        yield _span(
            execution,
            ATTEMPT,
            EXECUTION,
            at,
            following,
            key=f"{ATTEMPT} {number}",
            provider=str(hop.get("provider")),
            outcome=str(hop.get("outcome")),
            error=str(hop.get("code") or ""),
        )
        at = following


def _request(execution: Execution, begin: int, end: int) -> Span:
    parent = int(execution.traceparent[36:52], 16) if execution.traceparent else 0
    return Span(
        REQUEST,
        _trace(execution),
        _id(execution, REQUEST),
        parent,
        begin,
        end,
        is_server=bool(execution.request_id),
        attributes={**_facts(execution), "cofferdam.request.id": execution.request_id},
    )


def _span(
    execution: Execution,
    name: str,
    parent: str,
    start: int,
    end: int,
    *,
    key: str = "",
    error: str = "",
    **more: str | int,
) -> Span:
    told = {f"cofferdam.{key}": value for key, value in more.items()}
    return Span(
        name,
        _trace(execution),
        _id(execution, key or name),
        _id(execution, parent),
        start,
        max(start, end),
        error=error,
        attributes={**_facts(execution), **told},
    )


def _facts(execution: Execution) -> dict[str, str | int | bool]:
    facts: dict[str, Any] = {
        "execution.id": str(execution.pk),
        "tenant": execution.tenant_slug,
        "language": execution.language,
        "mode": execution.mode,
        "session.id": str(execution.session_id) if execution.session_id else None,
    }
    return {f"cofferdam.{name}": value for name, value in facts.items() if value is not None}


def _outcome(execution: Execution) -> dict[str, Any]:
    facts = {
        "status": str(execution.status),
        "provider": execution.provider or None,
        "config_version": execution.config_version,
        "runtime": execution.runtime or None,
        "isolation": execution.isolation or None,
        "exit_code": execution.exit_code,
        "error_code": execution.error_code or None,
    }
    succeeded = execution.status == Execution.Status.SUCCEEDED
    error = "" if succeeded else execution.error_code or str(execution.status)
    return {**{name: value for name, value in facts.items() if value is not None}, "error": error}


def _trace(execution: Execution) -> int:
    return int(execution.traceparent[3:35], 16) if execution.traceparent else execution.pk.int


def _id(execution: Execution, name: str) -> int:
    digest = hashlib.sha256(f"{execution.pk} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def _at(moment: datetime) -> int:
    return int(moment.timestamp() * _NANOSECONDS)


def _ns(milliseconds: Any) -> int:
    return max(0, int(milliseconds * _MS)) if isinstance(milliseconds, (int, float)) else 0
