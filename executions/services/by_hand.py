"""Whose hand it was: what is begun from a page is noted in the admin's log, by the account's id."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.contenttypes.models import ContentType

from executions.models import Execution, Session


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
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(Execution),
        object_id=str(execution_id),
        action_flag=ADDITION,
    )
    return list(entries.values_list("user_id", flat=True))
