"""The seam between the pool and whatever isolates: start one sandbox, watch it, end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from providers.errors import CreationFailed, ProviderUnavailable, RateLimited, SandboxError
from providers.runtime.guest import wire
from providers.runtime.pool.cgroup import Cgroup, ResourceUsage
from providers.runtime.pool.hardening import RUNC, Hardening
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.state_store import SandboxRecord
from providers.runtime.pool.template import Template

# A start that yields to others is to be late on a busy machine, but not to fail of it.
YIELDING_SECONDS = 3.0

# Read now: later this process may be a user who cannot.
OOM_SCORE_ADJ = int(Hardening.of(RUNC).settings["oom_score_adj"])

# What most guests share: nothing, with nobody.
ALONE = "execution"
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Guest(Protocol):
    """A started sandbox: its channel to the guest supervisor and the hold on its processes.

    `sharing` is whom its owner's other runs find here, by a name of `providers.isolation.SHARINGS`;
    `facts` belong into the metadata of every result. One that can outlive the process that started
    it is found again by the name `container` and by `found`, as JSON can hold it; nothing of it is
    secret. For the others `container` is "". `listener` is the socket of `guest.network`,
    bound and not listening, None where it can reach no network. `is_cut` is whether its channel has
    ended and it may go on, so that it can be found again.
    """

    sharing: str = ALONE
    facts: Mapping[str, Any] = NOTHING
    container: str = ""
    found: Mapping[str, Any] = NOTHING
    listener: socket.socket | None = None
    is_cut: bool = False

    async def open(self) -> GuestChannel:
        """Take over the channel, once."""

    def evidence(self) -> ResourceUsage:
        """What kernel or engine recorded so far."""

    def memory_bytes(self) -> int | None:
        """What it uses now, None where the kernel does not tell us."""

    def complaint(self) -> str:
        """What the isolation tool said when the start failed."""

    def watch(self, is_running: bool) -> None:
        """A run begins, or is over. What could not be seen after the end is looked for now."""

    def yield_processors(self, *, yields: bool) -> None:
        """Whether it lets others go first. It does until it is handed out, and after its last run,
        where the kernel can be told so."""

    def note_owner(self, owner: str) -> None:
        """Note outside of the sandbox whose runs it has from now on, where there is a place."""
        return

    def last_words(self) -> str | None:
        """What is known of an end that nobody of ours brought about.

        None: not even that it has ended, only that it cannot be reached any more.
        """

    async def destroy(self) -> None:
        """End everything in it and wait until it is gone. May be called more than once."""

    async def stay(self) -> None:
        """Outlive this process, from now on. Raises SandboxError."""
        raise ProviderUnavailable("This sandbox ends with the process that started it.")

    def leave(self) -> None:
        """Let go of it, and of nothing that is in it. Raises TypeError where it ends with us."""
        raise TypeError("it ends with this process")


class Starter(Protocol):
    """Starts sandboxes of one kind. Used from one event loop only.

    `enforced_by` says by what memory, processes, processor time and the separation of users are
    held.
    """

    runtime: str
    enforced_by: dict[str, str]

    async def start(self, template: Template) -> Guest:
        """Start one sandbox. It is warm when its guest has said so. Raises CreationFailed."""


class Launcher(Starter, Protocol):
    """A starter that is prepared once, and knows the machine's languages.

    Starting and ending take the processors from the run that makes them necessary, and from its
    answer on the way. So the pool lets these go first for `rest_seconds`, unless somebody waits.
    `enforced_by` is known once it is prepared. `counts` are its own figures beside those of the
    pool. `has_network` says whether its sandboxes can be given one: they have a loopback of
    their own.

    What only some can has a default here that says so: kernels for owners, sandboxes that are found
    again.
    """

    rest_seconds: float
    has_network: bool = True

    @property
    def counts(self) -> Mapping[str, int]:
        """Its own figures, by name."""
        return {}

    async def prepare(self) -> None:
        """Check once that sandboxes can be started. Raises SandboxError with the remedy."""

    def languages(self) -> list[str]:
        """The languages whose interpreter is there."""

    def interpreter(self, language: str, template: str = "") -> str | None:
        """Path of a language's interpreter as sandboxes of a template see it, None when there is
        none. Without a name the template is the language's own."""

    def version(self, language: str, template: str) -> str:
        """The template's interpreter, such as `python 3.11.2`, empty where it is not known."""

    def node_runner(self) -> list[str]:
        """The arguments by which Node.js in a sandbox finds our runner."""

    def hurry(self, *, is_wanted: bool) -> None:
        """Whether somebody waits for what is being started: then it does not yield.

        Nothing is done where there is nothing to weigh.
        """
        return

    def close(self) -> None:
        """Release what `prepare` took. Every sandbox is gone."""

    async def disconnect(self) -> None:
        """Wait, for a moment, until what `close` has begun is done."""
        return

    async def hold_template(self, name: str, digest: str, folder: Path) -> bool:
        """Give sandboxes of the template `name` the files in a folder, which have this digest.

        False where each needs a launcher of its own. Raises SandboxError.
        """
        return False

    async def drop_template(self, name: str) -> None:
        """Forget what `hold_template` has made. Raises SandboxError."""
        return

    def for_owner(self, owner: str) -> Starter:
        """What starts sandboxes in a kernel that no other owner's runs are in. Raises SandboxError
        where there is none."""
        raise ProviderUnavailable(
            "isolation: tenant-kernel is not available with this launcher. Start the pool with "
            "POOL_LAUNCHER=gvisor, which needs runsc, or docker with an engine that has runsc, or "
            "choose another isolation.",
            field="isolation",
        )

    async def adopt(
        self, container: str, runtime: str, found: Mapping[str, Any], echo: bytes
    ) -> Guest:
        """Take over a sandbox that a former process of this pool has left.

        Nothing of what it says is heard before `echo`. Raises CreationFailed for one that is gone
        or is not what it was, and ProviderUnavailable where that cannot be known now.
        """
        raise ProviderUnavailable(f"It is none of {self.runtime}'s.")

    async def copies(self) -> list[SandboxRecord]:
        """Return the records of which the engine keeps copies. Raises SandboxError."""
        return []

    async def end(self, container: str) -> None:
        """End one that is not taken over."""
        raise ProviderUnavailable(f"It is none of {self.runtime}'s.")


class PidfdGuest(Guest):
    """A sandbox whose first process we hold by a pidfd. Its end is the end of all in it.

    `at_end` is called once nothing of it is left.
    """

    def __init__(
        self,
        channel: socket.socket,
        pidfd: int,
        cgroup: Cgroup | None,
        at_end: Callable[[], None] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.listener = listener
        self._channel = channel
        self._pidfd = pidfd
        self._cgroup = cgroup
        self._at_end = at_end
        self._gone: asyncio.Future[None] | None = None
        self._ended: asyncio.Event | None = None

    async def open(self) -> GuestChannel:
        return await GuestChannel.open(self._channel)

    def evidence(self) -> ResourceUsage:
        return self._cgroup.evidence() if self._cgroup else ResourceUsage()

    def memory_bytes(self) -> int | None:
        return self._cgroup.memory_bytes() if self._cgroup else None

    def complaint(self) -> str:
        return ""

    def watch(self, is_running: bool) -> None:
        """The group of a sandbox of ours is there until we remove it."""

    def yield_processors(self, *, yields: bool) -> None:
        if self._cgroup:
            self._cgroup.yield_processors(yields=yields)

    def last_words(self) -> str | None:
        return "It ended by itself"

    async def destroy(self) -> None:
        if self._gone is None:
            self._channel.close()
            # Whoever gives up waiting does not take the end from the others.
            self._gone = asyncio.ensure_future(self._end())
        await asyncio.shield(self._gone)

    async def _end(self) -> None:
        self.yield_processors(yields=True)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await self._wait_for_end()
        os.close(self._pidfd)
        if self.listener:
            # The sandbox's network namespace goes with it.
            self.listener.close()
        if self._at_end:
            self._at_end()
        if self._cgroup:
            await self._cgroup.remove()

    async def _wait_for_end(self) -> None:
        """Return when the first process has ended. Any number of tasks may wait."""
        if self._ended is None:
            self._ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._pidfd, self._note_exit, self._ended)
        await self._ended.wait()

    def _note_exit(self, ended: asyncio.Event) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        ended.set()


class ProcessGuest(PidfdGuest):
    """A sandbox that is a child process of ours, with the channel on its stdin and stdout."""

    # How long after its channel the process itself may end.
    _END_SECONDS = 0.5

    def __init__(
        self, command: list[str], cgroup: Cgroup | None, env: Mapping[str, str] | None = None
    ) -> None:
        channel, theirs = socket.socketpair()
        channel.setblocking(False)
        self._stderr = ToolStderr()
        try:
            self._process = start_process(command, theirs, self._stderr, env or {})
        except BaseException:
            channel.close()
            self._stderr.close()
            raise
        finally:
            theirs.close()
        super().__init__(channel, os.pidfd_open(self._process.pid), cgroup)

    async def open(self) -> GuestChannel:
        return await GuestChannel.open(self._channel, before_end=self._note_the_end)

    def complaint(self) -> str:
        return self._stderr.read()

    def last_words(self) -> str | None:
        code = self._process.returncode
        if code is None:
            return super().last_words()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"Its first process on this machine ended with {how}"

    async def _note_the_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._END_SECONDS):
                await self._wait_for_end()
                self._process.poll()

    async def _end(self) -> None:
        await super()._end()
        self._process.wait()
        self._stderr.close()


async def receive_descriptor(channel: socket.socket, kind: bytes, seconds: float) -> int:
    """The descriptor that comes with a byte of this kind on a channel, before all frames.

    Raises OSError with the reason of the other side, and TimeoutError.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        async with start_deadline(seconds):
            await readable.wait()
    finally:
        loop.remove_reader(channel)
    answer, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if answer == kind and fds:
        return fds[0]
    if answer == kind:
        raise OSError(errno.EMFILE, "no descriptor is left for the sandbox")
    if not answer:
        raise ConnectionResetError("the sandbox has ended")
    reason = channel.recv(2000).decode("utf-8", "replace")
    raise OSError(errno.EAGAIN, reason) if answer == wire.EXHAUSTED else OSError(reason)


async def end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for it without a thread."""
    pidfd = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


@contextlib.asynccontextmanager
async def start_deadline(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after this many seconds in which the loop ran.

    A machine that stood still (a paused virtual machine, a disk that does not answer) counts as one
    second of them: what the sandbox sent meanwhile is read first.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def count(left: float) -> None:
        nonlocal timer
        if left <= 0:
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(min(left, 1), count, left - 1)

    timer = loop.call_later(min(seconds, 1), count, seconds - 1)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def hurried_when_late(guest: Guest) -> Iterator[None]:
    """Have its start yield to others, as all that starts does, for YIELDING_SECONDS at most."""
    loop = asyncio.get_running_loop()
    hurry = loop.call_later(YIELDING_SECONDS, partial(guest.yield_processors, yields=False))
    try:
        yield
    finally:
        if loop.time() >= hurry.when():
            guest.yield_processors(yields=True)
        hurry.cancel()


def about(launcher: Launcher) -> dict[str, Any]:
    """What a pool's figures say of its launcher."""
    figures = {
        "runtime": launcher.runtime,
        "enforced_by": dict(launcher.enforced_by),
        "network": launcher.has_network,
    }
    return {**figures, **launcher.counts}


def start_process(
    command: list[str], channel: socket.socket, stderr: ToolStderr, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an isolation tool with `channel` as its stdin and stdout.

    Called from the loop's own thread, which lives as long as the service does: the parent-death
    signal of the tools is tied to the thread that started them. In a session of its own, so that
    neither does a Ctrl-C end it before its time, nor can it signal the group of the service.
    """
    return subprocess.Popen(
        command,
        stdin=channel.fileno(),
        stdout=channel.fileno(),
        stderr=stderr.fileno(),
        env=env,
        start_new_session=True,
    )


def killed_first(command: Sequence[str]) -> list[str]:
    """The same command, which the kernel ends before the service when the machine is short of
    memory. So it does with all that the command starts."""
    script = f'echo {OOM_SCORE_ADJ} 2> /dev/null > /proc/self/oom_score_adj; exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *command]


def start_failure(tool: str, error: Exception, complaint: str = "") -> SandboxError:
    """A start that failed, as the error to raise.

    For want of what the machine may have again in a moment, which a guest may have used up, it is
    a rate limit: to be tried again, and nothing against the provider.
    """
    reason = f"{tool}: {complaint or error or type(error).__name__}"
    if wire.is_exhaustion(error):
        return exhausted(reason)
    return CreationFailed(reason)


def exhausted(reason: str) -> RateLimited:
    return RateLimited(
        f"{reason}. The machine does not have enough free processes, file descriptors or memory "
        "for another sandbox now. Try again later, run fewer at once, or raise its limits."
    )


class ToolStderr:
    """What an isolation tool writes to its stderr: a file in memory, which is ours to close."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("stderr", os.MFD_CLOEXEC)
        self._text: str | None = None

    def fileno(self) -> int:
        """Return the descriptor that the tool is given."""
        return self._fd

    def read(self) -> str:
        """Return its beginning, also after it is closed: the descriptor may be another's then."""
        if self._text is not None:
            return self._text
        return os.pread(self._fd, 2000, 0).decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self._text is None:
            self._text = self.read()
            os.close(self._fd)
