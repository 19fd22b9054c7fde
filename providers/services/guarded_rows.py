"""Changing guarded rows: made and kept as a version, or left waiting for a second person."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from providers import guarded
from providers.errors import InvalidConfiguration
from providers.guarded import Change, ConfigurationConflict, Values, rule_holds_for
from providers.models import ConfigVersion, PendingChange
from providers.services import history
from providers.services.approvers import hold
from providers.services.history import SYSTEM, Diff
from providers.services.row_changes import collecting

T = TypeVar("T")
Action = PendingChange.Action

_FOUND = "As it was found."


class NotAllowed(PermissionDenied):
    """Somebody may not make this change, alone or with others."""


def carry_out(
    person: Any, do: Callable[[], T], *, reason: str = ""
) -> tuple[T, list[PendingChange]]:
    """Have a signed-in person do something to guarded rows.

    Where the two-person rule does not hold what `do` changed is kept, each row as a new version.
    Where it does all that `do` wrote is undone, and what it made of the guarded rows is left
    waiting, in the list.
    Raises NotAllowed, and then nothing was done.
    """
    author = f"user:{person.get_username()}"
    # Looked up once and kept: what she may do is what she could before `do`.
    person.get_all_permissions()
    with transaction.atomic():
        with collecting() as touched:
            result = do()
        changes = touched.changes()
        for change in changes:
            refuse_to(person, change)
        waits = any(change.takes_two and rule_holds_for(change.guarded) for change in changes)
        if not waits:
            keep_versions(changes, author, reason)
            for change in changes:
                hold(_accounts(change, approved=False), person.pk)
        else:
            transaction.set_rollback(True)
    if not waits:
        return result, []
    with transaction.atomic():
        return result, [_leave_waiting(change, person, author, reason) for change in changes]


@sensitive_variables()
def restore(person: Any, version: ConfigVersion, *, reason: str = "") -> list[PendingChange]:
    """Give a row the values of an earlier version. Raises InvalidConfiguration and NotAllowed."""
    values = history.config_of(version)
    if not values:
        raise InvalidConfiguration(f"{version} is a removal: nothing to restore.")
    kind, pk = guarded.parse(version.subject)
    reason = reason or f"Rolled back to version {version.version}."
    return carry_out(person, lambda: guarded.write(kind, pk, values), reason=reason)[1]


def refuse_to(person: Any, change: Change) -> None:
    """Raise NotAllowed with the reason why this person may not make this change."""
    refuse = change.guarded.refuse
    if refuse is not None and (why := refuse(person, change)):
        raise NotAllowed(why)


@sensitive_variables()
def asked_for(waiting: PendingChange, config: Values | None) -> Change:
    """What a waiting change would make of the row as it is now. Raises ConfigurationConflict."""
    kind, pk = guarded.parse(waiting.subject)
    row = guarded.find(kind, pk)
    before = guarded.values_of(kind, row)
    removes = waiting.action == Action.REMOVE
    if before is None and (removes or waiting.base_version):
        raise ConfigurationConflict(f"{waiting.shown_as} does not exist any more.")
    after = None if removes else {**(before or {}), **(config or {})}
    return Change(kind, pk, before, after, kind.shown(row) if row else "")


@sensitive_variables()
def make(waiting: PendingChange, config: Values | None, approved_by: str) -> None:
    """Make an approved change, in the caller's transaction. Raises as `asked_for` does."""
    change = asked_for(waiting, config)
    versioned = change.before is not None and not change.guarded.removal_only
    if versioned and _found(change.subject, change) != waiting.base_version:
        raise ConfigurationConflict(f"{waiting.shown_as} was changed in the meantime.")
    if change.after is not None:
        history.refuse_another(difference(change), waiting.diff)
    with collecting() as touched:
        if change.after is None:
            row = guarded.find(change.guarded, change.pk)
            if row is not None:
                row.delete()
        else:
            guarded.write(change.guarded, change.pk, config or {})
    changes = touched.changes()
    keep_versions(changes, waiting.author, waiting.reason, approved_by)
    for made in changes:
        if waiting.author_id is not None:
            hold(_accounts(made, approved=True), waiting.author_id)


def keep_versions(
    changes: Iterable[Change], author: str, reason: str, approved_by: str = ""
) -> None:
    """Enter what was changed in the history, in the transaction that changed it."""
    for change in changes:
        _record(change, author, reason, approved_by)


def difference(change: Change) -> Diff:
    """What differs, with hidden columns named and not shown."""
    schema = guarded.schema_of_row(change.guarded)
    diff = history.difference_of(schema, change.before or {}, change.after or {})
    for entry in diff:
        if entry["field"] in change.guarded.hidden:
            entry["before"] = entry["before"] and "hidden"
            entry["after"] = entry["after"] and "hidden"
    return diff


def _accounts(change: Change, *, approved: bool) -> list[int]:
    puts = change.guarded.puts_in_hand
    return list(puts(change, approved)) if puts else []


@sensitive_variables()
def _leave_waiting(change: Change, person: Any, author: str, reason: str) -> PendingChange:
    is_new = change.before is None
    # The key that the undone insert was given is free again; that of a removed row is its own.
    was_here = ConfigVersion.objects.filter(subject=change.subject).exists()
    subject = f"{change.guarded.label}:" if is_new and not was_here else change.subject
    base = 0 if is_new or change.guarded.removal_only else _found(subject, change)
    return PendingChange.objects.create(
        subject=subject,
        shown_as=change.words[:200],
        action=Action.REMOVE if change.after is None else Action.SAVE,
        base_version=base,
        config=None if change.after is None else change.changed(),
        diff=difference(change),
        author=author[:200],
        author_id=person.pk,
        reason=reason[:500],
    )


@sensitive_variables()
def _record(change: Change, author: str, reason: str, approved_by: str = "") -> None:
    if change.guarded.removal_only:
        return
    if change.before is not None:
        _found(change.subject, change)
    before = guarded.visible(change.guarded, change.before)
    after = guarded.visible(change.guarded, change.after)
    if before == after:
        return
    history.record_version(
        change.subject,
        history.next_version(change.subject),
        before=before,
        after=after,
        author=author,
        reason=reason or ("Removed." if change.after is None else ""),
        approved_by=approved_by,
        shown_as=change.words,
    )


@sensitive_variables()
def _found(subject: str, change: Change) -> int:
    """The version that holds the row as it was, made now if it was written without one."""
    latest = ConfigVersion.objects.filter(subject=subject).order_by("-version").first()
    found = guarded.visible(change.guarded, change.before)
    kept: Values | None = None
    if latest is not None:
        try:
            kept = history.config_of(latest)
        except InvalidConfiguration:
            kept = None
        if kept == found:
            return latest.version
    made = history.record_version(
        subject,
        history.next_version(subject),
        before=kept,
        after=found,
        author=SYSTEM,
        reason=_FOUND,
        shown_as=change.words,
    )
    return made.version
