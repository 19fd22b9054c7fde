"""A running container as the pool sees it: its channel, what is known of it, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from providers.pool.cgroup import Evidence, find_cgroup
from providers.pool.channel import GuestChannel
from providers.pool.launchers.docker_engine import End, Started
from providers.pool.launchers.docker_stream import Demultiplexer


class DockerGuest:
    """A container with a guest in it. `facts` belong into the metadata of every result.

    `destroy` removes the container; `end_of` asks for the engine's record of its end.
    """

    def __init__(
        self,
        started: Started,
        facts: dict[str, Any],
        *,
        destroy: Callable[[], Awaitable[None]],
        end_of: Callable[[], Awaitable[End]],
    ) -> None:
        self.facts = facts
        self._started = started
        self._destroy = destroy
        self._ask_the_engine = end_of
        self._output = Demultiplexer()
        self._channel: GuestChannel | None = None
        self._cgroup = find_cgroup(started.pid, started.id)
        self._end = End()
        self._seen_last: Evidence | None = None
        self._gone: asyncio.Future[None] | None = None

    async def open(self) -> GuestChannel:
        self._started.stream.setblocking(False)
        self._channel = await GuestChannel.open(
            self._started.stream, self._output.feed, self._note_the_end
        )
        return self._channel

    def evidence(self) -> Evidence:
        seen = self._seen_last or self._look()
        return replace(seen, out_of_memory=seen.out_of_memory or self._end.out_of_memory)

    def complaint(self) -> str:
        return self._output.complaint

    def last_words(self) -> str:
        code = self._end.exit_code
        return "" if code is None else f"The engine saw it end with exit code {code}"

    async def destroy(self) -> None:
        if self._gone is None:
            (self._channel or self._started.stream).close()
            self._gone = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._gone)

    async def _note_the_end(self) -> None:
        """A container that ends takes its cgroup along, so the engine's record is asked for."""
        self._seen_last = self._look()
        self._end = await self._ask_the_engine()

    def _look(self) -> Evidence:
        return self._cgroup.evidence() if self._cgroup else Evidence()
