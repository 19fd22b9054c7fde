"""Which addresses a provider may be given, and may be connected to.

Public ones over https. Anything else is for whoever runs the server to allow: with
PROVIDER_ALLOWED_NETWORKS and PROVIDER_PLAIN_HTTP, or as an address in the environment. Otherwise
whoever may configure a provider could have this machine ask its own network's services.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

from providers.errors import InvalidConfiguration
from providers.options import options
from providers.schema import ConfigField, Schema, lines_of

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*\.?", re.I | re.ASCII)
# What resolvers take for a number, as in 127.1 or 0x7f000001.
_NUMBER = re.compile(r"(0x[0-9a-f]*|\d+)\.?", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# All that is global IPv6: whatever lies outside is of a site, reserved, or a way to write others.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Where clouds answer a machine's questions about itself, credentials included. Some of them count
# as private anyway, but may be allowed with their network; Azure's and Oracle's look public.
_METADATA = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # nearly all
            "fe80::/10",
            "168.63.129.16/32",  # Azure
            "192.0.0.192/32",  # Oracle
            "fd00:c1::/32",
            "100.100.100.200/32",  # Alibaba
            "fd00:ec2::/32",  # Amazon
            "fd20:ce::/32",  # Google
            "fd00:42::/32",  # Scaleway
        ),
    )
)
# What the registries of special addresses got, or lost, after the oldest Python that serves here.
_NEITHER = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20"))
)


class AddressRefused(OSError):
    """An address that is not allowed. Its text is for the server's log."""


@dataclass(frozen=True)
class Allowed:
    """One entry of a setting: a network, or a name; with a port, only that one of it."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    name: str = ""
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """From `10.0.0.0/8`, `10.1.2.3:9385`, `::1`, `[::1]:9385`, `pool` or `pool:9385`.

        Raises ValueError.
        """
        host, port = text.strip(), None
        if found := re.fullmatch(r"\[(.+)\]:(\d+)|([^:]+):(\d+)", host):
            host, port = found[1] or found[3], int(found[2] or found[4])
        try:
            return cls(ipaddress.ip_network(host.strip("[]")), port=port)
        except ValueError:
            if not _NAME.fullmatch(host) or _ends_in_number(host):
                raise ValueError(f"{text!r} is not a network, address or name") from None
        return cls(None, host.lower().rstrip("."), port)

    def covers(self, name: str, address: Address | None, port: int) -> bool:
        if self.port not in (None, port):
            return False
        if self.network is None:
            return name.lower().rstrip(".") == self.name
        return address is not None and address in self.network


@dataclass(frozen=True)
class Rules:
    """What may be connected to beside public addresses, and over plain http beside loopback."""

    allowed: tuple[Allowed, ...]
    plain_http: tuple[Allowed, ...]
    # By which `allowed` was said, for the server's log.
    setting: str = "PROVIDER_ALLOWED_NETWORKS"

    def check_url(self, text: str) -> None:
        """Raises ValueError telling what is wrong with an address as it is written."""
        url, host, port = _split(text)
        # Not to be found out by resolving alone: what is refused is best refused in the form.
        address = literal("127.0.0.1" if host == "localhost" else host)
        if url.scheme == "http" and not self._may_be_plain(host, address, port):
            raise ValueError(
                "Must begin with https://. The operator can allow plain http to this address with "
                "the setting PROVIDER_PLAIN_HTTP."
            )
        if address is not None and not self.is_allowed(host, address, port):
            raise ValueError(
                "Is not a public address. The operator can allow it with the setting "
                "PROVIDER_ALLOWED_NETWORKS."
            )

    def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of `host`, each of them allowed: connect to these, and not to the name.

        Raises AddressRefused, and OSError when the name does not resolve.
        """
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for text in addresses:
            if not self.is_allowed(host, ipaddress.ip_address(text), port):
                raise AddressRefused(
                    f"{host} port {port} is {text}, which is not public and not allowed by "
                    f"{self.setting}"
                )
        return addresses

    def is_allowed(self, name: str, address: Address, port: int) -> bool:
        """Whether `name`, which resolved to `address`, may be connected to there."""
        return is_public(address) or any(
            entry.covers(name, unwrapped(address), port) for entry in self.allowed
        )

    def _may_be_plain(self, host: str, address: Address | None, port: int) -> bool:
        if address is not None and unwrapped(address).is_loopback:
            return True
        return any(entry.covers(host, address, port) for entry in self.plain_http)


def rules(trusted: Iterable[str] = ()) -> Rules:
    """Return the deployment's rules. `trusted` are addresses that its environment holds.

    The deployment's own pool service is allowed too.
    """
    given = options()
    own = (f"127.0.0.1:{given.POOL_PORT}", f"[::1]:{given.POOL_PORT}")
    pool = f"{_bracketed(given.POOL_HOST)}:{given.POOL_PORT}"
    trusted_hosts = tuple(_host_and_port(text) for text in trusted if text)
    return _rules(
        (*given.PROVIDER_ALLOWED_NETWORKS, *own, pool, *trusted_hosts),
        (*given.PROVIDER_PLAIN_HTTP, *trusted_hosts),
    )


@lru_cache(maxsize=64)
def _rules(allowed: tuple[str, ...], plain_http: tuple[str, ...]) -> Rules:
    return Rules(tuple(map(Allowed.parse, allowed)), tuple(map(Allowed.parse, plain_http)))


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet and not to this network, machine or its cloud."""
    address = unwrapped(address)
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    if is_metadata(address) or any(address in network for network in _NEITHER):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_metadata(address: Address) -> bool:
    """Whether an address is where a cloud tells a machine about itself, or may well be."""
    address = unwrapped(address)
    return any(address in network for network in _METADATA)


def is_host(text: str) -> bool:
    """Whether `text`, as an URL's host without brackets, is an address or a name in ASCII.

    Not a number that only some resolvers read, as in 127.1, 0x7f000001 or 017700000001.
    """
    if "%" in text:
        return False
    if literal(text) is not None:
        return True
    return len(text) <= 254 and bool(_NAME.fullmatch(text)) and not _ends_in_number(text)


def normalized(text: str) -> str:
    """A form in which two addresses are the same exactly when they lead to the same place."""
    text = text.strip()
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return text
    if not url.scheme or not url.netloc:
        return text.lower().rstrip(".") if _NAME.fullmatch(text) and "." in text else text
    host = (url.hostname or "").rstrip(".")
    user = url.netloc.rpartition("@")[0]
    place = f"{url.scheme.lower()}://{user}@{host}:{port or _PORTS.get(url.scheme.lower())}"
    return f"{place}{url.path.rstrip('/')}?{url.query}#{url.fragment}"


def given_addresses(fields: Schema, config: Mapping[str, Any]) -> dict[str, str]:
    """The addresses that a configuration leads to, by field; an empty one is the provider's own."""
    found = {}
    for key, declared in fields.items():
        value = config.get(key) or declared.from_environment or declared.default or ""
        if value and not declared.secret and _is_address(fields, key, value):
            found[key] = str(value)
    return found


def entered_addresses(fields: Schema, config: Mapping[str, Any]) -> dict[str, str]:
    """Those of `given_addresses` that neither the provider nor the environment brings."""
    found = given_addresses(fields, config)
    own = given_addresses(fields, {})
    return {
        key: text
        for key, text in found.items()
        if places_of(fields[key], text) != places_of(fields[key], own.get(key, ""))
    }


def places_of(declared: ConfigField, value: object) -> frozenset[str]:
    """Return where the addresses of a field lead, in the form of `normalized`."""
    return frozenset(map(normalized, _each(declared, value)))


def are_public(addresses: Iterable[str]) -> bool:
    """Whether all of these, of fields with one address or several, lead out of this network."""
    nothing_else = Rules((), ())
    try:
        for address in addresses:
            for text in lines_of(address):
                _, host, port = _split(text)
                nothing_else.resolve(host, port)
    except (OSError, ValueError):
        return False
    return True


def check_fields(fields: Schema, config: Mapping[str, Any]) -> None:
    """Raises InvalidConfiguration naming each field whose address may not be used."""
    errors = {}
    for key, declared in fields.items():
        value = config.get(key)
        if value and _is_address(fields, key, value):
            allowed = rules([declared.from_environment])
            texts = _each(declared, value)
            for text in texts:
                try:
                    allowed.check_url(text)
                except ValueError as error:
                    errors[key] = f"{text}: {error}" if len(texts) > 1 else str(error)
                    break
    if errors:
        text = " ".join(f"{key}: {problem}" for key, problem in errors.items())
        raise InvalidConfiguration(text, field=next(iter(errors)), errors=errors)


def check_resolved(fields: Schema, config: Mapping[str, Any]) -> None:
    """Raises AddressRefused where a name leads to an address that is not allowed.

    For providers whose clients do not ask `Rules.resolve` themselves at each connection. A name
    that does not resolve is for the provider to report.
    """
    for key, text in given_addresses(fields, config).items():
        if not _is_address(fields, key, text):
            continue
        for each in _each(fields[key], text):
            _, host, port = _split(each)
            try:
                rules([fields[key].from_environment]).resolve(host, port)
            except AddressRefused as error:
                logger.warning("address refused: %s", error)
                raise
            except OSError:
                continue


def _each(declared: ConfigField, value: object) -> list[str]:
    return lines_of(value) if declared.several else [str(value)]


def _is_address(fields: Schema, key: str, value: object) -> bool:
    """Whether a value has to be one that may be used: a text in doubt, when it looks like one."""
    declared = fields[key]
    return bool(declared.address) or (declared.decides_receiver and "://" in str(value))


def _split(text: str) -> tuple[SplitResult, str, int]:
    """An address in its parts. Raises ValueError telling why it is none."""
    text = text.strip()
    try:
        url = urlsplit(text if "://" in text else f"https://{text}")
        host, port = url.hostname or "", url.port
    except ValueError:
        raise ValueError("Is not a URL.") from None
    if url.scheme not in _PORTS:
        raise ValueError("Must begin with https:// or http://.")
    if "@" in url.netloc or url.query or url.fragment or "\\" in text or port == 0:
        raise ValueError("Must be an address without user, query and fragment.")
    if not is_host(host):
        raise ValueError("Must name a host, in ASCII.")
    return url, host, port or _PORTS[url.scheme]


def _ends_in_number(host: str) -> bool:
    return bool(_NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]))


def literal(host: str) -> Address | None:
    """The address that `host` spells, if it does."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def unwrapped(address: Address) -> Address:
    """The IPv4 address within an IPv6 one that only carries it."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _host_and_port(text: str) -> str:
    _, host, port = _split(text)
    return f"{_bracketed(host)}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Of names, only localhost is known to be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
