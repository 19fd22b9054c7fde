"""Which servers files are fetched from.

Those of the internet. ALLOW_PRIVATE_URLS adds the private networks (RFC 1918, RFC 4193), because a
company's own file server is there. It does not add this machine, by whatever address: databases,
queues and engines listen on it that ask nobody for a password. Single services of it or of other
networks are for URL_ALLOWED_NETWORKS to name. A cloud's metadata is never fetched, since it hands
out the machine's own credentials.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from django.conf import settings

from providers.addresses import Address, Allowed, Rules, is_metadata, is_public, unwrapped

# A name may have any number of addresses, and each that does not answer takes seconds.
MOST_ADDRESSES = 4

# The ports that browsers connect to for no page (the Fetch standard's bad ports): behind each is
# another protocol, whose server could be made to read a request as its own commands.
BAD_PORTS = frozenset(
    {
        *(0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95),
        *(101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179),
        *(389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601),
        *(636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000),
        *(6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080),
    }
)

_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)


@dataclass(frozen=True)
class Destinations(Rules):
    """Rules for URLs that tenants give; `private` lets the private networks in."""

    private: bool = False

    def is_allowed(self, name: str, address: Address, port: int) -> bool:
        address = unwrapped(address)
        if is_metadata(address):
            return False
        if any(entry.covers(name, address, port) for entry in self.allowed):
            return True
        if _is_own(address):
            return False
        return is_public(address) or (
            self.private and any(address in network for network in _PRIVATE)
        )

    def resolve(self, host: str, port: int) -> list[str]:
        return super().resolve(host, port)[:MOST_ADDRESSES]


def destinations() -> Destinations:
    """Those of the deployment."""
    allowed = tuple(map(Allowed.parse, settings.URL_ALLOWED_NETWORKS))
    setting = "URL_ALLOWED_NETWORKS or ALLOW_PRIVATE_URLS"
    return Destinations(allowed, (), setting, settings.ALLOW_PRIVATE_URLS)


def _is_own(address: Address) -> bool:
    """Whether an address is this machine's, be it a public one: firewalls let it ask itself.

    The kernel sends from the very address that it sends to exactly then.
    """
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: a datagram's socket only looks the route up.
            probe.connect((str(address), 443))
            own = str(probe.getsockname()[0])
    except OSError:
        # No route, so no connection either.
        return False
    return ipaddress.ip_address(own) == address
