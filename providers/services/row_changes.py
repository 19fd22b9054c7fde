"""Watching guarded rows: what a piece of code does to them, and that nobody does it alone.

Whatever page or action a signed-in person finds, her write of a guarded row is refused here under
the two-person rule, unless it is collected by `collecting`, whose caller then asks a second person,
or is a thing of her own account, within `own_account`. Code on the server is not held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_save, pre_delete, pre_save

from providers.guarded import (
    Change,
    Guarded,
    Values,
    all_children,
    all_guarded,
    find,
    guarded_row,
    rule_holds_for,
    values_of,
)


class NeedsApproval(PermissionDenied):
    """A signed-in person would change alone what takes two."""


class Touched:
    """The guarded rows that were written, as they were before."""

    def __init__(self) -> None:
        self._before: dict[tuple[type[Model], str], tuple[Guarded, Values | None, str]] = {}

    def note(self, guarded: Guarded, pk: Any, *, is_new: bool = False) -> None:
        key = (guarded.model, str(pk))
        if key not in self._before:
            row = None if is_new else find(guarded, pk)
            self._before[key] = (guarded, values_of(guarded, row), _shown(guarded, row))

    def changes(self) -> list[Change]:
        """What differs now. Ask before the transaction ends."""
        found = []
        for (_, pk), (guarded, before, named) in self._before.items():
            row = find(guarded, pk)
            after = values_of(guarded, row)
            if before != after and not (guarded.removal_only and after is not None):
                found.append(Change(guarded, pk, before, after, named or _shown(guarded, row)))
        return found


_collecting: ContextVar[Touched | None] = ContextVar("touched", default=None)
_own: ContextVar[bool] = ContextVar("own_account", default=False)
_actor: list[Callable[[], str]] = []


@contextmanager
def collecting() -> Iterator[Touched]:
    """Within it guarded rows may be written; the caller decides what becomes of it."""
    touched = Touched()
    token = _collecting.set(touched)
    try:
        yield touched
    finally:
        _collecting.reset(token)


@contextmanager
def own_account() -> Iterator[None]:
    """Within it somebody writes what is hers alone: her password, her authenticator."""
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


def connect(actor: Callable[[], str]) -> None:
    """Watch what is guarded by now. `actor()` is `user:NAME` while a signed-in person acts."""
    _actor[:] = [actor]
    models = [guarded.model for guarded in all_guarded()]
    for model in (*models, *(child.model for child in all_children())):
        pre_save.connect(_before_save, sender=model, dispatch_uid="guarded")
        post_save.connect(_after_save, sender=model, dispatch_uid="guarded")
        pre_delete.connect(_before_delete, sender=model, dispatch_uid="guarded")
    for model in models:
        for field in model._meta.many_to_many:
            through = getattr(model, field.name).through
            m2m_changed.connect(_relation, sender=through, dispatch_uid="guarded")


def _shown(guarded: Guarded, row: Model | None) -> str:
    return "" if row is None else guarded.shown(row)


def _before_save(sender: Any, instance: Model, update_fields: Any = None, **_: Any) -> None:
    if guarded := _watched(instance, update_fields):
        if instance._state.adding and type(instance) is guarded[0].model:
            _refuse_alone(guarded[0])
        else:
            _note(*guarded)


def _after_save(sender: Any, instance: Model, created: bool, **_: Any) -> None:
    guarded, touched = _watched(instance, None), _collecting.get()
    if guarded and created and touched is not None and type(instance) is guarded[0].model:
        touched.note(*guarded, is_new=True)


def _before_delete(sender: Any, instance: Model, origin: Any = None, **_: Any) -> None:
    guarded = guarded_row(instance)
    if guarded is None:
        return
    # What goes along with another row is part of that row's removal.
    if guarded[0].removal_only and getattr(origin, "model", type(origin)) is not sender:
        return
    _note(*guarded)


def _relation(
    sender: Any, instance: Any, action: str, reverse: bool, model: Any, pk_set: Any, **_: Any
) -> None:
    if action not in ("pre_add", "pre_remove", "pre_clear") or pk_set == set():
        return
    rows: Iterable[Any] = [instance]
    if reverse:
        found = model._base_manager.filter(pk__in=pk_set) if pk_set else _related(sender, instance)
        rows = list(found)
    for row in rows:
        if guarded := guarded_row(row):
            _note(*guarded)


def _related(through: Any, instance: Any) -> list[Any]:
    for relation in instance._meta.related_objects:
        if getattr(relation, "through", None) is through:
            return list(getattr(instance, relation.get_accessor_name()).all())
    return []


def _watched(instance: Model, update_fields: Any) -> tuple[Guarded, Any] | None:
    guarded = guarded_row(instance)
    if guarded is None or guarded[0].removal_only:
        return None
    if update_fields is not None and set(update_fields) <= guarded[0].left_out:
        return None
    return guarded


def _note(guarded: Guarded, pk: Any) -> None:
    touched = _collecting.get()
    if touched is not None:
        touched.note(guarded, pk)
    else:
        _refuse_alone(guarded)


def _refuse_alone(guarded: Guarded) -> None:
    if not rule_holds_for(guarded) or _own.get() or _collecting.get() is not None:
        return
    if any(actor().startswith(("user:", "key:")) for actor in _actor):
        raise NeedsApproval(f"A change of a {guarded.name} needs a second administrator.")
