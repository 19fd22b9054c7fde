"""Where somebody signed in may have code run, in place of the tenant's route."""

from __future__ import annotations

from executions.kernel.declarations import refuse
from providers.models import ProviderConfig
from providers.services import two_person_rule
from providers.services.route_order import planned


def choices_for(tenant_slug: str, language: str) -> list[str]:
    """The providers that can be chosen for this tenant's code.

    Each one that is configured, whether it is active or not; what the tenant demands, such as a
    floor of isolation or a policy, holds there too. Under the two-person rule those alone that its
    code goes to now: where it runs is not for one person to choose.
    """
    rows = ProviderConfig.objects.order_by("provider_id").values_list("provider_id", "is_active")
    if not two_person_rule():
        return [provider_id for provider_id, _ in rows]
    route = planned(tenant_slug, language)
    return [
        provider_id
        for provider_id, is_active in rows
        if (provider_id in route if route else is_active)
    ]


def require_choice(provider_id: str, tenant_slug: str, language: str) -> None:
    """Raises InvalidConfiguration where this provider cannot be chosen."""
    if provider_id in choices_for(tenant_slug, language):
        return
    if two_person_rule():
        refuse(
            "provider", "The tenant's route does not use it; a change needs two-person approval."
        )
    refuse("provider", f"There is no configuration of {provider_id!r}.")
