"""What a report is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db.models import Exists, Max, Min, OuterRef, Q, QuerySet, Sum, Value
from django.db.models.functions import Coalesce, Length

from executions.kernel.text import first_uuid7
from executions.ledger.entry import column_of, moment
from executions.ledger.models import LedgerEntry, LegalHold
from executions.runs.models import Artifact, Execution
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration

MOST_RUNS = 100_000
MOST_IDS = 1000
# What is made while its page waits: so many runs, and so many entries to read.
_SMALL_RUNS = 200
_SMALL_ENTRIES = 5000
_SMALL_BYTES = 20_000_000
_BODIES = ("code", "arguments", "result", "outputs", "exception", "stdout", "stderr")
# Before the first and after the last of these, identifiers and written times do not reach.
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Scope:
    """Runs of one tenant, or of all ("" names none); made since a moment, and before another; of
    these the listed ones alone, where any are. `with_code`: whether the code itself is told."""

    tenant: str = ""
    since: datetime | None = None
    until: datetime | None = None
    ids: Sequence[UUID] = ()
    with_code: bool = False

    def check(self) -> None:
        """Raises InvalidConfiguration, naming the field, for what no report can be of."""
        if not (self.tenant or self.since or self.until or self.ids):
            raise InvalidConfiguration(
                "Select a tenant, a time, or executions.", field="tenant_slug"
            )
        for field, at in (("since", self.since), ("until", self.until)):
            if at and not _EARLIEST <= at <= _LATEST:
                raise InvalidConfiguration("Must be between 1970 and 9999.", field=field)
        if self.since and self.until and self.since >= self.until:
            raise InvalidConfiguration("Must be later than the beginning.", field="until")
        if len(self.ids) > MOST_IDS:
            raise InvalidConfiguration(f"Must be at most {MOST_IDS} executions.", field="ids")
        if self.tenant and not self._is_known():
            raise InvalidConfiguration("There is no such tenant.", field="tenant_slug")

    def stated(self) -> dict[str, Any]:
        """As reports and the ledger tell it."""
        return {
            "tenant": self.tenant or None,
            "since": moment(self.since),
            "until": moment(self.until),
            "executions": sorted(map(str, self.ids)),
            "with_code": self.with_code,
        }

    def executions(self) -> QuerySet[Execution]:
        """By the time in their ids, which their index has."""
        found = Execution.objects.filter(self._within("pk")).order_by("pk")
        return found.filter(tenant_slug=self.tenant) if self.tenant else found

    def entries_without_rows(self) -> QuerySet[LedgerEntry]:
        """Of runs whose record is gone, or says another tenant than its entry. Whose one is says
        its column, which is anybody's to write: whoever reads the entry looks at its statement."""
        rows = Execution.objects.filter(pk=OuterRef("execution_id"))
        entries = LedgerEntry.objects.filter(
            self._within("execution_id"), kind="execution", execution_id__isnull=False
        )
        if self.tenant:
            entries = entries.filter(subject=column_of(self.tenant))
            rows = rows.filter(tenant_slug=self.tenant)
        return entries.exclude(Exists(rows)).order_by("execution_id")

    def span(self) -> tuple[int, int]:
        """The first and the last entry that were entered in its time, or of its executions. Runs
        that were made in its time may have ended, and been entered, after it."""
        entries = LedgerEntry.objects.filter(self._within("execution_id"))
        if self.ids:
            ends = entries.aggregate(first=Min("sequence"), last=Max("sequence"))
            return ends["first"] or 1, ends["last"] or 1
        newest = LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"] or 0
        first = _entered_before(self.since, newest) + 1 if self.since else 1
        if self.until is None:
            return first, newest
        last = entries.aggregate(last=Max("sequence"))["last"] or 0
        return first, max(last, _entered_before(self.until, newest))

    def is_small(self) -> bool:
        """Whether it is made while somebody waits."""
        first, last = self.span()
        if last - first > _SMALL_ENTRIES:
            return False
        size = sum((Coalesce(Length(name), 0) for name in _BODIES), Value(0))
        runs = dict(
            self.executions().annotate(size=size).values_list("pk", "size")[: _SMALL_RUNS + 1]
        )
        if len(runs) > _SMALL_RUNS:
            return False
        entries = LedgerEntry.objects.filter(sequence__gte=first, sequence__lte=last)
        artifacts = Artifact.objects.filter(execution__in=runs)
        stated = entries.aggregate(size=Sum(Length("statement")))["size"] or 0
        files = artifacts.aggregate(size=Sum("size_bytes"))["size"] or 0
        return bool(sum(runs.values()) + stated + files <= _SMALL_BYTES)

    def _within(self, column: str) -> Q:
        within = Q()
        if self.since:
            within &= Q(**{f"{column}__gte": first_uuid7(self.since)})
        if self.until:
            within &= Q(**{f"{column}__lt": first_uuid7(self.until)})
        if self.ids:
            within &= Q(**{f"{column}__in": list(self.ids)})
        return within

    def _is_known(self) -> bool:
        """Also where it is gone, and its records or holds are not."""
        return (
            Tenant.objects.filter(slug=self.tenant).exists()
            or Execution.objects.filter(tenant_slug=self.tenant).exists()
            or LegalHold.objects.filter(tenant_slug=self.tenant).exists()
        )


def _entered_before(at: datetime, newest: int) -> int:
    """The last entry from before then, 0 where there is none; found by halving, for nothing else
    orders entries by time than their numbers."""
    low, high = 0, newest
    while low < high:
        middle = (low + high + 1) // 2
        times = LedgerEntry.objects.filter(sequence__gte=middle).order_by("sequence")
        found = times.values_list("at", flat=True).first()
        if found is not None and found < at:
            low = middle
        else:
            high = middle - 1
    return low
