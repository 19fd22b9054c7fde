"""Keeps a few sandboxes of every template warm and hands each out once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from providers.errors import CreationFailed, InvalidConfiguration, RateLimited, SandboxError
from providers.pool.launcher import Launcher
from providers.pool.sandbox import Sandbox
from providers.pool.template import Template

logger = logging.getLogger(__name__)

# Refilling competes with the run that emptied the place, so it lets a short run finish first.
REFILL_DELAY_SECONDS = 0.015

# A template nobody asked for in this time is no longer kept warm (the first one always is).
WARM_SECONDS = 300.0

LONGEST_BACKOFF_SECONDS = 5.0

# A warm sandbox that ends before it is this old counts as a start that failed.
INFANT_SECONDS = 1.0


@dataclass(frozen=True)
class PoolSettings:
    """`size` warm sandboxes per template, `capacity` alive in all, `queue` callers waiting.

    A caller waits `patience` seconds at most for a sandbox.
    """

    size: int = 4
    capacity: int = 16
    queue: int = 64
    patience: float = 10.0
    parallel_starts: int = 4


@dataclass
class _Shelf:
    """The sandboxes of one template: those ready, those on the way, and who waits for one."""

    template: Template
    always_warm: bool
    idle: deque[Sandbox] = field(default_factory=deque)
    starting: int = 0
    waiting: deque[asyncio.Future[Sandbox]] = field(default_factory=deque)
    last_asked: float = float("-inf")
    failures: int = 0
    not_before: float = 0.0

    def wanted(self, size: int, now: float) -> int:
        warm = self.always_warm or now - self.last_asked < WARM_SECONDS
        return (size if warm else 0) + len(self.waiting)


class Pool:
    """Warm sandboxes over one launcher. Lives in one event loop."""

    def __init__(
        self, launcher: Launcher, templates: Mapping[str, Template], settings: PoolSettings
    ) -> None:
        """The first template is kept warm from the start, the others once they were asked for."""
        self._launcher = launcher
        self._settings = settings
        self._shelves = {
            name: _Shelf(template, always_warm=index == 0)
            for index, (name, template) in enumerate(templates.items())
        }
        self._busy: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._refill_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.started = 0
        self.failed = 0

    def open(self) -> None:
        """Start warming up."""
        self._refill()

    async def acquire(self, template: str) -> Sandbox:
        """A warm sandbox for this caller alone.

        Raises InvalidConfiguration for an unknown template, CreationFailed when sandboxes cannot
        be started, RateLimited when the queue is full or the wait too long.
        """
        shelf = self._shelves.get(template)
        if shelf is None:
            raise InvalidConfiguration(f"There is no template {template!r}.", field="language")
        if self._closing:
            raise CreationFailed("The pool is shutting down.")
        shelf.last_asked = time.monotonic()
        while shelf.idle:
            sandbox = shelf.idle.popleft()
            if sandbox.alive:
                shelf.failures = 0
                self._busy.add(sandbox)
                self._refill_soon()
                return sandbox
            self._spawn(sandbox.destroy())
        if sum(len(each.waiting) for each in self._shelves.values()) >= self._settings.queue:
            raise RateLimited("Every sandbox is busy and the queue is full.", retry_after=1)
        place: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(place)
        self._refill()
        try:
            async with asyncio.timeout(self._settings.patience):
                return await place
        except TimeoutError:
            self._withdraw(shelf, place)
            raise RateLimited(
                f"No sandbox became free in {self._settings.patience:g} s.", retry_after=1
            ) from None
        except asyncio.CancelledError:
            self._withdraw(shelf, place)
            raise

    async def release(self, sandbox: Sandbox) -> None:
        """Destroy a sandbox that was handed out; its place can be filled again."""
        await sandbox.destroy()
        self._busy.discard(sandbox)
        self._refill_soon()

    def stats(self) -> dict[str, Any]:
        """What the pool holds now; `failing` counts the starts that failed since the last use."""
        return {
            "runtime": self._launcher.runtime,
            "size": self._settings.size,
            "capacity": self._settings.capacity,
            "busy": len(self._busy),
            "idle": sum(len(shelf.idle) for shelf in self._shelves.values()),
            "creating": sum(shelf.starting for shelf in self._shelves.values()),
            "waiting": sum(len(shelf.waiting) for shelf in self._shelves.values()),
            "started": self.started,
            "failed": self.failed,
            "failing": sum(shelf.failures for shelf in self._shelves.values()),
        }

    async def close(self) -> None:
        """End every sandbox and wait until all are gone."""
        self._closing = True
        if self._refill_timer:
            self._refill_timer.cancel()
        for shelf in self._shelves.values():
            for place in shelf.waiting:
                if not place.done():
                    place.set_exception(CreationFailed("The pool is shutting down."))
        for task in self._starts:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        sandboxes = [*self._busy, *(one for shelf in self._shelves.values() for one in shelf.idle)]
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refill_soon(self) -> None:
        if any(shelf.waiting for shelf in self._shelves.values()):
            self._refill()
        else:
            self._schedule(REFILL_DELAY_SECONDS)

    def _schedule(self, delay: float) -> None:
        """Refill after `delay` seconds, or earlier where that was asked for already."""
        loop = asyncio.get_running_loop()
        if self._refill_timer:
            if self._refill_timer.when() <= loop.time() + delay:
                return
            self._refill_timer.cancel()
        self._refill_timer = loop.call_later(delay, self._refill)

    def _refill(self) -> None:
        """Start what is missing, as far as capacity and the launcher's pace allow."""
        if self._refill_timer:
            self._refill_timer.cancel()
            self._refill_timer = None
        if self._closing:
            return
        now = time.monotonic()
        starting = sum(shelf.starting for shelf in self._shelves.values())
        alive = len(self._busy) + starting + sum(len(s.idle) for s in self._shelves.values())
        for shelf in sorted(self._shelves.values(), key=lambda shelf: -len(shelf.waiting)):
            if now < shelf.not_before:
                self._schedule(shelf.not_before - now)
                continue
            while (
                len(shelf.idle) + shelf.starting < shelf.wanted(self._settings.size, now)
                and starting < self._settings.parallel_starts
                and (alive < self._settings.capacity or self._give_up_idle(shelf))
            ):
                shelf.starting += 1
                starting += 1
                alive += 1
                task = self._spawn(self._start_one(shelf))
                self._starts.add(task)
                task.add_done_callback(self._starts.discard)

    def _give_up_idle(self, needy: _Shelf) -> bool:
        """Make room for a caller who waits by ending a warm sandbox of another template."""
        if len(needy.waiting) <= needy.starting:
            return False
        for shelf in self._shelves.values():
            if shelf is not needy and shelf.idle:
                self._spawn(shelf.idle.popleft().destroy())
                return True
        return False

    async def _start_one(self, shelf: _Shelf) -> None:
        try:
            sandbox = await Sandbox.start(self._launcher, shelf.template)
        except SandboxError as error:
            self._start_failed(shelf, error)
            return
        except Exception as error:
            # Whoever waits must not go on waiting, whatever it is.
            logger.exception("starting a sandbox broke")
            self._start_failed(shelf, CreationFailed(f"{self._launcher.runtime}: {error!r}"))
            return
        finally:
            shelf.starting -= 1
        self.started += 1
        self._hand_over(shelf, sandbox)
        self._refill()

    def _hand_over(self, shelf: _Shelf, sandbox: Sandbox) -> None:
        """Give an unused sandbox to who has waited longest, or keep it warm."""
        while shelf.waiting:
            place = shelf.waiting.popleft()
            if not place.done():
                shelf.failures = 0
                self._busy.add(sandbox)
                place.set_result(sandbox)
                return
        shelf.idle.append(sandbox)
        sandbox.closed.add_done_callback(lambda _: self._forget_dead(shelf, sandbox))

    def _withdraw(self, shelf: _Shelf, place: asyncio.Future[Sandbox]) -> None:
        """The caller has given up. It may have been served in the very same moment."""
        with contextlib.suppress(ValueError):
            shelf.waiting.remove(place)
        if place.done() and not place.cancelled() and place.exception() is None:
            self._busy.discard(place.result())
            self._hand_over(shelf, place.result())

    def _start_failed(self, shelf: _Shelf, error: SandboxError) -> None:
        """One caller learns of the failure at once; the next attempt waits longer each time."""
        self.failed += 1
        shelf.failures += 1
        logger.error(
            "sandbox start failed", extra={"template": shelf.template.name, "reason": error.message}
        )
        while shelf.waiting:
            place = shelf.waiting.popleft()
            if not place.done():
                place.set_exception(error)
                break
        self._back_off(shelf)

    def _back_off(self, shelf: _Shelf) -> None:
        delay = min(LONGEST_BACKOFF_SECONDS, 0.1 * 2 ** min(shelf.failures, 10))
        shelf.not_before = time.monotonic() + delay
        self._schedule(delay)

    def _forget_dead(self, shelf: _Shelf, sandbox: Sandbox) -> None:
        """Replace a sandbox that ended while nobody used it."""
        if sandbox in shelf.idle and not self._closing:
            shelf.idle.remove(sandbox)
            self._spawn(sandbox.destroy())
            if time.monotonic() - sandbox.started_at < INFANT_SECONDS:
                shelf.failures += 1
                self._back_off(shelf)
            self._refill()
