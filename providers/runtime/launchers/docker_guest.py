"""A running container as the pool sees it: its channel, what is known of it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from providers.runtime.guest.processes import read_small
from providers.runtime.launchers.container_guest import After
from providers.runtime.launchers.docker_engine import Demultiplexer, End, Recipe, Started
from providers.runtime.launchers.tenant_kernel import KERNEL_BYTES, needed_bytes
from providers.runtime.pool.cgroup import ROOT, Cgroup, ResourceUsage, own_groups
from providers.runtime.pool.launcher import Guest
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.template import Template

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


class ProcessLimit:
    """The limit of processes and threads of a container's group."""

    def __init__(self, path: Path) -> None:
        self._events = f"{path}/pids.events"

    def refused(self) -> int:
        """How many were refused so far. 0 when the group is gone, with which this goes too."""
        try:
            return int(read_small(self._events).split()[1])
        except OSError:
            return 0


def find_process_limit(
    pid: int, container: str, root: Path = ROOT, proc: Path = Path("/proc")
) -> ProcessLimit | None:
    """That of a container, where the engine runs on this host and lets us read it."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = root / path.lstrip("/")
            if "pids" in controllers.split(","):
                group = root / "pids" / path.lstrip("/")
            if container in path and (group / "pids.events").exists():
                return ProcessLimit(group)
    return None


class MemoryWatch:
    """Whether memory ran out in a container's group, known also when the group is gone.

    The engine removes the group with the container, and notes the reason only where it learned of
    it before the end, which it sometimes does not.
    """

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._signals = 0
        self._eventfd = -1
        if cgroup.version == 1:
            with contextlib.suppress(OSError):
                self._register()

    def ran_out(self) -> bool:
        """As far as it is known now. The kernel's last word comes a moment after the end."""
        if self._cgroup.evidence().out_of_memory:
            return True
        if self._eventfd >= 0:
            with contextlib.suppress(BlockingIOError):
                self._signals += os.eventfd_read(self._eventfd)
        # One signal for each time that memory ran out, and one when the group is removed.
        return self._signals > (0 if self._cgroup.path.exists() else 1)

    def close(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def _register(self) -> None:
        """Documentation/admin-guide/cgroup-v1/memory.rst of Linux, section 10."""
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            control = os.open(self._cgroup.path / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                path = self._cgroup.path / "cgroup.event_control"
                path.write_text(f"{eventfd} {control}")
            finally:
                os.close(control)
        except BaseException:
            os.close(eventfd)
            raise
        self._eventfd = eventfd


def find_cgroup(
    pid: int, container: str, root: Path = ROOT, proc: Path = Path("/proc")
) -> Cgroup | None:
    """The memory group of a container, where the engine runs on this host and lets us read it."""
    with contextlib.suppress(OSError):
        groups = {
            name: path for name, path in own_groups(proc, str(pid)).items() if container in path
        }
        if "memory" in groups:
            cpu = groups.get("cpuacct")
            return Cgroup(
                root / "memory" / groups["memory"].lstrip("/"),
                1,
                root / "cpuacct" / cpu.lstrip("/") if cpu else None,
            )
        if "" in groups and (root / "cgroup.controllers").exists():
            return Cgroup(root / groups[""].lstrip("/"), 2)
    return None
