"""Whose request it is, where proxies stand in front: believed only of those that are trusted.

The one place where `X-Forwarded-For` and `X-Forwarded-Proto` are read. After the middleware,
`REMOTE_ADDR` is the client's address for the record, for the throttling of logins and for locks.
It works on `request.META` alone, whatever the server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

# The settings import this module, also in processes that serve no request.
if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FORWARDED_FOR = "HTTP_X_FORWARDED_FOR"
FORWARDED_PROTO = "HTTP_X_FORWARDED_PROTO"
# What one IPv6 client commonly has to itself, and can choose its addresses from.
IPV6_CLIENT_BITS = 64

_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d{1,5})?", re.ASCII)
_IPV4_WITH_PORT = re.compile(r"([0-9.]+):\d{1,5}", re.ASCII)


def read_networks(texts: Iterable[str]) -> list[Network]:
    """Networks or single addresses. Raises ImproperlyConfigured naming what is neither."""
    networks = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text.strip()))
        except ValueError as error:
            raise ImproperlyConfigured(f"TRUSTED_PROXIES: {error}") from None
    return networks


def client_address(meta: Mapping[str, Any], trusted: Iterable[Network]) -> str:
    """The address of whoever is nearest and no trusted proxy; "" where the server knows none.

    The header is read from the right, where the nearest proxy wrote. What stands further left than
    an address that is not trusted was sent by that client, and so was anything beyond a value that
    is no address: neither is looked at.
    """
    networks = list(trusted)
    peer = _parsed(str(meta.get("REMOTE_ADDR", "")))
    if peer is None:
        return ""
    found = peer
    for text in reversed(str(meta.get(FORWARDED_FOR, "")).split(",")):
        if not _is_trusted(found, networks):
            break
        hop = _parsed(text)
        if hop is None:
            break
        found = hop
    return str(found)


def address_of(request: HttpRequest) -> str | None:
    """What failed logins are counted by: of IPv6 the network that one client has to itself."""
    return _counted(str(request.META.get("REMOTE_ADDR", ""))) or None


def counted_address(meta: Mapping[str, Any]) -> str:
    """The same of a request that the middleware has not seen. "" where nobody can say whose it is:
    the server knows no address, or only that of a trusted proxy, which stands for many clients."""
    networks = settings.TRUSTED_PROXIES
    peer = str(meta.get("REMOTE_ADDR", ""))
    if not networks:
        return _counted(peer)
    address = _parsed(client_address(meta, networks))
    if address is None or _is_trusted(address, networks):
        return ""
    return _counted(str(address))


@lru_cache(1024)
def _counted(text: str) -> str:
    address = _parsed(text)
    if isinstance(address, ipaddress.IPv6Address):
        network = ipaddress.ip_network((address, IPV6_CLIENT_BITS), strict=False)
        return str(network.network_address)
    return "" if address is None else str(address)


class ClientAddressMiddleware:
    """The first of all: what comes after it sees the client where it would see the proxy."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        read_forwarded(request.META)
        return self.get_response(request)


def read_forwarded(meta: MutableMapping[str, Any]) -> None:
    """Put the client's address in the peer's place; drop what an untrusted peer says of itself."""
    networks = settings.TRUSTED_PROXIES
    if not networks:
        meta.pop(FORWARDED_FOR, None)
        meta.pop(FORWARDED_PROTO, None)
        return
    peer = _parsed(str(meta.get("REMOTE_ADDR", "")))
    protocols = str(meta.pop(FORWARDED_PROTO, "")).split(",")
    said = protocols[-1].strip().lower()
    if said and peer is not None and _is_trusted(peer, networks):
        meta[FORWARDED_PROTO] = said
    meta["REMOTE_ADDR"] = client_address(meta, networks)
    meta.pop(FORWARDED_FOR, None)


def _is_trusted(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _parsed(text: str) -> Address | None:
    """An address, with or without brackets and port; None for anything else."""
    text = text.strip()
    if match := _BRACKETED.fullmatch(text) or _IPV4_WITH_PORT.fullmatch(text):
        text = match[1]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
