"""Who calls a tool, and where its work is carried out.

The SDK's server is asynchronous, and what it calls is not: a tool is a coroutine that has its work
done by the door, on threads that may wait and that have the database.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mcp.server.context import ServerRequestContext

from executions.kernel.coroutines import Waits
from executions.runs import active_runs
from executions.runs.event_log import EventLog
from executions.runs.record import Caller
from executions.runs.requests import run_limits
from executions.tenants.keys import note_refusal
from executions.tenants.models import ApiKey, Scope, Tenant

T = TypeVar("T")
# Under which a transport gives its requests their door.
DOOR = "cofferdam.door"
Context = ServerRequestContext[Any, Any]


class Door(Protocol):
    """One client's way in."""

    @property
    def caller(self) -> Caller: ...

    async def do(self, work: Callable[[], Waits[T]]) -> T:
        """What the work returns or raises, once it is done."""

    def note(self, run: Run) -> None:
        """Have this run end when the client leaves."""


class Lacking(Exception):
    """The key has not the scopes for this."""


@dataclass
class Run:
    """Something that runs, told of while it does, and ended when nobody wants it any more."""

    log: EventLog = field(default_factory=lambda: EventLog(run_limits()))
    _is_unwanted: bool = False

    def __post_init__(self) -> None:
        self.log.on_begin = self._begun

    def end(self) -> None:
        self._is_unwanted = True
        if self.log.execution_id and (found := active_runs.find(self.log.execution_id)):
            found.cancel("its client, which cancelled the call or left")

    def _begun(self) -> None:
        if self._is_unwanted:
            self.end()


def tenant_of(door: Door) -> Tenant:
    return door.caller.tenant


def by(door: Door) -> str:
    """Who acts, as the ledger and the session itself say it."""
    key = door.caller.api_key
    return "command:mcp" if key is None else f"key:{key.prefix}"


def lacks(door: Door, needs: Sequence[Scope]) -> list[str]:
    key = door.caller.api_key
    return [] if key is None else [scope.value for scope in needs if not key.has_scope(scope)]


def require(door: Door, needs: Sequence[Scope], what: str) -> None:
    """Raises Lacking, which is entered in the ledger."""
    if not (missing := lacks(door, needs)):
        return
    needed = " and ".join(missing)
    key: ApiKey | None = door.caller.api_key
    detail = f"{what} needs {needed}"
    note_refusal(key, "scope", detail=detail, address=door.caller.client_address)
    raise Lacking(f"The API key lacks the required scope: {needed}.")


Tell = Callable[[float, str], Awaitable[None]]
