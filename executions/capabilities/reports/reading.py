"""What a report is of, and its facts, read from the records and compared with the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db.models import Exists, Max, Min, OuterRef, Q, QuerySet, Sum, Value
from django.db.models.functions import Coalesce, Length

from executions.capabilities.reports.signing import Signed
from executions.kernel.text import first_uuid7
from executions.ledger.entry import canonical, column_of, moment, to_canonical
from executions.ledger.erasures import Erasures, Held, authentic, hold_scope, hold_scopes_in_ledger
from executions.ledger.models import Finding, LedgerEntry, LegalHold, Verification
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify_entries
from executions.runs.ledger_checks import alteration_of
from executions.runs.models import Artifact, Execution
from executions.runs.record import body_hashes
from executions.runs.results import policy_of
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


# Of a body: it is there, was never kept, was erased as an entry says, or is gone without one.
KEPT, NOT_KEPT, NONE, ERASED, REMOVED = "kept", "not kept", "none", "erased", "removed"
# Of a record: another tenant is named by it than by its entry.
MOVED = "moved"
_OUTPUTS = ("result", "outputs", "exception", "stdout", "stderr")


def run_facts(
    execution: Execution,
    entry: LedgerEntry | None,
    stated: Mapping[str, Any] | None,
    erasures: Erasures,
    *,
    artifacts: Iterable[Artifact],
    problem: str,
    held: bool,
    with_code: bool,
) -> dict[str, Any]:
    """All of it as JSON that has a canonical form. `stated` is what its entry says, where it is
    authentic; `problem` what is wrong with the record, "" where nothing is."""
    return {
        "id": str(execution.pk),
        **{name: to_canonical(getattr(execution, name)) for name in _COLUMNS},
        "api_key": to_canonical(
            {"name": execution.api_key_name, "prefix": execution.api_key_prefix}
        ),
        "asked_by": {name: to_canonical(getattr(execution, name)) for name in _ASKED},
        "code": to_canonical(execution.code) if with_code and execution.code else None,
        "error": _error(execution),
        "policy": to_canonical(policy_of(execution)),
        "bodies": {
            "code": _code_state(execution, stated, erasures),
            "output": _output_state(execution, stated, erasures),
        },
        "artifacts": [_artifact(each, execution, stated, erasures) for each in artifacts],
        "held": held,
        "problem": to_canonical(problem),
        "receipt": entry.receipt if entry is not None and stated is not None else None,
    }


_COLUMNS = (
    *("tenant_slug", "created_at", "run_at", "started_at", "finished_at", "mode", "language"),
    *("entrypoint", "subject", "request_id", "client_address", "session_id", "schedule_id"),
    *("replay_of_id", "code_hash", "timeout", "status", "exit_code", "provider"),
    *("config_version", "runtime", "isolation", "sharing", "cost", "received_ms", "queue_ms"),
    *("start_ms", "run_ms", "closed_ms", "total_ms"),
)
_ASKED = ("agent", "model", "conversation", "on_behalf_of", "traceparent")


def _error(execution: Execution) -> dict[str, Any] | None:
    if not execution.error_code:
        return None
    return {
        "code": execution.error_code,
        "field": to_canonical(execution.error_field) or None,
        "message": to_canonical(execution.error_message),
    }


def _code_state(execution: Execution, stated: Mapping[str, Any] | None, erasures: Erasures) -> str:
    if execution.code:
        return KEPT
    if stated is None or not stated.get("code_kept"):
        return NOT_KEPT
    return ERASED if erasures.covers(execution, "code") else REMOVED


def _output_state(
    execution: Execution, stated: Mapping[str, Any] | None, erasures: Erasures
) -> str:
    there = body_hashes(execution)
    if stated is None or not any(stated.get(f"{name}_hash") for name in _OUTPUTS):
        return KEPT if any(there[f"{name}_hash"] for name in _OUTPUTS) else NONE
    gone = [name for name in _OUTPUTS if stated.get(f"{name}_hash") and not there[f"{name}_hash"]]
    if not gone:
        return KEPT
    return ERASED if erasures.covers(execution, "output") else REMOVED


def _artifact(
    artifact: Artifact,
    execution: Execution,
    stated: Mapping[str, Any] | None,
    erasures: Erasures,
) -> dict[str, Any]:
    state = KEPT
    if not artifact.file:
        is_erased = stated is not None and erasures.covers_artifacts(execution, stated)
        state = ERASED if is_erased else REMOVED
    return {
        "name": to_canonical(artifact.name),
        "mime_type": to_canonical(artifact.mime_type),
        "size_bytes": artifact.size_bytes,
        "hash": f"sha256:{artifact.sha256}",
        "bytes": state,
    }


def gone_facts(entry: LedgerEntry, stated: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Of a run whose record is gone: what its entry still says, which is its receipt."""
    return {
        "id": str(entry.execution_id),
        "tenant_slug": to_canonical(stated.get("tenant")),
        "finished_at": moment(entry.at),
        "record": how,
        "receipt": entry.receipt,
    }


# Each may hold several hundred kilobytes.
_AT_ONCE = 25
_UNREADABLE = (TypeError, ValueError, AttributeError, KeyError, ArithmeticError)
# More than any row's number.
_NO_NUMBER = 2**63

# What is said of a run, and its canonical form.
Told = tuple[dict[str, Any], str]


class Reading:
    """Reads in passes: `gone`, then `runs`, then `gone` again, for what went meanwhile; then
    `verification` says what came of it all.

    Of runs and records that are gone, MOST_RUNS are read, and `truncated` says that there were
    more. Raises LedgerUnavailable when nothing can be trusted.
    """

    def __init__(self, scope: Scope, said: Callable[[str], None] = lambda progress: None) -> None:
        self.scope = scope
        self.said = said
        self.public_keys = trusted_keys()
        self.erasures = Erasures(self.public_keys)
        self.found = Verification()
        self.read = 0
        self.gone_read = 0
        self.truncated = False
        self.statuses: Counter[str] = Counter()
        self.bodies: Counter[str] = Counter()
        self.configurations: set[tuple[str, int]] = set()
        self.policies: set[tuple[str, str]] = set()
        self.span = (0, 0)
        self._seen: set[UUID | None] = set()
        self.by_ledger = hold_scopes_in_ledger(thorough=False)
        self._held: dict[str, Held] = {}

    def gone(self) -> Iterator[Told]:
        """Runs that the ledger has and the records have not, or have as another tenant's, and that
        no pass has told yet."""
        entries, after = self.scope.entries_without_rows(), None
        while chunk := list(
            (entries.filter(execution_id__gt=after) if after else entries)[:_AT_ONCE]
        ):
            after = chunk[-1].execution_id
            for entry in chunk:
                if entry.execution_id in self._seen:
                    continue
                stated = self._stated(entry, entry.execution_id)
                # One that is not authentic, and so may say anything, is left out of no report.
                tenant = stated.get("tenant") if stated else self.scope.tenant
                if self.scope.tenant and tenant != self.scope.tenant:
                    continue
                if self._is_full():
                    return
                self._seen.add(entry.execution_id)
                if stated is None:
                    self.find("altered", entry.sequence, "its entry is not as it was signed")
                    continue
                self.read += 1
                self.gone_read += 1
                facts = gone_facts(entry, stated, self._how(entry, stated))
                yield facts, canonical(facts)
            self.said(f"{self.gone_read} runs read whose record is gone")

    def runs(self) -> Iterator[Told]:
        rows, after = self.scope.executions().defer("pending"), None
        rows = rows.select_related("tenant", "api_key").prefetch_related("artifacts")
        while chunk := list((rows.filter(pk__gt=after) if after else rows)[:_AT_ONCE]):
            after = chunk[-1].pk
            entries = LedgerEntry.objects.in_bulk(
                [execution.pk for execution in chunk], field_name="execution_id"
            )
            for execution in chunk:
                if self._is_full():
                    return
                try:
                    told = self._run(execution, entries.get(execution.pk))
                except Execution.DoesNotExist:
                    self._went(execution)
                    continue
                self._seen.add(execution.pk)
                self.read += 1
                yield told
            self.said(f"{self.read} runs read")

    def unknown(self) -> list[str]:
        """Of the executions that were asked for, those that neither records nor ledger have, or
        that are another tenant's."""
        if self.truncated:
            return []
        return sorted(str(pk) for pk in set(self.scope.ids) - self._seen)

    def verification(self) -> Verification:
        """What was found in the records, and in the entries of the range, which are read now."""
        first, last = self.span = self.scope.span()

        def progress(found: Verification) -> None:
            self.said(f"{found.entries} of {last - first + 1} entries of the ledger read")

        chain = verify_entries(first, last, progress)
        for finding in self.found.findings:
            chain.add(finding)
        chain.omitted += self.found.omitted
        chain.executions = self.found.executions
        chain.sort()
        return chain

    def is_held(self, tenant: str, execution_id: UUID) -> bool:
        if tenant not in self._held:
            self._held[tenant] = hold_scope(tenant, self.by_ledger.get(tenant, Held()))
        held = self._held[tenant]
        return held.everything or execution_id in held.executions

    def _run(self, execution: Execution, entry: LedgerEntry | None) -> Told:
        if entry is None:
            # It may have ended since its row was read.
            execution.refresh_from_db()
            entry = LedgerEntry.objects.filter(execution_id=execution.pk).first()
        elif execution.is_open:
            execution.refresh_from_db()
        stated = self._stated(entry, execution.pk) if entry else None
        held = self.is_held(execution.tenant_slug, execution.pk)

        def told_of(
            row: Execution, artifacts: Iterable[Artifact], problem: str, with_code: bool
        ) -> Told:
            facts = run_facts(
                *(row, entry, stated, self.erasures),
                artifacts=artifacts,
                problem=problem,
                held=held,
                with_code=with_code,
            )
            return facts, canonical(facts)

        try:
            problem = self._problem(execution, entry, stated)
            told = told_of(execution, execution.artifacts.all(), problem, self.scope.with_code)
        except _UNREADABLE as error:
            # Whoever wrote nonsense into it must not keep the others from being reported.
            problem = f"it cannot be read: {type(error).__name__}"
            number = entry.sequence if entry else 0
            detail = f"the record of execution {execution.pk} cannot be read"
            self.find("altered record", number, detail)
            blank = Execution(pk=execution.pk, tenant_slug=execution.tenant_slug, timeout=0)
            told = told_of(blank, (), problem, False)
        facts, _ = told
        self.found.executions += entry is not None
        self.statuses[str(execution.status)] += 1
        for body, state in facts["bodies"].items():
            self.bodies[f"{body} {state}"] += 1
        if execution.provider and execution.config_version is not None:
            self.configurations.add((execution.provider, execution.config_version))
        policy = facts["policy"] or {}
        if isinstance(policy.get("id"), int) and abs(policy["id"]) < _NO_NUMBER:
            self.policies.add((str(policy["id"]), str(policy["version"])))
        return told

    def _problem(
        self, execution: Execution, entry: LedgerEntry | None, stated: Mapping[str, Any] | None
    ) -> str:
        """What is wrong with it, which is then also a finding."""
        if entry is None:
            if execution.is_open:
                return ""
            self.find("missing", 0, f"execution {execution.pk} ended and has no entry")
            return "it ended and has no entry in the ledger"
        if stated is None:
            self.find("altered", entry.sequence, "its entry is not as it was signed")
            return "its entry is not as it was signed"
        problem = alteration_of(execution, stated, self.erasures)
        if problem:
            # Bodies may have been erased since it was read.
            self.erasures.read_on()
            execution.refresh_from_db()
            problem = alteration_of(execution, stated, self.erasures)
        if problem:
            detail = f"in the record of execution {execution.pk}, {problem}"
            self.find("altered record", entry.sequence, detail)
        return problem

    def _went(self, execution: Execution) -> None:
        """Its record went while it was read. Where it has an entry, `gone` tells it."""
        if LedgerEntry.objects.filter(execution_id=execution.pk).exists():
            return
        self.erasures.read_on()
        if not self.erasures.covers(execution, "records"):
            detail = f"the record of execution {execution.pk}, which has no entry, was removed"
            self.find("missing record", 0, detail)

    def _stated(self, entry: LedgerEntry, execution_id: UUID | None) -> dict[str, Any] | None:
        """What its entry says of this very run; None where it is not as it was signed."""
        stated = authentic(entry, self.public_keys)
        if stated is None or stated.get("kind") != "execution":
            return None
        return stated if stated.get("subject") == str(execution_id) else None

    def _how(self, entry: LedgerEntry, stated: Mapping[str, Any]) -> str:
        """How its record went; a finding, where retention did not erase it."""
        if Execution.objects.filter(pk=stated["subject"]).exists():
            detail = f"the record of execution {entry.execution_id} was taken from its tenant"
            self.find("altered record", entry.sequence, detail)
            return MOVED
        if self._was_erased(stated):
            return ERASED
        detail = f"the record of execution {entry.execution_id} was removed"
        self.find("missing record", entry.sequence, detail)
        return REMOVED

    def _was_erased(self, stated: Mapping[str, Any]) -> bool:
        if self.erasures.covers_record(stated):
            return True
        self.erasures.read_on()
        return self.erasures.covers_record(stated)

    def _is_full(self) -> bool:
        self.truncated = self.truncated or self.read >= MOST_RUNS
        return self.truncated

    def find(self, kind: str, sequence: int, detail: str) -> None:
        self.found.add(Finding(kind, sequence, detail))


MOST_HOLDS = 1000
_PLACE = ("tenant_slug", "execution_id")


def holds_of(reading: Reading) -> tuple[list[dict[str, Any]], int]:
    """The first of them, and how many there are more. One that the ledger has and no row is a
    finding, and comes first."""
    tenant = reading.scope.tenant
    rows = LegalHold.objects.filter(tenant_slug=tenant) if tenant else LegalHold.objects.all()
    there = [(slug, str(pk) if pk else None) for slug, pk in rows.values_list(*_PLACE)]
    lost = _by_ledger(reading.by_ledger, tenant) - set(there)
    if lost:
        # One that was lifted since the ledger was read is none.
        lost &= _by_ledger(hold_scopes_in_ledger(thorough=False), tenant)
    found = [
        {"tenant": to_canonical(slug), "execution": pk, "reason": None, "since": None}
        for slug, pk in sorted(lost, key=lambda place: (place[0], place[1] or ""))
    ]
    for each in found:
        what = each["execution"] or "everything"
        reading.find("missing record", 0, f"the legal hold of {each['tenant']} ({what}) has no row")
    found += [
        {
            "tenant": to_canonical(hold.tenant_slug),
            "execution": str(hold.execution_id) if hold.execution_id else None,
            "reason": to_canonical(hold.reason),
            "since": moment(hold.created_at),
        }
        for hold in rows[:MOST_HOLDS]
    ]
    return found[:MOST_HOLDS], max(0, len(there) + len(lost) - MOST_HOLDS)


def _by_ledger(held: Mapping[str, Held], tenant: str) -> set[tuple[str, str | None]]:
    places: set[tuple[str, str | None]] = set()
    for slug, each in held.items():
        if tenant in ("", slug):
            places |= {(slug, str(pk)) for pk in each.executions}
            places |= {(slug, None)} if each.everything else set()
    return places


KIND = "report"


def entry_of(signed: Signed, public_keys: Mapping[str, str]) -> dict[str, Any] | None:
    """The authentic entry of the report that has this file; None without one."""
    digest = f"sha256:{signed.digest}"
    for entry in LedgerEntry.objects.filter(kind=KIND, subject=column_of(signed.report)):
        stated = authentic(entry, public_keys)
        if stated is None or (stated["kind"], stated["subject"]) != (KIND, signed.report):
            continue
        if digest in hashes_of(stated).values():
            return stated
    return None


def hashes_of(stated: Mapping[str, Any]) -> dict[str, str]:
    """By what a file is, the hash of what was signed of it."""
    return {"json": stated["json_hash"], "pdf": stated["pdf_hash"]}


def lines_of(stated: Mapping[str, Any]) -> list[str]:
    """What an entry says of its report, for whoever checks one."""
    told = [
        f"report {stated['subject']}, entered at {stated['at']} by {json.dumps(stated['made_by'])}",
        f"of {asked(stated['asked'])}",
        f"NOT INTACT: {stated['findings']} findings" if stated["findings"] else "INTACT",
    ]
    if stated["truncated"]:
        told.append(f"INCOMPLETE: it ends after {stated['runs']} runs")
    return told


def asked(stated: Mapping[str, Any]) -> str:
    tenant = json.dumps(stated["tenant"]) if stated["tenant"] else "every tenant"
    only = f", {len(stated['executions'])} executions" if stated["executions"] else ""
    since, until = stated["since"] or "the beginning", stated["until"] or "then"
    return f"{tenant}, runs made from {since} until {until}{only}"
