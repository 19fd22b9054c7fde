"""Names become addresses that are checked, and a connection goes to a checked address only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from providers.addresses import Address, Allowed, is_metadata, is_public, literal, unwrapped

RESOLVE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
# How long the addresses of this machine are remembered.
OWN_SECONDS = 30.0
_THREADS = 64
# A name server that does not answer costs its own tenant alone.
_LOOKUPS_OF_OWNER = 8
_MOST_ADDRESSES = 4

Lookup = Callable[[str, int], Sequence[str]]


class Unreachable(Exception):
    """No connection. `why` is one word for the record; the text is for the program."""

    def __init__(self, why: str, text: str, *, is_refused: bool = False) -> None:
        super().__init__(text)
        self.why = why
        self.is_refused = is_refused


def look_up(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, by the machine's own resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Dialer:
    """Connects to hosts, as far as their addresses may be reached.

    Public addresses may, unless they are this machine's own, and those that `allowed` has. Where a
    cloud describes a machine nothing may be reached, whatever is allowed.
    """

    def __init__(
        self,
        allowed: Sequence[Allowed] = (),
        lookup: Lookup = look_up,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """`trusted` verifies servers, by the certificates of this machine if it is None."""
        self._allowed = tuple(allowed)
        self._trusted = trusted or ssl.create_default_context()
        self._trusted.hostname_checks_common_name = False
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(_THREADS, "resolve")
        self._shares: dict[str, asyncio.Semaphore] = {}
        self._own: frozenset[Address] = frozenset()
        self._own_since = float("-inf")

    async def connect(
        self, host: str, port: int, owner: str = "", *, is_tls: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect for a tenant; with `is_tls` to who proves to be the host. Raises Unreachable."""
        addresses = await self._resolve(host, port, owner)
        for address in addresses:
            self._check(host, port, address)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                name = host if is_tls else None
                return await self._try(addresses[:_MOST_ADDRESSES], port, name)
        except TimeoutError:
            raise Unreachable("timeout", f"{host}:{port} does not answer.") from None
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or "the handshake failed"
            raise Unreachable("certificate", f"{host}:{port} with TLS: {reason}.") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise Unreachable("unreachable", f"{host}:{port}: {reason}.") from None

    async def _resolve(self, host: str, port: int, owner: str) -> list[Address]:
        if (address := literal(host)) is not None:
            return [address]
        loop = asyncio.get_running_loop()
        share = self._shares.setdefault(owner, asyncio.Semaphore(_LOOKUPS_OF_OWNER))
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                await share.acquire()
                looking = self._threads.submit(self._lookup, host, port)
                # When the thread is free again, which may be long after it is waited for.
                looking.add_done_callback(partial(_release, loop, share))
                found = await asyncio.wrap_future(looking)
        except TimeoutError:
            raise Unreachable("name", f"The name {host} was not resolved in time.") from None
        except (OSError, UnicodeError):
            raise Unreachable("name", f"The name {host} cannot be resolved.") from None
        addresses = [ipaddress.ip_address(text) for text in found]
        if not addresses:
            raise Unreachable("name", f"The name {host} has no address.")
        return addresses

    def _check(self, host: str, port: int, address: Address) -> None:
        """Raises Unreachable for an address that must not be reached."""
        plain = unwrapped(address)
        if not is_metadata(plain):
            if is_public(address) and plain not in self._own_addresses():
                return
            if any(entry.covers(host, plain, port) for entry in self._allowed):
                return
        raise Unreachable(
            "address",
            f"{host} leads to an address that is not public. The operator can allow it with the "
            "setting NETWORK_ALLOWED_ADDRESSES.",
            is_refused=True,
        )

    async def _try(
        self, addresses: Sequence[Address], port: int, name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first that answers, by TLS with a name. Raises the last one's
        OSError."""
        context = self._trusted if name else None
        for number, address in enumerate(addresses, 1):
            try:
                return await asyncio.open_connection(
                    str(address), port, ssl=context, server_hostname=name
                )
            except OSError:
                if number == len(addresses):
                    raise
        raise OSError("no address")

    def _own_addresses(self) -> frozenset[Address]:
        now = time.monotonic()
        if now - self._own_since > OWN_SECONDS:
            self._own, self._own_since = own_addresses(), now
        return self._own


def _release(loop: asyncio.AbstractEventLoop, share: asyncio.Semaphore, _: object) -> None:
    # At the end of the process the loop may have ended before.
    if not loop.is_closed():
        loop.call_soon_threadsafe(share.release)


def own_addresses(proc: Path = Path("/proc/net")) -> frozenset[Address]:
    """The addresses of this machine's interfaces, as the kernel has them. Raises OSError."""
    found: set[Address] = set()
    last = ""
    for line in (proc / "fib_trie").read_text().splitlines():
        text = line.strip()
        if text.startswith("|-- "):
            last = text[4:]
        elif text.startswith("/32 host LOCAL"):
            found.add(ipaddress.ip_address(last))
    if (proc / "if_inet6").exists():
        for line in (proc / "if_inet6").read_text().splitlines():
            found.add(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    return frozenset(found)
