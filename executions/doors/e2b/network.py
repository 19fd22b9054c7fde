"""A sandbox's network in E2B's words: what a request asks for, and what an answer says of it.

E2B denies ranges of addresses, and allows hosts in spite of that. Lists here allow hosts and deny
all else. So both say the same only where everything is denied, or nothing is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import PrivateAttr

from executions.doors.e2b.connect import invalid, unimplemented
from executions.kernel.declarations import Members
from executions.kernel.public_suffixes import check_rules
from executions.kernel.text import is_storable
from executions.runs.network import NetworkRequest
from executions.sessions.models import Session
from executions.sessions.networks import gives_network
from providers.addresses import literal
from providers.credentials import HERE, check_placement
from providers.network import MOST_RULES, PORTS, NetworkPolicy, Rule, SetHeader
from providers.runtime.guest.names import shorten

ALL_TRAFFIC = "0.0.0.0/0"
NOTHING = NetworkRequest(mode="none")
_OPEN = NetworkRequest(mode="open")
_LONGEST = 255
_READ = ("allowOut", "denyOut")
# What a header of `rules` has of a secret, and the most of them.
_SECRET = re.compile(r"\$\{e2b\.secrets\.([^{}]{1,63})\}")
_MOST_HEADERS = 50
# A name, or `*.` and a name: neither a port nor a user, a path, a scheme or a reason.
_NAME = re.compile(r"(?:\*\.)?[^\s/:@#,*\[\]]+")
# What asks for no more than holds here anyway: a sandbox's ports cannot be reached.
_HARMLESS = ("allowPublicTraffic",)


class _Request(NetworkRequest):
    """A list with headers, which no other API can name."""

    _headers: Annotated[tuple[SetHeader, ...], Members(_MOST_HEADERS)] = PrivateAttr(default=())

    def with_headers(self, headers: tuple[SetHeader, ...]) -> _Request:
        self._headers = headers
        return self

    @property
    def policy(self) -> NetworkPolicy:
        return replace(super().policy, headers=self._headers)


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
    copy = _Request(mode=policy.mode, allow=[str(rule) for rule in policy.rules])
    return copy.with_headers(policy.headers)


def detail(session: Session) -> dict[str, Any]:
    """What an answer says of the sandbox's own list; nothing where it has none."""
    policy = session.network_policy
    if policy is None:
        return {}
    rules = _rules_of(policy.headers)
    if policy.mode == "open":
        return {"allowInternetAccess": True, "network": rules}
    allowed = [_text_of(rule) for rule in policy.rules]
    return {"network": {"allowOut": allowed, "denyOut": [ALL_TRAFFIC], **rules}}


def _access_in(body: Mapping[str, Any]) -> bool | None:
    access = body.get("allow_internet_access")
    if access is not None and type(access) is not bool:
        raise invalid("allow_internet_access: Must be true or false.")
    return access


def _within(asked: NetworkRequest | None, tenant_slug: str) -> NetworkRequest | None:
    """All that is public is what the lists around it give. Where they give nothing, there is what
    a sandbox has that names none."""
    is_open = asked is not None and asked.mode == "open"
    return None if is_open and not gives_network(tenant_slug) else asked


def _asked(rules: Mapping[str, Any], where: str, *, is_denied: bool) -> NetworkRequest | None:
    headers = _headers(rules.get("rules"), f"{where}rules")
    asked = _hosts_asked(rules, where, is_denied=is_denied)
    if not headers:
        return asked
    if asked is None or asked.mode == "none":
        raise invalid(f"{where}rules: Name the hosts in allowOut, too.")
    if asked.mode != "open":
        known = asked.policy.rules
        for each in headers:
            # A header that is never set would be found out by its program only.
            if not any(_is_below(each.host, rule.host) for rule in known):
                raise invalid(f"{where}rules: Name {each.host} in allowOut, too.")
    return _Request(mode=asked.mode, allow=asked.allow).with_headers(headers)


def _is_below(host: str, around: str) -> bool:
    return host == around or (around.startswith("*.") and host.endswith(around[1:]))


def _hosts_asked(rules: Mapping[str, Any], where: str, *, is_denied: bool) -> NetworkRequest | None:
    for name, value in rules.items():
        if name not in (*_READ, "rules") and not _is_harmless(name, value):
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


def _headers(rules: Any, field: str) -> tuple[SetHeader, ...]:
    """What requests to hosts have set. Raises Refused."""
    if rules is None:
        return ()
    if not isinstance(rules, dict):
        raise invalid(f"{field}: Must be an object of lists by host.")
    found = []
    for host, transforms in rules.items():
        rule = _rule_of(str(host), field)
        if rule is None or not isinstance(transforms, list):
            raise invalid(f"{field}: Must be an object of lists by host.")
        try:
            check_rules((rule,))
        except ValueError as error:
            raise invalid(f"{field}: {error}") from None
        for each in transforms:
            found += [
                _header(rule.host, name, text, field)
                for name, text in _headers_in(each, field).items()
            ]
    if len(found) > _MOST_HEADERS:
        raise invalid(f"{field}: Has more than {_MOST_HEADERS} headers.")
    return tuple(found)


def _headers_in(each: Any, field: str) -> dict[str, Any]:
    if not isinstance(each, dict) or set(each) - {"transform"}:
        raise unimplemented(f"{field}: Anything but transform")
    transform = each.get("transform") or {}
    if not isinstance(transform, dict) or set(transform) - {"headers"}:
        raise unimplemented(f"{field}: Anything but headers in transform")
    headers = transform.get("headers") or {}
    if not isinstance(headers, dict):
        raise invalid(f"{field}: headers must be an object of texts.")
    return headers


def _header(host: str, name: str, text: Any, field: str) -> SetHeader:
    try:
        check_placement("header", name)
    except ValueError as error:
        raise invalid(f"{field}: {shorten(name)!r}: {error}") from None
    if not isinstance(text, str) or len(text) > _LONGEST or not re.fullmatch(r"[ -~]+", text):
        raise invalid(
            f"{field}: {shorten(name)!r} must be printable ASCII of at most {_LONGEST} characters."
        )
    secrets = _SECRET.findall(text)
    if len(secrets) != 1 or HERE in text or "${e2b.identity" in text:
        raise unimplemented(f"{field}: A header without exactly one secret")
    return SetHeader(host, name, _SECRET.sub(HERE, text), secrets[0])


def _rules_of(headers: Sequence[SetHeader]) -> dict[str, Any]:
    """The same in E2B's words."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in headers:
        text = each.text.replace(HERE, f"${{e2b.secrets.{each.credential}}}")
        found.setdefault(each.host, []).append({"transform": {"headers": {each.name: text}}})
    return {"rules": found} if found else {}


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
