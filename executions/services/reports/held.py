"""The legal holds that a report tells: those that have rows, and those that have lost theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.ledger.entry_format import moment
from executions.ledger.sealing import sealable
from executions.models.legal_hold import LegalHold
from executions.services.holds import Held, held_by_ledger
from executions.services.reports.reading import Reading

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
        lost &= _by_ledger(held_by_ledger(thorough=False), tenant)
    found = [
        {"tenant": sealable(slug), "execution": pk, "reason": None, "since": None}
        for slug, pk in sorted(lost, key=lambda place: (place[0], place[1] or ""))
    ]
    for each in found:
        what = each["execution"] or "everything"
        reading.find("missing record", 0, f"the legal hold of {each['tenant']} ({what}) has no row")
    found += [
        {
            "tenant": sealable(hold.tenant_slug),
            "execution": str(hold.execution_id) if hold.execution_id else None,
            "reason": sealable(hold.reason),
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
