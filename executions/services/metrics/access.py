"""Who may read `/metrics`. Nobody is the answer where nothing says otherwise."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings

_SCHEME = "Bearer "


@dataclass(frozen=True)
class Access:
    """What a request may read, or the status that it is refused with."""

    refused: int = 0
    with_tenants: bool = False


def access_of(meta: Mapping[str, Any]) -> Access:
    """By the token and the address of a request, each where it is demanded.

    With neither demanded only this machine may read, and not in production: there a proxy on it
    may pass on whatever comes. Tenants are named to whoever was let in by one of the two.
    """
    token, networks = settings.METRICS_TOKEN, settings.METRICS_ALLOWED_ADDRESSES
    if networks and not _is_within(meta, networks):
        return Access(refused=403)
    if token:
        given = str(meta.get("HTTP_AUTHORIZATION", ""))
        is_right = given.startswith(_SCHEME) and hmac.compare_digest(
            given.removeprefix(_SCHEME).encode("utf-8", "replace"), token.encode()
        )
        return Access(with_tenants=True) if is_right else Access(refused=401)
    if networks:
        return Access(with_tenants=True)
    if settings.PRODUCTION or not _is_within(meta, ("127.0.0.0/8", "::1/128")):
        return Access(refused=403)
    return Access()


def _is_within(meta: Mapping[str, Any], networks: Any) -> bool:
    try:
        address = ipaddress.ip_address(str(meta.get("REMOTE_ADDR", "")).partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in ipaddress.ip_network(network) for network in networks)
