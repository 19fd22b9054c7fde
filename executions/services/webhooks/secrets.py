"""The secrets that webhooks are signed with. Only here and where they sign is their text known."""

from __future__ import annotations

import base64
import secrets

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.kernel.declarations import refuse
from executions.ledger.bound_rows import enter_row, look_at
from executions.models.webhook import WebhookSecret
from executions.services.webhooks.signing import PREFIX
from executions.tenants.models import Tenant

_BYTES = 32
# One, and the one in its place while receivers change.
MOST = 2


@sensitive_variables("text")
def create_secret(tenant: Tenant) -> tuple[WebhookSecret, str]:
    """A new one and its text, which is shown now and never again.

    Raises InvalidConfiguration where the tenant has as many in force as it may.
    """
    text = PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()
    with transaction.atomic():
        # Of two who do this at once the other counts afterwards.
        Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
        check_room(tenant)
        return WebhookSecret.objects.create(tenant=tenant, secret=text), text


def check_room(tenant: Tenant) -> None:
    """Raises InvalidConfiguration where the tenant has as many in force as it may."""
    if in_force(tenant.pk).count() >= MOST:
        refuse("tenant", f"Has {MOST} active secrets. Retire one that no receiver uses.")


def retire(secret: WebhookSecret) -> bool:
    """Have nothing signed with it any more. False when it was so before."""
    with transaction.atomic():
        before = look_at(WebhookSecret, secret.pk)
        row = WebhookSecret.objects.filter(pk=secret.pk, retired_at=None)
        if not row.update(retired_at=timezone.now()):
            return False
        secret.refresh_from_db(fields=["retired_at"])
        enter_row(secret, "retired", before, {"tenant": secret.tenant.slug})
    return True


def in_force(tenant_id: int) -> QuerySet[WebhookSecret]:
    """Those that sign, the newest first."""
    return WebhookSecret.objects.filter(tenant=tenant_id, retired_at=None).order_by("-pk")
