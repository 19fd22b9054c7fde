"""The floor of isolation that a run must not go below, and whether a sandbox is above it."""

from __future__ import annotations

from django.conf import settings

from executions.models import Execution, Tenant
from executions.services.asking import guarded
from providers.base import SandboxInstance
from providers.isolation import MICROVM, NONE, IsolationUnmet, meets, of_instance, strictest
from providers.manager import Lease
from providers.services.routing import route_minimum


def floor_of(execution: Execution) -> str:
    """The strictest that deployment, tenant and route demand.

    What is run again keeps to what was demanded of the tenant whose code it is, too.
    """
    demanded = [settings.MINIMUM_ISOLATION, *_demands(execution.tenant, execution)]
    original = execution.replay_of
    if original is not None:
        demanded += _demands(original.tenant, original)
    return strictest(*demanded)


def require_provider(lease: Lease, floor: str) -> None:
    """Raise IsolationUnmet where no sandbox of this provider can be above the floor."""
    declared = guarded(lease.provider_id, lambda: lease.provider.isolation)
    if declared and not meets(declared, floor):
        raise _unmet(lease.provider_id, declared, floor)


def require_instance(lease: Lease, instance: SandboxInstance, floor: str) -> tuple[str, str]:
    """Isolation and sharing of the sandbox. Raises IsolationUnmet where it is below the floor."""
    isolation, sharing = guarded(lease.provider_id, lambda: of_instance(lease.provider, instance))
    if not meets(isolation, floor):
        raise _unmet(lease.provider_id, isolation, floor)
    return isolation, sharing


def _demands(tenant: Tenant | None, execution: Execution) -> tuple[str, str]:
    # Nobody knows any more what a tenant demanded that is gone.
    own = tenant.minimum_isolation if tenant is not None else MICROVM
    return own, route_minimum(execution.tenant_slug, execution.language)


def _unmet(provider_id: str, offered: str, floor: str) -> IsolationUnmet:
    remedy = " A provider that declares no isolation counts as none." if offered == NONE else ""
    return IsolationUnmet(
        f"minimum_isolation is {floor}, and a sandbox of {provider_id} has {offered}.{remedy}"
    )
