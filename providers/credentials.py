"""Credentials that the network proxy puts into requests, and code in a sandbox never has.

Code has a placeholder, `cfd-secret:NAME`. The proxy puts the value in where a request over TLS goes
to one of the hosts, methods and paths that the credential is bound to, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from providers.remote.secret import Secret

Placement = Literal["bearer", "basic", "header", "query", "sandbox"]

PLACEHOLDER = "cfd-secret:"
# Where the value goes in a text of `SetHeader`.
HERE = "${}"
# The end of the names by which programs reach upstreams. No public name ends so.
SANDBOX = ".sandbox"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
# A shorter value could be part of what a server sends anyway, and would be masked there.
LEAST_CHARACTERS = 8
MOST_CHARACTERS = 8192
# Of one scope.
MOST_CREDENTIALS = 50
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_PARAMETER = re.compile(r"[A-Za-z0-9._~-]{1,100}")
_UPSTREAM = re.compile(r"https://([a-z0-9.-]{1,253})(?::(\d{1,5}))?((?:/[A-Za-z0-9._~-]+)*/?)")
_USER = re.compile(r"[!-9;-~]{0,200}")
# What frames a message, leads it, or belongs to a connection is not for a credential.
_NO_CREDENTIAL = frozenset(
    (
        *("accept-encoding", "connection", "content-encoding", "content-length", "expect", "host"),
        *("if-range", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "range", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)


def check_value(text: str) -> None:
    """Raise ValueError for a value that no header can carry, or that cannot be masked."""
    if not LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
        raise ValueError(f"Must have {LEAST_CHARACTERS} to {MOST_CHARACTERS} characters.")
    if not re.fullmatch(r"[!-~]+(?: +[!-~]+)*", text):
        raise ValueError("Must be printable ASCII, without spaces at its ends.")


def check_placement(placement: str, field: str) -> None:
    """Raise ValueError for a placement that is none, or a field that does not fit it.

    `field` is the name of the header or of the query parameter, or the user name of `basic`.
    """
    if placement not in get_args(Placement):
        raise ValueError(f"Must be one of {', '.join(get_args(Placement))}.")
    if placement in ("bearer", "sandbox") and field:
        raise ValueError("Only a header, a parameter and a user name have a field.")
    if placement == "header" and (not _HEADER.fullmatch(field) or field.lower() in _NO_CREDENTIAL):
        raise ValueError("Must be the name of a header that may carry a credential.")
    if placement == "query" and not _PARAMETER.fullmatch(field):
        raise ValueError("Must be the name of a query parameter.")
    if placement == "basic" and not _USER.fullmatch(field):
        raise ValueError("Must be a user name, without a colon.")


class Upstream(NamedTuple):
    """The address of a service: its path has no slash at its end."""

    host: str
    port: int
    path: str


def read_upstream(text: str) -> Upstream:
    """Read an address such as `https://api.example.com/v1`. Raises ValueError."""
    found = _UPSTREAM.fullmatch(text)
    if found is None or not 0 < (port := int(found[2] or 443)) < 65536:
        raise ValueError("Must be an address such as https://api.example.com/v1.")
    return Upstream(found[1], port, (found[3] or "").rstrip("/"))


@dataclass(frozen=True)
class Credential:
    """One version of a credential, and the requests that it is for.

    `id` names it whatever its version. `rules` are texts of `providers.network.Rule`. `variable` is
    the environment variable that has the placeholder, "" for none. With an `upstream`, the address
    of a service, programs reach that as `http://NAME.sandbox/` too, and need no TLS for it.

    One of the placement `sandbox` has no rules: the list of a sandbox says where it goes. Bound by
    that it is a header with a `template`, in which the value stands for HERE, and the header is set
    whatever a program says.
    """

    id: str
    name: str
    version: int
    placement: Placement
    field: str
    rules: tuple[str, ...]
    variable: str
    value: Secret
    upstream: str = ""
    template: str = ""

    @property
    def placeholder(self) -> str:
        return f"{PLACEHOLDER}{self.name}"

    @property
    def label(self) -> str:
        """What records say of it."""
        return f"{self.name}@{self.version}"

    def to_json(self) -> dict[str, Any]:
        """With its value: for the process that puts it in, and nothing else."""
        return {
            "id": self.id,
            "name": self.name,
            "version": self.version,
            "placement": self.placement,
            "field": self.field,
            "rules": list(self.rules),
            "variable": self.variable,
            "upstream": self.upstream,
            "template": self.template,
            "value": self.value.reveal(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Credential:
        """Raises ValueError, in which the value is not."""
        if not isinstance(value, Mapping):
            raise ValueError("credentials: Must be a list of objects.")
        texts = {
            name: str(value.get(name, ""))
            for name in ("id", "name", "placement", "field", "variable", "upstream", "template")
        }
        rules, version = value.get("rules"), value.get("version")
        if not isinstance(rules, list) or not all(isinstance(each, str) for each in rules):
            raise ValueError("credentials: rules must be a list of rules.")
        if type(version) is not int:
            raise ValueError("credentials: version must be a whole number.")
        if not NAME.fullmatch(texts["name"]):
            raise ValueError("credentials: name must be small letters, digits, _ and -.")
        if texts["variable"] and not VARIABLE.fullmatch(texts["variable"]):
            raise ValueError("credentials: variable must be the name of a variable.")
        check_placement(texts["placement"], texts["field"])
        if texts["upstream"]:
            read_upstream(texts["upstream"])
        text = str(value.get("value", ""))
        check_value(text)
        return cls(
            texts["id"],
            texts["name"],
            version,
            cast("Placement", texts["placement"]),
            texts["field"],
            tuple(rules),
            texts["variable"],
            Secret(text),
            texts["upstream"],
            texts["template"],
        )


def changes_to_json(changes: Mapping[str, Credential | None]) -> dict[str, Any]:
    """Other versions of credentials by id, as `credential_changes` reads them."""
    return {name: each and each.to_json() for name, each in changes.items()}


def credential_changes(value: Any) -> dict[str, Credential | None]:
    """Other versions of credentials by id, None for those that are gone; of `Credential.to_json`.

    Raises ValueError.
    """
    if not isinstance(value, Mapping):
        raise ValueError("credentials: Must be an object of credentials by id.")
    return {
        str(name): None if each is None else Credential.from_json(each)
        for name, each in value.items()
    }
