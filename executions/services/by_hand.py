"""Whose hand it was: what is begun from a page is noted in the admin's log, by the account's id.

Who made a key on a page has seen its text, so what is sent with it may be that account's too.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model

from executions.models import ApiKey, Execution, Session


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


def begun_by(execution_id: UUID) -> list[int]:
    """The accounts by which it was begun, under whatever names they have by now."""
    return _accounts_that_added(Execution, [str(execution_id)])


def key_made_by(execution_id: UUID) -> list[int]:
    """The accounts that made the key it was sent with, or one in whose place that key came."""
    execution = Execution.objects.filter(pk=execution_id).select_related("api_key")
    found = execution.only("api_key").first()
    key = found.api_key if found is not None else None
    line: set[int] = set()
    while key is not None and key.pk not in line:
        line.add(key.pk)
        former = ApiKey.objects.filter(tenant=key.tenant_id, prefix=key.rotated_from)
        key = former.first() if key.rotated_from else None
    return _accounts_that_added(ApiKey, [str(pk) for pk in sorted(line)])


def _accounts_that_added(model: type[Model], keys: list[str]) -> list[int]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(model),
        object_id__in=keys,
        action_flag=ADDITION,
    )
    return list(entries.values_list("user_id", flat=True))
