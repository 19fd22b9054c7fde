"""Who may connect to the service: decided by the address alone, before anything is read."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllowedAddresses:
    """Networks that may connect; none named: all."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str], *, only_loopback: bool) -> AllowedAddresses:
        """From POOL_ALLOWED_ADDRESSES. Where it is empty `only_loopback` decides."""
        named = tuple(networks) or (("127.0.0.0/8", "::1/128") if only_loopback else ())
        return cls(tuple(ipaddress.ip_network(text) for text in named))

    def __contains__(self, host: object) -> bool:
        if not self.networks:
            return True
        address = ipaddress.ip_address(str(host).partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            # A socket that listens on both families shows IPv4 so.
            address = address.ipv4_mapped or address
        return any(address in network for network in self.networks)


class Gate(asyncio.Protocol):
    """Hands a new connection on, or breaks it off. Nothing is read from it until then."""

    def __init__(
        self, allowed: AllowedAddresses, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._allowed = allowed
        self._make_protocol = make_protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        if not peer or peer[0] not in self._allowed:
            logger.warning("a connection from %s is refused", peer[0] if peer else "nowhere")
            cast("asyncio.Transport", transport).abort()
            return
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
