"""How many templates a tenant may have, and what they may take."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Sum

from executions.capabilities.templates.models import Template, TemplateVersion
from executions.tenants.models import Tenant
from executions.tenants.quotas import tenant_lock
from providers.errors import RateLimited
from providers.templates.store import Built


def lock_of(tenant: Tenant | None) -> AbstractContextManager[Any]:
    return transaction.atomic() if tenant is None else tenant_lock(tenant.slug)


def ensure_one_more(tenant: Tenant | None) -> None:
    """Raises RateLimited for a tenant with as many templates as it may have."""
    if tenant is None:
        return
    most = settings.TEMPLATES_PER_TENANT
    has = Template.objects.filter(tenant=tenant, removed_at=None).count()
    if has >= most:
        raise RateLimited(
            f"The tenant has {has} templates, and the limit is {most}. Remove one.",
            field="templates",
        )
    ensure_room(tenant)


def ensure_room(tenant: Tenant | None, built: Built | None = None) -> None:
    """Raises RateLimited for a tenant whose templates take more than they may."""
    if tenant is None:
        return
    versions = TemplateVersion.objects.filter(template__tenant=tenant).exclude(digest="")
    files = versions.order_by().values("digest", "size_bytes").distinct()
    used = files.aggregate(used=Sum("size_bytes"))["used"] or 0
    if built is not None and not versions.filter(digest=built.digest).exists():
        used += built.size_bytes
    most = settings.TEMPLATES_MB_PER_TENANT << 20
    if used > most or (built is None and used >= most):
        raise RateLimited(
            f"The templates of the tenant take {used >> 20} MiB, and the limit is {most >> 20} "
            "MiB. Remove one.",
            field="template_bytes",
        )
