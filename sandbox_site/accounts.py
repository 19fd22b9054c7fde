"""Accounts, roles and authenticators as things that nobody changes who may do less than they."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.db.models.signals import post_delete
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.ledger.append import append, is_altered, rows_by_subject
from executions.ledger.bindings import subject_of_user
from providers.guarded import Change, Guarded, guard, values_of

logger = logging.getLogger(__name__)

_CREDENTIALS = ("password", "username")
_RIGHTS = ("is_active", "is_staff", "is_superuser", "groups", "user_permissions")


def guard_accounts() -> None:
    """Called once, when the app is ready."""
    guard(ACCOUNTS)
    guard(ROLES)
    guard(AUTHENTICATORS)
    post_delete.connect(_enter_removal, sender=TOTPDevice, dispatch_uid="accounts")


def _enter_removal(sender: Any, instance: TOTPDevice, **_: Any) -> None:
    name = User.objects.filter(pk=instance.user_id).values_list("username", flat=True).first()
    if instance.confirmed and name is not None:
        append("user", name, {"action": "authenticator removed"})


def why_not_manage(person: Any, account: Any) -> str:
    """Why this person may not change that account, "" when she may."""
    return _refuse_account(person, values_of(ACCOUNTS, account), None)


def why_not_unlock(person: Any, name: str) -> str:
    """The same by the name that was tried to sign in with; a name nobody has is nobody's."""
    account = User.objects.filter(username=name).first()
    return why_not_manage(person, account) if account else ""


def why_not_remove(account_id: Any) -> str:
    """Why nobody may remove that account, "" when somebody may: its entries would go with it."""
    if not LogEntry.objects.filter(user_id=account_id).exists():
        return ""
    return (
        "This account has actions in the admin log, which is kept. Deactivate the account "
        "instead: it can no longer sign in, and its actions stay in the log."
    )


def _account(person: Any, change: Change) -> str:
    if change.after is None and (why := why_not_remove(change.pk)):
        return why
    return _refuse_account(person, change.before, change.after)


def _refuse_account(
    person: Any, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> str:
    if person.is_superuser:
        return ""
    states = [values for values in (before, after) if values]
    if any(values["is_superuser"] for values in states):
        return "Only a superuser can change or create a superuser."
    return _beyond(person, set().union(*map(_permissions_of_account, states)))


def _role(person: Any, change: Change) -> str:
    if person.is_superuser:
        return ""
    states = [values for values in (change.before, change.after) if values]
    return _beyond(person, {_name(key) for values in states for key in values["permissions"]})


def _authenticator(person: Any, change: Change) -> str:
    owner = _owner(change)
    return why_not_manage(person, owner) if owner else ""


def _beyond(person: Any, permissions: set[str]) -> str:
    """Whoever could hand out or take over what she may not do herself would be able to do it."""
    beyond = permissions - person.get_all_permissions()
    if not beyond:
        return ""
    first = ", ".join(sorted(beyond)[:3])
    return f"The account has permissions you don't have: {first}. Ask a superuser."


def _permissions_of_account(values: Mapping[str, Any]) -> set[str]:
    groups = [key[0] for key in values["groups"]]
    of_groups = Permission.objects.filter(group__name__in=groups).select_related("content_type")
    return {_name(key) for key in values["user_permissions"]} | {
        _name(permission.natural_key()) for permission in of_groups
    }


def _name(key: Iterable[str]) -> str:
    codename, app, _ = key
    return f"{app}.{codename}"


def _account_in_hand(change: Change, approved: bool) -> list[int]:
    """Whose password or name somebody sets, or whom she lets in again, she may be. Other rights put
    nobody in hand once a second person has approved them; those given alone may be to oneself."""
    if change.after is None:
        return []
    before = change.before or {}
    columns = (*_CREDENTIALS, "is_active") if approved else (*_CREDENTIALS, *_RIGHTS)
    gained = any(_gains(before.get(name), change.after.get(name)) for name in columns)
    return [int(change.pk)] if gained or change.before is None else []


def _role_in_hand(change: Change, approved: bool) -> list[int]:
    before, after = change.before or {}, change.after or {}
    if approved or not _gains(before.get("permissions", []), after.get("permissions", [])):
        return []
    return list(User.objects.filter(groups=int(change.pk)).values_list("pk", flat=True))


def _authenticator_in_hand(change: Change, approved: bool) -> list[int]:
    owner = _owner(change)
    return [owner.pk] if owner else []


def _gains(before: Any, after: Any) -> bool:
    if isinstance(after, bool):
        return after and not before
    if isinstance(after, list):
        return any(item not in (before or []) for item in after)
    return bool(before != after)


def _owner(change: Change) -> User | None:
    values = change.before or change.after or {}
    name = values.get("user", [""])[0]
    return User.objects.filter(username=name).first()


def was_altered_outside(account: Any) -> bool:
    """Whether its row, or one of its authenticators', was changed past the service, which nobody
    has accepted. It must not sign in: see `manage.py accept_row`."""
    # One that was taken away, or given to somebody else, is known by its entries.
    called = rows_by_subject(TOTPDevice._meta.label_lower, subject_of_user(account.pk))
    devices = set(map(int, called))
    devices.update(TOTPDevice.objects.filter(user_id=account.pk).values_list("pk", flat=True))
    rows = [(User, account.pk), *((TOTPDevice, pk) for pk in sorted(devices))]
    altered = [(model, pk) for model, pk in rows if is_altered(model, pk)]
    for model, pk in altered:
        logger.critical(
            "ALERT: %s cannot sign in: %s %s was changed outside the service. Find out who can "
            "write to the database. `manage.py accept_row` lets the account in again.",
            account.get_username(),
            model._meta.label_lower,
            pk,
            extra={"alert": "account_altered_outside"},
        )
    return bool(altered)


def authenticator_of(account: Any) -> TOTPDevice | None:
    return TOTPDevice.objects.filter(user_id=account.pk, confirmed=True).first()


ACCOUNTS = Guarded(
    User,
    prefetch=("groups", "user_permissions__content_type"),
    hidden=frozenset(("password", "email", "first_name", "last_name")),
    left_out=frozenset(("last_login", "date_joined")),
    refuse=_account,
    puts_in_hand=_account_in_hand,
    # No version keeps a password: somebody has to set one before it lets anybody in.
    begin=User.set_unusable_password,
)
ROLES = Guarded(
    Group,
    prefetch=("permissions__content_type",),
    refuse=_role,
    puts_in_hand=_role_in_hand,
)
AUTHENTICATORS = Guarded(
    TOTPDevice,
    hidden=frozenset(("key",)),
    removal_only=True,
    called="authenticator of",
    shown=lambda device: str(device.user.get_username()),
    refuse=_authenticator,
    puts_in_hand=_authenticator_in_hand,
)
