"""The network of a session while it lives, as requests name it and answers show it."""

from __future__ import annotations

from typing import Annotated, TypedDict, get_args

from executions.capabilities.network import lists
from executions.kernel.bodies import Choices
from executions.kernel.declarations import Body, declared, refuse
from executions.runs.network import TOGETHER, Allow, ModeName, NetworkRequest, Preset
from executions.sessions.models import Session
from providers.network import Budget, Layer, Mode


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
