"""When the power of a key grows, which takes a second person under the two-person rule.

What takes power away, and a key that opens nothing yet, waits for nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from executions.kernel import batches
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import WORD_BOUNDS, ApiKey, Scope
from providers.errors import InvalidConfiguration
from providers.guarded import Change, Guarded, Values
from providers.isolation import meets
from providers.services.guarded_rows import NotAllowed

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


def refuse_used(api_keys: Collection[ApiKey]) -> None:
    """Before keys are deleted in one transaction: raise NotAllowed where more records name them
    than one transaction may write, for each of these is written then.
    """
    most = batches.MOST_ROWS
    # With the tenants, by whose index sessions are found.
    tenants = {key.tenant_id for key in api_keys}
    found = 0
    for model in (Execution, Session):
        named = model.objects.filter(tenant__in=tenants, api_key__in=api_keys).order_by()
        found += named.values("pk")[: most + 1].count()
    if found > most:
        raise NotAllowed(
            f"More than {most} runs and sessions use the selected keys. Revoke them instead: a "
            "revoked key has no access, and is deleted with its tenant."
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
