"""Retention as a capability: data is erased when its time is over, but for legal holds."""

from __future__ import annotations

from executions.ledger.erasures import OnHold, hold_scope
from executions.ledger.models import LegalHold
from executions.runs.extensions import Extension
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from providers.guarded import Change, Guarded


def keep_held_tenant(tenant: Tenant) -> None:
    """Raises OnHold for a tenant that is to be removed, and is held or has something that is."""
    held = hold_scope(tenant.slug)
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


class Retention(Extension):
    pages = ("executions.capabilities.retention.admin",)
    tasks = {"executions.tasks.apply_retention": 24 * 60}


CAPABILITY = Retention()
