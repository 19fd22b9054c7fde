"""How many sessions may have a sandbox, and how one lets its sandbox go: with all files saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TypeVar
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q, QuerySet

from executions.kernel import background
from executions.kernel.coroutines import run_sync, wait_for
from executions.ledger.append import enter_row, look_at
from executions.runs import extensions
from executions.runs.admission import current_usage
from executions.runs.models import Execution
from executions.sessions import cell_order
from executions.sessions.ending import (
    OVER_AGE,
    OVER_IDLE,
    SLEEPLESS,
    busy,
    close_if_idle,
    detach,
    end_leftovers,
    in_background,
    mark_lost,
    release,
)
from executions.sessions.models import Session, StoredTotal, Workspace
from executions.sessions.session_sandbox import open_sandbox
from executions.sessions.storage.file_saves import Saved, save
from executions.tenants.models import Tenant
from executions.tenants.quotas import (
    OF_ALL_SESSIONS,
    Quota,
    Use,
    limit_of,
    tenant_lock,
    tomorrow,
    used_requests,
)
from providers.errors import KeptFull, KeptSandboxLost, RateLimited, SandboxError
from providers.manager import Lease
from providers.remote.deadline import DeadlinePassed
from providers.sandbox import KeptSandbox
from providers.waiting import within

logger = logging.getLogger(__name__)

T = TypeVar("T")


# What is to sleep by its age; others are closed.
TIRED = (
    Q(state=Session.State.OPEN, ref__isnull=False, tenant__isnull=False)
    & ~Q(saves=Session.Saves.NEVER)
    & OVER_IDLE
    & ~OVER_AGE
)


def suspend(session_id: UUID, because: str, *, only_if: Q | None = None) -> bool:
    """Save all of a session's files and end its sandbox, unless something runs in it or begins to.

    Whether this call did. Waits, in the calling thread. Raises what `save` does; the sandbox is
    then still there.
    """
    condition = only_if or Q()
    found = Session.objects.filter(condition, pk=session_id, state=Session.State.OPEN)
    session = found.defer("env").first()
    if session is None or busy([session_id]):
        return False
    try:
        saved = save(session, thorough=True)
    except KeptSandboxLost as error:
        mark_lost(session, error.message)
        return False
    if not saved.is_complete:
        return False
    left = _mark_asleep(session, saved, because, condition)
    if left is None:
        return False
    logger.info("session %s is asleep: %s", session_id, because)
    run_sync(detach(session))
    # It may have been woken meanwhile, and more be running in its next sandbox.
    end_leftovers(session, only=left, because="Its session went to sleep.")
    cell_order.notify(session_id)
    return True


async def suspend_in_thread(session: Session, because: str) -> bool:
    """Suspend a session in a background thread, as `suspend` does, and wait for it."""
    pk = session.pk
    slept = background.submit_keyed(
        ("sleep", pk), session.tenant_slug, lambda: suspend(pk, because), first=True
    )
    await wait_for(slept)
    return slept.result()


def _mark_asleep(session: Session, saved: Saved, because: str, condition: Q) -> list[UUID] | None:
    """What ran in its sandbox in the background; None where it stays awake."""
    with transaction.atomic():
        # Whoever begins something in it writes its row first.
        rows = Session.objects.select_for_update().defer("env", "ref")
        mine = rows.filter(
            condition,
            pk=session.pk,
            state=Session.State.OPEN,
            touched=saved.touched,
            wakes=saved.wakes,
        )
        if mine.first() is None or busy([session.pk]):
            return None
        left = in_background(session)
        before = look_at(Session, session.pk)
        Session.objects.filter(pk=session.pk).update(
            state=Session.State.ASLEEP, ref=None, unsaved_since=None
        )
        _note_lost_turns(session)
        enter_row(Session.objects.get(pk=session.pk), "asleep", before, {"because": because})
    return left


def _note_lost_turns(session: Session) -> None:
    """What still runs in the background ends with the sandbox: nobody can say that the last it
    wrote is saved."""
    left = Execution.objects.filter(session=session.pk, finished_at=None, turn__isnull=False)
    if turns := list(left.values_list("turn", flat=True)):
        workspace = Workspace.objects.get(session=session.pk)
        lost = [*(workspace.lost_turns or []), *([turn, turn] for turn in turns)]
        Workspace.objects.filter(pk=workspace.pk).update(lost_turns=lost)


_RETRY_SECONDS = 5.0
# Who wants room waits no longer for others to be saved: that may take half an hour.
ROOM_SECONDS = 30.0
_BECAUSE = "another session was opened"
# Asleep, for each that a tenant may have awake: they have no sandbox, but rows and files.
ASLEEP_FOR_EACH = 50
# Who sleeps has no sandbox, unless it is being woken.
_AWAKE = Session.objects.filter(
    Q(state=Session.State.OPEN) | Q(state=Session.State.ASLEEP, waking_since__isnull=False)
)


async def reserve_slot(tenant: Tenant, reserve: Callable[[], T]) -> T:
    """What `reserve` returns, in a transaction in which there is room for one more of this tenant.

    Beyond its own bound it is the tenant's session that was unused for longest that goes to sleep,
    or is closed where nothing of it is saved. Beyond the bound of all it is that of the tenant who
    has the most: nobody loses one to somebody who has more. Raises RateLimited where each of them
    is busy, is being opened, or cannot be saved in time.
    """
    until = time.monotonic() + ROOM_SECONDS
    tried: set[UUID] = set()
    while True:
        # Over all tenants: what is counted is all that there are.
        with tenant_lock("sessions of all"):
            full = _full(tenant)
            if full is None:
                return reserve()
        slug, problem, quota = full
        session = next(iter(_unused_sessions(slug, tried)), None)
        if session is None or time.monotonic() > until:
            raise RateLimited(
                f"{problem}, and no more can be opened while these are in use. Close one.",
                field=quota,
                retry_after=_RETRY_SECONDS,
            )
        tried.add(session.pk)
        await _free_slot(session, until)


def awake_of(tenant: Tenant) -> int:
    """How many sessions it has that count."""
    return _AWAKE.filter(tenant_slug=tenant.slug).count()


def ensure_sleeping_bound(tenant: Tenant) -> None:
    """Raises RateLimited. Only who opens another is asked: those that are awake can fall asleep."""
    most = ASLEEP_FOR_EACH * limit_of(tenant, Quota.SESSIONS)
    asleep = Session.objects.filter(
        tenant_slug=tenant.slug, state=Session.State.ASLEEP, closed_at=None
    )
    if most and (number := asleep.count()) >= most:
        raise RateLimited(
            f"The tenant has {number} sleeping sessions, and the limit is {most}. Close some.",
            field=Quota.SESSIONS.value,
        )


def _full(tenant: Tenant) -> tuple[str, str, str] | None:
    """Whose sessions are one too many, why, and by which quota; None where there is room."""
    own = awake_of(tenant)
    if own >= (most := limit_of(tenant, Quota.SESSIONS)):
        said = f"The tenant has {own} sessions, and the limit is {most}"
        return tenant.slug, said, Quota.SESSIONS.value
    if (total := _AWAKE.count()) >= settings.SESSIONS_MAX_TOTAL:
        return _who_has_most(tenant.slug), f"There are {total} sessions", OF_ALL_SESSIONS
    return None


async def free_slot_at(provider: str, tenant_slug: str) -> bool:
    """Have one of the sessions go at a provider that keeps no more sandboxes, by the rule for all
    of them. False where each of those it may be is busy.
    """
    there = _AWAKE.filter(provider=provider)
    session = next(iter(_unused_sessions(_who_has_most(tenant_slug, there), (), there)), None)
    if session is None:
        return False
    await _free_slot(session, time.monotonic() + ROOM_SECONDS)
    return True


async def open_evicting(lease: Lease, session: Session, *, is_last: bool = True) -> KeptSandbox:
    """A new sandbox for it. At a full provider another session makes room, unless there is another
    provider left to try."""
    try:
        return await open_sandbox(lease, session)
    except KeptFull:
        if not is_last or not (await free_slot_at(lease.provider_id, session.tenant_slug)):
            raise
    return await open_sandbox(lease, session)


def _who_has_most(tenant_slug: str, awake: QuerySet[Session] = _AWAKE) -> str:
    counted = awake.values("tenant_slug").annotate(number=Count("pk")).order_by("-number")
    numbers = {row["tenant_slug"]: row["number"] for row in counted}
    most = max(numbers.values(), default=0)
    # The one who asks would have one more.
    if numbers.get(tenant_slug, 0) + 1 >= most and tenant_slug in numbers:
        return tenant_slug
    return next((slug for slug, number in numbers.items() if number == most), tenant_slug)


def _unused_sessions(
    tenant_slug: str, tried: Iterable[UUID], awake: QuerySet[Session] = _AWAKE
) -> list[Session]:
    """Its sessions in which nothing runs, the one unused for longest first. One that is being
    opened is in use by who opens it."""
    own = awake.filter(tenant_slug=tenant_slug, state=Session.State.OPEN, ref__isnull=False)
    found = list(own.exclude(pk__in=tried).defer("env").order_by("used_at", "pk"))
    taken = busy(session.pk for session in found)
    return [session for session in found if session.pk not in taken]


async def _free_slot(session: Session, until: float) -> None:
    pk = session.pk
    if Session.objects.filter(SLEEPLESS, pk=pk).exists():
        if close_if_idle(pk, _BECAUSE):
            await release(session)
            end_leftovers(session)
        return
    slept = background.submit_keyed(
        ("sleep", pk), session.tenant_slug, lambda: suspend(pk, _BECAUSE), first=True
    )
    awaited = within(max(until - time.monotonic(), 0), slept)
    await wait_for(awaited)
    try:
        awaited.result()
    except DeadlinePassed:
        logger.warning("session %s is still being saved, and is closed after that", pk)
    except SandboxError as error:
        logger.warning("session %s cannot sleep: %s", pk, error.message)


def usage_of(tenant: Tenant) -> dict[Quota, Use]:
    """All of its quotas, in their order."""
    held, day = current_usage(tenant), tomorrow()
    counted: dict[Quota, tuple[float, datetime | None]] = {
        Quota.RUNNING: (held.running, None),
        Quota.QUEUED: (held.queued, None),
        Quota.REQUESTS: _requests(tenant),
        Quota.EXECUTIONS: (held.executions, day),
        Quota.SECONDS: (round(held.seconds + held.reserved, 3), day),
        Quota.STORED_BYTES: (held.stored, day),
        Quota.SESSIONS: (awake_of(tenant), None),
        Quota.SCHEDULES: (0, None),
    }
    found = {
        quota: Use(limit_of(tenant, quota), number, resets_at)
        for quota, (number, resets_at) in counted.items()
    }
    total = StoredTotal.objects.filter(tenant=tenant.pk).first() or StoredTotal()
    found[Quota.STORAGE_BYTES] = Use(limit_of(tenant, Quota.STORAGE_BYTES), total.bytes)
    found[Quota.STORAGE_FILES] = Use(settings.TENANT_STORAGE_FILES, total.files)
    found |= dict.fromkeys((Quota.BUDGET_OF_DAY, Quota.BUDGET_OF_MONTH), Use(None, 0))
    for each in extensions.installed():
        found |= each.usage(tenant)
    return found


def _requests(tenant: Tenant) -> tuple[int, datetime | None]:
    rate = used_requests(tenant)
    if rate is None:
        return 0, None
    return rate.used, datetime.fromtimestamp(rate.resets_at, UTC)
