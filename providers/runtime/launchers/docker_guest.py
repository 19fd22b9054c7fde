"""A running container as the pool sees it: its channel, what is known of it, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from providers.runtime.launchers.docker_engine import After, Demultiplexer, End, Started
from providers.runtime.launchers.engine_cgroup import MemoryWatch, find_cgroup, find_process_limit
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.launcher import Guest
from providers.runtime.pool.protocol import GuestChannel

# How often, and how many times, it is looked for after the end what it was of.
LOOK_SECONDS, LAST_LOOKS = 0.02, 15

# How often during a run. From the refusal of a thread to the end of the group 0.1 s were measured.
WATCH_SECONDS = 0.02


class DockerGuest(Guest):
    """A container with a guest in it. `facts` belong into the metadata of every result.

    `destroy` removes the container; `end_of` asks for the engine's record of its end. `stay` has
    it outlive this process. `echo` is what a guest that another process has left says when it has
    heard us.
    """

    def __init__(
        self,
        started: Started,
        facts: dict[str, Any],
        *,
        destroy: Callable[[], Awaitable[None]],
        end_of: Callable[[], Awaitable[End]],
        stay: Callable[[], Awaitable[None]],
        echo: bytes = b"",
    ) -> None:
        self.facts = facts
        self.container = started.id
        self.found: Mapping[str, Any] = {"shape": started.shape, "facts": facts}
        self._stay = stay
        self._after = After(echo)
        self._started = started
        self._destroy = destroy
        self._ask_the_engine = end_of
        self._output = Demultiplexer()
        self._channel: GuestChannel | None = None
        self._cgroup = find_cgroup(started.pid, started.id)
        self._watch = MemoryWatch(self._cgroup) if self._cgroup else None
        self._processes = find_process_limit(started.pid, started.id)
        self._refused = 0
        self._timer: asyncio.TimerHandle | None = None
        self._end = End()
        self._seen_last: ResourceUsage | None = None
        self._ran_out = False
        self._gone: asyncio.Future[None] | None = None

    async def open(self) -> GuestChannel:
        self._started.stream.setblocking(False)
        self._channel = await GuestChannel.open(
            self._started.stream,
            lambda data: self._after.feed(self._output.feed(data)),
            self._note_the_end,
            greets=self._after.is_found,
        )
        return self._channel

    async def stay(self) -> None:
        """Outlive this process, from now on. Raises SandboxError."""
        await self._stay()

    def leave(self) -> None:
        """Let go of it, and of nothing that is in it."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._gone.set_result(None)
            (self._channel or self._started.stream).close()
            self.watch(False)
            if self._watch is not None:
                self._watch.close()

    def evidence(self) -> ResourceUsage:
        seen = self._seen_last or self._look()
        known = seen.out_of_memory or self._ran_out or self._end.out_of_memory
        self._count_refused()
        return replace(seen, out_of_memory=known, refused_processes=self._refused)

    def memory_bytes(self) -> int | None:
        return self._cgroup.memory_bytes() if self._cgroup else None

    def complaint(self) -> str:
        return self._output.complaint

    def last_words(self) -> str | None:
        if self._refused:
            return "It had more processes or threads than it may have"
        code = self._end.exit_code
        return None if code is None else f"The engine saw it end with exit code {code}"

    def yield_processors(self, *, yields: bool) -> None:
        """Its group has the weight that the engine has given it."""

    def watch(self, is_running: bool) -> None:
        """Look again and again during a run at what is gone when the container has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if is_running and self._processes is not None and not self._refused:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look_on)

    def _look_on(self) -> None:
        self._count_refused()
        self.watch(True)

    def _count_refused(self) -> None:
        if self._processes is not None:
            self._refused = max(self._refused, self._processes.refused())

    async def destroy(self) -> None:
        if self._gone is None:
            (self._channel or self._started.stream).close()
            self._gone = asyncio.ensure_future(self._end_it())
        await asyncio.shield(self._gone)

    async def _end_it(self) -> None:
        await self._destroy()
        if self._watch is not None:
            self._watch.close()

    async def _note_the_end(self) -> None:
        """A container that ends takes its cgroup along, so the engine's record is asked for."""
        self._look_on()
        self.watch(False)
        self._seen_last = self._look()
        self._end = await self._ask_the_engine()
        for _ in range(LAST_LOOKS):
            self._ran_out = self._watch is not None and self._watch.ran_out()
            if self._ran_out or self._end.out_of_memory:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> ResourceUsage:
        return self._cgroup.evidence() if self._cgroup else ResourceUsage()
