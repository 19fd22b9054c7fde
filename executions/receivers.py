"""What changes elsewhere and belongs into the ledger: configurations, routes, accounts, roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from django.contrib.admin.models import LogEntry, LogEntryManager
from django.contrib.auth import get_user_model
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save

from executions.models import ApiKey, LegalHold, Schedule, Tenant, WebhookSecret
from executions.services.holds import keep_held_tenant
from executions.services.ledger import append
from executions.services.ledger.bindings import BINDINGS, model_of
from executions.services.ledger.entering import enter_row
from executions.services.ledger.rows import DELETED
from executions.text import storable_value
from providers.signals import (
    configuration_changed,
    configuration_tried,
    rows_updated,
    setting_changed,
)

_ACTIONS = {1: "added", 2: "changed", 3: "deleted"}
_MEMBERSHIP = {"post_add": "added", "post_remove": "removed", "pre_clear": "removed"}


def connect() -> None:
    """Called once, when the app is ready."""
    configuration_changed.connect(_configuration, dispatch_uid="ledger")
    setting_changed.connect(_version, dispatch_uid="ledger")
    configuration_tried.connect(_trial, dispatch_uid="ledger")
    pre_delete.connect(_tenant_goes, sender=Tenant, dispatch_uid="holds")
    for label, binding in BINDINGS.items():
        model = model_of(label)
        if model is None:
            continue
        for signal in (post_save, post_delete):
            signal.connect(_row, sender=model, dispatch_uid="ledger")
        rows_updated.connect(_updated, sender=model, dispatch_uid="ledger")
        for name in binding.related:
            relation: Any = model._meta.get_field(name).remote_field
            m2m_changed.connect(_relation, sender=relation.through, dispatch_uid="ledger")
            for signal, receiver in _OF_RELATED:
                signal.connect(receiver, sender=relation.model, dispatch_uid=f"ledger {label}")
    LogEntryManager.bulk_create = _save_each  # type: ignore[assignment]


def _save_each(manager: Any, rows: Iterable[LogEntry]) -> list[LogEntry]:
    """The admin's log is written in bulk for several rows, of which no signal would tell."""
    saved = list(rows)
    for row in saved:
        row.save(force_insert=True)
    return saved


def _configuration(sender: Any, **sent: Any) -> None:
    content = {name: sent[name] for name in sent if name not in ("signal", "provider_id")}
    append("configuration", str(sent["provider_id"]), storable_value(content))


def _version(sender: Any, **sent: Any) -> None:
    content = {name: sent[name] for name in sent if name not in ("signal", "subject")}
    append("configuration", str(sent["subject"]), storable_value(content))


def _trial(sender: Any, **sent: Any) -> None:
    content = {"actor": sent["author"], "addresses": sent["addresses"], "stored": sent["stored"]}
    append("trial", str(sent["provider_id"]), storable_value(content))


def _row(sender: Any, instance: Model, **sent: Any) -> None:
    if isinstance(instance, get_user_model()) and sent.get("update_fields") == frozenset(
        ["last_login"]
    ):
        return
    enter_row(instance, _what(sent), _SAID.get(type(instance), lambda row: {})(instance))


def _tenant_goes(sender: Any, instance: Tenant, **sent: Any) -> None:
    keep_held_tenant(instance)


def _updated(sender: type[Model], pks: list[Any], **sent: Any) -> None:
    for row in sender._base_manager.filter(pk__in=pks):
        enter_row(row, "changed")


def _of_tenants_own(row: Any) -> dict[str, Any]:
    return {"tenant": row.tenant.slug}


def _of_log_entry(row: Any) -> dict[str, Any]:
    # Its own columns `action_flag` and `object_repr` in words.
    return {
        "did": _ACTIONS.get(row.action_flag, str(row.action_flag)),
        "type": row.content_type.model if row.content_type else None,
        "object": row.object_repr,
        "message": row.change_message,
    }


def _of_legal_hold(row: Any) -> dict[str, Any]:
    return {"execution": None if row.execution_id is None else str(row.execution_id)}


_SAID: Mapping[type[Model], Callable[[Any], dict[str, Any]]] = {
    ApiKey: _of_tenants_own,
    WebhookSecret: _of_tenants_own,
    Schedule: _of_tenants_own,
    LegalHold: _of_legal_hold,
    LogEntry: _of_log_entry,
}


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
    if pk_set == set():
        return
    if action in _MEMBERSHIP:
        others = (
            model._default_manager.filter(pk__in=pk_set) if pk_set else _all_of(sender, instance)
        )
        content = {
            "action": _MEMBERSHIP[action],
            "of": instance._meta.label_lower,
            "others": sorted(str(other) for other in others),
        }
        append("role", str(instance), content)
        if action == "pre_clear":
            instance._cleared = list(others)  # type: ignore[attr-defined]
            return
    if action in ("post_add", "post_remove", "post_clear"):
        changed = model._default_manager.filter(pk__in=pk_set) if pk_set else instance._cleared  # type: ignore[attr-defined]
        for row in changed if reverse else [instance]:
            enter_row(row, "changed")


def _related_goes(sender: Any, instance: Model, **sent: Any) -> None:
    """Remember whose rows it is part of: a role that goes is taken from everybody silently."""
    instance._held_by = [  # type: ignore[attr-defined]
        row
        for label, binding in BINDINGS.items()
        for name in binding.related
        if (model := model_of(label)) is not None
        and model._meta.get_field(name).related_model is sender
        for row in model._default_manager.filter(**{name: instance.pk})
    ]


def _related_gone(sender: Any, instance: Model, **sent: Any) -> None:
    for row in instance.__dict__.pop("_held_by", ()):
        enter_row(row, "changed")


def _related_changes(sender: Any, instance: Model, **sent: Any) -> None:
    """A role under another name is another one to everybody who has it."""
    instance._said_before = _said_of(instance)  # type: ignore[attr-defined]


def _related_changed(sender: Any, instance: Model, **sent: Any) -> None:
    before = instance.__dict__.pop("_said_before", None)
    if before and before != _said_of(instance):
        _related_goes(sender, instance)
        _related_gone(sender, instance)


def _said_of(instance: Model) -> list[tuple[Any, ...]]:
    """What others say of it, as the database has it now."""
    row = type(instance)._base_manager.filter(pk=instance.pk)
    return [
        said
        for label, binding in BINDINGS.items()
        for name, columns in binding.related.items()
        if (model := model_of(label)) is not None
        and model._meta.get_field(name).related_model is type(instance)
        for said in row.values_list(*columns)
    ]


_OF_RELATED = (
    (pre_save, _related_changes),
    (post_save, _related_changed),
    (pre_delete, _related_goes),
    (post_delete, _related_gone),
)


def _all_of(through: Any, instance: Model) -> list[Model]:
    """What is about to be cleared."""
    for relation in instance._meta.get_fields():
        if relation.many_to_many and _through(relation) is through:
            name = getattr(relation, "get_accessor_name", lambda field=relation: field.name)()
            return list(getattr(instance, name).all())
    return []


def _through(relation: Any) -> Any:
    return getattr(relation, "through", None) or relation.remote_field.through


def _what(sent: Mapping[str, Any]) -> str:
    if "created" not in sent:
        return DELETED
    return "created" if sent["created"] else "changed"
