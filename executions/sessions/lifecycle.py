"""Opening a session, by the rules that hold for every run, and more time for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from executions.kernel.declarations import refuse
from executions.kernel.text import storable
from executions.ledger.append import enter_row, look_at
from executions.runs import extensions, heartbeat
from executions.runs.admission import ensure_ready
from executions.runs.extensions import RunParts
from executions.runs.provider_calls import Step, lender, lent
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.runs.routing import (
    ProviderIncompatible,
    RouteWalk,
    Served,
    allowed_steps,
    ensure_provider_isolation,
    ensure_sandbox_isolation,
    ensure_supported,
    ensure_template,
    required_isolation_for,
    steps_for,
)
from executions.sessions.capacity import ensure_sleeping_bound, open_evicting, reserve_slot
from executions.sessions.control import change
from executions.sessions.due import ends
from executions.sessions.ending import fail
from executions.sessions.models import Session
from executions.sessions.requests import SessionChanges, SessionRequest, ensure_not_ended
from executions.sessions.session_sandbox import SHARING, lender_of, taken_over
from executions.sessions.storage.carry_over import inherit, kept_session
from executions.sessions.storage.models import Workspace
from executions.sessions.storage.restore import Restored
from executions.sessions.storage.snapshots import beginning_with, snapshot_of
from executions.sessions.storage.wake import restore_files
from executions.tenants.models import Tenant
from providers.base import KEPT
from providers.errors import SandboxError
from providers.manager import Lease, manager
from providers.sandbox import DEFAULT_CONTEXT, KeptSandbox
from providers.services.route_order import planned

logger = logging.getLogger(__name__)

NO_NETWORK = "none"


async def opening(
    request: SessionRequest,
    caller: Caller,
    *,
    may_choose: bool = False,
    beside: Callable[[Session], None] = lambda session: None,
) -> Session:
    """An open session. Its provider is chosen now, and never again.

    With `may_choose` it need not be on the tenant's route (`runs.routing`). `beside` writes
    what belongs to its row, in the transaction that inserts it.
    Raises InvalidConfiguration for a language or provider that the tenant's route does not lead
    to, BeyondKey for what the caller's key is not for, BlockedByPolicy for what the tenant's policy
    does not allow, Conflict for a name that is taken,
    RateLimited where there is no room, and what the provider does; the session is then closed.
    """
    slug = caller.tenant.slug
    steps: Sequence[Step] = _steps(request, slug, may_choose)
    ensure_template(caller, request.template)
    steps = allowed_steps(caller, request.language, steps)
    parts = extensions.begin_session(slug)
    parts.check_language(request.language)
    steps = parts.select(steps)
    ensure_supported(request.language, steps)
    former = kept_session(caller.tenant, request.source) if request.source else None
    snapshot = None
    if request.source and former is None:
        snapshot = snapshot_of(caller.tenant, request.source, "from")
    ensure_ready(slug)
    if request.offline:
        steps = await _without_network(steps)
    session = await _reserve(request, caller, beside)
    try:
        if snapshot:
            members = await beginning_with(session, snapshot)
        else:
            members = inherit(session, former)
        await _place(session, caller.tenant, request, steps, members, parts)
    except BaseException as error:
        problem = error.message if isinstance(error, SandboxError) else "the service failed"
        fail(session, f"it could not be opened: {storable(problem)}")
        raise
    ends.expect([session])
    return session


async def is_without_network(session: Session) -> bool:
    """Whether its provider promises this, as it did when the session was opened."""
    with ExitStack() as held:
        lease = await lent(Step(lender_of(session)), held)
        return lease.provider.network == NO_NETWORK


def _steps(request: SessionRequest, slug: str, may_choose: bool) -> list[Step]:
    if may_choose or not request.provider:
        return steps_for(request.language, slug, chosen=request.provider)
    on_route = planned(slug, request.language) or [manager.in_force()]
    if request.provider not in on_route:
        refuse("provider", "Must be a configuration on the tenant's route.")
    return [Step(lender(request.provider), request.provider)]


async def _without_network(steps: Sequence[Step]) -> list[Step]:
    """Those whose provider promises it. Asked before another session makes room for nothing."""
    found = []
    for step in steps:
        with ExitStack() as held:
            lease = await lent(step, held)
            if lease.provider.network == NO_NETWORK:
                found.append(step)
    if not found:
        refuse("offline", "No provider of the route guarantees a sandbox without network.")
    return found


async def _reserve(
    request: SessionRequest, caller: Caller, beside: Callable[[Session], None]
) -> Session:
    """The row, so that name and room are its own before anything is started."""
    key = caller.api_key
    session = Session(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        api_key=key,
        api_key_name=key.name if key else "",
        api_key_prefix=key.prefix if key else "",
        subject=request.subject,
        name=request.name,
        metadata=dict(request.metadata),
        language=request.language,
        template=request.template,
        env=dict(request.env),
        contexts=[{"id": DEFAULT_CONTEXT, "language": request.language, "cwd": ""}],
        idle_seconds=request.idle_seconds,
        max_seconds=request.max_seconds,
        saves=request.saves,
        conversation=request.conversation,
        process_id=heartbeat.current_process_id(),
    )

    def insert() -> None:
        ensure_sleeping_bound(caller.tenant)
        with transaction.atomic():
            session.save(force_insert=True)
            beside(session)

    try:
        await reserve_slot(caller.tenant, insert)
    except IntegrityError as error:
        name = "name" if request.name else "conversation"
        if not getattr(request, name):
            raise
        raise Conflict(f"{name}: An open session already has this {name}.", field=name) from error
    return session


async def _place(
    session: Session,
    tenant: Tenant,
    request: SessionRequest,
    steps: Sequence[Step],
    members: Sequence[Restored],
    parts: RunParts,
) -> None:
    floor = required_isolation_for(tenant, session.api_key, request.language)

    async def place(lease: Lease, held: ExitStack, is_last: bool) -> Served[None]:
        _require_kept(lease)
        if request.offline and lease.provider.network != NO_NETWORK:
            raise ProviderIncompatible(
                f"{lease.provider_id} does not guarantee sandboxes without network."
            )
        ensure_provider_isolation(lease, floor)
        parts.check_provider(lease)
        began = perf_counter()
        sandbox = await open_evicting(lease, session, is_last=is_last)
        start_ms = round((perf_counter() - began) * 1000, 3)
        try:
            isolation, _ = ensure_sandbox_isolation(lease, sandbox, floor)
            parts.check_sandbox(lease, isolation)
            mark = ""
            if members:
                mark = await restore_files(session, lease, sandbox, members)
            _put(session, lease, sandbox, isolation, mark, request.source)
            await taken_over(lease, session, sandbox)
        except BaseException:
            sandbox.submit_close()
            raise
        return Served(None, start_ms)

    probe = ExecutionRequest("pass", request.language)
    await RouteWalk().take(steps, probe, floor, place, has_code=False)


def _require_kept(lease: Lease) -> None:
    if KEPT not in lease.provider.capabilities:
        raise ProviderIncompatible(f"{lease.provider_id} does not support sessions.")


def _put(
    session: Session,
    lease: Lease,
    sandbox: KeptSandbox,
    isolation: str,
    mark: str,
    source: UUID | None,
) -> None:
    """Write down where it is. Raises SessionClosed where it was closed meanwhile."""
    values = {
        "provider": lease.provider_id,
        "config_version": lease.config_version,
        "ref": sandbox.ref,
        "runtime": storable(str(sandbox.metadata.get("runtime", "")))[:64],
        "isolation": isolation,
        "sharing": SHARING,
        "used_at": Now(),
        "process": None,
    }
    with transaction.atomic():
        before = look_at(Session, session.pk)
        won = Session.objects.filter(pk=session.pk, closed_at=None).update(**values)
        session.refresh_from_db()
        if won:
            # From this mark on others change what was put there.
            Workspace.objects.filter(session=session.pk).update(mark=mark, former=None)
            enter_row(session, "opened", before, {"from": str(source)} if source else None)
    ensure_not_ended(session)


def extend(session: Session, seconds: int, by: str) -> Session:
    """Have it live for so long from now at least, used or not; never shorter than it would.

    Raises InvalidConfiguration where it would then be older than any may be, and Conflict where it
    has ended.
    """
    if seconds <= 0:
        refuse("seconds", "Must be more than 0.")
    age = math.ceil((timezone.now() - session.created_at).total_seconds())
    longest = settings.SESSION_MAX_SECONDS
    if age + seconds > longest:
        refuse("seconds", f"Its maximum age is {longest} s, and it is {age} s old.")
    changes = SessionChanges(
        idle_seconds=max(session.idle_seconds, seconds),
        max_seconds=max(session.max_seconds, age + seconds),
    )
    return change(session, changes, by)
