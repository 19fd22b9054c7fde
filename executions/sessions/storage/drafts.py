"""Saved files that are changed in large numbers: written beside what is saved, and put in its place
at once.

A draft is a workspace of no session and no snapshot, so nobody sees it. It is filled in short
transactions. One short transaction more gives it to its session, and what the session had before
becomes rubbish. A process that dies leaves a workspace of nobody, which `collect` finds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.db import Error as DatabaseFailure
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from executions.kernel.database import in_batches, keys_of
from executions.sessions.models import Workspace, WorkspaceFile
from executions.sessions.storage import blobs, quota
from executions.tenants.models import Tenant

logger = logging.getLogger(__name__)

# How old a workspace of nobody is when nobody is filling or removing it any more.
GRACE = timedelta(hours=1)
_AT_ONCE = 20

# Rows of one statement: they are short.
_STATEMENT_ROWS = 125
_TABLE = WorkspaceFile._meta.db_table
_COLUMNS = "key, path, type, blob_id, size, mode, modified, target"
_ADD = (
    f"INSERT INTO {_TABLE} (workspace_id, {_COLUMNS})"  # noqa: S608
    f" VALUES (%s{', %s' * len(_COLUMNS.split(','))})"
)
_COPY = (
    f"INSERT INTO {_TABLE} (workspace_id, {_COLUMNS})"  # noqa: S608
    f" SELECT %s, {_COLUMNS} FROM {_TABLE} WHERE workspace_id = %s AND key IN ({{}})"
    " ORDER BY blob_id"
)
# What a session's workspace is beside its rows, and goes over to what takes its place.
_KEPT = (
    *("mark", "missed", "seen_turns", "open_turns", "lost_turns", "saved_at", "problem"),
    *("former", "created_at"),
)


class Overtaken(Exception):
    """Others changed the saved files, or the draft is gone. Nothing of the transaction counts."""


@contextmanager
def draft(tenant: Tenant, like: Workspace | None = None) -> Iterator[Workspace]:
    """A workspace of nobody. Removed at the end, unless somebody has it by then.

    `like` is the workspace that it is to be a copy of: its rows are counted for the tenant at once,
    before they are written. Raises QuotaExceeded.
    """
    with transaction.atomic():
        made = Workspace(tenant=tenant)
        if like is not None:
            quota.reserve(tenant.pk, files=like.files, names=like.names)
            made.files, made.names = like.files, like.names
            made.bytes, made.saved_at = like.bytes, like.saved_at
        made.save(force_insert=True)
    try:
        yield made
    finally:
        discard(made.pk)


def copy(source: Workspace, target: Workspace, *, but: Collection[str] = ()) -> None:
    """Copy the rows of a workspace, but for those with these keys."""
    place = Workspace._meta.pk.get_db_prep_value
    places = [place(target.pk, connection), place(source.pk, connection)]

    def write(keys: Sequence[str]) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_COPY.format(", ".join(["%s"] * len(keys))), [*places, *keys])

    left = (key for key in keys_of(source.rows.all(), "key") if key not in but)
    in_batches(left, write, statement_rows=_STATEMENT_ROWS)


def add(target: Workspace, rows: Iterable[WorkspaceFile]) -> None:
    """Write rows that are to be the draft's. Raises IntegrityError for a blob that is gone."""
    place = Workspace._meta.pk.get_db_prep_value(target.pk, connection)
    # Made before, so that the transactions are short: no model is made into SQL within them.
    values = [
        (
            *(place, row.key, row.path, row.type, row.blob_id),
            *(row.size, row.mode, row.modified, row.target),
        )
        for row in blobs.by_number(rows)
    ]

    def write(some: Sequence[tuple[Any, ...]]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(_ADD, some)

    in_batches(values, write, statement_rows=_STATEMENT_ROWS)


def swap(old: Workspace, new: Workspace, **values: Any) -> None:
    """Put a draft in the place of the session's workspace `old`, with these values, in a
    transaction of the caller. `discard(old.pk)` is to be called after it.

    Raises QuotaExceeded, and Overtaken where `old` has changed since it was read.
    """
    found = Workspace.objects.select_for_update()
    seen = found.filter(pk=old.pk, version=old.version, session=old.session_id).first()
    if seen is None or seen.session_id is None:
        raise Overtaken
    quota.reserve(
        seen.tenant_id, files=values["files"] - seen.files, names=values["names"] - seen.names
    )
    Workspace.objects.filter(pk=seen.pk).update(
        session=None, former=None, version=F("version") + 1, files=0, names=0, bytes=0
    )
    kept = {name: getattr(seen, name) for name in _KEPT}
    all_values = {**kept, **values, "version": seen.version + 1}
    mine = Workspace.objects.filter(pk=new.pk, session=None)
    if not mine.update(**all_values, session=seen.session_id):
        raise Overtaken


def detach(workspace: Workspace) -> None:
    """Within a transaction that holds its row: have a workspace be nobody's, and count nothing.

    `discard` is to be called after that transaction.
    """
    quota.reserve(workspace.tenant_id, files=-workspace.files, names=-workspace.names)
    Workspace.objects.filter(pk=workspace.pk).update(
        session=None, former=None, version=F("version") + 1, files=0, names=0, bytes=0
    )


def discard(pk: Any) -> set[int]:
    """Remove a workspace, if it is nobody's. The blobs that its rows named."""
    with transaction.atomic():
        rows = Workspace.objects.select_for_update(of=("self",))
        workspace = rows.filter(pk=pk, session=None, snapshot=None).first()
        if workspace is None:
            return set()
        if workspace.files or workspace.names:
            detach(workspace)
    named: set[int] = set()

    def delete(keys: Sequence[str]) -> None:
        rows = WorkspaceFile.objects.filter(workspace=pk, key__in=keys)
        named.update(rows.exclude(blob=None).values_list("blob", flat=True))
        # Nothing refers to them that the collecting of what refers to them could find.
        rows._raw_delete(rows.db)

    left = keys_of(WorkspaceFile.objects.filter(workspace=pk), "key")
    in_batches(left, delete, statement_rows=_STATEMENT_ROWS)
    Workspace.objects.filter(pk=pk, session=None).delete()
    return named


def discard_former(workspace: Workspace) -> None:
    """Remove what a draft took the place of. What is not removed now is collected."""
    try:
        discard(workspace.pk)
    except DatabaseFailure as problem:
        logger.warning("the former workspace %s still exists: %s", workspace.pk, problem)


def collect() -> int:
    """Remove what dead processes have left. How many workspaces."""
    old = Workspace.objects.filter(
        session=None, snapshot=None, created_at__lt=timezone.now() - GRACE
    )
    left = list(old.order_by("pk").values_list("pk", "tenant")[:_AT_ONCE])
    for pk, tenant_id in left:
        logger.info("the workspace %s has no owner and is removed", pk)
        blobs.remove_unnamed(tenant_id, discard(pk))
    return len(left)
