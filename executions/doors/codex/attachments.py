"""Which connection a session is attached to, and what is kept of it until its client comes back.

A session is attached to one connection of this process at a time. When that breaks, the processes
go on for a while; then they end, and the session stays until its idle time is over. A client that
comes back to another web process finds them there. All of it is state of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import UUID

from executions.doors.codex import recovery
from executions.doors.codex.messages import ALREADY_ATTACHED, Failure
from executions.doors.codex.processes import Call, Processes
from executions.kernel.coroutines import Coroutine
from executions.sessions.models import Session
from executions.sessions.queries import sessions_of
from providers.errors import SandboxError

logger = logging.getLogger(__name__)

# How long processes wait for their client after its connection broke.
DETACHED_SECONDS = 30.0


class Holder(Protocol):
    """A connection, as far as what is attached to it knows it."""

    async def notify(self, method: str, params: Mapping[str, Any]) -> None: ...


class Attachment:
    """A session with its processes, and the connection that has it now."""

    def __init__(self, session_id: UUID, call: Call) -> None:
        self.session_id = session_id
        self.processes = Processes(call, self._notify)
        self.holder: Holder | None = None
        # What the session's row has while its client was nowhere else since.
        self.mark: UUID | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._call = call

    def begin_anew(self) -> None:
        """Let go of processes that its client has known in another place since."""
        self.processes.mute()
        self.processes = Processes(self._call, self._notify)

    async def end(self) -> None:
        """End its processes, unless its client has come back in another place."""
        mark = self.mark

        async def is_latest() -> bool:
            return mark is not None and recovery.is_latest(self.session_id, mark)

        try:
            if mark is None or await self._call(is_latest):
                await self.processes.end(self.on_session)
                return
        except Exception:
            logger.exception("processes of session %s continue", self.session_id)
        self.processes.mute()

    async def _notify(self, method: str, params: Mapping[str, Any]) -> None:
        if self.holder is not None:
            await self.holder.notify(method, params)

    async def on_session(self, use: Callable[[Session], Coroutine[Any]]) -> None:
        """Do something with the session, if it lives, whether its key is still valid or not: only
        to end what is there."""

        async def work() -> None:
            session = sessions_of(None).filter(pk=self.session_id, closed_at=None).first()
            if session is not None and session.state == Session.State.OPEN:
                await use(session)

        try:
            await self._call(work)
        except SandboxError as error:
            logger.warning("processes of session %s continue: %s", self.session_id, error.message)


class Attachments:
    """Those of this process."""

    def __init__(self) -> None:
        self._of_sessions: dict[UUID, Attachment] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def ensure_free(self, session_id: UUID) -> None:
        """Raises Failure for one that another connection has."""
        found = self._of_sessions.get(session_id)
        if found is not None and found.holder is not None:
            raise Failure(
                ALREADY_ATTACHED,
                f"session {session_id} is already attached to another connection",
            )

    def attach(self, session_id: UUID, holder: Holder, call: Call) -> Attachment:
        """Give a session to a connection. Raises Failure for one that another has."""
        self.ensure_free(session_id)
        found = self._of_sessions.get(session_id)
        if found is None:
            found = self._of_sessions[session_id] = Attachment(session_id, call)
        if found.expiry is not None:
            found.expiry.cancel()
        found.holder, found.expiry = holder, None
        return found

    def detach(self, attachment: Attachment) -> None:
        """Keep the processes for a while; then end them."""
        attachment.holder = None
        loop = asyncio.get_running_loop()
        attachment.expiry = loop.call_later(DETACHED_SECONDS, self._expire, attachment)

    def _expire(self, attachment: Attachment) -> None:
        del self._of_sessions[attachment.session_id]
        ending = asyncio.create_task(attachment.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
