"""Tenants: who owns keys and executions."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from executions.models.tenant import Tenant
from providers.errors import InvalidConfiguration
from providers.services.touched import collecting

INTERNAL = "internal"
# The first one, which `manage.py bootstrap` creates.
DEMO = "demo"


def create_tenant(slug: str, name: str = "") -> Tenant:
    """A new active tenant. Raises InvalidConfiguration when the slug is malformed or taken."""
    tenant = Tenant(slug=slug, name=name or slug)
    try:
        tenant.clean_fields()
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        raise InvalidConfiguration(f"{field}: {' '.join(messages)}", field=field) from error
    try:
        with transaction.atomic():
            tenant.save(force_insert=True)
    except IntegrityError as error:
        raise InvalidConfiguration(f"Tenant {slug!r} already exists.", field="slug") from error
    return tenant


def internal_tenant() -> Tenant:
    """The tenant under which code run from within this process is recorded."""
    # The product's own: whoever happens to act first when it is made changes nobody's rights.
    with collecting():
        tenant, _ = Tenant.objects.get_or_create(
            slug=INTERNAL, defaults={"name": "Internal (in-process calls)"}
        )
    return tenant


def require_active(tenant: Tenant) -> None:
    """Raises InvalidConfiguration for one that is not active."""
    if not tenant.is_active:
        raise InvalidConfiguration("tenant: Is not active: nothing is run for it.", field="tenant")
