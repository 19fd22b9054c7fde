"""What changes elsewhere and belongs into the ledger: configurations, routes, accounts, roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce, wraps
from typing import Any

from django.contrib.admin.models import LogEntry, LogEntryManager
from django.db import router, transaction
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save

from executions.capabilities.retention.capability import keep_held_tenant
from executions.capabilities.retention.service import check_mark
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.webhooks.models import WebhookSecret
from executions.kernel.text import storable_value
from executions.ledger.append import (
    Before,
    append,
    compare_before_save,
    enter_row,
    look_at,
    state_before_save,
    track_save,
)
from executions.ledger.bindings import BINDINGS, DELETED, NOT_COMPARED, columns_of, model_of
from executions.ledger.entry import lock_ledger
from executions.ledger.models import LegalHold
from executions.tenants.models import ApiKey, Tenant
from providers.signals import (
    configuration_changed,
    configuration_tried,
    rows_update,
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
    pre_save.connect(_tenant_saves, sender=Tenant, dispatch_uid="removal")
    saved_whole: set[type[Model]] = set()
    for label, binding in BINDINGS.items():
        model = model_of(label)
        if model is None:
            continue
        saved_whole.add(model)
        for signal, receiver in _OF_ROW:
            signal.connect(receiver, sender=model, dispatch_uid="ledger")
        for name in binding.related:
            relation: Any = model._meta.get_field(name).remote_field
            m2m_changed.connect(_relation, sender=relation.through, dispatch_uid="ledger")
            for signal, receiver in _OF_RELATED:
                signal.connect(receiver, sender=relation.model, dispatch_uid="ledger of others")
            saved_whole.add(relation.model)
    _save_whole(tuple(saved_whole))
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


def _save_whole(models: tuple[type[Model], ...]) -> None:
    """Have rows of these models compared, written and entered in one transaction, whoever saves
    them: `loaddata` calls the method of `Model` itself."""
    save_base = Model.save_base

    @wraps(save_base)
    def save_whole(row: Model, *args: Any, **options: Any) -> None:
        if not isinstance(row, models):
            save_base(row, *args, **options)
            return
        using = options.get("using") or router.db_for_write(type(row), instance=row)
        with transaction.atomic(using=using, savepoint=False), track_save(row):
            save_base(row, *args, **options)

    Model.save_base = save_whole  # type: ignore[assignment,method-assign]


def _saves(sender: Any, instance: Model, update_fields: Any = None, **sent: Any) -> None:
    if _is_of_bound(instance, update_fields):
        compare_before_save(instance)


def _saved(sender: Any, instance: Model, created: bool, **sent: Any) -> None:
    if _is_of_bound(instance, sent.get("update_fields")):
        before = state_before_save(instance, created=created)
        enter_row(instance, "created" if created else "changed", before, said_of(instance))


def _is_of_bound(instance: Model, update_fields: Any) -> bool:
    """Whether a save writes any column that is bound."""
    if update_fields is None:
        return True
    options: Any = instance._meta
    written = {options.get_field(name).attname for name in update_fields}
    return not written.isdisjoint(columns_of(type(instance)))


def _goes(sender: Any, instance: Model, **sent: Any) -> None:
    instance._before = look_at(sender, instance.pk)  # type: ignore[attr-defined]


def _gone(sender: Any, instance: Model, **sent: Any) -> None:
    before = instance.__dict__.pop("_before")
    enter_row(instance, DELETED, before, said_of(instance))


def said_of(row: Model) -> dict[str, Any]:
    """What an entry of this row tells beside its columns."""
    return _SAID.get(type(row), lambda row: {})(row)


def _tenant_goes(sender: Any, instance: Tenant, **sent: Any) -> None:
    keep_held_tenant(instance)


def _tenant_saves(sender: Any, instance: Tenant, **sent: Any) -> None:
    check_mark(instance)


def _updates(sender: type[Model], pks: list[Any], before: dict[Any, Any], **sent: Any) -> None:
    for pk in sorted(pks):
        before[pk] = look_at(sender, pk)


def _updated(sender: type[Model], pks: list[Any], before: dict[Any, Any], **sent: Any) -> None:
    for row in sender._base_manager.filter(pk__in=pks):
        enter_row(row, "changed", before[row.pk])


_OF_ROW = (
    (pre_save, _saves),
    (post_save, _saved),
    (pre_delete, _goes),
    (post_delete, _gone),
    (rows_update, _updates),
    (rows_updated, _updated),
)


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


def _of_template(row: Any) -> dict[str, Any]:
    # It goes with its tenant, which may be gone first.
    tenant = Tenant.objects.filter(pk=row.tenant_id)
    return {"tenant": tenant.values_list("slug", flat=True).first()}


def _of_version(row: Any) -> dict[str, Any]:
    return {"template": row.template.name, **_of_template(row.template)}


def _of_legal_hold(row: Any) -> dict[str, Any]:
    return {"execution": None if row.execution_id is None else str(row.execution_id)}


_SAID: Mapping[type[Model], Callable[[Any], dict[str, Any]]] = {
    ApiKey: _of_tenants_own,
    WebhookSecret: _of_tenants_own,
    Schedule: _of_tenants_own,
    LegalHold: _of_legal_hold,
    Template: _of_template,
    TemplateVersion: _of_version,
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
    if action in ("pre_add", "pre_remove", "pre_clear"):
        rows = _members(sender, instance, reverse, model, pk_set)
        if action == "pre_add":
            # Whoever renames them meanwhile would not find the new member.
            _hold([instance] if reverse else list(model._default_manager.filter(pk__in=pk_set)))
        instance._compared = {row.pk: look_at(type(row), row.pk) for row in rows}  # type: ignore[attr-defined]
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
        compared = instance.__dict__.pop("_compared")
        for row in changed if reverse else [instance]:
            enter_row(row, "changed", compared[row.pk])


def _members(
    through: Any, instance: Model, reverse: bool, model: type[Model], pk_set: set[Any] | None
) -> list[Any]:
    """The rows whose memberships change, in the order in which all hold them."""
    if not reverse:
        return [instance]
    if pk_set:
        return list(model._default_manager.filter(pk__in=pk_set).order_by("pk"))
    return sorted(_all_of(through, instance), key=lambda row: row.pk)


def _hold(rows: Iterable[Model]) -> None:
    """Let nobody else change these until this transaction ends."""
    for row in sorted(rows, key=lambda row: row.pk):
        held = type(row)._base_manager.select_for_update(no_key=True).filter(pk=row.pk)
        held.values_list("pk").first()


def _holders(instance: Model) -> list[Model]:
    """The rows that it is part of, in the order in which all hold them."""
    return [
        row
        for label, binding in BINDINGS.items()
        for name in binding.related
        if (model := model_of(label)) is not None
        and model._meta.get_field(name).related_model is type(instance)
        for row in model._default_manager.filter(**{name: instance.pk}).order_by("pk")
    ]


def _related_goes(sender: Any, instance: Model, **sent: Any) -> None:
    """Remember whose rows it is part of: a role that goes is taken from everybody silently."""
    _hold([instance])
    instance._held_by = [  # type: ignore[attr-defined]
        (row, look_at(type(row), row.pk)) for row in _holders(instance)
    ]


def _related_gone(sender: Any, instance: Model, **sent: Any) -> None:
    for row, before in instance.__dict__.pop("_held_by", ()):
        enter_row(row, "changed", before)


def _related_changes(sender: Any, instance: Model, **sent: Any) -> None:
    """A role under another name is another one to everybody who has it."""
    if instance.pk is None:
        return
    _hold([instance])
    said = _said_of(instance)
    if said and any(stored != _named(instance, columns) for stored, columns in said):
        instance._said_before = said  # type: ignore[attr-defined]
        instance._looked_at = {  # type: ignore[attr-defined]
            (type(row), row.pk): look_at(type(row), row.pk) for row in _holders(instance)
        }


def _related_changed(sender: Any, instance: Model, **sent: Any) -> None:
    said = instance.__dict__.pop("_said_before", None)
    looked_at = instance.__dict__.pop("_looked_at", {})
    if said is None or said == _said_of(instance):
        return
    # Who has it since then is known once nobody else enters anything.
    lock_ledger()
    for row in _holders(instance):
        before = looked_at.get((type(row), row.pk)) or Before(NOT_COMPARED)
        enter_row(row, "changed", before)


def _said_of(instance: Model) -> list[tuple[tuple[Any, ...], tuple[str, ...]]]:
    """What others say of it, as the database has it now, and by which columns."""
    row = type(instance)._base_manager.filter(pk=instance.pk)
    named = {
        columns
        for label, binding in BINDINGS.items()
        for name, columns in binding.related.items()
        if (model := model_of(label)) is not None
        and model._meta.get_field(name).related_model is type(instance)
    }
    return [(said, columns) for columns in sorted(named) for said in row.values_list(*columns)]


def _named(instance: Model, columns: tuple[str, ...]) -> tuple[Any, ...]:
    """The same, as it is to be."""
    return tuple(
        reduce(lambda found, part: getattr(found, part), column.split("__"), instance)
        for column in columns
    )


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
