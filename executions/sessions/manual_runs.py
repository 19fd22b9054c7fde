"""Whose hand it was: what is begun from a page is noted in the admin's log, by the account's id.

Who made a key on a page has seen its text, so what is sent with it may be that account's too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model

from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import ApiKey


def note(person: Any, row: Execution | Session, message: str) -> None:
    """Note that this person, who is signed in, has begun it."""
    LogEntry.objects.create(
        user_id=person.pk,
        content_type_id=ContentType.objects.get_for_model(type(row)).pk,
        object_id=str(row.pk),
        object_repr=str(row.pk),
        action_flag=ADDITION,
        change_message=message,
    )


def initiators(execution_id: UUID) -> list[int]:
    """The accounts by which it was begun, under whatever names they have by now."""
    return _accounts_that_added(Execution, [str(execution_id)])


def key_made_by(execution_id: UUID) -> list[int]:
    """The accounts that made the key it was sent with, or one in whose place that key came. Also of
    keys that somebody deleted: the ledger knows them."""
    found = Execution.objects.filter(pk=execution_id).values_list("api_key_prefix", flat=True)
    todo, line, keys = set(found), {""}, set[str]()
    while new := todo - line:
        prefix = new.pop()
        line.add(prefix)
        for pk, rotated_from in _keys_called(prefix):
            keys.add(pk)
            todo.add(rotated_from)
    return _accounts_that_added(ApiKey, sorted(keys))


def _keys_called(prefix: str) -> Iterator[tuple[str, str]]:
    """The keys with this prefix, each with the prefix of the one in whose place it came."""
    for pk, rotated_from in ApiKey.objects.filter(prefix=prefix).values_list("pk", "rotated_from"):
        yield str(pk), rotated_from
    for entry in LedgerEntry.objects.filter(kind="api_key", subject=prefix):
        stated = parse(entry.statement)
        if stated is not None and stated.get("subject") == prefix and "row" in stated:
            yield stated["row"], stated.get("rotated_from") or ""


def _accounts_that_added(model: type[Model], keys: list[str]) -> list[int]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(model),
        object_id__in=keys,
        action_flag=ADDITION,
    )
    return list(entries.values_list("user_id", flat=True))
