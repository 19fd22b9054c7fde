"""The files of a session as they are now, kept apart, and sessions that begin with them.

Rows are copied by the database; the bytes are there once, however many name them. Variables are no
part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet

from executions.kernel import background, database
from executions.kernel.coroutines import wait_for
from executions.kernel.declarations import Body, Query, declared, newest_first
from executions.ledger.append import enter_row, look_at
from executions.ledger.bindings import DELETED
from executions.ledger.erasures import hold_scope
from executions.runs import active_runs
from executions.runs.requests import Caller, Conflict
from executions.runs.results import DEFAULT_LIMIT, Cursor, Limit
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session, Snapshot, Workspace
from executions.sessions.requests import NOT_FOUND, SessionName, ensure_not_ended
from executions.sessions.storage import blobs, drafts, quota
from executions.sessions.storage.archives import Restored, to_restore
from executions.sessions.storage.changes import run_in_storage_thread
from executions.sessions.storage.file_saves import save
from executions.tenants.models import Tenant
from providers.errors import KeptSandboxLost, ProviderUnavailable, SandboxError
from providers.remote.deadline import DeadlinePassed
from providers.waiting import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_SECONDS = 600.0
# Of a tenant. Its files are bounded by themselves; a snapshot of none takes a row as well.
MOST_SNAPSHOTS = 1000

# Of copies that a change of the files overtook.
_TRIES = 3


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


async def take_snapshot(session: Session, wanted: SnapshotRequest, caller: Caller) -> Snapshot:
    """Take a snapshot of the session's files; one that is awake is saved thoroughly first.

    Raises Conflict where a file could not be saved, QuotaExceeded, and what `save` does; there is
    no snapshot then.
    """
    if session.saves == Session.Saves.NEVER:
        raise Conflict("No files of the session are saved: it was opened with saves=never.")
    # Before anything is saved for it.
    _refuse_one_more(caller.tenant)
    if session.state == Session.State.OPEN:
        await _save(session)
    workspace = Workspace.objects.filter(session=session.pk).first()
    return await _copy(workspace, session, lambda: _take(session, wanted, caller))


async def _save(session: Session) -> None:
    saved = background.submit_keyed(
        ("snapshot", session.pk), session.tenant_slug, lambda: save(session, thorough=True)
    )
    awaited = within(SAVE_SECONDS, saved)
    with active_runs.cancel_on_shutdown(awaited):
        await wait_for(awaited)
    error = None if awaited.cancelled() else awaited.exception()
    if awaited.cancelled() or isinstance(error, DeadlinePassed):
        raise ProviderUnavailable("The files were not saved in time. Try again.", retry_after=5)
    if isinstance(error, KeptSandboxLost):
        mark_lost(session, error.message)
        ensure_not_ended(session)
        raise Conflict(
            "The sandbox is gone. The session sleeps now, with the files that were saved before. "
            "Send the request again for a snapshot of these."
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
            "of the session names one. Send the request again when nothing writes to them."
        )


def _take(session: Session, wanted: SnapshotRequest, caller: Caller) -> Snapshot:
    """The rows are copied in short transactions. The last one has the snapshot be there, if the
    files are still those that were copied."""
    key = caller.api_key
    for _ in range(_TRIES):
        workspace = Workspace.objects.filter(session=session.pk).first()
        session.refresh_from_db()
        ensure_not_ended(session)
        if workspace is None:
            raise Conflict("No files of the session are saved yet. Try again.", retry_after=1)
        with drafts.draft(caller.tenant, workspace) as mine:
            drafts.copy(workspace, mine)
            with transaction.atomic():
                # Whoever changes what is saved writes this row first.
                found = Workspace.objects.select_for_update()
                same = found.filter(pk=workspace.pk, version=workspace.version, session=session.pk)
                if same.first() is None:
                    continue
                session.refresh_from_db()
                ensure_not_ended(session)
                # One after the other for each tenant, so that the number stays true until it is
                # committed. What only refers to the tenant does not wait.
                tenants = Tenant.objects.select_for_update(no_key=True)
                tenants.filter(pk=caller.tenant.pk).first()
                _refuse_one_more(caller.tenant)
                snapshot = Snapshot.objects.create(
                    tenant=caller.tenant,
                    tenant_slug=caller.tenant.slug,
                    api_key_name=key.name if key else "",
                    api_key_prefix=key.prefix if key else "",
                    name=wanted.name,
                    source=session.pk,
                    workspace=mine,
                    files=workspace.files,
                    bytes=workspace.bytes,
                )
                snapshot.refresh_from_db()
        logger.info("session %s: its files are the snapshot %s", session.pk, snapshot.pk)
        return snapshot
    raise Conflict("Another request changed the files meanwhile. Try again.", retry_after=1)


def _refuse_one_more(tenant: Tenant) -> None:
    if Snapshot.objects.filter(tenant=tenant).count() >= MOST_SNAPSHOTS:
        raise quota.QuotaExceeded(
            f"The tenant has {MOST_SNAPSHOTS} snapshots, which is the most. Delete some.",
            field="snapshots",
        )


async def copy_snapshot(session: Session, snapshot: Snapshot) -> list[Restored]:
    """Copy the files of a snapshot to a new session, and return what its sandbox is given.

    Raises QuotaExceeded, and NoSuchSnapshot for one that was removed meanwhile.
    """
    return await _copy(snapshot.workspace, session, lambda: _begin(session, snapshot))


def _begin(session: Session, snapshot: Snapshot) -> list[Restored]:
    source = Workspace.objects.filter(snapshot=snapshot.pk).first()
    if source is None:
        raise _no_such("from")
    if session.saves == Session.Saves.NEVER or session.tenant is None:
        members = to_restore(source)
        if not Workspace.objects.filter(pk=source.pk, snapshot=snapshot.pk).exists():
            raise _no_such("from")
        return members
    quota.check_session(session.provider, source.files, source.bytes, source.names)
    with drafts.draft(session.tenant, source) as mine:
        drafts.copy(source, mine)
        with transaction.atomic():
            found = Workspace.objects.select_for_update()
            if found.filter(pk=source.pk, snapshot=snapshot.pk).first() is None:
                raise _no_such("from")
            Workspace.objects.filter(pk=mine.pk).update(session=session.pk)
    return to_restore(mine)


async def _copy(source: Workspace | None, session: Session, copy: Callable[[], T]) -> T:
    """What a copy returns. One of many rows takes its time: none of the threads that serve waits
    for it."""
    if source is not None and source.files > database.MOST_ROWS:
        return await run_in_storage_thread(session, copy)
    return copy()


def snapshot_of(tenant: Tenant, snapshot_id: UUID, field: str | None = None) -> Snapshot:
    """Raises NoSuchSnapshot for one that is not there, and for somebody else's."""
    found = snapshots_of(tenant).filter(pk=snapshot_id).first()
    if found is None:
        raise _no_such(field)
    return found


def list_snapshots(
    tenant: Tenant, wanted: SnapshotFilter, *, source: UUID | None = None, name: str = ""
) -> Page:
    """A page of the tenant's snapshots, newest first; of one session, or of one name."""
    found = snapshots_of(tenant)
    if source is not None:
        found = found.filter(source=source)
    if name:
        found = found.filter(name=name)
    return Page(*newest_first(found, wanted.cursor, wanted.limit))


def remove(snapshot: Snapshot, by: str) -> bool:
    """Remove it, and the bytes that nothing else names. Whether this call did.

    Raises Conflict where its tenant is under a legal hold.
    """
    if hold_scope(snapshot.tenant_slug).everything:
        raise Conflict("The tenant is under a legal hold: its snapshots are kept.")
    with transaction.atomic():
        workspace = Workspace.objects.select_for_update().filter(snapshot=snapshot.pk).first()
        if workspace is None:
            return False
        # Entered below, with who did it.
        before = look_at(Snapshot, snapshot.pk)
        mine = Snapshot.objects.filter(pk=snapshot.pk)
        mine._raw_delete(mine.db)
        # Before anything is entered in the ledger, which all wait for.
        drafts.detach(workspace)
        enter_row(snapshot, DELETED, before, {"by": by})
    logger.info("the snapshot %s was removed, with %s rows", snapshot.pk, workspace.files)
    # The rows may be many, and storage may be slow. What is not removed now is collected later.
    tenant, pk = workspace.tenant_id, workspace.pk

    def clean() -> None:
        blobs.remove_unnamed(tenant, drafts.discard(pk))

    def begin() -> None:
        background.submit_keyed(("clean", snapshot.pk), snapshot.tenant_slug, clean)

    # Before that another thread would find it as it was.
    transaction.on_commit(begin)
    return True


def _no_such(field: str | None) -> NoSuchSnapshot:
    named = f"{field}: " if field else ""
    return NoSuchSnapshot(f"{named}Snapshot not found.", field=field)


def snapshots_of(tenant: Tenant) -> QuerySet[Snapshot]:
    return Snapshot.objects.filter(tenant=tenant, workspace__isnull=False)
