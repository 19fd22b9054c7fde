"""The network of a session while it lives: shown, and changed."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from typing import Annotated, TypedDict, get_args

from django.db import transaction
from django.db.models import Q

from executions.capabilities.network import lists
from executions.kernel.bodies import Choices
from executions.kernel.declarations import Body, declared, refuse
from executions.ledger.append import enter_row, look_at
from executions.runs import extensions
from executions.runs.network import TOGETHER, Allow, ModeName, NetworkRequest, Preset
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
from providers.network import Budget, Layer, Mode, NetworkPolicy
from providers.values import SandboxSpec


@declared
class NetworkChange:
    """The hosts that code and commands of a session may reach from now on."""

    mode: ModeName = None
    allow: Allow = ()
    preset: Preset = None

    def __post_init__(self) -> None:
        try:
            self.request.policy  # noqa: B018  raises for what is no list
        except ValueError as error:
            refuse("allow", str(error))

    @property
    def request(self) -> NetworkRequest:
        return NetworkRequest(mode=self.mode, allow=self.allow, preset=self.preset)


PUT = Body(NetworkChange, "NetworkChange", says=TOGETHER)


class NetworkLayerShape(TypedDict):
    """A list that holds. An attempt must be allowed by all of them."""

    name: Annotated[str, "`installation`, `tenant` or `session`."]
    mode: Annotated[str, Choices.of(get_args(Mode))]
    allow: list[str]
    log_only: Annotated[bool, "It refuses nothing, and records what it would have refused."]


class BudgetShape(TypedDict):
    """What the sandbox may use of the network."""

    connections: Annotated[int, "Open at once."]
    connections_per_minute: int
    bytes: Annotated[int, "Of both ways together."]


class SessionNetworkShape(TypedDict):
    """What a session may reach."""

    mode: Annotated[str, Choices.of(get_args(Mode))]
    allow: Annotated[list[str], "The rules of the session's own list."]
    layers: Annotated[
        list[NetworkLayerShape], "All lists, the session's own last; empty without a network."
    ]
    budget: BudgetShape | None


def network_of_session(session: Session) -> SessionNetworkShape:
    """The session's list, and those that hold around it."""
    own = session.network_policy
    if own is None:
        return {"mode": "none", "allow": [], "layers": [], "budget": None}
    inner = Layer("session", own)
    network = lists.network_for(session.tenant_slug, inner)
    return {
        "mode": own.mode,
        "allow": [str(rule) for rule in own.rules],
        "layers": [
            {
                "name": layer.name,
                "mode": layer.policy.mode,
                "allow": [str(rule) for rule in layer.policy.rules],
                "log_only": layer.policy.log_only,
            }
            for layer in (*lists.outer_layers(session.tenant_slug), inner)
        ],
        "budget": None if network is None else _budget(network.budget),
    }


def _budget(budget: Budget) -> BudgetShape:
    return {
        "connections": budget.connections,
        "connections_per_minute": budget.connections_per_minute,
        "bytes": budget.bytes,
    }


async def change_network(session: Session, asked: NetworkRequest, by: str) -> Session:
    """Give a session another network, and its sandbox too, if it has one. One that sleeps stays
    asleep. Raises InvalidConfiguration for what the lists around it or its provider do not allow,
    BlockedByPolicy, Conflict for one that has ended or is being woken, and what the sandbox does.
    Then a list is stored all the same, and given to the sandbox within a minute; that there is to
    be no network is stored only once the sandbox has none.
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
        won = rows.update(network=None if policy is None else policy.to_json())
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
    parts = extensions.begin_session(session.tenant_slug, policy)
    spec = parts.specify(SandboxSpec(session.language), seconds=NEW_SECONDS)
    with ExitStack() as held:
        lease = await borrow_lease(Step(lender_of(session)), held)
        ensure_network(lease, spec.network)
