"""Which rows decide where code runs, who pays and who may change that; their values, in and out.

An app names its own with `guard`. What is guarded waits for a second administrator under the
two-person rule, and has versions that can be restored. All columns of a guarded row are carried,
so that a later column is under the rule without being named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.serializers.base import DeserializationError
from django.db.models import Model
from django.views.decorators.debug import sensitive_variables

from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError, EncryptedTextField
from providers.schema import ConfigField, Schema

Values = dict[str, Any]


@dataclass(frozen=True)
class Child:
    """Rows that belong to a guarded one and are carried with it.

    `related` is a relation to read along, `unread` a column of it to leave where it is.
    """

    model: type[Model]
    parent: str
    accessor: str
    related: str
    unread: str


@dataclass(frozen=True)
class Guarded:
    """How the rows of one model are carried.

    `hidden` columns are carried and never shown or kept in a version; `left_out` ones are not
    carried at all. Of `removal_only` rows, which the service itself writes, removing one is the
    change. `called` and `shown` put a row into words. `refuse` says why somebody may not make a
    change, "" when she may. `puts_in_hand` names the accounts (user ids) that a change gives into
    the hands of whoever makes it; its second argument says whether a second person approved it.
    `begin` fills what no version keeps into a row that is made anew. `takes_two` says which changes
    wait for a second person; without it, all of them do. With `two_always` they wait also where
    the two-person rule is off.
    """

    model: type[Model]
    children: tuple[Child, ...] = ()
    prefetch: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    removal_only: bool = False
    called: str = ""
    shown: Callable[[Any], str] = str
    refuse: Callable[[Any, Change], str] | None = None
    puts_in_hand: Callable[[Change, bool], Iterable[int]] | None = None
    begin: Callable[[Any], None] | None = None
    takes_two: Callable[[Change], bool] | None = None
    two_always: bool = False

    @property
    def label(self) -> str:
        return self.model._meta.label_lower

    @property
    def name(self) -> str:
        return self.called or str(self.model._meta.verbose_name)


@dataclass(frozen=True)
class Change:
    """A guarded row before and after: None where it is not there. `pk` is "" for a new one."""

    guarded: Guarded
    pk: str
    before: Values | None
    after: Values | None
    shown_as: str = ""

    @property
    def subject(self) -> str:
        return f"{self.guarded.label}:{self.pk}"

    @property
    def takes_two(self) -> bool:
        """Whether it waits for a second person, where the two-person rule holds for its row."""
        asks = self.guarded.takes_two
        return asks is None or asks(self)

    @property
    def words(self) -> str:
        return f"{self.guarded.name} {self.shown_as}"

    def changed(self) -> Values:
        """The columns that differ, as they are to be."""
        before = self.before or {}
        after = self.after or {}
        return {k: v for k, v in after.items() if self.before is None or before.get(k) != v}


_guarded: dict[type[Model], Guarded] = {}
_children: dict[type[Model], tuple[Guarded, Child]] = {}


def guard(guarded: Guarded) -> None:
    """Called by an app that is ready, before `changes.connect`."""
    _guarded[guarded.model] = guarded
    for child in guarded.children:
        _children[child.model] = (guarded, child)


def all_guarded() -> list[Guarded]:
    return list(_guarded.values())


def all_children() -> list[Child]:
    return [child for _, child in _children.values()]


def guarded_row(instance: Model) -> tuple[Guarded, Any] | None:
    """What guards a row and the key of the row it belongs to, None for what is not guarded."""
    model = type(instance)
    if model in _guarded:
        return _guarded[model], instance.pk
    if model in _children:
        guarded, child = _children[model]
        return guarded, getattr(instance, f"{child.parent}_id")
    return None


def is_row(subject: str) -> bool:
    """Whether a subject names a guarded row; a provider's id holds no colon."""
    return ":" in subject


def parse(subject: str) -> tuple[Guarded, str]:
    """What guards a subject, and its key. Raises InvalidConfiguration for what is unknown."""
    label, _, pk = subject.partition(":")
    for guarded in _guarded.values():
        if guarded.label == label:
            return guarded, pk
    raise InvalidConfiguration(f"This version does not know the type {label!r} any more.")


def find(guarded: Guarded, pk: Any) -> Model | None:
    # What no key opens must not keep its row from being replaced.
    encrypted = (
        field.name
        for field in guarded.model._meta.concrete_fields
        if isinstance(field, EncryptedTextField)
    )
    rows = guarded.model._base_manager.prefetch_related(*guarded.prefetch).defer(*encrypted)
    return rows.filter(pk=pk).first() if pk not in (None, "") else None


@sensitive_variables()
def values_of(guarded: Guarded, row: Model | None) -> Values | None:
    """Every column and relation of a row as JSON, with the rows that belong to it."""
    if row is None:
        return None
    values = _plain(row)
    for name in guarded.left_out:
        values.pop(name, None)
    for child in guarded.children:
        rows = child.model._base_manager.filter(**{child.parent: row.pk}).order_by("pk")
        rows = rows.select_related(child.related).defer(child.unread)
        values[child.accessor] = [_child_values(found, child) for found in rows]
    return values


@sensitive_variables()
def _plain(row: Model) -> Values:
    columns = row._meta.concrete_fields
    encrypted = {field.name for field in columns if isinstance(field, EncryptedTextField)}
    relations = {field.name for field in row._meta.many_to_many}
    names = {field.name for field in columns} - encrypted | relations
    (document,) = serializers.serialize(
        "python", [row], fields=names, use_natural_foreign_keys=True
    )
    # Serialized, it would have another text each time.
    fields = {**document["fields"], **{name: _opened(row, name) for name in encrypted}}
    plain: Values = json.loads(json.dumps(fields, default=_as_text))
    return {k: sorted(v) if k in relations else v for k, v in plain.items()}


@sensitive_variables()
def _opened(row: Model, name: str) -> Any:
    """Return the value of an encrypted column, None where no key opens it."""
    try:
        return getattr(row, name)
    except DecryptionError:
        return None


def _as_text(value: Any) -> str:
    """A time, a date or a number with its decimals, to the last digit."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _child_values(row: Model, child: Child) -> Values:
    return {name: value for name, value in _plain(row).items() if name != child.parent}


def visible(guarded: Guarded, values: Mapping[str, Any] | None) -> Values:
    """What a version keeps."""
    return {k: v for k, v in (values or {}).items() if k not in guarded.hidden}


def schema_of_row(guarded: Guarded) -> Schema:
    """The columns as fields with a label, for whatever shows a difference."""
    fields = {
        field.name: str(field.verbose_name)
        for field in (*guarded.model._meta.concrete_fields, *guarded.model._meta.many_to_many)
    } | {child.accessor: child.accessor for child in guarded.children}
    return {
        name: ConfigField("string", label[:1].upper() + label[1:], secret=name in guarded.hidden)
        for name, label in fields.items()
    }


@sensitive_variables()
def write(guarded: Guarded, pk: str, values: Mapping[str, Any]) -> Model:
    """Give a row these values; those that are not named stay. Without the row it is made anew.

    Raises InvalidConfiguration for what does not fit. Call it in a transaction.
    """
    names = {child.accessor for child in guarded.children}
    row = find(guarded, pk)
    if row is None:
        row = guarded.model(pk=pk or None)
        if pk:
            # It begins anew: what there was before it went is not its own any more.
            names.add("created_at")
        if guarded.begin is not None:
            guarded.begin(row)
    relations = _fill(row, {k: v for k, v in values.items() if k not in names})
    _save(row)
    for name, related in relations.items():
        getattr(row, name).set(related)
    for child in guarded.children:
        if child.accessor not in values:
            continue
        getattr(row, child.accessor).all().delete()
        for each in values[child.accessor]:
            made = child.model(**{child.parent: row})
            _fill(made, each)
            _save(made)
    return row


@sensitive_variables()
def _fill(row: Model, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Set the columns of `row`; answers what is to be set once it is stored."""
    document = {"model": row._meta.label_lower, "pk": None, "fields": dict(fields)}
    try:
        read = next(iter(serializers.deserialize("python", [document], ignorenonexistent=True)))
    except (DeserializationError, StopIteration) as error:
        raise InvalidConfiguration(f"{row._meta.verbose_name}: {error}") from None
    relations = {field.name for field in row._meta.many_to_many}
    for field in row._meta.concrete_fields:
        if field.name in fields and not field.primary_key:
            setattr(row, field.attname, getattr(read.object, field.attname))
    return {k: v for k, v in (read.m2m_data or {}).items() if k in relations}


def _save(row: Model) -> None:
    try:
        row.full_clean()
    except ValidationError as error:
        raise InvalidConfiguration("; ".join(error.messages)) from None
    row.save()


class ConfigurationConflict(Exception):
    """Somebody else changed the configuration first. Nothing was saved."""


class NotPermitted(Exception):
    """Whoever asked for a change cannot approve it, and it can be decided only once."""


def two_person_rule() -> bool:
    return bool(settings.TWO_PERSON_RULE)


def rule_holds_for(guarded: Guarded) -> bool:
    """Whether changes of these rows wait for a second person, where they take two."""
    return guarded.two_always or two_person_rule()
