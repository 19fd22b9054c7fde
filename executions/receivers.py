"""What changes elsewhere and belongs into the ledger: configurations, routes, accounts, roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, cast

from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_delete, post_save

from executions.models import ApiKey, Budget, Tenant
from executions.services.ledger import append
from executions.services.ledger.canonical import moment
from executions.text import storable_value
from providers.models import ProviderPrice, Route, RouteStep
from providers.signals import configuration_changed, setting_changed

_ACTIONS = {1: "added", 2: "changed", 3: "deleted"}
_MEMBERSHIP = {"post_add": "added", "post_remove": "removed", "pre_clear": "removed"}


def connect() -> None:
    """Called once, when the app is ready."""
    user = get_user_model()
    configuration_changed.connect(_configuration, dispatch_uid="ledger")
    setting_changed.connect(_version, dispatch_uid="ledger")
    entered: dict[type[Model], Callable[..., None]] = {
        Tenant: _tenant,
        ApiKey: _api_key,
        user: _user,
        Group: _group,
        **dict.fromkeys((Route, RouteStep, ProviderPrice, Budget), _setting),
    }
    for sender, enter in entered.items():
        post_save.connect(enter, sender=sender, dispatch_uid="ledger")
        post_delete.connect(enter, sender=sender, dispatch_uid="ledger")
    for through in (user.groups.through, user.user_permissions.through, Group.permissions.through):
        m2m_changed.connect(_relation, sender=through, dispatch_uid="ledger")
    post_save.connect(_admin_action, sender=LogEntry, dispatch_uid="ledger")


def _configuration(sender: Any, **sent: Any) -> None:
    content = {name: sent[name] for name in sent if name not in ("signal", "provider_id")}
    append("configuration", str(sent["provider_id"]), storable_value(content))


def _version(sender: Any, **sent: Any) -> None:
    content = {name: sent[name] for name in sent if name not in ("signal", "subject")}
    append("configuration", str(sent["subject"]), storable_value(content))


def _setting(sender: Any, instance: Model, **sent: Any) -> None:
    facts = _facts(instance, leave_out=("id",))
    append(
        "setting", f"{instance._meta.model_name} {instance.pk}", {"action": _what(sent), **facts}
    )


def _tenant(sender: Any, instance: Tenant, **sent: Any) -> None:
    facts = _facts(instance, leave_out=("id", "slug", "created_at"))
    append("tenant", instance.slug, {"action": _what(sent), **facts})


def _api_key(sender: Any, instance: ApiKey, **sent: Any) -> None:
    facts = _facts(
        instance,
        leave_out=("id", "tenant", "key_hash", "prefix", "created_at", "last_used_at"),
    )
    content = {"action": _what(sent), "tenant": instance.tenant.slug, **facts}
    append("api_key", instance.prefix, content)


def _facts(instance: Model, *, leave_out: tuple[str, ...]) -> dict[str, Any]:
    """The columns of a row, whichever it has; none of them may be a secret."""
    facts = {}
    for field in instance._meta.concrete_fields:
        if field.name not in leave_out:
            value = getattr(instance, field.attname)
            if isinstance(value, datetime):
                value = moment(value)
            facts[field.attname] = format(value, "f") if isinstance(value, Decimal) else value
    return cast("dict[str, Any]", storable_value(facts))


def _user(sender: Any, instance: Any, raw: bool = False, **sent: Any) -> None:
    if (sent.get("update_fields") or ()) == frozenset(["last_login"]):
        return
    flags = ("is_active", "is_staff", "is_superuser")
    content = {"action": _what(sent), **{name: getattr(instance, name) for name in flags}}
    append("user", instance.get_username(), content)


def _group(sender: Any, instance: Group, **sent: Any) -> None:
    append("role", instance.name, {"action": _what(sent)})


def _relation(
    sender: Any,
    instance: Model,
    action: str,
    reverse: bool,
    model: type[Model],
    pk_set: set[Any] | None,
    **sent: Any,
) -> None:
    """Membership of a group, or permissions of a user or group, from either side."""
    if action not in _MEMBERSHIP or pk_set == set():
        return
    others = model._default_manager.filter(pk__in=pk_set) if pk_set else _all_of(sender, instance)
    content = {
        "action": _MEMBERSHIP[action],
        "of": instance._meta.label_lower,
        "others": sorted(str(other) for other in others),
    }
    append("role", str(instance), content)


def _all_of(through: Any, instance: Model) -> list[Model]:
    """What is about to be cleared."""
    for relation in instance._meta.get_fields():
        if relation.many_to_many and _through(relation) is through:
            name = getattr(relation, "get_accessor_name", lambda field=relation: field.name)()
            return list(getattr(instance, name).all())
    return []


def _through(relation: Any) -> Any:
    return getattr(relation, "through", None) or relation.remote_field.through


def _admin_action(sender: Any, instance: LogEntry, **sent: Any) -> None:
    content = {
        "action": _ACTIONS.get(instance.action_flag, str(instance.action_flag)),
        "type": instance.content_type.model if instance.content_type else None,
        "object": instance.object_repr,
        "message": instance.change_message,
    }
    append("admin_action", instance.object_id or "", content)


def _what(sent: Mapping[str, Any]) -> str:
    if "created" not in sent:
        return "deleted"
    return "created" if sent["created"] else "changed"
