"""The network that a request asks for, and what a record keeps of the attempts to reach hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from executions.kernel.declarations import END, STORABLE, STRICT, Members, Rule, one_of
from executions.kernel.public_suffixes import check_rules
from executions.kernel.text import storable, to_json
from executions.runs.models import Execution
from executions.runs.shapes import NetworkAttemptShape, NetworkShape
from providers.network import (
    MOST_CHARACTERS,
    MOST_LISTED,
    MOST_RULES,
    NETWORK,
    PRESETS,
    Mode,
    NetworkPolicy,
    Outcome,
)

# The key of a record's metadata that has the lists which held for its run.
NETWORK_LISTS = "network_lists"
# The same, the credentials that were there for its requests, as name@version.
NETWORK_CREDENTIALS = "network_credentials"
# Those that a record of a run without a network has none of.
NETWORK_KEYS = frozenset((NETWORK, NETWORK_LISTS, NETWORK_CREDENTIALS))
FIGURES = ("allowed", "refused", "failed", "sent", "received")
OUTCOMES: tuple[str, ...] = get_args(Outcome)

MOST_BYTES = 64 * 1024
MOST_REMARKS = 10
_LARGEST = 2**53
# The end of the year 9999, as seconds since 1970.
_LATEST = 253_402_300_800
_TEXTS = {
    "host": 255,
    "why": 100,
    "method": 16,
    "path": 256,
    "layer": 16,
    "rule": 300,
    "credential": 80,
}


ModeName = Annotated[
    Annotated[str, one_of(get_args(Mode))] | None,
    Field(description="The default is `allowlist` with `allow` or `preset`, else `none`."),
]
Allow = Annotated[
    Sequence[
        Annotated[
            str,
            Field(min_length=1, max_length=MOST_CHARACTERS),
            STORABLE,
            WithJsonSchema(
                {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MOST_CHARACTERS,
                    "format": "network-rule",
                }
            ),
        ]
    ],
    Members(MOST_RULES),
    Field(
        description="Rules: `[METHODS ][scheme://]host[:ports][/path][ # reason]`, such as "
        "`pypi.org` or `*.example.com:443`."
    ),
]
Preset = Annotated[
    Annotated[str, one_of(tuple(PRESETS))] | None,
    Field(description="Adds the rules of a preset: `packages` is the package registries."),
]
# Only an allowlist has rules, and it has some.
TOGETHER: Mapping[str, Any] = {
    "anyOf": [
        {
            "properties": {
                "mode": {"pattern": f"^(none|open){END}"},
                "allow": {"maxItems": 0},
                "preset": {"type": "null"},
            }
        },
        {
            "required": ["allow"],
            "properties": {
                "mode": {"pattern": f"^allowlist{END}"},
                "allow": {"type": "array", "minItems": 1},
            },
        },
        {
            "required": ["preset"],
            "properties": {
                "mode": {"pattern": f"^allowlist{END}"},
                "preset": {"type": "string"},
            },
        },
    ]
}


class NetworkRequest(BaseModel):
    """The hosts that the code may reach."""

    model_config = ConfigDict(**STRICT, json_schema_extra={**TOGETHER})

    mode: ModeName = None
    allow: Allow = ()
    preset: Preset = None

    @property
    def policy(self) -> NetworkPolicy:
        """Its list. Raises ValueError with what is wrong."""
        lines = [*self.allow, *(PRESETS[self.preset] if self.preset else ())]
        mode = self.mode or ("allowlist" if lines else "none")
        found = NetworkPolicy.parse(mode, lines)
        if mode == "allowlist" and not found.rules:
            raise ValueError("An allowlist needs allow or preset.")
        check_rules(found.rules)
        return found


def _check(asked: NetworkRequest) -> NetworkRequest:
    asked.policy  # noqa: B018  raises for what is no list
    return asked


NetworkField = Annotated[NetworkRequest, Rule(_check)]


def checked_attempts(claimed: Any) -> dict[str, Any] | None:
    """What a provider says of attempts, bounded, as records keep it; None for what is none.

    A value that is not stated has its default: see `providers.network.Attempt`.
    """
    if not isinstance(claimed, Mapping):
        return None
    listed = claimed.get("attempts")
    attempts: list[dict[str, Any]] = []
    room = MOST_BYTES
    for each in listed[:MOST_LISTED] if isinstance(listed, list) else ():
        attempt = checked_attempt(each)
        if attempt is None:
            continue
        room -= len(to_json(attempt).encode())
        if room < 0:
            break
        attempts.append(attempt)
    return {**{name: _whole(claimed.get(name)) for name in FIGURES}, "attempts": attempts}


def checked_attempt(claimed: Any) -> dict[str, Any] | None:
    """One attempt, as `checked_attempts` has it; None for what is none."""
    if not isinstance(claimed, Mapping) or claimed.get("outcome") not in OUTCOMES:
        return None
    at, port = _number(claimed.get("at"), _LATEST), claimed.get("port")
    if at is None:
        return None
    if type(port) is not int or not 0 <= port < 65536:
        return None
    texts = {
        name: storable(text[:most])
        for name, most in _TEXTS.items()
        if isinstance(text := claimed.get(name), str) and text
    }
    if "host" not in texts:
        return None
    numbers = {name: _whole(claimed.get(name)) for name in ("sent", "received")}
    return {
        "at": at,
        "port": port,
        "outcome": claimed["outcome"],
        **texts,
        **({"noted": True} if claimed.get("noted") is True else {}),
        **{name: number for name, number in numbers.items() if number},
        "seconds": round(_number(claimed.get("seconds"), _LARGEST) or 0.0, 3),
    }


def _number(value: Any, below: int) -> float | None:
    # Not a number is below nothing.
    is_number = type(value) in (int, float) and 0 <= value < below
    return float(value) if is_number else None


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _LARGEST else 0


def network_of(execution: Execution) -> NetworkShape | None:
    """The network of a run as the API has it: its lists, figures, and the first attempts."""
    lists = execution.meta.get(NETWORK_LISTS)
    credentials = execution.meta.get(NETWORK_CREDENTIALS)
    found = checked_attempts(execution.meta.get(NETWORK))
    if not lists and found is None:
        return None
    figures = {name: (found or {}).get(name, 0) for name in FIGURES}
    return {
        "lists": lists if isinstance(lists, list) else [],
        "credentials": credentials if isinstance(credentials, list) else [],
        "allowed": figures["allowed"],
        "refused": figures["refused"],
        "failed": figures["failed"],
        "sent": figures["sent"],
        "received": figures["received"],
        "attempts": [attempt_shape(each) for each in found["attempts"]] if found else [],
    }


def attempt_shape(stored: Mapping[str, Any]) -> NetworkAttemptShape:
    """An attempt in full, of one as `checked_attempts` has it."""
    return {
        "at": datetime.fromtimestamp(stored["at"], UTC).isoformat(),
        "host": stored["host"],
        "port": stored["port"],
        "outcome": stored["outcome"],
        "why": stored.get("why", ""),
        "method": stored.get("method", ""),
        "path": stored.get("path", ""),
        "layer": stored.get("layer", ""),
        "rule": stored.get("rule", ""),
        "credential": stored.get("credential", ""),
        "noted": stored.get("noted", False),
        "sent": stored.get("sent", 0),
        "received": stored.get("received", 0),
        "seconds": stored.get("seconds", 0.0),
    }


_WHOM = {
    "installation": "ask an administrator to add the host to the installation's network list",
    "tenant": "ask an administrator to add the host to the tenant's network list",
    "template": "run it with another template, or without one",
    "session": "name the host with PUT /api/v1/sessions/{id}/network",
    "run": "name the host in the field network of the request",
}


def network_remarks(execution: Execution) -> list[str]:
    """A line for each host that a list refused, the first of them."""
    found = checked_attempts(execution.meta.get(NETWORK))
    if found is None or not found["refused"]:
        return []
    lines = [
        f"network: {each['host']}:{each['port']} was refused by the {each['layer']}'s list; "
        f"{_WHOM[each['layer']]}"
        for each in found["attempts"]
        if each["outcome"] == "refused" and each.get("layer") in _WHOM
    ]
    return list(dict.fromkeys(lines))[:MOST_REMARKS]
