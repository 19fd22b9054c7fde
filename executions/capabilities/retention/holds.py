"""Legal holds: what stays, whatever retention says and whatever one administrator wants.

The ledger is asked beside the rows. A hold whose row is gone, and of which no signed entry says
that it was lifted, still holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from executions.capabilities.retention.models import LegalHold
from executions.ledger.erasures import Holds, authentic, entries_of_holds, note_hold
from executions.ledger.trust import trusted_keys
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from providers.guarded import Change, Guarded
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


def keep_held_tenant(tenant: Tenant) -> None:
    """Raises OnHold for a tenant that is to be removed, and is held or has something that is."""
    held = held_of(tenant.slug)
    if held.everything or held.executions:
        raise OnHold(f"{tenant.slug} is under a legal hold. Two administrators can lift it.")


def check_hold(hold: LegalHold) -> None:
    """Raises InvalidConfiguration for a hold of what there is not."""
    known = Execution.objects.filter(tenant_slug=hold.tenant_slug)
    if hold.execution_id is not None:
        if not known.filter(pk=hold.execution_id).exists():
            raise InvalidConfiguration(
                "The tenant does not have this execution.", field="execution_id"
            )
    elif not Tenant.objects.filter(slug=hold.tenant_slug).exists() and not known.exists():
        raise InvalidConfiguration("There is no such tenant.", field="tenant_slug")


def _takes_two(change: Change) -> bool:
    """To hold something is for one; to let go of it, or hold another thing instead, is for two."""
    return change.before is not None


HOLDS = Guarded(LegalHold, called="legal hold", takes_two=_takes_two, two_always=True)
