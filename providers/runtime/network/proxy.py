"""The process that serves the network of all sandboxes of a pool.

It has no privilege, and no secret but the credentials that it puts in. What a program sends is read
here, and nowhere else. The pool speaks over descriptor 0, in frames of
`providers.runtime.guest.wire` with an `op`:

    open     gate `gate` of `owner`: the part `network`, and with the frame a descriptor, which is a
             listener, or with `stream` the stream of `lane_stream`; the part `authority` where
             TLS may be opened
    change   the part `network` holds for `gate` from now on, and the part `authority`
    credentials  the part `changes` has other versions of credentials for all gates, by id
    sync     is answered by `synced` of the `gate`, after the attempts that have ended
    close    `gate` ends with its connections

It answers with frames that have an `event`: `attempt` of a `gate`, with the part `attempt`, and
`closed` of a `gate`, after its last attempt. The process ends with descriptor 0.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from providers.addresses import Allowed
from providers.credentials import Credential, credential_changes
from providers.network import Attempt, Network, Rule, check_bound
from providers.runtime.guest import wire
from providers.runtime.network.authority import Authority
from providers.runtime.network.client import POLICY_BYTES
from providers.runtime.network.connections import serve
from providers.runtime.network.gates import Gate
from providers.runtime.network.lane_stream import LaneStream
from providers.runtime.network.resolving import Dialer

logger = logging.getLogger(__name__)

# Whose rights the process has. Nothing belongs to this user.
NOBODY = 65534
FRAME_BYTES = 2 * POLICY_BYTES
CLOSE_SECONDS = 4.0
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


class _OpenGate:
    """A gate, and where its connections come from."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.server: asyncio.Server | None = None
        self.stream: LaneStream | None = None
        self.opening: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self.opening is not None:
            # A listener that is opened later would take connections from the next gate.
            await asyncio.wait({self.opening})
        if self.server is not None:
            self.server.close()
        self.gate.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.gate.ended()
        except TimeoutError:
            logger.warning("connections of a sandbox did not end in time")
        if self.stream is not None:
            self.stream.close()


class Proxy:
    """Serves the gates that the pool opens. Lives in one event loop."""

    def __init__(self, control: socket.socket, dialer: Dialer) -> None:
        control.setblocking(False)
        self._control = control
        self._dialer = dialer
        self._gates: dict[int, _OpenGate] = {}
        self._owners: Counter[str] = Counter()
        self._parser = wire.Parser(FRAME_BYTES)
        self._fds: deque[int] = deque()
        self._out = bytearray()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the pool's end of the control channel is closed."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._hear)
        await self._ended.wait()
        loop.remove_reader(self._control)
        for each in self._gates.values():
            each.gate.close()

    def _hear(self) -> None:
        try:
            data, ancillary, _, _ = self._control.recvmsg(1 << 16, socket.CMSG_SPACE(16 * 4))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            self._ended.set()
            return
        try:
            for header, parts in self._parser.feed(data):
                self._carry_out_one(header, parts)
        except wire.FrameError as error:
            logger.error("the pool cannot be understood: %s", error)
            self._ended.set()

    def _carry_out_one(self, header: dict[str, object], parts: dict[str, bytes]) -> None:
        try:
            self._carry_out(header, parts)
        except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
            logger.warning("a message of the pool cannot be carried out: %r", error)

    def _carry_out(self, header: dict[str, object], parts: dict[str, bytes]) -> None:
        name = header.get("op")
        if name == "credentials":
            changes = _readable(json.loads(parts["changes"]))
            for each in self._gates.values():
                each.gate.change_credentials(changes)
            return
        number = int(str(header["gate"]))
        authority = Authority.from_pem(pem) if (pem := parts.get("authority")) else None
        if name == "open":
            end = socket.socket(fileno=self._fds.popleft())
            network = Network.from_json(json.loads(parts["network"]))
            gate = Gate(
                network,
                partial(self._tell_attempt, number),
                str(header["owner"]),
                self._owners,
                authority=authority,
            )
            self._gates[number] = opened = _OpenGate(gate)
            opened.opening = self._spawn(
                self._open(opened, end, is_stream=header.get("stream") is True)
            )
        elif name == "change":
            changed = self._gates[number].gate
            try:
                network = Network.from_json(json.loads(parts["network"]))
            except (ValueError, KeyError, TypeError):
                # What held before may allow more.
                changed.close()
                raise
            changed.change(network, authority)
        elif name == "sync":
            self._spawn(self._sync(number))
        elif name == "close":
            self._spawn(self._close(number))

    async def _open(self, opened: _OpenGate, end: socket.socket, *, is_stream: bool) -> None:
        end.setblocking(False)
        if is_stream:
            loop = asyncio.get_running_loop()
            accept = partial(self._accept, opened.gate)
            _, opened.stream = await loop.create_connection(lambda: LaneStream(accept), sock=end)
        else:
            work = partial(serve, gate=opened.gate, dialer=self._dialer)
            opened.server = await asyncio.start_server(work, sock=end)

    def _accept(self, gate: Gate, end: socket.socket) -> None:
        self._spawn(self._serve(gate, end))

    async def _serve(self, gate: Gate, end: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=end)
        await serve(reader, writer, gate, self._dialer)

    async def _sync(self, number: int) -> None:
        if (opened := self._gates.get(number)) is not None:
            await opened.gate.settle()
        self._tell({"event": "synced", "gate": number})

    async def _close(self, number: int) -> None:
        opened = self._gates.pop(number, None)
        if opened is not None:
            await opened.close()
        self._tell({"event": "closed", "gate": number})

    def _tell_attempt(self, number: int, attempt: Attempt) -> None:
        self._tell(
            {"event": "attempt", "gate": number},
            [("attempt", json.dumps(attempt.to_json()).encode())],
        )

    def _tell(self, header: dict[str, object], parts: Sequence[tuple[str, bytes]] = ()) -> None:
        self._out += wire.pack(header, list(parts))
        self._write()

    def _write(self) -> None:
        """Write what the pool has room for. The budgets of the gates bound what waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._out:
                del self._out[: self._control.send(self._out)]
        except BlockingIOError:
            loop.add_writer(self._control, self._write)
            return
        except OSError:
            self._ended.set()
        loop.remove_writer(self._control)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _readable(changes: Mapping[str, object]) -> dict[str, Credential | None]:
    """Other versions of credentials. One that cannot be read takes its credential away."""
    found: dict[str, Credential | None] = {}
    for name, each in changes.items():
        try:
            (found[name],) = credential_changes({name: each}).values()
            if (new := found[name]) is not None:
                check_bound(map(Rule.parse, new.rules))
        except ValueError as error:
            logger.warning("a version of the credential %r cannot be read: %s", name, error)
            found[name] = None
    return found


def give_up_privileges() -> None:
    """Become a user to whom nothing belongs, and end with the pool. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    # After the change of the user, which clears it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(ca_file: str, allowed: Sequence[str]) -> None:
    """Serve the pool that has the other end of descriptor 0.

    `ca_file` has certificates that servers may have beside those this machine trusts, "" for none.
    """
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    control = socket.socket(fileno=os.dup(0))
    # Loaded now: later the files may not be ours to read.
    asyncio.new_event_loop().close()
    "x".encode("idna")
    trusted = ssl.create_default_context()
    if ca_file:
        trusted.load_verify_locations(ca_file)
    give_up_privileges()

    addresses = [Allowed.parse(each) for each in allowed]

    async def run() -> None:
        await Proxy(control, Dialer(addresses, trusted=trusted)).run()

    asyncio.run(run())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
