"""Secrets that a tenant's callers create themselves, and bind in the list of a sandbox.

Each is a credential of the placement `sandbox`. A credential that an administrator has bound cannot
be read, changed or replaced here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.credentials import put_credential, revoke
from executions.capabilities.network.models import NetworkCredential
from executions.kernel.audit import acting_as
from executions.kernel.declarations import refuse
from executions.runs.requests import Conflict
from executions.tenants.models import Tenant
from providers.services.guarded_rows import keep_versions
from providers.services.history import SYSTEM
from providers.services.row_changes import collecting

_SANDBOX = NetworkCredential.Placement.SANDBOX
_ID = re.compile(r"secret_\d+")

# Of one tenant, with those of secrets that were removed. Their rows say to all processes which
# values no sandbox may have any more: each look reads them.
MOST_NAMES = 1000
# How long after its removal. Every sandbox was told of it within minutes.
KEPT = timedelta(days=1)
# At once.
MOST_FORGOTTEN = 20


def secrets_of(tenant: Tenant) -> Sequence[NetworkCredential]:
    """Return the tenant's, by name."""
    rows = NetworkCredential.objects.defer("value").filter(
        tenant_slug=tenant.slug, placement=_SANDBOX, revoked_at=None
    )
    return list(rows.order_by("name"))


def find_secret(tenant: Tenant, text: str) -> NetworkCredential | None:
    """Return the tenant's secret of this name or id."""
    found = secrets_of(tenant)
    by_name = (each for each in found if each.name == text)
    return next(by_name, next((each for each in found if id_of(each) == text), None))


def id_of(secret: NetworkCredential) -> str:
    return f"secret_{secret.pk}"


@sensitive_variables("value")
def create_secret(tenant: Tenant, name: str, value: str, by: str) -> NetworkCredential:
    """Create one. Raises InvalidConfiguration, and Conflict for a name that is taken."""
    if _ID.fullmatch(name):
        refuse("name", "Must not have the form of an id.")
    _ensure_free(tenant, name)
    with acting_as(lambda: by):
        _forget_removed(tenant)
        own = NetworkCredential.objects.filter(tenant_slug=tenant.slug, placement=_SANDBOX)
        if own.exclude(name=name).count() >= MOST_NAMES:
            refuse(
                "name",
                f"A tenant has at most {MOST_NAMES} names of secrets in {KEPT.days} days, with "
                "those of removed secrets. Use such a name again.",
            )
    return _put(tenant, name, value, by)


@sensitive_variables("value")
def change_secret(secret: NetworkCredential, tenant: Tenant, value: str, by: str) -> None:
    """Store another value as the next version. Raises InvalidConfiguration, and Conflict for one
    that was removed meanwhile."""
    _put(tenant, secret.name, value, by, secret)
    secret.refresh_from_db(fields=["version", "changed_at"])


def remove_secret(secret: NetworkCredential, by: str) -> bool:
    """Erase its value. False where that was done before."""
    with acting_as(lambda: by):
        return revoke(secret)


def _ensure_free(tenant: Tenant, name: str) -> None:
    former = NetworkCredential.objects.filter(tenant_slug=tenant.slug, name=name)
    if former.exclude(placement=_SANDBOX, revoked_at__isnull=False).exists():
        raise Conflict(f"name: There is a credential {name!r} already.")


def _forget_removed(tenant: Tenant) -> None:
    """Delete what was removed so long ago that no sandbox has it."""
    removed = NetworkCredential.objects.filter(
        tenant_slug=tenant.slug, placement=_SANDBOX, revoked_at__lt=timezone.now() - KEPT
    )
    for pk in list(removed.values_list("pk", flat=True)[:MOST_FORGOTTEN]):
        with transaction.atomic(), collecting() as touched:
            # Unless it has a value again.
            if row := removed.defer("value").select_for_update().filter(pk=pk).first():
                row.delete()
            keep_versions(touched.changes(), SYSTEM, "Removed long ago.")


@sensitive_variables("value")
def _put(
    tenant: Tenant, name: str, value: str, by: str, former: NetworkCredential | None = None
) -> NetworkCredential:
    """`former` is the secret that is changed, None to create one."""
    rows = NetworkCredential.objects.select_for_update(no_key=True).defer("value")
    try:
        with transaction.atomic(), acting_as(lambda: by):
            # It stays as it is from here on.
            list(rows.filter(tenant_slug=tenant.slug, name=name))
            if former is None:
                _ensure_free(tenant, name)
            elif not rows.filter(pk=former.pk, placement=_SANDBOX, revoked_at=None).exists():
                raise Conflict(f"The secret {name!r} was removed.")
            return put_credential(
                name,
                value,
                tenant_slug=tenant.slug,
                reason=f"by {by}",
                placement=_SANDBOX,
                field="",
                rules="",
                variable="",
                upstream="",
                source="",
            )
    except IntegrityError:
        raise Conflict(f"name: There is a credential {name!r} already.") from None
    except ValidationError as error:
        told = error.message_dict if hasattr(error, "error_dict") else {"name": error.messages}
        field, messages = next(iter(told.items()))
        refuse("name" if field == "__all__" else field, " ".join(messages))
