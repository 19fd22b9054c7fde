"""A gVisor kernel for each tenant, in which a process of ours makes the tenant's runs.

A fresh gVisor sandbox takes a second kernel's start; here only the first run of a tenant pays for
it. Between runs of one tenant stand namespaces, a user, a memory cgroup and a system call filter
of each run's own, all of them gVisor's. Between tenants nothing is shared.

A kernel is renewed after MOST_RUNS, after MOST_SECONDS, when nobody has used it for IDLE_SECONDS,
and at any doubt: when a run could not be ended, broke the protocol, or ended by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from providers.errors import CreationFailed, SandboxError
from providers.runtime.guest import lanes, wire
from providers.runtime.guest.lanes import LaneError
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.launcher import Guest, Starter, start_failure
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.template import WORKSPACE, Template

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
MOST_SECONDS = 900.0
IDLE_SECONDS = 60.0

# Of different tenants, kept although nothing is in them.
MOST_IDLE = 8

# What the kernel and what makes runs in it need for themselves.
KERNEL_BYTES = 128 << 20
# The same for each run: its supervisor, and the kernel's own notes on it.
RUN_BYTES = 24 << 20

# How long a run that was told to end may take before its kernel is ended, and how much longer while
# another is being started: what makes runs may import libraries for it, and hears of no end then.
END_SECONDS, START_SECONDS = 5.0, 30.0


def needed_bytes(template: Template) -> int:
    """What a run of it may have, with what is there for it alone."""
    return template.limits.memory_bytes + RUN_BYTES


class KernelHost(Protocol):
    """What a kernel runs in: a process of `runsc` or a container of an engine.

    `most_bytes` is what it may have where that cannot be changed any more. `facts` belong into the
    metadata of every result.
    """

    most_bytes: int | None
    facts: Mapping[str, Any]

    async def connect(self) -> socket.socket:
        """Its stream, once it has started. Raises OSError or SandboxError."""

    def decode(self, data: bytes) -> bytes:
        """What of the stream's bytes is the kernel's."""

    def evidence(self) -> ResourceUsage: ...
    def complaint(self) -> str: ...
    def resize(self, memory_bytes: int) -> None: ...
    def yield_processors(self, *, yields: bool) -> None: ...
    async def destroy(self) -> None: ...
    def destroy_now(self) -> None: ...


class TenantKernels:
    """The kernels of all owners. Lives in one event loop."""

    def __init__(
        self,
        start: Callable[[Template, int], KernelHost],
        enforced_by: Mapping[str, str],
        kind_of: Callable[[Template], str] = lambda _: "",
    ) -> None:
        """`start` starts one for runs such as this, that may have so many bytes at first. Runs of
        which `kind_of` differs are in different kernels. `enforced_by` is what holds for them."""
        self.enforced_by = {
            **enforced_by,
            "memory": f"supervisor, by gVisor's count; all of a tenant's: {enforced_by['memory']}",
            "cpu_seconds": "supervisor",
            "users": "uid per run in the tenant's gVisor kernel",
            "system_calls": "seccomp, gVisor",
        }
        self._start_sentry = start
        self._kind_of = kind_of
        self._current: dict[tuple[str, str], list[_Kernel]] = {}
        self._all: set[_Kernel] = set()

    def of(self, owner: str) -> Starter:
        """What starts runs in this owner's kernel."""
        if not owner:
            raise ValueError("a tenant's kernel has an owner")
        return _OwnersKernel(self, owner)

    async def start(self, owner: str, template: Template) -> Guest:
        """A run in the kernel of this owner, which is started if need be. Raises SandboxError."""
        key = owner, self._kind_of(template)
        for kernel in list(self._current.get(key, ())):
            if not kernel.usable:
                self._current[key].remove(kernel)
                kernel.retire()
            elif kernel.fits(template):
                return await kernel.start(template)
        return await self._make(key, template).start(template)

    def close(self) -> None:
        """End all of them."""
        for kernel in list(self._all):
            kernel.destroy_now()
        self._all.clear()
        self._current.clear()

    def _make(self, key: tuple[str, str], template: Template) -> _Kernel:
        idle = sorted((each for each in self._all if not each.count), key=lambda each: each.used_at)
        for each in idle[: max(0, len(idle) + 1 - MOST_IDLE)]:
            each.end("other kernels need its place")
        sentry = self._start_sentry(template, KERNEL_BYTES)
        kernel = _Kernel(sentry, lambda: self._forget(key, kernel))
        self._all.add(kernel)
        self._current.setdefault(key, []).append(kernel)
        return kernel

    def _forget(self, key: tuple[str, str], kernel: _Kernel) -> None:
        self._all.discard(kernel)
        kept = [each for each in self._current.get(key, ()) if each is not kernel]
        if kept:
            self._current[key] = kept
        else:
            self._current.pop(key, None)


class _OwnersKernel:
    def __init__(self, kernels: TenantKernels, owner: str) -> None:
        self.runtime = "gvisor"
        self.enforced_by = kernels.enforced_by
        self._kernels = kernels
        self._owner = owner

    async def start(self, template: Template) -> Guest:
        return await self._kernels.start(self._owner, template)


class _Kernel:
    """One gVisor kernel of one owner."""

    def __init__(self, sentry: KernelHost, at_end: Callable[[], None]) -> None:
        self.sentry = sentry
        self.used_at = self._started_at = time.monotonic()
        self._at_end = at_end
        self._retired = self._closed = False
        self._ending: asyncio.Task[None] | None = None
        self._runs = 0
        self._allowed: dict[TenantGuest, int] = {}
        self._idle: asyncio.TimerHandle | None = None
        self.stream = Lanes(self._note_the_end, sentry.decode)
        self._opened = asyncio.get_running_loop().create_task(self._open())

    @property
    def count(self) -> int:
        """How many runs are in it, warm ones included."""
        return len(self._allowed)

    @property
    def is_starting(self) -> bool:
        """Whether a run of it is being made, and may still come."""
        since = time.monotonic() - START_SECONDS
        return any(
            guest.lane and guest.began_at > since and not guest.lane.has_spoken
            for guest in self._allowed
        )

    @property
    def usable(self) -> bool:
        """Whether it may have another run."""
        young = time.monotonic() - self._started_at < MOST_SECONDS
        return self.stream.alive and not self._retired and young and self._runs < MOST_RUNS

    def fits(self, template: Template) -> bool:
        """Whether there is room for another run beside those that are in it."""
        most = self.sentry.most_bytes
        return most is None or self._bytes + needed_bytes(template) <= most

    @property
    def _bytes(self) -> int:
        return KERNEL_BYTES + sum(self._allowed.values())

    async def start(self, template: Template) -> Guest:
        self._runs += 1
        guest = TenantGuest(self)
        # Counted from here on, so that it does not end as idle meanwhile.
        self._allow(guest, needed_bytes(template))
        argument = template.guest_argument(workspace=WORKSPACE, watch_memory=True)
        try:
            await asyncio.shield(self._opened)
            guest.facts = self.sentry.facts
            guest.lane, guest.end = await self.stream.open(argument.encode())
        except SandboxError:
            self.release(guest)
            self.end("it could not be started")
            raise
        except OSError as error:
            self.release(guest)
            if not wire.is_exhaustion(error):
                self.end("it cannot be reached")
            raise start_failure("gVisor", error, self.complaint()) from error
        except BaseException:
            self.release(guest)
            raise
        guest.lane.ended.add_done_callback(lambda _: self.release(guest))
        return guest

    def complaint(self) -> str:
        return self.stream.failure or self.sentry.complaint()

    def retire(self) -> None:
        """Have no more runs made in it; it ends with the last of those that are."""
        self._retired = True
        self._end_if_unused()

    def doubt(self, reason: str) -> None:
        """Something of it is not as it should be: nothing new runs in it, whoever is running may
        finish."""
        if not self.stream.alive:
            return
        if not self._retired:
            logger.warning("replacing a tenant's kernel: %s", reason)
        self._retired = True
        for guest in list(self._allowed):
            if not guest.running and guest.lane is not None:
                guest.lane.end()
        self._end_if_unused()

    def end(self, reason: str) -> None:
        """End it, and every run in it."""
        if self._ending is None:
            logger.info("ending a tenant's kernel: %s", reason)
            self._retired = True
            self._ending = asyncio.get_running_loop().create_task(self._end())

    def destroy_now(self) -> None:
        """The same, waiting for it."""
        self._retired = self._closed = True
        if self._idle:
            self._idle.cancel()
        self.stream.close()
        self.sentry.destroy_now()

    def release(self, guest: TenantGuest) -> None:
        """Nothing is left of this run."""
        if self._allowed.pop(guest, None) is not None:
            self.used_at = time.monotonic()
            self._resize()
            self.weigh()
            self._end_if_unused()

    def weigh(self) -> None:
        """Yield the processors while it only makes runs, and clears up after them."""
        self.sentry.yield_processors(yields=not any(each.wanted for each in self._allowed))

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.stream, sock=await self.sentry.connect())

    def _allow(self, guest: TenantGuest, memory_bytes: int) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None
        self._allowed[guest] = memory_bytes
        self._resize()

    def _resize(self) -> None:
        """All of it may have what its runs may have together."""
        # Memory of a run that has ended is given back a little later: then the next one asks.
        with contextlib.suppress(OSError):
            self.sentry.resize(self._bytes)

    def _end_if_unused(self) -> None:
        if self._allowed or self._ending or not self.stream.alive:
            return
        if self._retired:
            self.end("it is replaced")
        elif self._idle is None:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_SECONDS, self.end, "it was idle")

    def _note_the_end(self) -> None:
        """Its stream has ended, whoever ended it."""
        if self._ending is None and not self._closed:
            memory = " of memory" if self.sentry.evidence().out_of_memory else ""
            logger.error("a tenant's kernel has ended%s: %s", memory, self.complaint())
            self.end("it is gone")

    async def _end(self) -> None:
        if self._idle:
            self._idle.cancel()
        with contextlib.suppress(OSError, SandboxError):
            await self._opened
        self.stream.close()
        await self.sentry.destroy()
        self._at_end()


class TenantGuest(Guest):
    """One run in a tenant's kernel."""

    sharing = "tenant-kernel"

    def __init__(self, kernel: _Kernel) -> None:
        self.lane: Lane | None = None
        self.end: socket.socket | None = None
        self.running = self.wanted = False
        self.began_at = time.monotonic()
        self.facts: Mapping[str, Any] = {}
        self._kernel = kernel
        self._channel: GuestChannel | None = None
        self._destroyed = False

    async def open(self) -> GuestChannel:
        if self.lane is None or self.end is None:
            raise CreationFailed("gVisor: the run was not started.")
        self._channel = await GuestChannel.open(self.end)
        return self._channel

    def evidence(self) -> ResourceUsage:
        """What its supervisor sees is all there is: the machine knows the whole kernel only, of
        which an end for memory may be the doing of any run in it."""
        return ResourceUsage()

    def memory_bytes(self) -> int | None:
        return None

    def complaint(self) -> str:
        return self.last_words() or self._kernel.complaint()

    def watch(self, is_running: bool) -> None:
        self.running = is_running
        over = self._channel is not None and self._channel.closed.done()
        if not is_running and over and not self._destroyed:
            self._kernel.doubt("a run ended by itself or broke the protocol")

    def yield_processors(self, *, yields: bool) -> None:
        """Its kernel does while none of its runs is handed out."""
        self.wanted = not yields
        self._kernel.weigh()

    def last_words(self) -> str | None:
        """None where the kernel is gone: that is not known to be this run's doing."""
        if self.lane is None or not self.lane.ended.done():
            return None
        return self.lane.ended.result()

    async def destroy(self) -> None:
        self._destroyed = True
        if self.lane is None or self.end is None:
            return
        self.lane.end()
        self.end.close()
        for seconds in (END_SECONDS, START_SECONDS):
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.shield(self.lane.ended)
                return
            except TimeoutError:
                if not self._kernel.is_starting:
                    break
        self._kernel.end("a run in it could not be ended")


REASON_LIMIT = 500


class Lane(asyncio.Protocol):
    """One run's stream. Its other end is the socket that `open` has returned.

    `ended` is done once nothing of the run is left, with how it ended in words, or once the kernel
    is gone: then its result is None. `has_spoken` once anything has come from it.
    """

    def __init__(self, stream: Lanes, number: int) -> None:
        self.number = number
        self.has_spoken = False
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._credit = lanes.WINDOW
        self._held = bytearray()
        self._granted = lanes.WINDOW
        self._taken = 0
        self._full = False
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.end()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._grant()

    def more_credit(self, count: int) -> None:
        """The kernel takes so many more bytes. Raises LaneError."""
        self._credit += count
        if self._credit > lanes.WINDOW:
            raise LaneError("more credit than the window")
        self._send()

    def receive(self, data: bytes) -> None:
        """Bytes of the run's. Raises LaneError."""
        self.has_spoken = True
        self._granted -= len(data)
        if self._granted < 0:
            raise LaneError("the kernel has sent more than it has credit for")
        self._taken += len(data)
        if self._transport is not None:
            self._transport.write(data)
        if not self._full:
            self._grant()

    def end(self) -> None:
        """Have the kernel end the run, if there is anything of it."""
        if not self._closed:
            self._closed = True
            self._held.clear()
            if not self.ended.done():
                self._stream.write(lanes.pack(self.number, lanes.END))
            if self._transport is not None:
                self._transport.abort()

    def note_the_end(self, how: str | None) -> None:
        """Nothing of it is left; how it ended, None where the kernel is gone."""
        if not self.ended.done():
            self.ended.set_result(how)
        self._closed = True
        if self._transport is not None:
            # What was written before is still delivered.
            self._transport.close()

    def _send(self) -> None:
        if self._closed:
            return
        while self._held and self._credit:
            part = bytes(self._held[: min(self._credit, lanes.MESSAGE_LIMIT)])
            del self._held[: len(part)]
            self._credit -= len(part)
            self._stream.write(lanes.pack(self.number, lanes.DATA, part))
        if self._transport is not None and not self._transport.is_closing():
            if self._held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _grant(self) -> None:
        if self._taken >= lanes.WINDOW // 2 and not self._closed:
            self._granted += self._taken
            self._stream.write(lanes.pack_credit(self.number, self._taken))
            self._taken = 0


class Lanes(asyncio.Protocol):
    """All lanes of one kernel. `at_end` is called once when its stream has ended, however.

    `decode` takes off what an engine puts around the bytes of the kernel.
    """

    def __init__(
        self, at_end: Callable[[], None], decode: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.failure = ""
        self.alive = True
        self._at_end = at_end
        self._decode = decode
        self._parser = lanes.Parser()
        self._transport: asyncio.WriteTransport | None = None
        self._early = bytearray()
        self._lanes: dict[int, Lane] = {}
        self._last = 0

    @property
    def count(self) -> int:
        """How many runs of which something is left."""
        return len(self._lanes)

    async def open(self, template: bytes) -> tuple[Lane, socket.socket]:
        """Have the kernel make a run for this template: its lane, and the end to speak to it by.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._last += 1
        lane = Lane(self, self._last)
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: lane, sock=ours)
            if not self.alive:
                raise ConnectionResetError(self.failure or "the tenant's kernel has ended")
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._lanes[lane.number] = lane
        self.write(lanes.pack(lane.number, lanes.START, template))
        return lane, theirs

    def write(self, data: bytes) -> None:
        """Say something, if anybody is there."""
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, content in self._parser.feed(self._decode(data)):
                self._receive(number, kind, content)
        except LaneError as error:
            self.failure = self.failure or str(error)
            logger.error("ending a tenant's kernel: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.alive:
            self.alive = False
            for lane in self._lanes.values():
                lane.note_the_end(None)
            self._lanes.clear()
            self._at_end()

    def close(self) -> None:
        """Speak no more. The kernel ends when it notices."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def _receive(self, number: int, kind: int, content: bytes) -> None:
        if kind == lanes.FAILED:
            raise LaneError(content[:REASON_LIMIT].decode("utf-8", "replace"))
        lane = self._lanes.get(number)
        if lane is None:
            raise LaneError("it sent a message for an unknown run")
        if kind == lanes.DATA:
            lane.receive(content)
        elif kind == lanes.CREDIT:
            lane.more_credit(lanes.credit(content))
        elif kind == lanes.ENDED:
            code, reason = _read_end(content)
            del self._lanes[number]
            lane.note_the_end(_in_words(code, reason))
            if reason and code is not None:
                # It has ended, and something of it is left.
                raise LaneError(reason)
        else:
            raise LaneError("it sent an unexpected message")


def _read_end(content: bytes) -> tuple[int | None, str]:
    try:
        told = json.loads(content)
        code, reason = told["code"], told["reason"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaneError("an unreadable end message") from error
    return code if type(code) is int else None, str(reason)[:REASON_LIMIT]


def _in_words(code: int | None, reason: str) -> str:
    if code is None:
        return reason
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"Its first process ended with {how}"
