"""The network credentials in force: who has which, and their change and revocation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, cast

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.signals import post_delete, post_save
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.models import NetworkCredential
from executions.kernel.declarations import refuse
from executions.ledger.append import enter_row, look_at
from providers.credentials import Credential, Placement
from providers.fields import DecryptionError
from providers.guarded import Guarded
from providers.network import Layer, Rule, SetHeader
from providers.remote.secret import Secret
from providers.services.guarded_rows import keep_versions
from providers.services.history import SYSTEM
from providers.services.row_changes import collecting
from providers.services.settings_cache import CachedQuery

logger = logging.getLogger(__name__)


@dataclass
class _Rows:
    """Credentials in force by tenant and by id, and the ids of all, also of those revoked."""

    by_tenant: dict[str, list[Credential]] = field(default_factory=dict)
    by_id: dict[str, Credential] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)


# Those of which it was logged: they are looked up each second.
_reported: set[int] = set()


@sensitive_variables()
def _load() -> _Rows:
    found = _Rows()
    for row in _rows():
        found.ids.setdefault(row.tenant_slug, []).append(str(row.pk))
        if not _is_for_sandboxes(row) or row.revoked_at is not None:
            continue
        if (credential := _credential_of(row)) is not None:
            found.by_tenant.setdefault(row.tenant_slug, []).append(credential)
            found.by_id[credential.id] = credential
    return found


def _is_for_sandboxes(row: NetworkCredential) -> bool:
    # The key of an environment of Claude is the worker's alone.
    return row.placement != NetworkCredential.Placement.CLAUDE


def _rows() -> Iterable[NetworkCredential]:
    rows: QuerySet[NetworkCredential] = NetworkCredential.objects.order_by("name")
    try:
        return list(rows)
    except DecryptionError:
        # One that no key opens must not take the others away.
        return rows.defer("value")


@sensitive_variables()
def _credential_of(row: NetworkCredential) -> Credential | None:
    try:
        value = row.open_value()
    except ValueError as error:
        if row.pk not in _reported:
            _reported.add(row.pk)
            logger.error(
                "The network credential %s is not used. Find out who can write to the database, "
                "and enter its value again, or put its key back into FERNET_KEYS.",
                error,
            )
        return None
    _reported.discard(row.pk)
    return Credential(
        str(row.pk),
        row.name,
        row.version,
        cast("Placement", row.placement),
        row.field,
        tuple(row.rules.splitlines()),
        row.variable,
        Secret(value),
        row.upstream,
    )


_in_force = CachedQuery(_load, NetworkCredential)


def credentials_in_force(tenant_slug: str) -> tuple[Credential, ...]:
    """Return the tenant's, then the installation's of other names. As of a second ago at most.

    A secret of the tenant's callers is bound by no rules, and takes no name from the others.
    """
    rows = _in_force()
    own = rows.by_tenant.get(tenant_slug, []) if tenant_slug else []
    names = {each.name for each in own if each.placement != "sandbox"}
    general = (each for each in rows.by_tenant.get("", []) if each.name not in names)
    return (*own, *general)


def all_in_force() -> Mapping[str, Credential]:
    """Return the credentials of all tenants by id. As of a second ago at most."""
    return _in_force().by_id


@sensitive_variables()
def read_in_force(credential_id: str) -> Credential | None:
    """Return one as the database has it now, None where it is not in force."""
    try:
        row = NetworkCredential.objects.filter(pk=credential_id, revoked_at=None).first()
    except DecryptionError:
        return None
    return None if row is None or not _is_for_sandboxes(row) else _credential_of(row)


def ids_of(tenant_slug: str) -> set[str]:
    """Return the ids of all that the tenant's sandboxes can have had, also of those revoked."""
    ids = _in_force().ids
    return {*ids.get("", ()), *ids.get(tenant_slug, ())}


def within(credentials: Iterable[Credential], layers: Sequence[Layer]) -> tuple[Credential, ...]:
    """Return those that are bound to a host which all layers may allow."""
    return tuple(
        each
        for each in credentials
        if any(all(_may_allow(layer, rule) for layer in layers) for rule in _parsed(each.rules))
    )


@lru_cache(maxsize=1000)
def _parsed(rules: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(map(Rule.parse, rules))


def bound_by(headers: Iterable[SetHeader], tenant_slug: str) -> tuple[Credential, ...]:
    """Return the tenant's credentials that these headers have. One that is gone is left out."""
    own = {
        each.name: each
        for each in _in_force().by_tenant.get(tenant_slug, ())
        if each.placement == "sandbox"
    }
    return tuple(
        replace(
            own[header.credential],
            placement="header",
            field=header.name,
            rules=(f"https://{header.host}",),
            template=header.text,
        )
        for header in headers
        if header.credential in own
    )


def ensure_there(headers: Iterable[SetHeader], tenant_slug: str) -> None:
    """Raises InvalidConfiguration for a header whose credential the tenant does not have."""
    for header in headers:
        if not bound_by((header,), tenant_slug):
            refuse("network", f"There is no secret {header.credential!r}. Create it first.")


def _may_allow(layer: Layer, bound: Rule) -> bool:
    policy = layer.policy
    if policy.log_only or policy.mode == "open":
        return True
    return any(
        rule.scheme != "http" and set(rule.ports) & set(bound.ports) and _meet(rule, bound)
        for rule in policy.rules
    )


def _meet(one: Rule, other: Rule) -> bool:
    """Whether there is a host of both."""
    return any(
        wide.covers_host(narrow.host)
        or (wide.host.startswith("*.") and narrow.host.endswith(wide.host[1:]))
        for wide, narrow in ((one, other), (other, one))
    )


# A version that is restored gets a later number, and undoes no revocation: `save` sees to that.
CREDENTIALS = Guarded(
    NetworkCredential,
    hidden=frozenset(("value",)),
    left_out=frozenset(("created_at", "changed_at")),
)


def find_credential(name: str, tenant_slug: str = "") -> NetworkCredential | None:
    """Return the credential of this name, also a revoked one, without its value."""
    rows = NetworkCredential.objects.defer("value")
    return rows.filter(tenant_slug=tenant_slug, name=name).first()


@sensitive_variables()
def put_credential(
    name: str, value: str, *, tenant_slug: str = "", reason: str = "", **columns: Any
) -> NetworkCredential:
    """Add a credential, or give one another value and other columns. For code on the server.

    Raises ValidationError.
    """
    with transaction.atomic(), collecting() as touched:
        row = find_credential(name, tenant_slug)
        row = row or NetworkCredential(tenant_slug=tenant_slug, name=name)
        for column, given in columns.items():
            setattr(row, column, given)
        row.set_value(value)
        row.full_clean()
        row.save()
        keep_versions(touched.changes(), SYSTEM, reason)
    return row


def revoke(credential: NetworkCredential) -> bool:
    """Erase the value, for good. False where it was revoked before."""
    with transaction.atomic():
        before = look_at(NetworkCredential, credential.pk)
        row = NetworkCredential.objects.filter(pk=credential.pk, revoked_at=None)
        if not row.update(value=None, revoked_at=timezone.now()):
            return False
        credential.refresh_from_db(fields=["value", "revoked_at"])
        enter_row(credential, "revoked", before)
        _after_change(credential)
    return True


_on_change: list[Callable[[str], None]] = []


def on_change(call: Callable[[str], None]) -> None:
    """Have `call` get the id of each credential that this process changes, after the commit."""
    _on_change.append(call)


def _after_change(credential: NetworkCredential) -> None:
    """Have the sandboxes of this process get the change once it is committed."""
    _in_force.forget()
    transaction.on_commit(partial(_spread, str(credential.pk)))


def _spread(credential_id: str) -> None:
    # What was looked up before the commit is the former.
    _in_force.forget()
    for call in _on_change:
        call(credential_id)


def _changed(sender: Any, instance: NetworkCredential, **signal: Any) -> None:
    _after_change(instance)


post_save.connect(_changed, sender=NetworkCredential, dispatch_uid="credentials")
post_delete.connect(_changed, sender=NetworkCredential, dispatch_uid="credentials")
