"""The network of a session: changed while it lives, and whether there is one to be had."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy

from django.db import transaction
from django.db.models import Q

from executions.ledger.append import enter_row, look_at
from executions.runs import extensions
from executions.runs.extensions import RunParts
from executions.runs.network import NetworkRequest
from executions.runs.provider_calls import Step, borrow_lease
from executions.runs.requests import Conflict
from executions.runs.routing import ensure_network
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.requests import ensure_not_ended
from executions.sessions.session_sandbox import (
    NEW_SECONDS,
    apply_network,
    collect_attempts,
    lender_of,
)
from providers.errors import KeptSandboxLost
from providers.network import Network, NetworkPolicy
from providers.values import SandboxSpec

# What a provider's `network` says where its sandboxes have none.
NO_NETWORK = "none"


def gives_network(tenant_slug: str) -> bool:
    """Whether the lists around the tenant's sessions allow anything. Raises BlockedByPolicy."""
    parts = extensions.begin_session(tenant_slug, NetworkPolicy("open"))
    return _specified(parts, "python") is not None


async def promises_no_network(session: Session) -> bool:
    """Whether the session's provider promises that a sandbox without a list has no network."""
    with ExitStack() as held:
        lease = await borrow_lease(Step(lender_of(session)), held)
        return lease.provider.network == NO_NETWORK


async def change_network(session: Session, asked: NetworkRequest | None, by: str) -> Session:
    """Give a session another network, and its sandbox too, if it has one.

    None asks for what a session has that names none. One that sleeps stays asleep. Raises
    InvalidConfiguration for what the lists around it or its provider do not allow, BlockedByPolicy,
    Conflict for one that has ended or is being woken, and what the sandbox does. Then a list is
    stored all the same, and given to the sandbox within a minute; that there is to be no network is
    stored only once the sandbox has none.
    """
    policy = extensions.session_network(session.tenant_slug, asked)
    if policy is not None:
        await _ensure_possible(session, policy)
    elif session.state == Session.State.OPEN and session.network is not None:
        await _close(session)
    with transaction.atomic():
        # One that is being woken may have been asked for already, with the former list.
        rows = Session.objects.filter(
            Q(state=Session.State.OPEN, ref__isnull=False)
            | Q(state=Session.State.ASLEEP, waking_since=None),
            pk=session.pk,
        )
        before = look_at(Session, session.pk)
        won = rows.update(network=session.network_json(policy))
        session.refresh_from_db()
        if won:
            enter_row(session, "changed", before, {"by": by})
    ensure_not_ended(session)
    if not won:
        raise Conflict("The session is being opened or woken. Try again.", retry_after=5)
    if session.state == Session.State.OPEN:
        try:
            await apply_network(session)
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            ensure_not_ended(session)
    return session


async def _close(session: Session) -> None:
    """Take the network from the session's sandbox, and store what was tried until then."""
    closed = copy(session)
    closed.network = None
    try:
        await apply_network(closed)
    except KeptSandboxLost as error:
        mark_lost(session, error.message)
        ensure_not_ended(session)
    await collect_attempts(session)


async def _ensure_possible(session: Session, policy: NetworkPolicy) -> None:
    parts = extensions.begin_session(session.tenant_slug, policy, session.template_version)
    network = _specified(parts, session.language)
    with ExitStack() as held:
        lease = await borrow_lease(Step(lender_of(session)), held)
        ensure_network(lease, network)


def _specified(parts: RunParts, language: str) -> Network | None:
    return parts.specify(SandboxSpec(language), seconds=NEW_SECONDS).network
