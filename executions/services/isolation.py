"""The floor of isolation that a run must not go below, and whether a sandbox is above it."""

from __future__ import annotations

from django.conf import settings

from executions.models.execution import Execution
from executions.services.asking import guarded
from executions.services.policies.in_force import isolation_of
from executions.tenants.models import ApiKey, Tenant
from providers.isolation import MICROVM, NONE, IsolationUnmet, meets, of_sandbox, strictest
from providers.manager import Lease
from providers.sandbox import Sandbox
from providers.services.route_order import route_minimum


def floor_of(execution: Execution) -> str:
    """The strictest that deployment, tenant, policy, key and route demand.

    What is run again keeps to what was demanded of the code when it came, too.
    """
    demanded = [settings.MINIMUM_ISOLATION, *_demands(execution.tenant, execution)]
    if execution.api_key is not None:
        demanded.append(execution.api_key.minimum_isolation)
    original = execution.replay_of
    if original is not None:
        demanded += [*_demands(original.tenant, original), _demand_of_key(original)]
    return strictest(*demanded)


def floor_for(tenant: Tenant, api_key: ApiKey | None, language: str) -> str:
    """The same, of a session."""
    return strictest(
        settings.MINIMUM_ISOLATION,
        tenant.minimum_isolation,
        *isolation_of(tenant.slug),
        api_key.minimum_isolation if api_key is not None else "",
        route_minimum(tenant.slug, language),
    )


def require_provider(lease: Lease, floor: str) -> None:
    """Raise IsolationUnmet where no sandbox of this provider can be above the floor."""
    declared = guarded(lease.provider_id, lambda: lease.provider.isolation)
    if declared and not meets(declared, floor):
        raise _unmet(lease.provider_id, declared, floor)


def require_sandbox(lease: Lease, sandbox: Sandbox, floor: str) -> tuple[str, str]:
    """Isolation and sharing of the sandbox. Raises IsolationUnmet where it is below the floor."""
    isolation, sharing = guarded(lease.provider_id, lambda: of_sandbox(lease.provider, sandbox))
    require_isolation(lease, isolation, floor)
    return isolation, sharing


def require_isolation(lease: Lease, isolation: str, floor: str) -> None:
    """As `require_sandbox`, of one whose isolation is known."""
    if not meets(isolation, floor):
        raise _unmet(lease.provider_id, isolation, floor)


def _demands(tenant: Tenant | None, execution: Execution) -> tuple[str, ...]:
    # Nobody knows any more what a tenant demanded that is gone.
    own = tenant.minimum_isolation if tenant is not None else MICROVM
    slug = execution.tenant_slug
    return own, route_minimum(slug, execution.language), *isolation_of(slug)


def _demand_of_key(execution: Execution) -> str:
    if execution.api_key is not None:
        return execution.api_key.minimum_isolation
    # As above, of a key.
    return MICROVM if execution.api_key_prefix else ""


def _unmet(provider_id: str, offered: str, floor: str) -> IsolationUnmet:
    remedy = " A provider that declares no isolation counts as none." if offered == NONE else ""
    return IsolationUnmet(
        f"minimum_isolation is {floor}, and a sandbox of {provider_id} has {offered}.{remedy}"
    )
