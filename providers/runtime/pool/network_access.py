"""The network of one sandbox: closed, or open to the hosts of a policy."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from providers.errors import InvalidConfiguration
from providers.isolation import NONE, of_runtime
from providers.network import Attempt, Attempts, Network
from providers.runtime.guest.network import ADDRESS

if TYPE_CHECKING:
    from providers.runtime.network.client import Gate, NetworkProxy

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
}


class NetworkAccess:
    """What one sandbox may reach now, and what it has tried. Lives in one event loop."""

    def __init__(self, listener: socket.socket | None, runtime: str) -> None:
        self._listener = listener
        self._runtime = runtime
        self._gate: Gate | None = None
        self._attempts = Attempts()
        self._had_network = False

    async def open(
        self,
        proxy: NetworkProxy,
        network: Network,
        owner: str,
        stream: socket.socket | None = None,
    ) -> None:
        """Let programs reach these hosts, and no others. Raises SandboxError.

        `stream` carries the connections of a guest that could hand over no listener. It is closed
        here.
        """
        if of_runtime(self._runtime) == NONE:
            # Its loopback is the machine's own.
            raise InvalidConfiguration(
                "network: What runs without isolation cannot be held to a network policy.",
                field="network",
            )
        if self._gate is not None:
            await self._gate.change(network)
        elif self._listener is not None:
            self._had_network = True
            self._gate = await proxy.open(self._listener, network, owner, self._add)
        elif stream is not None:
            self._had_network = True
            with stream:
                self._gate = await proxy.open_stream(stream, network, owner, self._add)
        else:
            raise InvalidConfiguration(
                f"network: Single runs under {self._runtime} have no network. Run it in a session.",
                field="network",
            )

    @property
    def is_open(self) -> bool:
        return self._gate is not None

    @property
    def has_listener(self) -> bool:
        """Whether the host can accept the connections itself."""
        return self._listener is not None

    async def close(self) -> None:
        """End all connections. What became of them is known then."""
        gate, self._gate = self._gate, None
        if gate is not None:
            await gate.close()

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
        return {**(VARIABLES if self._gate is not None else {}), **environment}

    def _add(self, attempt: Attempt) -> None:
        self._attempts.add(attempt)
