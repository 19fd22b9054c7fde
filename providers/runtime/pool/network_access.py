"""The network of one sandbox: closed, or open to the hosts of a policy."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from providers.errors import InvalidConfiguration
from providers.isolation import NONE, of_runtime
from providers.network import Attempt, Attempts, Network
from providers.runtime.guest import wire
from providers.runtime.guest.network import ADDRESS, AUTHORITY
from providers.runtime.guest.protocol import CHUNK_BYTES
from providers.runtime.pool.protocol import ChannelClosed, Frame, GuestChannel
from providers.runtime.pool.template import NPM_RETRIES, OWN_PROGRAMS

if TYPE_CHECKING:
    from providers.runtime.network.authority import Authority
    from providers.runtime.network.client import Gate, NetworkProxy, OnAttempt

logger = logging.getLogger(__name__)

_HOST, _PORT = ADDRESS
_PROXY = f"http://{_HOST}:{_PORT}"
_OWN = "localhost,127.0.0.1,::1"

# By which the usual clients find the proxy. A SOCKS address would have httpx ask for a package.
VARIABLES = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _PROXY),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _PROXY),
    "NO_PROXY": _OWN,
    "no_proxy": _OWN,
    "NODE_USE_ENV_PROXY": "1",
    "JAVA_TOOL_OPTIONS": " ".join(
        f"-D{scheme}.proxyHost={_HOST} -D{scheme}.proxyPort={_PORT}" for scheme in ("http", "https")
    ),
    # What npm installs for all folders, and what it downloads, which is not kept.
    "npm_config_prefix": OWN_PROGRAMS,
    "npm_config_cache": "/tmp/.cache/npm",  # noqa: S108  the sandbox has one of its own
    "npm_config_update_notifier": "false",
    NPM_RETRIES: "2",
}


# What may wait for the proxy to read it: the lanes of all connections, and some frames.
MOST_WAITING = 32 * 1024 * 1024


class FrameCarrier:
    """Carries the connections of one run between the frames of its sandbox and the proxy."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = bytearray()

    def begin(self, channel: GuestChannel) -> None:
        """Pass on what the proxy says, from now until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._carry(channel))

    def receive(self, frame: Frame) -> None:
        """Pass on what the sandbox says. Raises wire.FrameError for more than it may."""
        data = frame[1].get("data", b"")
        if self._writer is None:
            self._early += data
            waiting = len(self._early)
        else:
            self._writer.write(data)
            waiting = self._writer.transport.get_write_buffer_size()
        if waiting > MOST_WAITING:
            raise wire.FrameError("more of the network than the proxy has given credit for")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._stream.close()

    async def _carry(self, channel: GuestChannel) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._stream)
        self._writer.write(bytes(self._early))
        try:
            while data := await reader.read(CHUNK_BYTES):
                channel.write(wire.pack({"op": "network"}, [("data", data)]))
                await channel.drained()
        except (ChannelClosed, wire.FrameError, OSError) as error:
            logger.debug("the network of a run has ended: %s", error)


class NetworkAccess:
    """What one sandbox may reach now, and what it has tried. Lives in one event loop."""

    def __init__(self, listener: socket.socket | None, runtime: str) -> None:
        self._listener = listener
        self._runtime = runtime
        self._gate: Gate | None = None
        self._network: Network | None = None
        # Its sandbox trusts it, from the first network on that has TLS opened.
        self._authority: Authority | None = None
        self._attempts = Attempts()
        self._watches: list[OnAttempt] = []
        self._had_network = False
        self._carrier: FrameCarrier | None = None

    def prepare(self, network: Network) -> None:
        """Have `extend` say what programs need for a network that is to be opened."""
        self._network = network
        if self._authority is None and network.may_open_tls:
            # Only here: it takes 5 MiB.
            from providers.runtime.network.authority import Authority

            self._authority = Authority.create()

    async def open(
        self,
        proxy: NetworkProxy,
        network: Network,
        owner: str,
        stream: socket.socket | None = None,
    ) -> None:
        """Let programs reach these hosts, and no others. Raises SandboxError.

        Where the guest has handed over no listener, `stream` carries the connections, and is closed
        here. Without one the frames of the one run carry them (`carrier`).
        """
        if of_runtime(self._runtime) == NONE:
            # Its loopback is the machine's own.
            raise InvalidConfiguration(
                "network: What runs without isolation cannot have a network policy.",
                field="network",
            )
        self.prepare(network)
        if self._gate is not None:
            await self._gate.change(network, self._authority)
            return
        self._had_network = True
        terms = (network, owner, self._add, self._authority)
        if self._listener is not None:
            self._gate = await proxy.open(self._listener, *terms)
        elif stream is not None:
            with stream:
                self._gate = await proxy.open_stream(stream, *terms)
        else:
            ours, theirs = socket.socketpair()
            self._carrier = FrameCarrier(ours)
            with theirs:
                self._gate = await proxy.open_stream(theirs, *terms)

    @property
    def carrier(self) -> FrameCarrier | None:
        """What takes the frames of the run, where these carry its connections."""
        return self._carrier

    @property
    def is_open(self) -> bool:
        return self._gate is not None

    @property
    def has_listener(self) -> bool:
        """Whether the host can accept the connections itself."""
        return self._listener is not None

    async def close(self) -> None:
        """End all connections. What became of them is known then."""
        gate, self._gate, self._network = self._gate, None, None
        if self._carrier is not None:
            self._carrier.close()
        if gate is not None:
            await gate.close()

    async def sync(self) -> None:
        """Wait for what has ended so far, not for ever."""
        if self._gate is not None:
            await self._gate.sync()

    def take_attempts(self) -> Attempts:
        """Those that have ended since this was last called."""
        attempts, self._attempts = self._attempts, Attempts()
        return attempts

    @property
    def had_network(self) -> bool:
        """Whether anything could be reached at any time."""
        return self._had_network

    def extend(self, environment: Mapping[str, str]) -> dict[str, str]:
        """An environment of programs that may reach something, with what leads them there."""
        if self._network is None:
            return dict(environment)
        placeholders = {
            each.variable: each.placeholder for each in self._network.credentials if each.variable
        }
        trust = {AUTHORITY: self._authority.certificate.decode()} if self._authority else {}
        return {**placeholders, **VARIABLES, **environment, **trust}

    @contextmanager
    def watched(self, notice: OnAttempt | None) -> Iterator[None]:
        """Give `notice` the attempts that end meanwhile, as many as are listed."""
        if notice is None:
            yield
            return
        self._watches.append(notice)
        try:
            yield
        finally:
            self._watches.remove(notice)

    def _add(self, attempt: Attempt) -> None:
        if self._attempts.add(attempt):
            for notice in self._watches:
                notice(attempt)
