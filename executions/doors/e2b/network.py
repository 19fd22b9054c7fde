"""A sandbox's network in E2B's words: what a request asks for, and what an answer says of it.

E2B denies ranges of addresses, and allows hosts in spite of that. Lists here allow hosts and deny
all else. So both say the same only where everything is denied, or nothing is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from executions.doors.e2b.connect import invalid, unimplemented
from executions.kernel.text import is_storable
from executions.runs.network import NetworkRequest
from executions.sessions.models import Session
from executions.sessions.networks import gives_network
from providers.addresses import literal
from providers.network import MOST_RULES, PORTS, Rule
from providers.runtime.guest.names import shorten

ALL_TRAFFIC = "0.0.0.0/0"
NOTHING = NetworkRequest(mode="none")
_OPEN = NetworkRequest(mode="open")
_LONGEST = 255
_READ = ("allowOut", "denyOut")
# A name, or `*.` and a name: neither a port nor a user, a path, a scheme or a reason.
_NAME = re.compile(r"(?:\*\.)?[^\s/:@#,*\[\]]+")
# What asks for no more than holds here anyway: a sandbox's ports cannot be reached.
_HARMLESS = ("allowPublicTraffic",)


def network_of_new(body: Mapping[str, Any], tenant_slug: str) -> NetworkRequest | None:
    """The network that the request for a sandbox names; None where it names none. Clients send
    `allow_internet_access` of true without being asked. Raises Refused and BlockedByPolicy.
    """
    rules = body.get("network")
    if rules is None:
        rules = {}
    if not isinstance(rules, dict):
        raise invalid("network: Must be an object.")
    access = _access_in(body)
    return _within(_asked(rules, "network.", is_denied=access is False), tenant_slug)


def network_of_change(body: Mapping[str, Any], tenant_slug: str) -> NetworkRequest | None:
    """The network that replaces a sandbox's own. Raises Refused and BlockedByPolicy."""
    access = _access_in(body)
    rules = {name: value for name, value in body.items() if name != "allow_internet_access"}
    asked = _asked(rules, "", is_denied=access is False)
    return _within(_OPEN if asked is None and access else asked, tenant_slug)


def network_of_copy(session: Session) -> NetworkRequest:
    """What a copy of the session asks for: the same list, or none."""
    policy = session.network_policy
    if policy is None:
        return NOTHING
    return NetworkRequest(mode=policy.mode, allow=[str(rule) for rule in policy.rules])


def detail(session: Session) -> dict[str, Any]:
    """What an answer says of the sandbox's own list; nothing where it has none."""
    policy = session.network_policy
    if policy is None:
        return {}
    if policy.mode == "open":
        return {"allowInternetAccess": True, "network": {}}
    allowed = [_text_of(rule) for rule in policy.rules]
    return {"network": {"allowOut": allowed, "denyOut": [ALL_TRAFFIC]}}


def _access_in(body: Mapping[str, Any]) -> bool | None:
    access = body.get("allow_internet_access")
    if access is not None and type(access) is not bool:
        raise invalid("allow_internet_access: Must be true or false.")
    return access


def _within(asked: NetworkRequest | None, tenant_slug: str) -> NetworkRequest | None:
    """All that is public is what the lists around it give. Where they give nothing, there is what
    a sandbox has that names none."""
    return None if asked is _OPEN and not gives_network(tenant_slug) else asked


def _asked(rules: Mapping[str, Any], where: str, *, is_denied: bool) -> NetworkRequest | None:
    for name, value in rules.items():
        if name not in _READ and not _is_harmless(name, value):
            raise unimplemented(f"{where}{name[:64]}")
    allowed, denied = (_entries(rules, name, where) for name in _READ)
    hosts = [_rule_of(entry, f"{where}allowOut") for entry in allowed or ()]
    denies_all = _denies_all(denied or (), f"{where}denyOut", is_denied=is_denied)
    # What is allowed goes before what is denied.
    if None in hosts:
        return _OPEN
    named = [rule for rule in hosts if rule is not None]
    if denies_all:
        return _allowlist(named, f"{where}allowOut")
    if any(literal(rule.host) is None for rule in named):
        raise invalid(
            f"{where}allowOut: Has names, but nothing else is denied. Add {ALL_TRAFFIC} to denyOut."
        )
    return None if allowed is None and denied is None else _OPEN


def _allowlist(rules: Sequence[Rule], field: str) -> NetworkRequest:
    if not rules:
        return NOTHING
    asked = NetworkRequest(allow=[str(rule) for rule in rules])
    try:
        asked.policy  # noqa: B018  raises for what is no list
    except ValueError as error:
        raise invalid(f"{field}: {error}") from None
    return asked


def _is_harmless(name: str, value: Any) -> bool:
    return value is None or value in ([], {}) or (name in _HARMLESS and type(value) is bool)


def _entries(rules: Mapping[str, Any], name: str, where: str) -> list[str] | None:
    found = rules.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > MOST_RULES:
        raise invalid(f"{where}{name}: Must be a list of at most {MOST_RULES} strings.")
    for entry in found:
        if not isinstance(entry, str) or not is_storable(entry) or len(entry) > _LONGEST:
            raise invalid(
                f"{where}{name}: Must have strings of at most {_LONGEST} characters, without NUL."
            )
    return found


def _rule_of(entry: str, field: str) -> Rule | None:
    """The rule that allows it, None for all traffic."""
    if "/" in entry:
        addresses = _range_of(entry, field)
        if str(addresses) == ALL_TRAFFIC:
            return None
        if addresses.num_addresses > 1:
            raise unimplemented(f"{field}: {addresses}, a range of addresses,")
        entry = str(addresses.network_address)
    if ":" in entry and literal(entry) is not None:
        entry = f"[{entry}]"
    elif not _NAME.fullmatch(entry):
        raise invalid(
            f"{field}: {shorten(entry)!r} is not a host, such as example.com, *.example.com or "
            "8.8.8.8. The ports are 443 and 80."
        )
    try:
        return Rule.parse(entry)
    except ValueError as error:
        raise invalid(f"{field}: {error}") from None


def _denies_all(denied: Sequence[str], field: str, *, is_denied: bool) -> bool:
    ranges = [str(_range_of(entry, field)) for entry in denied]
    if is_denied or ALL_TRAFFIC in ranges:
        return True
    if ranges:
        raise unimplemented(f"{field}: Anything but {ALL_TRAFFIC}")
    return False


def _range_of(text: str, field: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise invalid(f"{field}: {shorten(text)!r} is not an address or a CIDR range.") from None


def _text_of(rule: Rule) -> str:
    is_plain = not rule.scheme and not rule.needs_requests and rule.ports == PORTS
    return rule.host if is_plain else str(replace(rule, reason=""))
