"""What legal holds keep, by their rows and by the ledger.

A hold whose row is gone, and of which no signed entry says that it was lifted, still holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from executions.ledger.erasures import Holds, authentic, entries_of_holds, note_hold
from executions.ledger.models import LegalHold
from executions.ledger.trust import trusted_keys
from providers.services.guarded_rows import NotAllowed


class OnHold(NotAllowed):
    """A legal hold forbids it. Nothing was done."""


@dataclass(frozen=True)
class Held:
    """What of one tenant is held: all of it, or these executions."""

    everything: bool = False
    executions: Collection[UUID] = field(default_factory=frozenset)


def held_of(tenant_slug: str, by_ledger: Held | None = None) -> Held:
    """What of the tenant must not be erased now, by the rows and by the ledger: by what was read
    of it before, or by entries whose columns say what they are.
    """
    found = set(
        LegalHold.objects.filter(tenant_slug=tenant_slug).values_list("execution_id", flat=True)
    )
    said = by_ledger or held_by_ledger(thorough=False).get(tenant_slug, Held())
    everything = said.everything or None in found
    return Held(everything, frozenset(said.executions) | {pk for pk in found if pk is not None})


def held_by_ledger(*, thorough: bool) -> dict[str, Held]:
    """By tenant, what the ledger says was put on hold and not lifted.

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
