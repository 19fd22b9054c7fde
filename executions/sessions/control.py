"""Opening a session, by the rules that hold for every run, and changes of an open one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, TypeVar
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from executions.kernel.declarations import refuse
from executions.kernel.text import storable
from executions.ledger.append import enter_row, look_at
from executions.runs import event_log, extensions, heartbeat
from executions.runs.admission import ensure_ready
from executions.runs.extensions import RunParts, SessionTemplate
from executions.runs.network import NetworkRequest
from executions.runs.provider_calls import Step, borrow_lease, lender
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.runs.routing import (
    ProviderIncompatible,
    RouteWalk,
    Served,
    allowed_steps,
    ensure_image,
    ensure_provider_isolation,
    ensure_sandbox_isolation,
    ensure_supported,
    ensure_template,
    required_isolation_for,
    steps_for,
)
from executions.sessions.capacity import ensure_sleeping_bound, open_evicting, reserve_slot
from executions.sessions.cell_order import use_session
from executions.sessions.ending import end_leftovers, fail, in_background, mark_lost
from executions.sessions.maintenance import ends, save_changes
from executions.sessions.models import Session, Snapshot, Workspace
from executions.sessions.networks import NO_NETWORK, promises_no_network
from executions.sessions.requests import (
    ContextRequest,
    ContextShape,
    SessionAsleep,
    SessionChanges,
    SessionRequest,
    ensure_not_ended,
)
from executions.sessions.session_sandbox import (
    OPERATION_SECONDS,
    SHARING,
    call_sandbox,
    extend_lease,
    put_files,
    start_session,
)
from executions.sessions.storage.archives import Restored
from executions.sessions.storage.carry_over import ended_session_with_files, inherit
from executions.sessions.storage.snapshots import copy_snapshot, snapshot_of
from executions.sessions.storage.wake import ensure_awake, restore_files
from executions.tenants.models import Tenant
from providers.base import KEPT
from providers.errors import KeptSandboxLost, ProviderUnavailable, SandboxError
from providers.manager import Lease, manager
from providers.network import NetworkPolicy
from providers.runtime.guest.names import escape
from providers.sandbox import DEFAULT_CONTEXT, Context, KeptSandbox
from providers.services.route_order import planned

logger = logging.getLogger(__name__)

T = TypeVar("T")


# It sleeps, and nobody has begun to wake it with what it had before.
_SLEEPS = Q(state=Session.State.ASLEEP, waking_since=None)


async def with_sandbox(
    session: Session,
    call: Callable[[KeptSandbox], Any],
    check: Callable[[Any], T],
    seconds: float = OPERATION_SECONDS,
    *,
    is_use: bool = True,
    changes_files: bool = False,
    saves: bool = True,
) -> T:
    """What the session's sandbox answers to `call`; its idle time counts from now, if it `is_use`,
    and if it sleeps it is woken. What `changes_files` is saved, before or behind the answer;
    without `saves` the caller has it saved, once for several.

    Raises SandboxError; where the sandbox is gone, SessionLost, or SessionAsleep where something of
    it is saved. What has proven not to have begun in one that is gone is begun once more.
    """
    for is_last in (False, True):
        if session.state == Session.State.ASLEEP:
            if not is_use:
                raise SessionAsleep("The session is asleep: it has no sandbox.")
            await ensure_awake(session)
        if changes_files:
            use_session(session.pk)
        elif is_use:
            Session.objects.filter(pk=session.pk, closed_at=None).update(used_at=Now())
        try:
            found = await call_sandbox(session, call, check, seconds)
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            ensure_not_ended(session)
            if is_last or not is_use or not error.nothing_ran:
                raise SessionAsleep(
                    f"{error.message} The next use of the session restores the saved files. Send "
                    "the request again."
                ) from error
        else:
            break
    if changes_files:
        # It went to sleep meanwhile, and nobody can say whether this was saved with the rest.
        if not use_session(session.pk, session.wakes):
            raise SessionAsleep("The session went to sleep meanwhile. Send the request again.")
        if saves:
            await save_changes(session)
    return found


async def interrupt(session: Session, context: str = DEFAULT_CONTEXT) -> bool:
    """Stop what runs in a context, whose state stays. False when nothing ran."""
    _ensure_known(session, context, "context")
    return await with_sandbox(session, lambda kept: kept.interrupt(context), _boolean)


async def reset(session: Session, by: str) -> Session:
    """End its processes and contexts, and begin with an empty default one. Files stay."""
    running = in_background(session)
    # Before they are killed, which is not how they are to be recorded.
    ends = [event_log.take(pk) for pk in running]
    await with_sandbox(session, lambda kept: kept.reset(), lambda _: None)
    for end in ends:
        end()
    with transaction.atomic():
        row = Session.objects.filter(pk=session.pk, closed_at=None)
        default = {"id": DEFAULT_CONTEXT, "language": session.language, "cwd": ""}
        before = look_at(Session, session.pk)
        if row.update(contexts=[default], used_at=Now()):
            session.refresh_from_db()
            enter_row(session, "reset", before, {"by": by})
    end_leftovers(session, only=running, because="Its session was reset.")
    session.refresh_from_db()
    ensure_not_ended(session)
    return session


def change(
    session: Session, changes: SessionChanges, by: str, *, if_awake: bool = False
) -> Session:
    """Give it other ages or metadata. Raises Conflict where it has ended, and SessionAsleep where
    it sleeps and is to be changed only `if_awake`."""
    with transaction.atomic():
        row = Session.objects.filter(pk=session.pk, closed_at=None)
        if if_awake:
            row = row.exclude(state=Session.State.ASLEEP)
        before = look_at(Session, session.pk)
        won = row.update(**changes.given, used_at=Now())
        session.refresh_from_db()
        if won and changes.given:
            enter_row(session, "changed", before, {"by": by})
    ensure_not_ended(session)
    if not won:
        raise SessionAsleep("The session sleeps.")
    ends.expect([session])
    return session


async def create_context(session: Session, wanted: ContextRequest) -> ContextShape:
    """Start another interpreter in the session. Raises Conflict where its id is taken."""
    if any(each["id"] == wanted.id for each in session.contexts):
        raise Conflict("id: The session already has a context with this id.", field="id")
    made = await with_sandbox(
        session,
        lambda kept: kept.contexts.create(wanted.language, wanted.cwd, wanted.id),
        _context,
    )
    _write_contexts(
        session, lambda known: [*(each for each in known if each["id"] != made["id"]), made]
    )
    return made


async def end_context(session: Session, context_id: str) -> bool:
    """End one of its interpreters. False when it was not there. One that sleeps is not woken: its
    next sandbox does not get it.
    """
    if all(each["id"] != context_id for each in session.contexts):
        return False

    def without(known: list[ContextShape]) -> list[ContextShape]:
        return [each for each in known if each["id"] != context_id]

    if context_id == DEFAULT_CONTEXT or not _write_contexts(session, without, only_if=_SLEEPS):
        await with_sandbox(session, lambda kept: kept.contexts.destroy(context_id), _boolean)
        _write_contexts(session, without)
    return True


async def restart_context(session: Session, context_id: str) -> ContextShape | None:
    """Begin anew in a context, under its id. None when it is not there."""
    contexts: list[ContextShape] = session.contexts
    known = next((each for each in contexts if each["id"] == context_id), None)
    if known is None:
        return None
    await with_sandbox(session, lambda kept: kept.contexts.restart(context_id), lambda _: None)
    return {**known}


def _write_contexts(
    session: Session,
    anew: Callable[[list[ContextShape]], list[ContextShape]],
    *,
    only_if: Q | None = None,
) -> bool:
    """False where it is not as `only_if` says, and nothing was written."""
    with transaction.atomic():
        rows = Session.objects.select_for_update().defer("env", "ref")
        row = rows.filter(only_if or Q(), pk=session.pk).first()
        if row is None:
            return False
        row.contexts = anew(row.contexts)
        Session.objects.filter(pk=session.pk).update(contexts=row.contexts)
    session.contexts = row.contexts
    return True


def _ensure_known(session: Session, context: Any, field: str) -> None:
    if all(each["id"] != context for each in session.contexts):
        refuse(field, "The session has no context with this id.")


def _boolean(answer: Any) -> bool:
    return answer is True


def _context(answer: Any) -> ContextShape:
    if not isinstance(answer, Context) or not isinstance(answer.id, str) or not answer.id:
        raise ProviderUnavailable("The provider did not return a context.")
    return {
        "id": storable(answer.id)[:64],
        "language": storable(str(answer.language))[:32],
        "cwd": escape(str(answer.cwd))[:512],
    }


async def open_session(
    request: SessionRequest,
    caller: Caller,
    *,
    may_choose: bool = False,
    beside: Callable[[Session], None] = lambda session: None,
) -> Session:
    """Open a session. Its provider is chosen now, and never again.

    With `may_choose` it need not be on the tenant's route (`runs.routing`). `beside` writes what
    belongs to its row, in the transaction that inserts it. Raises InvalidConfiguration for a
    language or provider that the tenant's route does not lead to, BeyondKey for what the caller's
    key is not for, BlockedByPolicy for what the tenant's policy does not allow, Conflict for a name
    that is taken, RateLimited where there is no room, and what the provider does; the session is
    then closed.
    """
    slug = caller.tenant.slug
    wanted, source = _template_and_source(request)
    steps: Sequence[Step] = _steps(request, slug, may_choose)
    former = ended_session_with_files(caller.tenant, source) if source else None
    snapshot = None
    if source and former is None:
        snapshot = snapshot_of(caller.tenant, source, "from")
    template = None if wanted else _template_of(former, snapshot)
    ensure_template(caller, template.label if template else wanted)
    steps = allowed_steps(caller, request.language, steps)
    asked = NetworkRequest(mode="none") if request.offline else request.network
    network = extensions.session_network(slug, asked)
    if wanted:
        template = extensions.session_template(slug, wanted)
    parts = extensions.begin_session(slug, network, template.version if template else None)
    parts.check_language(request.language)
    steps = parts.select(steps)
    ensure_supported(request.language, steps)
    if wanted and template is None:
        ensure_image(wanted, steps, extensions.template_names(slug))
    ensure_ready(slug)
    if request.offline:
        steps = await _offline_steps(steps)
    label = template.label if template else wanted
    version = template.version if template else None
    session = await _reserve(request, caller, network, (label, version), beside)
    try:
        if snapshot:
            members = await copy_snapshot(session, snapshot)
        else:
            members = inherit(session, former)
        await _place(session, caller.tenant, request, steps, members, parts, source)
    except BaseException as error:
        problem = error.message if isinstance(error, SandboxError) else "the service failed"
        fail(session, f"it could not be opened: {storable(problem)}")
        raise
    ends.expect([session])
    return session


_SNAPSHOT = "snapshot:"


def _template_and_source(request: SessionRequest) -> tuple[str, UUID | None]:
    """Read the template `snapshot:ID` as the source of files that it is.

    Raises InvalidConfiguration.
    """
    if not request.template.startswith(_SNAPSHOT):
        return request.template, request.source
    if request.source is not None:
        refuse("template", "Name a snapshot either here or in `from`.")
    try:
        return "", UUID(request.template.removeprefix(_SNAPSHOT))
    except ValueError:
        refuse("template", "What follows snapshot: is the id of a snapshot.")


def _template_of(former: Session | None, snapshot: Snapshot | None) -> SessionTemplate | None:
    """The template of the session whose files a new one begins with."""
    if snapshot is not None:
        former = Session.objects.filter(pk=snapshot.source).first()
    if former is None or former.template_version is None:
        return None
    return SessionTemplate(former.template, former.template_version)


async def is_without_network(session: Session) -> bool:
    """Whether it has none of its own, and its provider promises no other, as it did when the
    session was opened."""
    return session.network is None and await promises_no_network(session)


def _steps(request: SessionRequest, slug: str, may_choose: bool) -> list[Step]:
    if may_choose or not request.provider:
        return steps_for(request.language, slug, chosen=request.provider)
    on_route = planned(slug, request.language) or [manager.in_force()]
    if request.provider not in on_route:
        refuse("provider", "Must be a configuration on the tenant's route.")
    return [Step(lender(request.provider), request.provider)]


async def _offline_steps(steps: Sequence[Step]) -> list[Step]:
    """Those whose provider promises it. Asked before another session makes room for nothing."""
    found = []
    for step in steps:
        with ExitStack() as held:
            lease = await borrow_lease(step, held)
            if lease.provider.network == NO_NETWORK:
                found.append(step)
    if not found:
        refuse("offline", "No provider of the route guarantees a sandbox without network.")
    return found


async def _reserve(
    request: SessionRequest,
    caller: Caller,
    network: NetworkPolicy | None,
    template: tuple[str, UUID | None],
    beside: Callable[[Session], None],
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
        template=template[0],
        template_version=template[1],
        env=dict(request.env),
        contexts=[{"id": DEFAULT_CONTEXT, "language": request.language, "cwd": ""}],
        idle_seconds=request.idle_seconds,
        max_seconds=request.max_seconds,
        saves=request.saves,
        conversation=request.conversation,
        process_id=heartbeat.current_process_id(),
    )
    session.network = session.network_json(network)

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
    source: UUID | None,
) -> None:
    floor = required_isolation_for(tenant, session.api_key, request.language)

    async def place(lease: Lease, held: ExitStack, is_last: bool) -> Served[None]:
        _ensure_persistent(lease)
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
            elif files := parts.session_files():
                await put_files(session, lease, sandbox, files)
            await start_session(session, lease, sandbox, parts)
            _put(session, lease, sandbox, isolation, mark, source)
            await extend_lease(lease, session, sandbox)
        except BaseException:
            sandbox.submit_close()
            raise
        return Served(None, start_ms)

    probe = ExecutionRequest("pass", request.language)
    await RouteWalk().take(steps, probe, floor, place, has_code=False)


def _ensure_persistent(lease: Lease) -> None:
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
