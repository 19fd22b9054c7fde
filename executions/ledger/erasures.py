"""What the ledger says of erasures and legal holds, and what holds keep.

A hold whose row is gone, and of which no signed entry says that it was lifted, still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.db.models import Max, Q, QuerySet

from executions.kernel.text import time_of
from executions.ledger.bindings import ACCEPTED, ALTERED, DELETED
from executions.ledger.entry import is_signed_by, moment, parse, signed_bytes
from executions.ledger.models import LedgerEntry, LegalHold
from executions.ledger.trust import trusted_keys
from providers.services.guarded_rows import NotAllowed

_KIND, _MODEL = "legal_hold", "executions.legalhold"
# By the row of each hold, its tenant and its execution; None is all of the tenant's.
Holds = MutableMapping[str, tuple[str, str | None]]


def of_holds(*, thorough: bool) -> Q:
    """Entries of holds. `thorough` reads all of the ledger, for those whose columns were changed:
    what is erased in spite of a hold is gone before a verification finds such a column.
    """
    by_column = Q(kind=_KIND)
    return by_column | Q(statement__contains=f'"kind":"{_KIND}"') if thorough else by_column


def entries_of_holds(*, thorough: bool) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(of_holds(thorough=thorough))


def authentic(entry: LedgerEntry, public_keys: Mapping[str, str]) -> dict[str, Any] | None:
    """What an entry states that one of these keys signed, in its place; None for any other."""
    stated = parse(entry.statement)
    if stated is None or stated.get("sequence") != entry.sequence:
        return None
    public_key = public_keys.get(str(stated.get("key_id")), "")
    is_signed = is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature)
    return stated if is_signed else None


def note_hold(holds: Holds, stated: Mapping[str, Any]) -> None:
    """Take in what an authentic entry says of a hold, if it is of one."""
    if (stated.get("kind"), stated.get("model")) != (_KIND, _MODEL):
        return
    is_removal = stated["action"] == ACCEPTED and stated["row_hash"] is None
    if stated["action"] == ALTERED or is_removal:
        # Nobody who may has placed or lifted it: to lift one takes two, and its row.
        return
    if stated["action"] == DELETED:
        holds.pop(stated["row"], None)
    else:
        # What it held first: a row that says something else by now is not as it was entered.
        holds.setdefault(stated["row"], (stated["tenant_slug"], stated["execution"]))


ERASURE = "erasure"


class Erasable(Protocol):
    """An execution, as far as erasures are decided by it."""

    pk: UUID
    tenant_slug: str
    created_at: datetime
    run_at: datetime | None


@dataclass
class Erasures:
    """Up to when data was erased, by tenant and kind of it; read when it is first asked for.

    Of one tenant and kind there is an erasure a day, so only that is kept of them which differs:
    the last moment for each set of executions that was held then, by what an erasure says itself
    and by the holds that were entered before it. One of a tenant that was held as a whole has
    erased nothing. `thorough` reads the whole ledger for holds: see `held.of_holds`.
    """

    public_keys: Mapping[str, str]
    thorough: bool = False
    _until: dict[tuple[str, str], dict[frozenset[str], str]] = field(default_factory=dict)
    _holds: Holds = field(default_factory=dict)
    _read_to: int = 0

    def read_on(self) -> None:
        """Take in what was entered since."""
        newest = LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"] or 0
        entries = LedgerEntry.objects.filter(
            Q(kind=ERASURE) | of_holds(thorough=self.thorough),
            sequence__gt=self._read_to,
            sequence__lte=newest,
        )
        for entry in entries.order_by("sequence").iterator():
            if (stated := authentic(entry, self.public_keys)) is not None:
                note_hold(self._holds, stated)
                self._note(stated)
        self._read_to = newest

    def _note(self, stated: Mapping[str, Any]) -> None:
        if stated.get("kind") != ERASURE:
            return
        held = {pk for slug, pk in self._holds.values() if slug == stated["subject"]}
        if None in held:
            return
        kept = frozenset(map(str, held)) | frozenset(stated.get("held", ()))
        found = self._until.setdefault((stated["subject"], stated["data"]), {})
        found[kept] = max(found.get(kept, ""), stated["created_before"])

    def covers(self, execution: Erasable, data: str) -> bool:
        """Whether the ledger itself says that this kind of data of an execution was erased."""
        made = max(execution.created_at, execution.run_at or execution.created_at)
        return self._covers(execution.tenant_slug, data, str(execution.pk), moment(made) or "")

    def covers_record(self, stated: Mapping[str, Any]) -> bool:
        """Whether the whole record was erased of which an entry states this."""
        return self._covers(stated["tenant"], "records", stated["subject"], _creation_time(stated))

    def covers_artifacts(self, execution: Erasable, stated: Mapping[str, Any]) -> bool:
        """Whether the bytes of its artifacts were erased: by themselves, or with the record of
        which an entry states this, whose bytes go before it does."""
        return self.covers(execution, "artifacts") or self.covers_record(stated)

    def _covers(self, tenant: str, data: str, execution_id: str, created: str) -> bool:
        if not self._read_to:
            self.read_on()
        return any(
            created < until and execution_id not in held
            for held, until in self._until.get((tenant, data), {}).items()
        )


def _creation_time(stated: Mapping[str, Any]) -> str:
    """When the execution of this entry was made, which also of a record that is gone its id has, or
    the later time that it was asked for at."""
    made = moment(time_of(UUID(stated["subject"]))) or ""
    return max(made, stated.get("run_at") or "")


class OnHold(NotAllowed):
    """A legal hold forbids it. Nothing was done."""


@dataclass(frozen=True)
class Held:
    """What of one tenant is held: all of it, or these executions."""

    everything: bool = False
    executions: Collection[UUID] = field(default_factory=frozenset)


def hold_scope(tenant_slug: str, by_ledger: Held | None = None) -> Held:
    """Return what of the tenant must not be erased now, by the rows and by the ledger: by what was
    read of it before, or by entries whose columns say what they are."""
    found = set(
        LegalHold.objects.filter(tenant_slug=tenant_slug).values_list("execution_id", flat=True)
    )
    said = by_ledger or hold_scopes_in_ledger(thorough=False).get(tenant_slug, Held())
    everything = said.everything or None in found
    return Held(everything, frozenset(said.executions) | {pk for pk in found if pk is not None})


def hold_scopes_in_ledger(*, thorough: bool) -> dict[str, Held]:
    """Return, by tenant, what the ledger says was put on hold and not lifted.

    `thorough` reads all of it, and finds also what somebody has made to look as if it were
    something else.
    """
    rows: Holds = {}
    keys = trusted_keys()
    for entry in entries_of_holds(thorough=thorough).order_by("sequence").iterator():
        if (stated := authentic(entry, keys)) is not None:
            note_hold(rows, stated)
    found: dict[str, set[str | None]] = {}
    for slug, execution_id in rows.values():
        found.setdefault(slug, set()).add(execution_id)
    return {
        slug: Held(None in held, frozenset(UUID(pk) for pk in held if pk is not None))
        for slug, held in found.items()
    }
