"""What is wrong with a session, rather than with what was asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from executions.models.session import Session
from executions.tenants.models import Tenant
from providers.errors import ErrorCode, InvalidConfiguration, SandboxError

CONFLICT = ErrorCode("conflict", "Conflict", "Check the session: it has ended, or it is busy.", 409)


class Conflict(SandboxError):
    """What was asked for does not go together with the state that the session is in."""

    entry = CONFLICT


class SessionLost(Conflict):
    """Its sandbox is gone, and all that it held."""


class SessionAsleep(Conflict):
    """Its sandbox is gone, or was let go of. What was saved of its files is kept."""


class SessionClosed(Conflict):
    """It was closed, before or while this ran."""


NOT_FOUND = ErrorCode("not_found", "Not found", "Check the id.", 404)


class NoSuchSession(SandboxError):
    """There is none of this id, or it is somebody else's: nobody is told which."""

    entry = NOT_FOUND


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """What the sandbox refuses is told by the names that the request has for it."""
    try:
        yield
    except InvalidConfiguration as error:
        if (name := names.get(error.field or "")) is not None:
            if error.message.startswith(prefix := f"{error.field}: "):
                error.message = f"{name}: {error.message.removeprefix(prefix)}"
            error.field = name
        raise


def refuse_ended(session: Session) -> None:
    """Raises SessionLost or SessionClosed."""
    if session.state == Session.State.LOST:
        raise SessionLost(f"The session and its content are lost: {session.closed_because}")
    if session.closed_at is not None:
        raise SessionClosed(f"The session was closed: {session.closed_because}")


def tenant_of(session: Session) -> Tenant:
    """Raises Conflict where it is gone."""
    if session.tenant is None:
        raise Conflict("The tenant of the session is gone.")
    return session.tenant
