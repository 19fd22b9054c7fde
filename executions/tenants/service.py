"""Tenants, who own keys and executions, and the three roles of the admin."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Group, Permission
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet

from executions.ledger.append import Before, enter_row, look_at
from executions.ledger.bindings import has_baseline
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from providers.services.row_changes import collecting

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


def ensure_active(tenant: Tenant) -> None:
    """Raises InvalidConfiguration for one that is not active."""
    if not tenant.is_active:
        raise InvalidConfiguration("tenant: Is not active: nothing is run for it.", field="tenant")


ADMINISTRATOR = "Administrator"
OPERATOR = "Operator"
AUDITOR = "Auditor"

_OURS = ("executions", "providers")
_LOOKS = Q(content_type__app_label__in=_OURS) & (
    Q(codename__startswith="view_") | Q(codename__startswith="export_")
)
# Whoever looks at the ledger may have it verified, which changes nothing in it.
_VERIFIES = Q(content_type__app_label="executions", codename="request_ledgercheck")
# Views that show who did what in the admin, and who may.
_ACCOUNTS = Q(content_type__app_label="auth", content_type__model__in=("user", "group"))
_LOG = Q(content_type__app_label="admin", codename="view_logentry") | Q(
    content_type__app_label="axes", codename="view_accessattempt"
)
_UNLOCKS = Q(content_type__app_label="axes", codename="delete_accessattempt")
_REPORTS = Q(content_type__app_label="executions", codename="make_report")
# What keeps the service running, without a way to change what runs it or who may.
_OPERATES = Q(
    content_type__app_label__in=_OURS,
    codename__in=(
        "activate_providerconfig",
        "test_providerconfig",
        "delete_circuitbreaker",
        "add_tenant",
        "change_tenant",
        "add_apikey",
        "change_apikey",
        "replay_execution",
        "cancel_execution",
        "use_playground",
        "pause_schedule",
        "operate_session",
        "acknowledge_alert",
        "resend_webhookdelivery",
        "share_savedfilter",
    ),
)

_SHARES = Q(content_type__app_label="executions", codename="share_savedfilter")

_ROLES = {
    ADMINISTRATOR: Q(content_type__app_label__in=_OURS) | _ACCOUNTS | _LOG | _UNLOCKS,
    OPERATOR: _LOOKS | _OPERATES | _VERIFIES,
    AUDITOR: (
        (_LOOKS | _VERIFIES | _LOG | _REPORTS | _SHARES)
        | (_ACCOUNTS & Q(codename__startswith="view_"))
    ),
}


def ensure_roles(using: str = "default", **_: Any) -> None:
    """Create the roles and give them what they lack; every `migrate` ends with it.

    Nothing is taken from a role, and permissions of later models reach it by themselves. Rows are
    written in bulk: it is the product that says what a role may, and nobody's action. Before the
    ledger took stock it is silent of them too.
    """
    existing = set(
        Group.objects.using(using).filter(name__in=_ROLES).values_list("name", flat=True)
    )
    missing = [Group(name=name) for name in _ROLES if name not in existing]
    Group.objects.using(using).bulk_create(missing)
    through = Group.permissions.through
    for group in Group.objects.using(using).filter(name__in=_ROLES):
        is_new = group.name not in existing
        wanted = _permissions(group.name, using).exclude(group=group).values_list("pk", flat=True)
        if not (wanted or is_new):
            continue
        with transaction.atomic(using=using):
            is_entered = has_baseline()
            before = look_at(Group, group.pk) if is_entered and not is_new else Before(None)
            through._default_manager.using(using).bulk_create(
                [through(group_id=group.pk, permission_id=pk) for pk in wanted]
            )
            if is_entered:
                enter_row(group, "created" if is_new else "changed", before)


def _permissions(role: str, using: str) -> QuerySet[Permission]:
    return Permission.objects.using(using).filter(_ROLES[role])
