"""Keeps a few sandboxes of every template warm and hands them out, fairly, to who asks."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from providers.errors import CreationFailed, RateLimited, SandboxError
from providers.runtime.pool.launcher import Launcher, about, start_failure
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import PoolSettings
from providers.runtime.pool.shelf import (
    OWNERS_REST_SECONDS,
    QueueFull,
    Shares,
    Shelf,
    Shelves,
    Waiter,
    WaitQueue,
    describe,
    missing,
    take_beyond,
    take_least_used,
    take_older,
    without_start,
)
from providers.runtime.pool.template import Template

__all__ = ["Pool", "PoolSettings"]

logger = logging.getLogger(__name__)

# How often old, surplus and forgotten sandboxes are looked for.
HOUSEKEEPING_SECONDS = 5.0

LONGEST_RETRY_AFTER_SECONDS = 60


class Pool:
    """Warm sandboxes over one launcher. Lives in one event loop."""

    def __init__(
        self, launcher: Launcher, templates: Mapping[str, Template], settings: PoolSettings
    ) -> None:
        """The first template is kept warm from the start, the others once they were asked for."""
        self._launcher = launcher
        self._settings = settings
        self._shelves = Shelves(launcher, templates)
        self._shares = Shares()
        self._line = WaitQueue(self._more_for)
        self._busy: dict[Sandbox, Shelf] = {}
        self._ending: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._refill_timer: asyncio.TimerHandle | None = None
        self._housekeeping: asyncio.TimerHandle | None = None
        self._hold_seconds = 1.0
        self._handed_out = 0
        self._refused = 0
        self._expired = 0
        self._closing = False

    def open(self) -> None:
        """Start warming up."""
        self._refill()
        self._keep_house()

    async def acquire(self, template: str, owner: str = "", *, alone: bool = False) -> Sandbox:
        """A warm sandbox for this caller alone, and never for another owner.

        One that is to be `alone` shares nothing with other runs of its owner, whatever the
        settings. Raises InvalidConfiguration for an unknown template, CreationFailed when sandboxes
        cannot be started, RateLimited when the line is full or the wait too long.
        """
        in_kernels = self._settings.isolation == "tenant-kernel" and not alone
        shelf = self._shelves.find(template, owner if in_kernels else "")
        if self._closing:
            raise CreationFailed("The pool is shutting down.")
        shelf.asked()
        sandbox = shelf.take(owner) if self._more_for(owner) else None
        if sandbox is not None:
            self._hand_out(sandbox, shelf, owner)
            self._refill_soon(shelf)
            return sandbox
        failure = shelf.failure()
        if failure and shelf.is_failing:
            self._refused += 1
            raise failure
        return await self._wait(shelf, self._join(shelf, owner))

    def add(self, template: Template, launcher: Launcher) -> None:
        """Have one more template, started by this launcher, for as long as it is asked for."""
        self._shelves.add(template, launcher)

    def has(self, template: str) -> bool:
        """Whether it is a template of the pool, or anything of it is left."""
        names = {each.template.name for each in self._shelves.values()}
        return template in names | {each.template.name for each in self._ending}

    async def release(self, sandbox: Sandbox) -> None:
        """Take back a sandbox that was handed out.

        It is destroyed and its place filled again, or kept for its owner where that is allowed
        and the sandbox is proved clean.
        """
        shelf = self._busy.get(sandbox)
        if shelf is None:
            await sandbox.destroy()
            return
        self._hold_seconds += 0.1 * (time.monotonic() - sandbox.handed_out_at - self._hold_seconds)
        if self._may_keep(sandbox) and await sandbox.renewed() and self._may_keep(sandbox):
            if self._take_back(sandbox):
                self._keep(shelf, sandbox)
        elif self._take_back(sandbox):
            self._serve_from_shelves()
            await asyncio.shield(self._end(sandbox))

    def take_over(self, sandbox: Sandbox, owner: str) -> None:
        """Count one that a former process has started for this owner. It is released as any is."""
        sandbox.hand_out(owner, reusable=False)
        if shelf := self._shelves.get(sandbox.template.name):
            self._busy[sandbox] = shelf
            self._shares.give(owner)

    def let_go(self, sandbox: Sandbox) -> None:
        """No longer count one that outlives this process."""
        self._take_back(sandbox)

    async def resize(self, settings: PoolSettings) -> None:
        """Work by these settings from now on. Neither what runs nor who waits is disturbed."""
        self._settings = settings
        self._serve_from_shelves()
        self._trim()
        self._refill()
        self._keep_house()

    @property
    def is_full(self) -> bool:
        """Whether a caller has to wait until another one has done."""
        return len(self._busy) >= self._settings.capacity

    def stats(self) -> dict[str, Any]:
        """What the pool holds now, in all and per template."""
        return {
            **about(self._launcher),
            "isolation": self._settings.isolation,
            "size": self._settings.size,
            "capacity": self._settings.capacity,
            "busy": len(self._busy),
            "ending": len(self._ending),
            "waiting": len(self._line),
            "handed_out": self._handed_out,
            "refused": self._refused,
            "expired": self._expired,
            **describe(self._shelves.values(), self._settings),
        }

    async def close(self) -> None:
        """End every sandbox and wait until all are gone."""
        self._closing = True
        for timer in (self._refill_timer, self._housekeeping):
            if timer:
                timer.cancel()
        for place in self._line.everybody():
            self._refuse(place, CreationFailed("The pool is shutting down."))
        for task in self._starts:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        sandboxes = [*self._busy, *self._ending]
        for shelf in self._shelves.values():
            sandboxes += [*shelf.idle, *shelf.kept]
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))

    def _join(self, shelf: Shelf, owner: str) -> Waiter:
        try:
            place, displaced = self._line.join(owner, shelf.name, self._settings.queue)
        except QueueFull:
            self._refused += 1
            raise RateLimited(
                "Every sandbox is busy and the queue is full.", retry_after=self._retry_after()
            ) from None
        if displaced:
            error = RateLimited(
                "The queue is full, and callers with fewer queued requests come first.",
                retry_after=self._retry_after(),
            )
            self._refuse(displaced, error)
        shelf.waited()
        return place

    async def _wait(self, shelf: Shelf, place: Waiter) -> Sandbox:
        self._refill()
        patience = self._settings.patience
        try:
            async with asyncio.timeout(patience):
                return await place.future
        except TimeoutError:
            if place.future.done() and not place.future.cancelled():
                return place.future.result()
            self._refused += 1
            message = f"No sandbox became free in {patience:g} s."
            error = shelf.failure() or RateLimited(message, retry_after=self._retry_after())
            raise error from None
        except asyncio.CancelledError:
            # Whoever was cancelled while being served has no use for what it was given.
            served = place.future.done() and not place.future.cancelled()
            if served and place.future.exception() is None:
                self._spawn(self.release(place.future.result()))
            raise
        finally:
            self._line.leave(place)

    def _refuse(self, place: Waiter, error: SandboxError) -> None:
        self._line.leave(place)
        if not place.future.done():
            self._refused += 1
            place.future.set_exception(error)

    def _retry_after(self) -> float:
        """When there should be room: so many callers, each holding a sandbox so long."""
        rounds = (len(self._line) + 1) / max(1, self._settings.capacity)
        return float(min(LONGEST_RETRY_AFTER_SECONDS, math.ceil(rounds * self._hold_seconds)))

    def _hand_out(self, sandbox: Sandbox, shelf: Shelf, owner: str) -> None:
        sandbox.hand_out(owner, reusable=self._settings.isolation == "tenant")
        self._shelves.handed_out(shelf)
        self._busy[sandbox] = shelf
        self._shares.give(owner)
        self._handed_out += 1

    def _take_back(self, sandbox: Sandbox) -> bool:
        if self._busy.pop(sandbox, None) is None:
            return False
        self._shares.take_back(sandbox.owner)
        return True

    def _more_for(self, owner: str) -> int:
        return self._shares.more_for(owner, self._settings.capacity)

    def _serve_from_shelves(self) -> None:
        """Those who waited for their share to grow, while there were sandboxes."""
        for place in list(self._line):
            shelf = self._shelves[place.template]
            if self._more_for(place.owner) and (sandbox := shelf.take(place.owner)):
                self._serve(place, shelf, sandbox)

    def _serve(self, place: Waiter, shelf: Shelf, sandbox: Sandbox) -> None:
        self._line.serve(place)
        self._hand_out(sandbox, shelf, place.owner)
        place.future.set_result(sandbox)

    def _may_keep(self, sandbox: Sandbox) -> bool:
        young = time.monotonic() - sandbox.started_at < self._settings.max_lifetime
        tenant = self._settings.isolation == "tenant" and sandbox.reusable
        return tenant and young and sandbox.alive and not sandbox.running and not self._closing

    def _keep(self, shelf: Shelf, sandbox: Sandbox) -> None:
        """Give a clean sandbox to its owner's next caller, or put it by, unless others need it."""
        needy = without_start(self._line, self._shelves)[len(self._ending) :]
        place = self._line.first(shelf.name, sandbox.owner)
        is_full = self._room() <= 1  # this sandbox has left the busy ones, and is alive
        if is_full and needy and needy[0].owner != sandbox.owner:
            self._end(sandbox)
        elif place:
            self._serve(place, shelf, sandbox)
        else:
            shelf.kept.append(sandbox)
            self._refill_soon(shelf)

    def _end(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Destroy one that is nobody's any more. It counts until it is gone."""
        self._ending.add(sandbox)
        return self._spawn(self._destroy(sandbox))

    async def _destroy(self, sandbox: Sandbox) -> None:
        try:
            if sandbox.answered and not len(self._line):
                # All in it but its supervisor has ended, so the caller may have the answer first.
                await asyncio.sleep(self._launcher.rest_seconds)
            await sandbox.destroy()
        finally:
            self._ending.discard(sandbox)
            self._refill_soon()

    def _room(self) -> int:
        """How many more may be alive, what is about to start or not yet gone included."""
        shelved = sum(
            len(shelf.idle) + len(shelf.kept) + shelf.starting for shelf in self._shelves.values()
        )
        return self._settings.capacity - len(self._busy) - len(self._ending) - shelved

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refill_soon(self, shelf: Shelf | None = None) -> None:
        rest = OWNERS_REST_SECONDS if shelf and shelf.owner else self._launcher.rest_seconds
        self._refill_in(0.0 if len(self._line) else rest)

    def _refill_in(self, delay: float) -> None:
        if self._closing:
            return
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
        self._launcher.hurry(is_wanted=len(self._line) > 0)
        pace = self._settings.parallel_starts
        pace -= sum(shelf.starting for shelf in self._shelves.values())
        room = self._room()
        coming = len(self._ending)
        for shelf, is_awaited in missing(self._line, self._shelves, self._settings):
            if pace <= 0:
                break
            if now < shelf.not_before:
                self._refill_in(shelf.not_before - now)
            elif room > 0:
                room -= 1
                pace -= 1
                shelf.starting += 1
                task = self._spawn(self._start_one(shelf))
                self._starts.add(task)
                task.add_done_callback(self._starts.discard)
            elif is_awaited and coming:
                coming -= 1
            elif not (is_awaited and self._make_room()):
                break

    def _make_room(self) -> bool:
        """End a warm sandbox that nobody waits for, in favour of a caller who waits."""
        if sandbox := take_least_used(self._shelves.values()):
            self._end(sandbox)
        return sandbox is not None

    async def _start_one(self, shelf: Shelf) -> None:
        began = time.monotonic()
        try:
            sandbox = await Sandbox.start(shelf.starter, shelf.template)
            if shelf.owner:
                sandbox.give_to(shelf.owner, reusable=False)
        except SandboxError as error:
            self._start_failed(shelf, error)
            return
        except Exception as error:
            logger.exception("sandbox start failed")
            self._start_failed(shelf, start_failure(type(error).__name__, error))
            return
        finally:
            shelf.starting -= 1
        shelf.start_succeeded(time.monotonic() - began)
        sandbox.closed.add_done_callback(lambda _: self._forget_dead(shelf, sandbox))
        place = self._line.first(shelf.name)
        if place:
            self._serve(place, shelf, sandbox)
        else:
            shelf.idle.append(sandbox)
            self._trim()
        self._refill()

    def _start_failed(self, shelf: Shelf, error: SandboxError) -> None:
        """One caller learns of it at once, and all when it goes on; then it is tried again."""
        delay = shelf.start_failed(error)
        logger.error(
            "sandbox start failed", extra={"template": shelf.name, "reason": error.message}
        )
        while (place := self._line.first(shelf.name)) and (failure := shelf.failure()):
            self._refuse(place, failure)
            if not shelf.is_failing:
                break
        self._refill_in(delay)

    def _forget_dead(self, shelf: Shelf, sandbox: Sandbox) -> None:
        """Replace a sandbox that ended while nobody used it."""
        if not self._closing and shelf.remove(sandbox):
            self._refill_in(shelf.ended_unused(sandbox))
            self._end(sandbox)

    def _trim(self) -> None:
        """End what is beyond the settings and in nobody's use."""
        for sandbox in take_beyond(self._shelves.values(), self._settings):
            self._end(sandbox)
        while self._room() + len(self._ending) < 0 and self._make_room():
            continue

    def _keep_house(self) -> None:
        """End what has been warm, or handed out and unused, for too long; then look again later."""
        oldest = time.monotonic() - self._settings.max_lifetime
        for sandbox in take_older(self._shelves.values(), oldest):
            self._expire(sandbox)
        unused = [each for each in self._busy if not (each.running or each.kept)]
        for sandbox in [each for each in unused if each.used_at < oldest]:
            self._take_back(sandbox)
            self._expire(sandbox)
        self._trim()
        used = {shelf.name for shelf in self._busy.values()}
        used |= {sandbox.template.name for sandbox in self._ending}
        self._shelves.forget(used | {place.template for place in self._line.everybody()})
        if self._housekeeping:
            self._housekeeping.cancel()
        interval = min(HOUSEKEEPING_SECONDS, self._settings.max_lifetime / 4)
        self._housekeeping = asyncio.get_running_loop().call_later(interval, self._keep_house)

    def _expire(self, sandbox: Sandbox) -> None:
        self._expired += 1
        self._end(sandbox)
