"""When the power of a key grows, which takes a second person under the two-person rule.

What takes power away, and a key that opens nothing yet, waits for nobody.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from executions.tenants.models import WORD_BOUNDS, ApiKey, Scope
from providers.errors import InvalidConfiguration
from providers.guarded import Change, Guarded, Values
from providers.isolation import meets

CONFIGURE = "providers.change_providerconfig"


def is_escalation(change: Change) -> bool:
    """Whether the key can do anything after the change that it could not before."""
    before, after = change.before, change.after
    if after is None:
        return False
    if before is None:
        return bool(after["scopes"])
    return (
        before["tenant"] != after["tenant"]
        or not _words(after, "scopes") <= _words(before, "scopes")
        or any(_is_looser(before, after, name) for name in WORD_BOUNDS)
        or not meets(after["minimum_isolation"], before["minimum_isolation"])
        or _is_later(before["expires_at"], after["expires_at"])
    )


def _words(values: Values, name: str) -> set[str]:
    return set(values[name].split())


def _is_looser(before: Values, after: Values, name: str) -> bool:
    """By the words alone: a network within another one counts as something else."""
    former, now = _words(before, name), _words(after, name)
    return bool(former) and (not now or not now <= former)


def _is_later(before: str | None, after: str | None) -> bool:
    if before is None or after is None:
        return before is not None
    return datetime.fromisoformat(after) > datetime.fromisoformat(before)


def _refuse(person: Any, change: Change) -> str:
    """Who may not configure providers could otherwise do so with a key made or widened here."""
    states = [values for values in (change.before, change.after) if values]
    if not is_escalation(change) or not any(
        Scope.ADMIN in _words(values, "scopes") for values in states
    ):
        return ""
    if person.has_perm(CONFIGURE):
        return ""
    return (
        "The scope admin, and changes that extend a key with this scope, need the permission to "
        "configure providers."
    )


def _begin(row: ApiKey) -> None:
    raise InvalidConfiguration("The text of a deleted key is not stored. Create a new key.")


KEYS = Guarded(
    ApiKey,
    left_out=frozenset(
        ("prefix", "key_hash", "rotated_from", "created_at", "revoked_at", "last_used_at")
    ),
    refuse=_refuse,
    begin=_begin,
    takes_two=is_escalation,
)
