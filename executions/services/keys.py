"""API keys: made, checked, revoked. Only here is a key's text ever known."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from executions.models import ApiKey, Tenant
from executions.services.ledger.entering import enter_row
from providers.errors import InvalidConfiguration

_PREFIX_LENGTH = 10
_USE_RECORDED_EVERY = timedelta(minutes=1)


class Unauthenticated(Exception):
    """No valid key came with the request. Deliberately the same for every reason."""


def create_api_key(
    tenant: Tenant,
    name: str,
    expires_at: datetime | None = None,
    scope: str = ApiKey.Scope.EXECUTE,
) -> tuple[ApiKey, str]:
    """A new key and its text, which is known only now. Raises InvalidConfiguration."""
    if not name or len(name) > 100:
        raise InvalidConfiguration("name: Must be 1 to 100 characters long.", field="name")
    if scope not in ApiKey.Scope.values:
        known = ", ".join(ApiKey.Scope.values)
        raise InvalidConfiguration(f"scope: Must be one of: {known}.", field="scope")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidConfiguration("expires_at: Must be in the future.", field="expires_at")
    key_text = "cfd_" + secrets.token_urlsafe(32)
    api_key = ApiKey.objects.create(
        tenant=tenant,
        name=name,
        prefix=key_text[:_PREFIX_LENGTH],
        key_hash=_hash(key_text),
        expires_at=expires_at,
        scope=scope,
    )
    return api_key, key_text


def authenticate(key_text: str) -> ApiKey:
    """The valid key, with its tenant, in one query. Raises Unauthenticated.

    What is compared is the hash, by an index, so the time taken says nothing of the key.
    """
    now = timezone.now()
    # Without an order, which would be compiled anew for each request, for one row at most.
    found = ApiKey.objects.select_related("tenant").filter(key_hash=_hash(key_text)).order_by()
    api_key = next(iter(found), None)
    if api_key is None or not api_key.is_valid(now) or not api_key.tenant.is_active:
        raise Unauthenticated
    _record_use(api_key, now)
    return api_key


def revoke(api_key: ApiKey) -> bool:
    """True when the key was valid until now, False when it had been revoked before."""
    now = timezone.now()
    with transaction.atomic():
        if not ApiKey.objects.filter(pk=api_key.pk, revoked_at=None).update(revoked_at=now):
            return False
        api_key.refresh_from_db(fields=["revoked_at"])
        enter_row(api_key, "revoked", {"tenant": api_key.tenant.slug})
    return True


def _record_use(api_key: ApiKey, now: datetime) -> None:
    threshold = now - _USE_RECORDED_EVERY
    if api_key.last_used_at is not None and api_key.last_used_at > threshold:
        return
    ApiKey.objects.filter(
        Q(last_used_at=None) | Q(last_used_at__lte=threshold), pk=api_key.pk
    ).update(last_used_at=now)


def _hash(key_text: str) -> str:
    return hashlib.sha256(key_text.encode("utf-8", "surrogatepass")).hexdigest()
