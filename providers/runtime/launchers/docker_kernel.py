"""A container of an engine as a tenant's gVisor kernel: how it is made, and its stream."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from providers.runtime.launchers.docker_engine import Demultiplexer, Recipe, Started
from providers.runtime.launchers.tenant_kernel import KERNEL_BYTES, needed_bytes
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.template import Template

# gVisor's own runtime cannot give a container more memory once it runs: so many runs find room in
# one, and a tenant that has more at once gets another one.
MOST_AT_ONCE = 6

# To make namespaces and to mount, in gVisor's kernel alone.
_CAPABILITY = "SYS_ADMIN"


def kernel_argument(program: bytes) -> str:
    """What the guest reads that makes runs: their filter of system calls."""
    return json.dumps({"makes_runs": True, "filter": program.hex()}, separators=(",", ":"))


def kernel_recipe(recipe: Recipe, template: Template, processors: int) -> Recipe:
    """That of one sandbox, made into that of a kernel for MOST_AT_ONCE of them.

    Only for a runtime that was seen to be gVisor: what is added means much on any other.
    """
    host = dict(recipe.host)
    memory = KERNEL_BYTES + MOST_AT_ONCE * needed_bytes(template)
    host["Memory"] = host["MemorySwap"] = memory
    host["PidsLimit"] *= MOST_AT_ONCE
    host["NanoCpus"] *= min(MOST_AT_ONCE, processors)
    host["CapAdd"] = [*host["CapAdd"], _CAPABILITY]
    # It ends with this process: nothing in it outlives who made it.
    return replace(recipe, host=host, ends_with_stream=True)


class DockerKernelHost:
    """One such container, from its making to its removal."""

    def __init__(
        self,
        make: Callable[[], Awaitable[Started]],
        remove: Callable[[], Awaitable[None]],
        remove_now: Callable[[], object],
        template: Template,
        facts: Mapping[str, Any],
    ) -> None:
        """`make` raises SandboxError, after which nothing is left."""
        self.most_bytes: int | None = KERNEL_BYTES + MOST_AT_ONCE * needed_bytes(template)
        self.facts = facts
        self._make, self._remove, self._remove_now = make, remove, remove_now
        self._output = Demultiplexer()
        self._making: asyncio.Task[Started] | None = None

    async def connect(self) -> socket.socket:
        self._making = asyncio.ensure_future(self._make())
        started = await asyncio.shield(self._making)
        started.stream.setblocking(False)
        return started.stream

    def decode(self, data: bytes) -> bytes:
        return self._output.feed(data)

    def evidence(self) -> ResourceUsage:
        """Nothing that would say more of a run than that the kernel is gone."""
        return ResourceUsage()

    def complaint(self) -> str:
        return self._output.complaint

    def resize(self, memory_bytes: int) -> None:
        """It has what it may ever have."""

    def yield_processors(self, *, yields: bool) -> None:
        """Its group has the weight that the engine has given it."""

    async def destroy(self) -> None:
        if self._making is not None:
            # What is being made is removed by whoever makes it, if that fails.
            await asyncio.wait([self._making])
            if self._making.exception() is None:
                await self._remove()

    def destroy_now(self) -> None:
        """Have it removed, without an event loop that could wait."""
        self._remove_now()
