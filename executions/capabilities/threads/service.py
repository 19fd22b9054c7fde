"""Threads of agents: which there are, what one comes to, and its calls from the first one on.

A thread is the executions of one tenant that name one conversation. It may have any number of
them: what is counted and shown of it is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import (
    Case,
    Exists,
    F,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    TextField,
    When,
)
from django.db.models.functions import Coalesce, Left, Length, Right
from django.db.models.lookups import Exact

from executions.runs.models import Artifact, Execution
from providers.network import NETWORK

# Of one thread: of more calls the latest so many are counted.
MOST_COUNTED = 1_000
CALLS_PER_PAGE = 50
MOST_FILES = 20
# Of the sessions, agents and models of one thread.
MOST_NAMED = 20
# Of a session, how many of its latest executions are looked at for threads.
MOST_LOOKED_AT = 200
# What is read of a call for its page: its code whole where it is not longer than this.
MOST_WHOLE_CODE, MOST_CODE = 64 * 1024, 2 * 1024
MOST_OUTPUT = 2 * 1024

_FAILED = (Execution.Status.FAILED, *Execution.WITH_ERROR)
_STREAMS = ("stdout", "stderr")
UNREAD = (
    *("pending", "code", "arguments", "result", "outputs", "exception", *_STREAMS),
    *("hops", "input_files", "output_order"),
)
_OUTCOMES = ("allowed", "refused", "failed")

HAS_THREAD = Q(conversation__isnull=False)
_IS_REMOVED = Q(tenant__isnull=True)


def is_exactly(column: str, value: Any) -> Exact:
    """Return the condition that a column has a value, for which no index of it is taken."""
    return Exact(Coalesce(column, column), value)


def _same(conversation: Any, tenant: Any) -> Q:
    return Q(conversation=conversation, tenant=tenant)


def _same_of_removed(conversation: Any, slug: Any) -> Q:
    # The record has a tenant that was removed by its slug alone.
    is_tenant = is_exactly("tenant_slug", slug)
    return Q(_IS_REMOVED, is_tenant, conversation=conversation)


_OUTER = (
    _same(OuterRef("conversation"), OuterRef("tenant")),
    _same_of_removed(OuterRef("conversation"), OuterRef("tenant_slug")),
)


def is_latest() -> Q:
    """Return the condition that an execution is the latest of its thread."""
    # Apart, so that the index of conversations finds each.
    newer, newer_of_removed = (
        Exists(Execution.objects.filter(same, pk__gt=OuterRef("pk"))) for same in _OUTER
    )
    return (~_IS_REMOVED & ~newer) | (_IS_REMOVED & ~newer_of_removed)


def calls_of(one: Execution) -> QuerySet[Execution]:
    """Return the executions of the same thread, from the first one on."""
    if one.tenant_id is None:
        same = _same_of_removed(one.conversation, one.tenant_slug)
    else:
        same = _same(one.conversation, one.tenant_id)
    return Execution.objects.filter(same).order_by("pk")


@dataclass(frozen=True)
class Sum:
    """What the latest calls of a thread come to. `is_whole` says that it has no more."""

    calls: int
    failed: int
    sessions: int
    cost: Decimal | None
    first: datetime
    is_whole: bool


def sums_of(threads: Sequence[Execution]) -> dict[UUID, Sum]:
    """Return what each thread comes to, by its latest execution. It takes two queries."""
    if not threads:
        return {}
    first = _first_of(threads)
    parts: list[str] = []
    given: list[Any] = []
    failed_ones = ", ".join(f"'{status.value}'" for status in _FAILED)
    for number, one in enumerate(threads):
        rows = calls_of(one).order_by("-pk").values_list("status", "session_id", "cost")
        sql, params = rows[: MOST_COUNTED + 1].query.sql_with_params()
        # Django's own statement, and numbers and names of ours around it.
        parts.append(
            f"SELECT {number}, COUNT(*), COUNT(DISTINCT session_id), SUM(cost),"  # noqa: S608
            f" SUM(CASE WHEN status IN ({failed_ones}) THEN 1 ELSE 0 END) FROM ({sql}) AS calls"
        )
        given += params
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(parts), given)
        found = cursor.fetchall()
    return {
        threads[number].pk: Sum(
            calls=min(calls, MOST_COUNTED),
            failed=int(failed or 0),
            sessions=sessions,
            cost=None if cost is None else Decimal(str(cost)),
            first=first.get(threads[number].pk, threads[number].created_at),
            is_whole=calls <= MOST_COUNTED,
        )
        for number, calls, sessions, cost, failed in found
    }


def _first_of(threads: Sequence[Execution]) -> dict[UUID, datetime]:
    """When each began."""
    first, first_of_removed = (
        Subquery(Execution.objects.filter(same).order_by("pk").values("created_at")[:1])
        for same in _OUTER
    )
    rows = Execution.objects.filter(pk__in=[one.pk for one in threads]).order_by()
    began = rows.annotate(began=Coalesce(first, first_of_removed))
    return dict(began.values_list("pk", "began"))


@dataclass(frozen=True)
class Totals:
    """What a thread comes to. The names are in the order in which they came up."""

    calls: int
    failed: int
    running: int
    cost: Decimal | None
    files: int
    attempts: Mapping[str, int]
    sessions: Sequence[UUID]
    agents: Sequence[str]
    models: Sequence[str]
    first: datetime
    last: datetime
    is_whole: bool


def totals_of(one: Execution) -> Totals:
    """Return what the latest calls of a thread come to."""
    figures = [f"meta__{NETWORK}__{outcome}" for outcome in _OUTCOMES]
    columns = ("status", "cost", "artifact_count", "session_id", "agent", "model", "created_at")
    rows = calls_of(one).order_by("-pk").values_list(*columns, *figures)
    latest = list(rows[: MOST_COUNTED + 1])
    is_whole = len(latest) <= MOST_COUNTED
    counted = latest[:MOST_COUNTED][::-1]
    statuses, costs, files, sessions, agents, models, times, *attempts = (
        zip(*counted, strict=True) if counted else ((),) * (len(columns) + len(figures))
    )
    known = [cost for cost in costs if cost is not None]
    began = calls_of(one).values_list("created_at", flat=True).first()
    return Totals(
        calls=len(counted),
        failed=sum(status in _FAILED for status in statuses),
        running=sum(status in Execution.OPEN for status in statuses),
        cost=sum(known, Decimal(0)) if known else None,
        files=sum(files),
        attempts={
            outcome: sum(number for number in numbers if type(number) is int)
            for outcome, numbers in zip(_OUTCOMES, attempts, strict=True)
        },
        sessions=_named(sessions),
        agents=_named(agents),
        models=_named(models),
        first=began or one.created_at,
        last=times[-1] if times else one.created_at,
        is_whole=is_whole,
    )


def _named(values: Sequence[Any]) -> list[Any]:
    return [value for value in dict.fromkeys(values) if value][:MOST_NAMED]


@dataclass(frozen=True)
class Page:
    """Calls in their order. `before` and `start` are the keys of the pages around it."""

    calls: Sequence[Any]
    before: UUID | None = None
    start: UUID | None = None


def page_from(one: Execution, start: UUID | None = None) -> Page:
    """Return the calls of a thread from this one on, or from the first one on."""
    rows = _readable(calls_of(one))
    here = rows if start is None else rows.filter(pk__gte=start)
    found = list(here[: CALLS_PER_PAGE + 1])
    following = found[CALLS_PER_PAGE].pk if len(found) > CALLS_PER_PAGE else None
    is_first = start is None or not calls_of(one).filter(pk__lt=start).exists()
    return Page(found[:CALLS_PER_PAGE], None if is_first else start, following)


def page_before(one: Execution, end: UUID | None = None) -> Page:
    """Return the calls of a thread that come before this one, or the last ones."""
    rows = _readable(calls_of(one)).order_by("-pk")
    here = rows if end is None else rows.filter(pk__lt=end)
    found = list(here[: CALLS_PER_PAGE + 1])
    shown = found[:CALLS_PER_PAGE][::-1]
    before = shown[0].pk if len(found) > CALLS_PER_PAGE else None
    return Page(shown, before, end)


def _readable(rows: QuerySet[Execution]) -> QuerySet[Execution]:
    """With the beginning of the code, the end of the output, the first files and the approval."""
    sizes = {f"{name}_size": Length(name) for name in ("code", *_STREAMS)}
    ends = {f"{name}_end": Right(name, MOST_OUTPUT) for name in _STREAMS}
    whole = When(code_size__lte=MOST_WHOLE_CODE, then=F("code"))
    beginning = Case(whole, default=Left("code", MOST_CODE), output_field=TextField())
    artifacts = Artifact.objects.order_by("pk").only("execution", "name", "size_bytes")
    return (
        rows.select_related("approval")
        .defer(*UNREAD)
        .annotate(**sizes)
        .annotate(**ends, begun_code=beginning)
        .prefetch_related(Prefetch("artifacts", artifacts[:MOST_FILES], to_attr="first_files"))
    )


def threads_of_session(session_id: UUID) -> list[tuple[str, UUID]]:
    """Return the threads that have used a session lately: their name, and an execution of each."""
    rows = Execution.objects.filter(session=session_id).order_by("-pk")
    latest = rows.values_list("conversation", "pk")[:MOST_LOOKED_AT]
    found = {name: pk for name, pk in reversed(latest) if name}
    return list(found.items())[:MOST_NAMED]
