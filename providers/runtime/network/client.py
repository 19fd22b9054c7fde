"""The pool's end of the proxy process: it starts it, opens gates, and hears of attempts."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from providers.credentials import Credential, changes_to_json
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.network import Attempt, Network, with_credentials
from providers.runtime.guest import wire

if TYPE_CHECKING:
    from providers.runtime.network.authority import Authority

logger = logging.getLogger(__name__)

# Some lists of as many rules as there may be, each as long as it may be.
POLICY_BYTES = 8 * 1024 * 1024
BACKLOG = 128
# A process that ends at once is not started again at once.
RESTART_SECONDS = 1.0
CLOSE_SECONDS = 5.0
_FRAME_BYTES = 1024 * 1024
_PROJECT = Path(__file__).parents[3]

OnAttempt = Callable[[Attempt], None]
Parts = Sequence[tuple[str, bytes]]


class Gate:
    """The way of one sandbox to the network, until it is closed."""

    def __init__(
        self,
        proxy: NetworkProxy,
        number: int,
        network: Network,
        owner: str,
        on_attempt: OnAttempt,
        authority: Authority | None,
    ) -> None:
        self.number, self.network, self.owner = number, network, owner
        self.on_attempt = on_attempt
        self._authority = authority
        self.listener: socket.socket | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._proxy = proxy
        self._synced: list[asyncio.Future[None]] = []

    async def change(self, network: Network, authority: Authority | None = None) -> None:
        """Hold this policy from now on; connections that it does not allow end."""
        self.network, self._authority = network, self._authority or authority
        await self._proxy.send({"op": "change", "gate": self.number}, self.parts())

    def parts(self) -> Parts:
        """What the process is sent of it. Raises InvalidConfiguration for what is too long."""
        text = json.dumps(self.network.to_json(), ensure_ascii=False).encode()
        if len(text) > POLICY_BYTES:
            raise InvalidConfiguration("network: The lists are too long.", field="network")
        authority = [("authority", self._authority.to_pem())] if self._authority else []
        return [("network", text), *authority]

    async def sync(self) -> None:
        """Wait until all attempts are known that have ended so far, CLOSE_SECONDS at most."""
        synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._synced.append(synced)
        with suppress(TimeoutError, ProviderUnavailable):
            await self._proxy.send({"op": "sync", "gate": self.number})
            async with asyncio.timeout(CLOSE_SECONDS):
                await synced

    def receive(self, event: object, parts: dict[str, bytes]) -> None:
        """Take in what the process says of this gate. Raises ValueError and KeyError."""
        if event == "attempt":
            self.on_attempt(Attempt.from_json(json.loads(parts["attempt"])))
        elif event == "synced" and self._synced:
            synced = self._synced.pop(0)
            if not synced.done():
                synced.set_result(None)
        elif event == "closed" and not self.closed.done():
            self.closed.set_result(None)

    async def close(self) -> None:
        """End all connections, and listen no more. Every attempt is known then."""
        await self._proxy.close_gate(self)
        if self.listener is not None:
            # After the process has let go of it. Another gate can be opened over the same socket.
            with suppress(OSError):
                self.listener.shutdown(socket.SHUT_RD)


class NetworkProxy:
    """One proxy process, started with its first gate. Lives in one event loop."""

    def __init__(self, allowed: Sequence[str] = (), ca_file: str = "") -> None:
        """`allowed` are entries of NETWORK_ALLOWED_ADDRESSES, `ca_file` is NETWORK_CA_FILE."""
        self._arguments = (ca_file, *allowed)
        self._numbers = itertools.count(1)
        self._gates: dict[int, Gate] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, None where none runs."""
        return self._process.pid if self._process else None

    async def open(
        self,
        listener: socket.socket,
        network: Network,
        owner: str,
        on_attempt: OnAttempt,
        authority: Authority | None = None,
    ) -> Gate:
        """Serve what connects to a bound socket, which listens from now on.

        `on_attempt` is told of each attempt that has ended. Without an `authority` no TLS is
        opened. Raises ProviderUnavailable.
        """
        gate = self._new_gate(network, owner, on_attempt, authority)
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            del self._gates[gate.number]
            raise ProviderUnavailable(
                f"network: The sandbox's own address of the proxy is in use: {error.strerror}."
            ) from error
        gate.listener = listener
        return await self._send_gate(gate, listener)

    async def open_stream(
        self,
        stream: socket.socket,
        network: Network,
        owner: str,
        on_attempt: OnAttempt,
        authority: Authority | None = None,
    ) -> Gate:
        """Serve the connections that come over a stream, as `lane_stream` reads it.

        Raises ProviderUnavailable.
        """
        return await self._send_gate(self._new_gate(network, owner, on_attempt, authority), stream)

    async def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Put in other versions of credentials from now on, by id; None takes one away.

        Raises ProviderUnavailable.
        """
        for gate in self._gates.values():
            gate.network = with_credentials(gate.network, changes)
        if self._control is not None:
            text = json.dumps(changes_to_json(changes)).encode()
            await self.send({"op": "credentials"}, [("changes", text)])

    async def send(
        self, header: dict[str, object], parts: Parts = (), end: socket.socket | None = None
    ) -> None:
        """Send a message, with a descriptor. Raises ProviderUnavailable."""
        message = wire.pack(header, list(parts))
        async with self._sending:
            try:
                control = self._control or self._start()
                if end is not None:
                    await _send_descriptor(control, message[:1], end)
                    message = message[1:]
                await asyncio.get_running_loop().sock_sendall(control, message)
            except OSError as error:
                raise ProviderUnavailable(f"The network proxy has ended: {error}.") from error

    async def close_gate(self, gate: Gate) -> None:
        """Called by the gate."""
        if self._gates.get(gate.number) is not gate:
            return
        with suppress(TimeoutError, ProviderUnavailable):
            await self.send({"op": "close", "gate": gate.number})
            async with asyncio.timeout(CLOSE_SECONDS):
                await gate.closed
        self._gates.pop(gate.number, None)

    async def close(self) -> None:
        """End the process, and with it every connection."""
        if self._reading is not None:
            self._reading.cancel()
        self._end_process()

    def _new_gate(
        self, network: Network, owner: str, on_attempt: OnAttempt, authority: Authority | None
    ) -> Gate:
        gate = Gate(self, next(self._numbers), network, owner, on_attempt, authority)
        self._gates[gate.number] = gate
        return gate

    async def _send_gate(self, gate: Gate, end: socket.socket) -> Gate:
        header = {
            "op": "open",
            "gate": gate.number,
            "owner": gate.owner,
            "stream": gate.listener is None,
        }
        try:
            await self.send(header, gate.parts(), end)
        except BaseException:
            self._gates.pop(gate.number, None)
            raise
        return gate

    def _start(self) -> socket.socket:
        """Raises OSError."""
        control, theirs = socket.socketpair()
        control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "providers.runtime.network.proxy", *self._arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=_PROJECT,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        self._control = control
        self._reading = asyncio.get_running_loop().create_task(self._read(control))
        return control

    async def _read(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        parser = wire.Parser(_FRAME_BYTES)
        try:
            while data := await loop.sock_recv(control, 1 << 16):
                for header, parts in parser.feed(data):
                    self._receive(header, parts)
        except (OSError, wire.FrameError, ValueError, KeyError) as error:
            logger.warning("the network proxy cannot be understood: %r", error)
        logger.warning("the network proxy has ended, and is started again")
        self._end_process()
        await asyncio.sleep(RESTART_SECONDS)
        await self._open_again()

    def _receive(self, header: dict[str, object], parts: dict[str, bytes]) -> None:
        gate = self._gates.get(int(str(header.get("gate"))))
        if gate is not None:
            gate.receive(header.get("event"), parts)

    async def _open_again(self) -> None:
        """Give a new process the gates that have a listener. Those of streams have ended."""
        for gate in list(self._gates.values()):
            lost = Attempt(time.time(), "", 0, "failed", "proxy_ended")
            gate.on_attempt(lost)
            if gate.listener is None or gate.closed.done():
                if not gate.closed.done():
                    gate.closed.set_result(None)
                self._gates.pop(gate.number, None)
                continue
            try:
                await self._send_gate(gate, gate.listener)
            except (ProviderUnavailable, OSError) as error:
                logger.warning("a sandbox has lost its network: %s", error)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


async def _send_descriptor(control: socket.socket, first: bytes, end: socket.socket) -> None:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            socket.send_fds(control, [first], [end.fileno()])
            return
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(control, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(control)
