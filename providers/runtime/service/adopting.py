"""Finding the kept sandboxes that a former process of this pool has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from providers.errors import CreationFailed, ProviderUnavailable, SandboxError
from providers.isolation import meets, of_runtime
from providers.runtime.guest.protocol import VERSION
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.lasting import find_again
from providers.runtime.pool.launcher import LastingLauncher
from providers.runtime.pool.remembered import Memory, Remembered
from providers.runtime.pool.template import Template

if TYPE_CHECKING:
    from providers.runtime.service.keeper import PoolKeeper
    from providers.runtime.service.lines import Line

logger = logging.getLogger(__name__)

# How often it is tried to be the pool's one process, and to reach an engine that does not answer.
RETRY_SECONDS = 0.5
AT_ONCE = 8
# A guest that does not answer is attached to once more.
ATTEMPTS = 2

Found = Callable[["Line", Kept, Remembered], None]


async def adopt_all(
    keeper: PoolKeeper, memory: Memory, minimum_isolation: str, found: Found
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

    async def one(remembered: Remembered) -> None:
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
    keeper: PoolKeeper,
    remembered: Remembered,
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
                if not isinstance(line.launcher, LastingLauncher):
                    raise ProviderUnavailable(f"It is not one of {line.kind}'s.")
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


async def _end(keeper: PoolKeeper, remembered: Remembered) -> None:
    """At once where that is possible, else the launcher's search for orphans does it."""
    try:
        line = await keeper.current()
        if isinstance(line.launcher, LastingLauncher):
            await line.launcher.end(remembered.container)
    except SandboxError as error:
        logger.info("the container is left for the search for orphans: %s", error.message)
