"""Waking a session that sleeps: its files, and the state of its contexts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from executions.kernel.coroutines import Coroutine, wait_for
from executions.kernel.text import storable
from executions.ledger.append import enter_row, look_at
from executions.runs import heartbeat
from executions.runs.active_runs import ensure_not_ending
from executions.runs.admission import ensure_ready
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, borrow_lease, call_provider
from executions.runs.requests import Conflict
from executions.runs.routing import (
    ensure_provider_isolation,
    ensure_sandbox_isolation,
    required_isolation_for,
)
from executions.sessions import cell_order
from executions.sessions.capacity import open_evicting, reserve_slot
from executions.sessions.maintenance import ends
from executions.sessions.models import Session, Workspace
from executions.sessions.requests import SavedFilesShape, SessionClosed, ensure_not_ended, tenant_of
from executions.sessions.session_sandbox import (
    LEASE_SECONDS,
    extend_lease,
    parts_of,
    start_session,
    waker_of,
)
from executions.sessions.storage.archives import Restored, archive_of, to_restore
from executions.sessions.storage.file_saves import mark_of
from providers.errors import InvalidConfiguration, SandboxError
from providers.manager import Lease
from providers.sandbox import DEFAULT_CONTEXT, KeptSandbox
from providers.waiting import submit, within

logger = logging.getLogger(__name__)

# How long files may take to be back; how long it is waited for who wakes a session; and how old an
# attempt must be to be a dead process's.
RESTORE_SECONDS = 600.0
CALL_SECONDS = 60.0
PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.1
DEAD_AFTER = timedelta(seconds=RESTORE_SECONDS + 300)

# What this process wakes no longer, and could not write down: sessions, and since when.
_left: set[tuple[UUID, datetime]] = set()


async def ensure_awake(session: Session, turn: int | None = None) -> None:
    """Have the session's sandbox be there, and `session` say where.

    `turn` is of the execution that wants it: the first after a wake says that files were restored.
    Raises Conflict where it has ended, RateLimited where there is no room, IsolationUnmet, and
    what the provider or the storage does; it is then still asleep.
    """
    session.refresh_from_db()
    ensure_not_ended(session)
    if session.state != Session.State.ASLEEP:
        return
    until = time.monotonic() + PATIENCE_SECONDS
    with cell_order.poll_pause(session.pk) as pause:
        while True:
            # Before the look: what happens after it rings.
            with cell_order.waiter(session.pk) as bell:
                session.refresh_from_db()
                ensure_not_ended(session)
                if session.state != Session.State.ASLEEP:
                    return
                if (claimed_at := (await _claim(session))) is not None:
                    break
                if time.monotonic() > until:
                    raise Conflict("The session is being woken. Try again.", retry_after=5)
                await wait_for(within(pause(LOOK_SECONDS), bell))
            ensure_not_ending()
        try:
            await _wake(session, claimed_at, turn)
        except BaseException as error:
            _give_back(session.pk, claimed_at)
            said = error.message if isinstance(error, SandboxError) else "the service failed"
            logger.warning("session %s is still asleep: %s", session.pk, said)
            raise


async def _claim(session: Session) -> datetime | None:
    """When this call began to wake it; None where another does, or it is awake by now."""
    tenant = tenant_of(session)
    ensure_ready(tenant.slug)
    now = timezone.now()
    free = Session.objects.filter(
        Q(waking_since=None) | Q(waking_since__lt=now - DEAD_AFTER),
        pk=session.pk,
        state=Session.State.ASLEEP,
    )
    if not free.exists():
        return None
    mine = {"waking_since": now, "process": heartbeat.current_process_id()}
    try:
        won = await reserve_slot(tenant, lambda: free.update(**mine))
    except DatabaseFailure:
        # A commit that was not answered may have been carried out.
        _give_back(session.pk, now)
        raise
    return now if won else None


def _give_back(session_id: UUID, claimed_at: datetime) -> None:
    """Let others wake it; where the database is away, once it is back (`release_stale_claims`)."""
    _left.add((session_id, claimed_at))
    try:
        _give_back_one(session_id, claimed_at)
    except DatabaseFailure as problem:
        logger.warning("session %s cannot be woken by others yet: %s", session_id, problem)


def release_stale_claims() -> None:
    """Give back what could not be, while the database was away. Raises what the database does.

    Nobody else does while this process lives, and they would wait for it until DEAD_AFTER.
    """
    for session_id, claimed_at in list(_left):
        _give_back_one(session_id, claimed_at)


def _give_back_one(session_id: UUID, claimed_at: datetime) -> None:
    mine = Session.objects.filter(pk=session_id, waking_since=claimed_at)
    mine.update(waking_since=None, process=None)
    _left.discard((session_id, claimed_at))
    cell_order.notify(session_id)


async def _wake(session: Session, claimed_at: datetime, turn: int | None) -> None:
    tenant = tenant_of(session)
    # A save of its former sandbox that is still under way must not change what is restored.
    Workspace.objects.filter(session=session.pk).update(version=F("version") + 1)
    # One that was ended before this began is not made again.
    session.refresh_from_db(fields=["contexts", "network"])
    workspace = Workspace.objects.filter(session=session.pk).first()
    members = to_restore(workspace) if workspace is not None else []
    with ExitStack() as held:
        lease = await borrow_lease(Step(waker_of(session)), held)
        floor = required_isolation_for(tenant, session.api_key, session.language)
        ensure_provider_isolation(lease, floor)
        sandbox = await open_evicting(lease, session)
        try:
            isolation, _ = ensure_sandbox_isolation(lease, sandbox, floor)
            mark = await restore_files(session, lease, sandbox, members)
            await start_session(session, lease, sandbox, parts_of(session))
            _put(session, lease, sandbox, isolation, mark, claimed_at, turn)
            await extend_lease(lease, session, sandbox)
        except BaseException:
            sandbox.submit_close()
            raise
    ends.expect([session])
    logger.info("session %s is awake, with %s of its files", session.pk, len(members))
    cell_order.notify(session.pk)


async def restore_files(
    session: Session, lease: Lease, sandbox: KeptSandbox, members: Sequence[Restored]
) -> str:
    """Its files and contexts are there again. From what mark on others change them."""

    def call(do: Any, check: Any, seconds: float = CALL_SECONDS) -> Coroutine[Any]:
        return call_provider(
            lease.provider_id,
            lambda: submit(do, may_refuse=True),
            check,
            seconds,
            owner=session.tenant_slug,
            may_refuse=True,
        )

    if members:
        await call(lambda: sandbox.renew(LEASE_SECONDS), lambda answer: answer)
        await call(
            lambda: sandbox.files.write_archive(archive_of(members)),
            lambda answer: answer,
            RESTORE_SECONDS,
        )
    # Nobody's code has run in it yet: what stands there now is what is saved.
    mark: str = await call(sandbox.files.changes, mark_of)
    for context in session.contexts:
        if context["id"] != DEFAULT_CONTEXT:
            made = partial(sandbox.contexts.create, context["language"], context_id=context["id"])
            try:
                await call(partial(made, cwd=context["cwd"]), lambda answer: answer)
            except InvalidConfiguration as error:
                # Its folder may be none any more: that is no reason to keep all else from waking.
                said = error.message
                logger.warning(
                    "a context of session %s begins in the workspace: %s", session.pk, said
                )
                await call(made, lambda answer: answer)
    return mark


def _put(
    session: Session,
    lease: Lease,
    sandbox: KeptSandbox,
    isolation: str,
    mark: str,
    claimed_at: datetime,
    turn: int | None,
) -> None:
    """Write down that it is awake. Raises Conflict where it was closed meanwhile."""
    with transaction.atomic():
        before = look_at(Session, session.pk)
        mine = Session.objects.filter(
            pk=session.pk, state=Session.State.ASLEEP, waking_since=claimed_at
        )
        won = mine.update(
            state=Session.State.OPEN,
            ref=sandbox.ref,
            config_version=lease.config_version,
            runtime=storable(str(sandbox.metadata.get("runtime", "")))[:64],
            isolation=isolation,
            used_at=Now(),
            woken_at=Now(),
            waking_since=None,
            process=None,
            unsaved_since=None,
            wakes=F("wakes") + 1,
            touched=F("touched") + 1,
            woken_turn=turn if turn is not None else F("turns") + 1,
        )
        session.refresh_from_db()
        if won:
            _begin_anew(session, mark, turn)
            enter_row(session, "awake", before)
    if not won:
        ensure_not_ended(session)
        raise SessionClosed("The session was woken by another request meanwhile.")


def _begin_anew(session: Session, mark: str, turn: int | None) -> None:
    """What stands in the sandbox is what is saved; and `turn` runs there, wherever it was to."""
    workspace = Workspace.objects.select_for_update().filter(session=session.pk).first()
    if workspace is None:
        return
    lost = workspace.lost_turns or []
    if turn is not None:
        parts = [part for a, b in lost for part in ([a, min(b, turn - 1)], [max(a, turn + 1), b])]
        lost = [[first, last] for first, last in parts if first <= last]
    Workspace.objects.filter(pk=workspace.pk).update(
        version=F("version") + 1, mark=mark, missed=[], lost_turns=lost
    )


# The key of a record's metadata under which it says that files were restored for it.
RESTORED = "restored"


def files_of(session: Session) -> SavedFilesShape:
    """What is saved of a session. `unsaved_since` is null where nothing else is in its sandbox."""
    workspace: Workspace | None = getattr(session, "workspace", None)
    if workspace is None:
        count = size = 0
        saved_at, problem = None, ""
    else:
        count, size = workspace.files, workspace.bytes
        saved_at, problem = workspace.saved_at, workspace.problem
    has_more = session.saves != Session.Saves.NEVER and session.state == Session.State.OPEN
    unsaved = session.unsaved_since if has_more else None
    return {
        "count": count,
        "bytes": size,
        "saved_at": saved_at.isoformat() if saved_at else None,
        "unsaved_since": unsaved.isoformat() if unsaved else None,
        "problem": problem or None,
    }


def are_files_saved(execution: Execution) -> bool | None:
    """Whether all that there was when it ended is in storage; None outside sessions."""
    if execution.session_id is None:
        return None
    if execution.files_saved is not None:
        return execution.files_saved
    if execution.finished_at is None or execution.turn is None:
        return False
    looks = Workspace.objects.filter(session=execution.session_id)
    found = looks.values_list("seen_turns", "open_turns", "lost_turns").first()
    if found is None:
        return False
    turn, (seen, still_open, lost) = execution.turn, found
    is_lost = any(first <= turn <= last for first, last in lost or ())
    return turn <= seen and turn not in still_open and not is_lost


def is_restored(execution: Execution) -> bool:
    """Whether it is the first since its session was woken: files are there, variables are not."""
    return execution.meta.get(RESTORED) is True


def is_first_after_wake(session: Session, execution: Execution) -> bool:
    """Whether nothing before it has said that files were restored. A run that was to say so may
    have ended without a result: then the next one does.
    """
    if session.woken_turn is None or execution.turn is None:
        return False
    # As it is now: the one before may have said so meanwhile.
    woken = Session.objects.filter(pk=session.pk, woken_turn__lte=execution.turn)
    return woken.exists()


def mark_wake_reported(session: Session) -> None:
    """Note that a caller was told of this wake: the next one need not hear of it."""
    told = Session.objects.filter(pk=session.pk, woken_turn=session.woken_turn)
    told.update(woken_turn=None)
