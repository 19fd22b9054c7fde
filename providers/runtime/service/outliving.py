"""The kept sandboxes that outlive this process: remembered for the next, which finds them."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace

from providers.errors import SandboxError
from providers.runtime.guest.protocol import VERSION
from providers.runtime.pool.lasting import guest_seconds
from providers.runtime.pool.launcher import LastingGuest
from providers.runtime.pool.remembered import GRACE_SECONDS, Memory, Remembered, boot, now
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.sessions import Session

logger = logging.getLogger(__name__)

# A lease that differs by more than that from what is remembered is remembered anew.
SLACK_SECONDS = 0.5


@dataclass
class _Entry:
    """`remembered` is None where that did not work: the sandbox ends with this process."""

    remembered: Remembered | None
    lives_until: float
    was_found: bool = False


class Outliving:
    """Those of this process. All of it happens in one event loop."""

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._entries: dict[Session, _Entry] = {}
        self._left: set[str] = set()

    def may(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox can outlive this process, and another one would find it."""
        ours = self._memory is not None and self._memory.is_ours
        return ours and isinstance(sandbox.guest, LastingGuest)

    async def begin(self, session: Session, marker: str) -> None:
        """Remember one whose guest has been told its marker."""
        guest, template = session.kept.sandbox.guest, session.kept.sandbox.template
        if self._memory is None or not isinstance(guest, LastingGuest):
            return
        left = session.expires_at - time.monotonic()
        remembered = Remembered(
            container=guest.container,
            ref=session.ref,
            owner=session.owner,
            template=template.name,
            language=template.language,
            runtime=session.kept.sandbox.runtime,
            limits=asdict(template.limits),
            interpreter=template.interpreter,
            marker=marker,
            found=guest.found,
            version=VERSION,
            boot=boot(),
            opened_at=now(),
            expires_at=now() + left,
            seconds=left,
        )
        entry = self._entries[session] = _Entry(None, time.monotonic() + guest_seconds(left))
        try:
            self._memory.save(remembered)
            await guest.stay()
        except (OSError, SandboxError) as error:
            logger.warning("a persistent sandbox will end with this process: %s", error)
            self._memory.forget(guest.container)
        else:
            if session in self._entries:
                entry.remembered = remembered
            else:
                # It has ended meanwhile.
                self._memory.forget(guest.container)

    def go_on(self, session: Session, remembered: Remembered) -> None:
        """One that this process has found."""
        lives_until = time.monotonic() + guest_seconds(remembered.left)
        self._entries[session] = _Entry(remembered, lives_until, was_found=True)

    def found(self) -> list[Session]:
        """Those that a former process has left."""
        return [session for session, entry in self._entries.items() if entry.was_found]

    def look(self) -> None:
        """Have guests and memory know of the leases as they are now."""
        for session, entry in self._entries.items():
            try:
                self._look_at(session, entry)
            except Exception:
                # Whatever is wrong with one, the others are told.
                logger.exception("the lease of a persistent sandbox could not be sent")

    def _look_at(self, session: Session, entry: _Entry) -> None:
        left = session.expires_at - time.monotonic()
        renewed = entry.remembered and abs(entry.remembered.left - left) > SLACK_SECONDS
        if renewed and (left > 0 or not session.kept.busy):
            self._save(entry, left)
        lives_for = entry.lives_until - time.monotonic()
        # One that is busy is left beyond its lease.
        if abs(lives_for - guest_seconds(left)) > SLACK_SECONDS and (
            left > 0 or lives_for < GRACE_SECONDS / 2
        ):
            session.kept.lives_for(guest_seconds(left))
            entry.lives_until = time.monotonic() + guest_seconds(left)

    def _save(self, entry: _Entry, left: float) -> None:
        if self._memory is None or entry.remembered is None:
            return
        entry.remembered = replace(
            entry.remembered, expires_at=now() + left, seconds=max(0.0, left)
        )
        try:
            self._memory.save(entry.remembered)
        except OSError as error:
            logger.warning("a lease could not be stored: %s", error)

    def ended(self, session: Session) -> None:
        """It is over, whoever ended it."""
        entry = self._entries.pop(session, None)
        if self._memory is not None and entry is not None and entry.remembered is not None:
            self._memory.forget(entry.remembered.container)

    def leave(self) -> list[Session]:
        """Those that are to be let go of, because they outlive this process."""
        self.look()
        found = [
            session
            for session, entry in self._entries.items()
            if entry.remembered is not None and session.kept.alive
        ]
        self._left |= {session.ref for session in found}
        for session in found:
            del self._entries[session]
        return found

    def may_come(self, ref: str) -> bool:
        """Whether a sandbox that is not here may be had again, from us or from the next process."""
        return ref in self._left or (self._memory is not None and self._memory.knows(ref))
