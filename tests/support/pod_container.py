"""A container of a Pod: a process of runc or runsc with its streams, held until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from providers.runtime.pool.cgroup import ROOT as CGROUPS
from providers.runtime.pool.cgroup import Cgroup
from tests.support.processes import command_line

# Of what it has written, so much is kept for `kubectl logs`.
LOG_BYTES = 1 << 20
_CHUNK = 1 << 16

Sink = Callable[[int, bytes], Awaitable[None]]


@dataclass(frozen=True)
class End:
    """How a container has ended. `reason` is what a kubelet has in its status."""

    code: int
    reason: str


class Attachment:
    """A connection that has the streams of a container. `send` takes a stream's number and bytes."""

    def __init__(self, send: Sink) -> None:
        self.send = send
        self.over = asyncio.Event()


class Container:
    """Runs a bundle. What it writes is read at all times, and goes to the one that is attached."""

    def __init__(
        self,
        tool: str,
        folder: Path,
        name: str,
        cgroup: Cgroup,
        *,
        has_input: bool,
        input_once: bool,
    ) -> None:
        self.folder = folder
        self.name = name
        self.cgroup = cgroup
        self.log = bytearray()
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._is_gvisor = os.path.basename(tool) == "runsc"
        self._tool = [tool, "--root", str(folder / "state")]
        if self._is_gvisor:
            self._tool += ["--network=none", "--ignore-cgroups", "--host-uds=none"]
            self._tool += ["--overlay2=none"]
        self._has_input = has_input
        self._input_once = input_once
        self._input: asyncio.StreamWriter | None = None
        self._pid: int | None = None
        self._helpers: set[int] = set()
        self._attachment: Attachment | None = None
        self._removal: asyncio.Task[None] | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start it. Raises OSError with what the runtime says."""
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if self._has_input:
                read, write = os.pipe2(os.O_CLOEXEC)
                theirs.append(read)
                ours.append(write)
            else:
                theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for _ in range(2):
                read, write = os.pipe2(os.O_CLOEXEC)
                theirs.append(write)
                ours.append(read)
            work = asyncio.create_task(self._run(theirs))
            try:
                failed = await asyncio.shield(work)
            except asyncio.CancelledError:
                # What has begun has to be known, or it could not be removed.
                await work
                raise
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        *inputs, out, error = ours
        if inputs:
            self._input = await _writer(inputs[0])
        for number, fd in ((1, out), (2, error)):
            reader = await _reader(fd)
            self._pumps.append(asyncio.create_task(self._pump(number, reader)))
        if failed:
            await self._end_streams()
            raise OSError(self.log.decode(errors="replace").strip() or f"exit code {failed}")

    async def _run(self, streams: list[int]) -> int:
        """The exit code of the runtime, 0 where the container runs."""
        loop = asyncio.get_running_loop()
        pid_file = self.folder / "pid"
        command = [*self._tool, "run", "--detach", "--pid-file", str(pid_file)]
        command += ["--bundle", str(self.folder), self.name]
        if self._is_gvisor:
            for path in self.cgroup.procs:
                command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', path, *command]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
        )
        if code := await process.wait():
            return code
        # It is our child now, as this process adopts what has lost its parent. So is the file
        # server of gVisor.
        self._pid = int(pid_file.read_text())
        if self._is_gvisor:
            self._helpers = _children_of(self.name) - {self._pid}
        pidfd = os.pidfd_open(self._pid)
        loop.add_reader(pidfd, self._at_end, pidfd)
        return 0

    def _at_end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        assert self._pid is not None
        _, status = os.waitpid(self._pid, 0)
        self._pid = None
        code = os.waitstatus_to_exitcode(status)
        code = code if code >= 0 else 128 - code
        if self.cgroup.evidence().out_of_memory:
            self.end.set_result(End(code, "OOMKilled"))
        else:
            self.end.set_result(End(code, "Error" if code else "Completed"))

    async def _pump(self, number: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            self.log += data
            del self.log[:-LOG_BYTES]
            if attachment := self._attachment:
                with contextlib.suppress(ConnectionError):
                    await attachment.send(number, data)

    def attach(self, send: Sink) -> Attachment:
        """Give the streams to a connection. One that has had them is over."""
        if self._attachment:
            self._attachment.over.set()
        self._attachment = Attachment(send)
        return self._attachment

    async def write(self, attachment: Attachment, data: bytes) -> None:
        """Write to its standard input, for the one that has the streams."""
        if self._input and self._attachment is attachment:
            self._input.write(data)
            with contextlib.suppress(ConnectionError):
                await self._input.drain()

    def detach(self, attachment: Attachment) -> None:
        """The end of a connection, which is that of the input where this is taken once."""
        if self._attachment is attachment:
            self._attachment = None
            if self._input_once and self._input:
                self._input.close()
                self._input = None

    async def exec(self, words: Sequence[str], process: Mapping[str, Any], number: int) -> Any:
        """Start a command in it, with the rights of its own process, and return that process."""
        described = {**process, "args": list(words)}
        path = self.folder / f"exec-{number}.json"
        path.write_text(json.dumps(described))
        return await asyncio.create_subprocess_exec(
            *(*self._tool, "exec", "--process", str(path), self.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_CHUNK,
        )

    async def signal(self, number: int) -> None:
        """Send a signal to its process 1, if there is one."""
        if self._pid is None:
            return
        if self._is_gvisor and number != signal.SIGKILL:
            await self._ask("kill", self.name, str(int(number)))
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def _ask(self, *words: str) -> None:
        """Run a command of the runtime, whatever comes of it."""
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *self._tool, *words, stdout=silent, stderr=silent
        )
        await process.wait()

    async def remove(self) -> None:
        """Kill it, and remove what it has left. That goes on where the caller is cancelled."""
        if self._removal is None:
            self._removal = asyncio.create_task(self._remove())
        await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        await self.signal(signal.SIGKILL)
        if self._pid is not None:
            await self.end
        await self._end_streams()
        await self._ask("delete", "--force", self.name)
        for pid in self._helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._helpers.clear()
        await self.cgroup.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def read_all(self) -> None:
        """Wait until all that it has written has been read. It has ended by now."""
        await asyncio.wait(self._pumps, timeout=10)

    async def _end_streams(self) -> None:
        if self._attachment:
            self._attachment.over.set()
        if self._input:
            self._input.close()
            self._input = None
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1)
        for task in self._pumps:
            task.cancel()
        self._pumps.clear()


def _children_of(name: str) -> set[int]:
    """The children of this process that have the container's name in their command line."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return {pid for pid in map(int, children) if name.encode() in command_line(pid).split(b"\0")}


def cgroup_path(cgroup: Cgroup) -> str:
    """A group as runc takes it: on version 1 below the group of this process."""
    if cgroup.version == 2:
        return f"/{cgroup.path.relative_to(CGROUPS)}"
    return f"{cgroup.path.parent.name}/{cgroup.path.name}"


async def _reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    pipe = os.fdopen(fd, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "wb", buffering=0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    return asyncio.StreamWriter(transport, protocol, None, loop)
