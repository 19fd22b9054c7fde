"""An entry of the ledger as an event of the Open Cybersecurity Schema Framework, 1.3.0.

What runs is API Activity (6003), what is changed about keys, people and settings is Entity
Management (3004). `raw_data` is the signed statement itself: with `unmapped` its reader can check
the signature and the chain without us.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.conf import settings

from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution

VERSION = "1.3.0"
_API_ACTIVITY, _ENTITY_MANAGEMENT = 6003, 3004
_CREATE, _UPDATE, _DELETE, _OTHER = 1, 3, 4, 99
_INFORMATIONAL, _MEDIUM = 1, 3
_SUCCESS, _FAILURE = 1, 2
# Of a row of settings or people; anything else that is entered is done to what is called.
_ENTITIES = frozenset(
    (
        *("tenant", "api_key", "setting", "user", "role", "authenticator", "configuration"),
        *("policy", "legal_hold", "webhook_secret"),
    )
)
_ACTIVITIES = {
    **dict.fromkeys(("created", "added", "opened", "found"), _CREATE),
    **dict.fromkeys(("changed", "activated", "rotated", "reset"), _UPDATE),
    **dict.fromkeys(("deleted", "removed", "revoked", "closed", "retired"), _DELETE),
}
_UNKNOWN = "unknown"
_FAILED = frozenset(("failed", "timed_out", "out_of_memory", "blocked", "error"))


def events_of(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    """Their events. By which key a run was asked for is its record's to say, which the entry binds
    by a hash: it is looked up for all of them at once."""
    wanted = [entry.execution_id for entry in entries if entry.execution_id is not None]
    rows = Execution.objects.filter(pk__in=wanted).values_list("pk", "api_key_prefix")
    keys = {pk: f"key:{prefix}" for pk, prefix in rows if prefix}
    return [
        event_of(entry, keys.get(entry.execution_id, "") if entry.execution_id else "")
        for entry in entries
    ]


def event_of(entry: LedgerEntry, asked_by: str = "") -> dict[str, Any]:
    """JSON. Of a statement that is none, because somebody wrote to the database, what there is."""
    stated = parse(entry.statement) or {}
    status = stated.get("status")
    is_entity, is_refusal = entry.kind in _ENTITIES, entry.kind == "refusal"
    kind = _ENTITY_MANAGEMENT if is_entity else _API_ACTIVITY
    action = str(stated.get("action") or "")
    activity = _ACTIVITIES.get(action, _CREATE if entry.kind == "execution" else _OTHER)
    operation = (
        "execute_code" if entry.kind == "execution" else f"{entry.kind}.{action}".rstrip(".")
    )
    subject = str(stated.get("subject") or "")
    event: dict[str, Any] = {
        "activity_id": activity,
        "category_uid": kind // 1000,
        "class_uid": kind,
        "type_uid": kind * 100 + activity,
        "severity_id": _MEDIUM if entry.kind in ("alert", "refusal") else _INFORMATIONAL,
        "status_id": _FAILURE if str(status) in _FAILED or is_refusal else _SUCCESS,
        "time": milliseconds_of(entry.at),
        "metadata": {
            "version": VERSION,
            "product": {"name": "Cofferdam", "vendor_name": "Cofferdam"},
            "log_name": "ledger",
            "event_code": operation,
            "sequence": entry.sequence,
            "uid": f"{entry.sequence}-{entry.digest[:16]}",
        },
        "actor": {"user": {"name": str(stated.get("actor") or asked_by or _UNKNOWN)}},
        "message": f"{operation} {subject}".rstrip(),
        "raw_data": entry.statement,
        "unmapped": {
            "kind": entry.kind,
            "digest": entry.digest,
            "key_id": entry.key_id,
            "signature": entry.signature,
        },
    }
    if status is not None:
        event["status"] = str(status)
    if entry.execution_id is not None:
        event["metadata"]["correlation_uid"] = str(entry.execution_id)
    if tenant := stated.get("tenant_slug") or stated.get("tenant"):
        event["metadata"]["tenant_uid"] = str(tenant)
    if is_entity:
        event["entity"] = {"type": entry.kind, "name": subject or str(stated.get("row") or "-")}
    else:
        event["api"] = {"operation": operation, "service": {"name": "cofferdam"}}
        event["src_endpoint"] = {"name": settings.INSTANCE}
    return event


def milliseconds_of(at: datetime) -> int:
    return int(at.timestamp() * 1000)
