"""Session sandboxes that outlive this process: they are told so, and remembered for the next one,
which finds and adopts them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from providers.errors import CreationFailed, SandboxError
from providers.isolation import meets, of_runtime
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import VERSION
from providers.runtime.pool.conversation import Conversation, ConversationEnded, Refused
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.sessions import Session
from providers.runtime.pool.state_store import GRACE_SECONDS, SandboxRecord, StateStore, boot, now
from providers.runtime.pool.template import Template

if TYPE_CHECKING:
    from providers.runtime.service.pool_manager import PoolManager
    from providers.runtime.service.revisions import Revision

logger = logging.getLogger(__name__)

# A lease that differs by more than that from what is remembered is remembered anew.
SLACK_SECONDS = 0.5


@dataclass
class _Entry:
    """`remembered` is None where that did not work: the sandbox ends with this process."""

    remembered: SandboxRecord | None
    lives_until: float
    was_found: bool = False


class DurableSandboxes:
    """Those of this process. All of it happens in one event loop."""

    def __init__(self, memory: StateStore | None) -> None:
        self._memory = memory
        self._entries: dict[Session, _Entry] = {}
        self._left: set[str] = set()

    def may(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox can outlive this process, and another one would find it."""
        ours = self._memory is not None and self._memory.is_ours
        return ours and sandbox.guest.container != ""

    async def begin(self, session: Session, marker: str) -> None:
        """Remember one whose guest has been told its marker."""
        guest, template = session.kept.sandbox.guest, session.kept.sandbox.template
        if self._memory is None or not guest.container:
            return
        left = session.expires_at - time.monotonic()
        remembered = SandboxRecord(
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

    def go_on(self, session: Session, remembered: SandboxRecord) -> None:
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


# How often it is tried to be the pool's one process, and to reach an engine that does not answer.
RETRY_SECONDS = 0.5
AT_ONCE = 8
# A guest that does not answer is attached to once more.
ATTEMPTS = 2

Found = Callable[["Revision", Kept, SandboxRecord], None]


async def adopt_all(
    keeper: PoolManager, memory: StateStore, minimum_isolation: str, found: Found
) -> None:
    """Take over what is remembered, once no other process of this pool is there.

    What is lost is ended and forgotten, so that nobody waits for it. `found` has each that is not.
    """
    try:
        while not memory.take():
            await asyncio.sleep(RETRY_SECONDS)
    except OSError as error:
        logger.warning("persistent sandboxes end with this process: %s", error)
        return
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(remembered: SandboxRecord) -> None:
        try:
            await _adopt(keeper, remembered, minimum_isolation, found, slots)
        except Exception as error:
            # Whatever is wrong with one, the others are found.
            logger.warning(
                "the persistent sandbox of container %s is lost: %s",
                remembered.container[:12],
                error if isinstance(error, SandboxError) else repr(error),
                exc_info=None if isinstance(error, SandboxError) else error,
            )
            memory.forget(remembered.container)
            await _end(keeper, remembered)

    async with asyncio.TaskGroup() as group:
        for remembered in memory.all():
            group.create_task(one(remembered))


async def _adopt(
    keeper: PoolManager,
    remembered: SandboxRecord,
    minimum_isolation: str,
    found: Found,
    slots: asyncio.Semaphore,
) -> None:
    """Raises SandboxError for one that is not to be had any more."""
    if remembered.version != VERSION:
        raise CreationFailed("Its guest speaks another version of the protocol.")
    if not meets(of_runtime(remembered.runtime), minimum_isolation):
        raise CreationFailed("Its isolation is weaker than MINIMUM_ISOLATION.")
    template = Template(
        remembered.template,
        remembered.language,
        limits=remembered.sandbox_limits,
        interpreter=remembered.interpreter,
    )
    failures = 0
    while remembered.left > 0:
        try:
            async with slots:
                line = await keeper.current()
                kept = await find_again(line.launcher, remembered, template)
            found(line, kept, remembered)
            return
        except CreationFailed:
            failures += 1
            if failures == ATTEMPTS:
                raise
        except SandboxError as error:
            logger.info("a persistent sandbox is not found yet: %s", error.message)
            await asyncio.sleep(RETRY_SECONDS)
    raise CreationFailed("Its lease has ended.")


async def _end(keeper: PoolManager, remembered: SandboxRecord) -> None:
    """At once where that is possible, else the launcher's search for orphans does it."""
    try:
        line = await keeper.current()
        await line.launcher.end(remembered.container)
    except SandboxError as error:
        logger.info("the container is left for the search for orphans: %s", error.message)


# Long enough that nobody guesses one, nor says one by chance.
MARK_BYTES = 32
# How long a guest may take to stop what ran, and to answer whoever has found it.
RESUME_SECONDS = 15.0


def new_marker() -> str:
    """In hexadecimal digits, as `protocol` has it."""
    return secrets.token_hex(MARK_BYTES)


def lasting(marker: str, seconds: float) -> Mapping[str, object]:
    """What a guest is told at first: `seconds` is its lease."""
    return {"marker": marker, "seconds": guest_seconds(seconds)}


def guest_seconds(left: float) -> float:
    """How long a guest lives by itself, when so much is left of its lease."""
    return max(0.0, left) + GRACE_SECONDS


async def find_again(launcher: Launcher, remembered: SandboxRecord, template: Template) -> Kept:
    """The sandbox as it was, without what was under way in it.

    Raises CreationFailed for one that has ended, is not what it was, or does not answer, and
    ProviderUnavailable where that cannot be known now.
    """
    echo = secrets.token_bytes(MARK_BYTES)
    guest = await launcher.adopt(remembered.container, remembered.runtime, remembered.found, echo)
    sandbox = await _opened(launcher, guest, template, remembered.runtime)
    try:
        conversation = Conversation(sandbox.keep())
        conversation.tell_bytes(bytes.fromhex(remembered.marker))
        asked = {"echo": echo.hex(), "seconds": guest_seconds(remembered.left)}
        await conversation.ask("resume", asked, seconds=RESUME_SECONDS)
    except (ConversationEnded, Refused, wire.FrameError, TimeoutError) as error:
        sandbox.leave()
        raise CreationFailed(f"It does not answer: {str(error) or 'it was silent'}.") from error
    except BaseException:
        sandbox.leave()
        raise
    return Kept(sandbox, conversation)


async def _opened(launcher: Launcher, guest: Guest, template: Template, runtime: str) -> Sandbox:
    channel = await guest.open()
    return Sandbox(template, guest, channel, runtime, launcher.enforced_by)
