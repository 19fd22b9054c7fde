"""Taking over kept sandboxes: those that a former process has left, and those whose connection was
lost while this one runs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from providers.errors import CreationFailed, ProviderUnavailable, SandboxError
from providers.isolation import meets, of_runtime
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import VERSION
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.protocol import Conversation, ConversationEnded, Refused
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.state_store import GRACE_SECONDS, SandboxRecord, StateStore
from providers.runtime.pool.template import Template

logger = logging.getLogger(__name__)

# How often it is tried to be the pool's one process, and to reach an engine that does not answer.
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 10.0
AT_ONCE = 8
# A guest that does not answer is attached to once more.
ATTEMPTS = 2

# Takes the pool in force, what was found, and its record.
Found = Callable[[Any, Kept, SandboxRecord], None]


class OpenPool(Protocol):
    """A pool whose launcher is prepared."""

    @property
    def launcher(self) -> Launcher: ...


class Pools(Protocol):
    """Which pool is in force."""

    async def current(self) -> OpenPool:
        """Return it. Raises SandboxError."""
        ...


async def adopt_all(pools: Pools, memory: StateStore, minimum_isolation: str, found: Found) -> None:
    """Take over what is remembered, once no other process of this pool is there.

    What is lost is ended and forgotten, so that nobody waits for it. `found` has each that is not.
    """
    try:
        while not memory.take():
            await asyncio.sleep(RETRY_SECONDS)
        if memory.has_copies:
            await _restore(pools, memory)
    except OSError as error:
        logger.warning("persistent sandboxes end with this process: %s", error)
        return
    slots = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for remembered in memory.all():
            group.create_task(find_one(pools, memory, remembered, minimum_isolation, found, slots))


async def find_one(
    pools: Pools,
    memory: StateStore,
    remembered: SandboxRecord,
    minimum_isolation: str,
    found: Found,
    slots: asyncio.Semaphore,
) -> None:
    """Take over one, or end it and forget it."""
    try:
        await _adopt(pools, remembered, minimum_isolation, found, slots)
    except Exception as error:
        # Whatever is wrong with one, the others are found.
        logger.warning(
            "the persistent sandbox of container %s is lost: %s",
            remembered.container[:12],
            error if isinstance(error, SandboxError) else repr(error),
            exc_info=None if isinstance(error, SandboxError) else error,
        )
        memory.forget(remembered.container)
        await _end(pools, remembered)


async def _restore(pools: Pools, memory: StateStore) -> None:
    """Remember what a process on another machine has left. Raises OSError."""
    while True:
        try:
            revision = await pools.current()
            memory.restore(await revision.launcher.copies())
            return
        except SandboxError as error:
            logger.info("persistent sandboxes are not found yet: %s", error.message)
            await asyncio.sleep(RETRY_SECONDS)


async def _adopt(
    pools: Pools,
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
    failures, pause = 0, RETRY_SECONDS
    while remembered.left > 0:
        try:
            async with slots:
                revision = await pools.current()
                kept = await find_again(revision.launcher, remembered, template)
            found(revision, kept, remembered)
            return
        except CreationFailed:
            failures += 1
            if failures == ATTEMPTS:
                raise
        except SandboxError as error:
            logger.info("a persistent sandbox is not found yet: %s", error.message)
            await asyncio.sleep(pause)
            pause = min(LONGEST_RETRY_SECONDS, pause * 1.5)
    raise CreationFailed("Its lease has ended.")


async def _end(pools: Pools, remembered: SandboxRecord) -> None:
    """At once where that is possible, else the launcher's search for orphans does it."""
    try:
        revision = await pools.current()
        await revision.launcher.end(remembered.container)
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
        is_cut = guest.is_cut
        sandbox.leave()
        if is_cut:
            raise ProviderUnavailable("The connection to it was lost.") from error
        raise CreationFailed(f"It does not answer: {str(error) or 'it was silent'}.") from error
    except BaseException:
        sandbox.leave()
        raise
    return Kept(sandbox, conversation)


async def _opened(launcher: Launcher, guest: Guest, template: Template, runtime: str) -> Sandbox:
    channel = await guest.open()
    return Sandbox(template, guest, channel, runtime, launcher.enforced_by)
