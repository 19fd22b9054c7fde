"""The environment that a worker serves: its id, the one address that gets its key, and the key."""

from __future__ import annotations

from dataclasses import dataclass

from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.models import NetworkCredential
from providers.fields import DecryptionError
from providers.remote.secret import Secret


class NoEnvironment(Exception):
    """There is none that can be served. The text is for the operator, and has the remedy."""


@dataclass(frozen=True)
class Environment:
    """One version of what an administrator has entered."""

    id: str
    address: str
    key: Secret
    # Of the row, and of its value.
    version: tuple[int, int]


@sensitive_variables()
def open_environment(tenant_slug: str, name: str) -> Environment:
    """Return it as the database has it now. Raises NoEnvironment, also once it is revoked."""
    rows = NetworkCredential.objects.filter(
        tenant_slug=tenant_slug, name=name, placement=NetworkCredential.Placement.CLAUDE
    )
    try:
        row = rows.first()
        if row is None:
            raise NoEnvironment(
                f"The tenant {tenant_slug!r} has no environment {name!r}. Add it with "
                "network_credential --placement claude."
            )
        if row.revoked_at is not None:
            raise NoEnvironment(f"The key of {name!r} is revoked. Enter another one.")
        key = Secret(row.open_value())
    except (DecryptionError, ValueError):
        raise NoEnvironment(
            f"The key of {name!r} cannot be read, or the row was changed outside the service. "
            "Enter the key again."
        ) from None
    return Environment(row.field, row.rules.partition(" # ")[0], key, (row.pk, row.version))
