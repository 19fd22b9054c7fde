"""A process as a client of Codex knows it: what is to be started, and what is kept of it.

All of it is state of the event loop.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import deque
from contextlib import suppress
from typing import Any
from uuid import UUID

from executions.doors.codex.messages import INVALID_REQUEST, Failure, Paths, Read, Start, plain
from executions.doors.codex.recovery import Name
from executions.runs.models import Execution
from executions.sessions.requests import CommandRequest, TerminalSize
from providers.sandbox import below_workspace

# Of the output of one, for who asks again; the record has more.
KEPT_BYTES = 256 * 1024
# Each piece takes more memory than its bytes, and a process may put out one byte at a time.
MOST_PIECES = 8192
MOST_WAIT_SECONDS = 60.0
# Writes that are known again when a client repeats one after a broken connection.
MOST_WRITES = 256
# Of the input of one that waits for its approval.
MOST_HELD_BYTES = 64 * 1024
_SHELLS = ("bash", "/bin/bash", "/usr/bin/bash")
_SCRIPT = (("-lc",), ("-c",), ("-l", "-c"))


def command_of(wanted: Start, paths: Paths, agent: str) -> CommandRequest:
    """Return what is to be started. Raises Failure and InvalidConfiguration.

    The file permissions that a client wishes for (`sandbox`) are about its user's machine. They are
    not carried out here: the answer says so, and the sandbox of the session holds in any case.
    """
    if not wanted.argv:
        raise Failure(INVALID_REQUEST, "argv must not be empty")
    if wanted.arg0 not in (None, wanted.argv[0]):
        raise Failure(INVALID_REQUEST, "arg0: Another name for the program is not supported.")
    if wanted.network_proxy is not None:
        raise Failure(INVALID_REQUEST, "networkProxy: The network is the session's own.")
    path = paths.to_path(wanted.cwd, "cwd")
    below = below_workspace(path)
    argv, script = wanted.argv, ""
    if argv[0] in _SHELLS and tuple(argv[1:-1]) in _SCRIPT and argv[-1]:
        # As the shell's own text a command is looked at and recorded as such.
        argv, script = [], argv[-1]
    policy = wanted.env_policy.set if wanted.env_policy else {}
    metadata = wanted.metadata
    return CommandRequest(
        command=argv,
        shell=script,
        cwd=path if below is None else below,
        env={**policy, **wanted.env},
        stdin=wanted.pipe_stdin and not wanted.tty,
        pty=TerminalSize(cols=80, rows=24) if wanted.tty else None,
        background=True,
        agent=agent,
        conversation=plain(metadata.thread_id, 255) if metadata else "",
    )


class Process:
    """One, from when its client names it until nobody can ask for it any more."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.id = name.process_id
        self.is_tty = name.is_tty
        self.takes_input = name.takes_input
        # Set where its client has said up to which number it knows all.
        self.is_resumed = asyncio.Event()
        self.execution_id: UUID | None = None
        # Whether it waits for its approval, and what was written to it meanwhile.
        self.is_waiting = False
        self.held = bytearray()
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.failure: str | None = None
        self.is_closed = False
        self.writing = asyncio.Lock()
        self.writes: deque[str] = deque(maxlen=MOST_WRITES)
        self._chunks: deque[tuple[int, str, bytes]] = deque()
        self._kept = 0
        self._seq = 0
        self._changed = asyncio.Event()

    def resume(self, after: int) -> None:
        """Go on behind the last number that its client was told, if by another process, and also
        where less of it is known here."""
        if self.is_resumed.is_set():
            return
        self.is_resumed.set()
        # Its exit and its close have numbers of their own.
        last = self._seq - (self.exit_code is not None) - self.is_closed
        self._seq += max(0, after - last)

    @property
    def is_running(self) -> bool:
        return self.pid is not None and self.exit_code is None

    @property
    def is_known(self) -> bool:
        """Whether its client was answered that it is there."""
        return self.pid is not None or self.is_waiting or self.exit_code is not None

    def begin(self, execution: Execution) -> None:
        """It runs from now on."""
        self.execution_id, self.pid, self.is_waiting = execution.pk, execution.pid, False

    def hold(self, data: bytes) -> None:
        """Keep input for when it starts. Raises Failure beyond the bound."""
        if len(self.held) + len(data) > MOST_HELD_BYTES:
            raise Failure(
                INVALID_REQUEST,
                f"process {self.id} waits for an approval: at most {MOST_HELD_BYTES} bytes of "
                "input are kept until then",
            )
        self.held += data

    def next_seq(self) -> int:
        self._seq += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return self._seq

    def skip(self, count: int) -> None:
        """Leave out the first pieces of its output, which are not kept."""
        self._seq += count

    def put(self, stream: str, data: bytes) -> dict[str, Any]:
        """Keep a piece of its output. Return what its client is told."""
        name = "pty" if self.is_tty else stream
        seq = self.next_seq()
        self._chunks.append((seq, name, data))
        self._kept += len(data)
        while self._kept > KEPT_BYTES or len(self._chunks) > MOST_PIECES:
            self._kept -= len(self._chunks.popleft()[2])
        return {"processId": self.id, **_chunk(seq, name, data)}

    async def wait(self, wanted: Read) -> None:
        """Wait until there is something new, or for as long as the client waits."""
        seconds = min((wanted.wait_ms or 0) / 1000, MOST_WAIT_SECONDS)
        if self._seq > (wanted.after_seq or 0) or self.is_closed or not seconds:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def read(self, wanted: Read) -> dict[str, Any]:
        """Return what has come after a number, as far as it is kept."""
        found: list[dict[str, Any]] = []
        after, size = wanted.after_seq or 0, 0
        most = KEPT_BYTES if wanted.max_bytes is None else wanted.max_bytes
        next_seq = self._seq + 1
        for seq, name, data in self._chunks:
            if seq <= after:
                continue
            if found and size + len(data) > most:
                next_seq = found[-1]["seq"] + 1
                break
            size += len(data)
            found.append(_chunk(seq, name, data))
        return {
            "chunks": found,
            "nextSeq": next_seq,
            "exited": self.exit_code is not None,
            "exitCode": self.exit_code,
            "closed": self.is_closed,
            "failure": self.failure,
            "sandboxDenied": False,
        }


def _chunk(seq: int, name: str, data: bytes) -> dict[str, Any]:
    return {"seq": seq, "stream": name, "chunk": b64encode(data).decode()}
