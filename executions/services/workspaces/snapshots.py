"""The files of a session as they are now, kept apart, and sessions that begin with them.

Rows are copied by the database; the bytes are there once, however many name them. Variables are no
part of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from uuid import UUID

from django.db import connection, transaction

from executions.models import Session, Snapshot, Tenant, Workspace, WorkspaceFile
from executions.services import ongoing
from executions.services.declared import declared
from executions.services.holds import held_of
from executions.services.ledger.entering import enter_row, look_at
from executions.services.ledger.rows import DELETED
from executions.services.listing import DEFAULT_LIMIT, Cursor, Limit
from executions.services.owned import snapshots_of
from executions.services.paging import newest_first
from executions.services.record import Caller
from executions.services.sessions.ending import lose
from executions.services.sessions.errors import NOT_FOUND, Conflict, refuse_ended
from executions.services.sessions.requests import SessionName
from executions.services.shapes import Body, Query
from executions.services.waiting import Waits
from executions.services.workspaces import blobs, quota, threads
from executions.services.workspaces.cleaning import drop
from executions.services.workspaces.restoring import Restored, to_restore
from executions.services.workspaces.saving import save
from providers.errors import KeptSandboxLost, ProviderUnavailable, SandboxError
from providers.remote.deadline import DeadlinePassed
from providers.waiting import within

logger = logging.getLogger(__name__)

SAVE_SECONDS = 600.0

_TABLE = WorkspaceFile._meta.db_table
_COLUMNS = "key, path, type, blob_id, size, mode, modified, target"
_COPY = (
    f"INSERT INTO {_TABLE} (workspace_id, {_COLUMNS})"  # noqa: S608
    f" SELECT %s, {_COLUMNS} FROM {_TABLE} WHERE workspace_id = %s ORDER BY blob_id"
)


class NoSuchSnapshot(SandboxError):
    """There is none of this id, or it is somebody else's: nobody is told which."""

    entry = NOT_FOUND


@declared
class SnapshotRequest:
    """Keep the files of a session as they are now."""

    name: SessionName = ""


@declared
class SnapshotFilter:
    """Where to go on."""

    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


TAKE = Body(SnapshotRequest, "SnapshotRequest")
LIST = Query(SnapshotFilter, empty_is_none=True)


@dataclass(frozen=True)
class Page:
    snapshots: list[Snapshot]
    next_cursor: str


def taking(session: Session, wanted: SnapshotRequest, caller: Caller) -> Waits[Snapshot]:
    """A snapshot of the session's files; one that is awake is saved thoroughly first.

    Raises Conflict where a file could not be saved, QuotaExceeded, and what `save` does; there is
    no snapshot then.
    """
    if session.saves == Session.Saves.NEVER:
        raise Conflict("Nothing of the session is saved: it was opened with saves=never.")
    if session.state == Session.State.OPEN:
        yield from _saved(session)
    return _take(session, wanted, caller)


def _saved(session: Session) -> Waits[None]:
    saved = threads.submit(
        ("snapshot", session.pk), session.tenant_slug, lambda: save(session, thorough=True)
    )
    awaited = within(SAVE_SECONDS, saved)
    with ongoing.given_up_at_the_end(awaited):
        yield awaited
    error = None if awaited.cancelled() else awaited.exception()
    if awaited.cancelled() or isinstance(error, DeadlinePassed):
        raise ProviderUnavailable("The files were not saved in time. Try again.", retry_after=5)
    if isinstance(error, KeptSandboxLost):
        lose(session, error.message)
        refuse_ended(session)
        raise Conflict(
            "The sandbox is gone. The session sleeps now, with the files that were saved before: "
            "send this again for a snapshot of these."
        ) from error
    if isinstance(error, Conflict):
        session.refresh_from_db()
        if session.state == Session.State.ASLEEP:
            # It fell asleep meanwhile, and was saved for that.
            return
    if error is not None:
        raise error
    if missed := awaited.result().missed:
        raise Conflict(
            f"{len(missed)} files changed while they were read, or cannot be read: `files.problem` "
            "of the session names one. Send this again when nothing writes to them."
        )


def _take(session: Session, wanted: SnapshotRequest, caller: Caller) -> Snapshot:
    key = caller.api_key
    with transaction.atomic():
        # Whoever changes what is saved writes this row first.
        workspace = Workspace.objects.select_for_update().filter(session=session.pk).first()
        session.refresh_from_db()
        refuse_ended(session)
        if workspace is None:
            raise Conflict("Nothing of the session is saved yet. Try again.", retry_after=1)
        mine = Workspace.objects.create(
            tenant=caller.tenant, bytes=workspace.bytes, saved_at=workspace.saved_at
        )
        files = _copied(workspace, mine)
        snapshot = Snapshot.objects.create(
            tenant=caller.tenant,
            tenant_slug=caller.tenant.slug,
            api_key_name=key.name if key else "",
            api_key_prefix=key.prefix if key else "",
            name=wanted.name,
            source=session.pk,
            workspace=mine,
            files=files,
            bytes=workspace.bytes,
        )
        snapshot.refresh_from_db()
    logger.info("session %s: its %s files are the snapshot %s", session.pk, files, snapshot.pk)
    return snapshot


def begin_with(session: Session, snapshot: Snapshot) -> list[Restored]:
    """Have the files of a snapshot be what is saved of a new session. What its sandbox is given.

    Raises QuotaExceeded, and NoSuchSnapshot for one that was removed meanwhile.
    """
    with transaction.atomic():
        source = Workspace.objects.select_for_update().filter(snapshot=snapshot.pk).first()
        if source is None:
            raise _no_such("from")
        if session.saves == Session.Saves.NEVER or session.tenant is None:
            return to_restore(source)
        quota.check_session(session.provider, source.files, source.bytes, source.names)
        mine = Workspace.objects.create(
            tenant=session.tenant, session=session, bytes=source.bytes, saved_at=source.saved_at
        )
        _copied(source, mine)
    return to_restore(mine)


def _copied(source: Workspace, target: Workspace) -> int:
    """How many rows there are now, which are counted for the tenant: first, because copying those
    that there may not be costs as much.
    """
    quota.reserve(target.tenant_id, files=source.files, names=source.names)
    place = Workspace._meta.pk.get_db_prep_value
    with connection.cursor() as cursor:
        cursor.execute(_COPY, [place(target.pk, connection), place(source.pk, connection)])
    Workspace.objects.filter(pk=target.pk).update(files=source.files, names=source.names)
    return source.files


def snapshot_of(tenant: Tenant, snapshot_id: UUID, field: str | None = None) -> Snapshot:
    """Raises NoSuchSnapshot for one that is not there, and for somebody else's."""
    found = snapshots_of(tenant).filter(pk=snapshot_id).first()
    if found is None:
        raise _no_such(field)
    return found


def list_snapshots(tenant: Tenant, wanted: SnapshotFilter) -> Page:
    """A page of the tenant's snapshots, newest first."""
    return Page(*newest_first(snapshots_of(tenant), wanted.cursor, wanted.limit))


def remove(snapshot: Snapshot, by: str) -> bool:
    """Remove it, and the bytes that nothing else names. Whether this call did.

    Raises Conflict where its tenant is under a legal hold.
    """
    if held_of(snapshot.tenant_slug).everything:
        raise Conflict("The tenant is under a legal hold: its snapshots are kept.")
    with transaction.atomic():
        workspace = Workspace.objects.select_for_update().filter(snapshot=snapshot.pk).first()
        if workspace is None:
            return False
        # Entered below, with who did it.
        before = look_at(Snapshot, snapshot.pk)
        mine = Snapshot.objects.filter(pk=snapshot.pk)
        mine._raw_delete(mine.db)
        files, named = drop(workspace)
        enter_row(snapshot, DELETED, before, {"by": by})
    logger.info("the snapshot %s was removed, with %s rows", snapshot.pk, files)
    # Storage may be slow. What is not removed now is collected later.
    tenant = workspace.tenant_id
    threads.submit(
        ("clean", snapshot.pk), snapshot.tenant_slug, lambda: blobs.remove_unnamed(tenant, named)
    )
    return True


def _no_such(field: str | None) -> NoSuchSnapshot:
    named = f"{field}: " if field else ""
    return NoSuchSnapshot(f"{named}There is no such snapshot, or it is not yours.", field=field)
