"""The runs of a report, one after the other, each compared with what the ledger says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from executions.ledger.entry_format import canonical
from executions.ledger.executions import Erasures, alteration_of, authentic
from executions.ledger.findings import Finding, Verification
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify_entries
from executions.runs.models import Artifact, Execution
from executions.services.holds import Held, held_by_ledger, held_of
from executions.services.reports import scope as scopes
from executions.services.reports.facts import ERASED, MOVED, REMOVED, gone_facts, run_facts
from executions.services.reports.scope import Scope

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
        self.by_ledger = held_by_ledger(thorough=False)
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
            self._held[tenant] = held_of(tenant, self.by_ledger.get(tenant, Held()))
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
        self.truncated = self.truncated or self.read >= scopes.MOST_RUNS
        return self.truncated

    def find(self, kind: str, sequence: int, detail: str) -> None:
        self.found.add(Finding(kind, sequence, detail))
