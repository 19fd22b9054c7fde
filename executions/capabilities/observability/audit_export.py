"""The export of the ledger to a collector, by OTLP or syslog.

Each entry is sent as an event of the Open Cybersecurity Schema Framework, 1.3.0. What
runs is API Activity (6003), what is changed about keys, people and settings is Entity Management
(3004). `raw_data` is the signed statement itself: with `unmapped` its reader can check the
signature and the chain without us.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from executions.capabilities.observability.destinations import AuditDestination
from executions.capabilities.observability.models import AuditExport
from executions.kernel import http
from executions.kernel.claims import by_claim, claim, end
from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers import draining
from providers.addresses import Allowed, Rules
from providers.remote.receiver import Receiver

logger = logging.getLogger(__name__)


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


_INFO = 9


class NotTaken(OSError):
    """The collector did not take the batch, or not all of it."""


def send_otlp(entries: Sequence[LedgerEntry], destination: AuditDestination) -> None:
    """Returns when the collector has taken them all. Raises NotTaken."""
    host = f"[{destination.host}]" if ":" in destination.host else destination.host
    place = f"{host}:{destination.port}"
    # The operator's own collector may be anywhere; nothing else may.
    rules = Rules((Allowed.parse(place),), (), "AUDIT_EXPORT_URL")
    body = json.dumps(request_of(entries), separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", **dict(destination.headers)}
    answer = http.post_json(
        f"https://{place}{destination.path}", body, headers, Receiver(rules, destination.ca)
    )
    if answer.problem:
        raise NotTaken(answer.problem)
    rejected = _rejected(answer.body)
    if rejected is None:
        raise NotTaken("the receiver is not a collector: its answer is not OTLP")
    if rejected:
        raise NotTaken(f"{rejected} of {len(entries)} entries were rejected")


def request_of(entries: Sequence[LedgerEntry]) -> dict[str, Any]:
    """An ExportLogsServiceRequest."""
    now = time.time_ns()
    return {
        "resourceLogs": [
            {
                "resource": {
                    "attributes": [
                        _attribute("service.name", "cofferdam"),
                        _attribute("service.instance.id", settings.INSTANCE),
                    ]
                },
                "scopeLogs": [
                    {
                        "scope": {"name": "cofferdam.ledger"},
                        "logRecords": [
                            _record(entry, event, now)
                            for entry, event in zip(entries, events_of(entries), strict=True)
                        ],
                    }
                ],
            }
        ]
    }


def _record(entry: LedgerEntry, event: Mapping[str, Any], now: int) -> dict[str, Any]:
    return {
        # 64 bits, which JSON has as a text.
        "timeUnixNano": str(int(entry.at.timestamp() * 1_000_000) * 1000),
        "observedTimeUnixNano": str(now),
        "severityNumber": _INFO,
        "severityText": "INFO",
        "body": {"stringValue": json.dumps(event, separators=(",", ":"))},
        "attributes": [
            _attribute("ledger.kind", entry.kind),
            _attribute("ledger.digest", entry.digest),
            {"key": "ledger.sequence", "value": {"intValue": str(entry.sequence)}},
        ],
    }


def _attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def _rejected(body: bytes) -> int | None:
    """How many a 200 says were not taken, which OTLP calls a partial success. None for an answer
    of something else, such as a proxy's page.
    """
    try:
        said = json.loads(body or b"{}")
        return int((said.get("partialSuccess") or {}).get("rejectedLogRecords") or 0)
    except (ValueError, TypeError, AttributeError):
        return None


# For each step: connecting, the handshake, sending a batch, its end.
STEP_SECONDS = 10.0
# Facility 13, "log audit", and severity 6, "informational".
_PRIORITY = 13 * 8 + 6
_MOST_SEQUENCE = 2**31 - 1
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


def send_syslog(entries: Sequence[LedgerEntry], destination: AuditDestination) -> None:
    """Returns when the collector has read them all. Raises OSError, ssl.SSLError among them."""
    frames = b"".join(map(frame_of, entries, events_of(entries)))
    context = ssl.create_default_context(cadata=destination.ca or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python takes the end of a connection for a close_notify. Here it says that something is lost.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    place = (destination.host, destination.port)
    with (
        socket.create_connection(place, timeout=STEP_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=destination.host) as secure,
    ):
        secure.settimeout(STEP_SECONDS)
        secure.sendall(frames)
        secure.unwrap()


def frame_of(entry: LedgerEntry, event: Mapping[str, Any]) -> bytes:
    """One message, with its length before it: nothing within can end it."""
    at = entry.at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    host = _UNPRINTABLE.sub("-", settings.INSTANCE)[:255] or "-"
    kind = _UNPRINTABLE.sub("-", entry.kind)[:32] or "-"
    number = (entry.sequence - 1) % _MOST_SEQUENCE + 1
    text = json.dumps(event, separators=(",", ":"))
    head = f'<{_PRIORITY}>1 {at} {host} cofferdam - {kind} [meta sequenceId="{number}"] '
    message = (head + text).encode("ascii")
    return b"%d %s" % (len(message), message)


BATCH = 200
# One entry may be larger, and is then a batch by itself.
BATCH_BYTES = 512 * 1024
# Longer than a batch may take, so that nobody else begins meanwhile.
LEASE = timedelta(seconds=90)
LONGEST_RETRY = timedelta(minutes=1)
LOOK_SECONDS = 1.0
# A turn ends before the schedule begins the next one.
TURN_SECONDS = 50.0

_SEND: dict[str, Callable[[Sequence[LedgerEntry], AuditDestination], None]] = {
    "syslog": send_syslog,
    "otlp": send_otlp,
}


def export_for(seconds: float | None = None) -> int:
    """Send what there is, and what comes within so many seconds, or a turn. How many have arrived.

    Ends at once where somebody else does it, or nothing is to be sent to.
    """
    destination = settings.AUDIT_EXPORT
    if destination is None:
        return 0
    AuditExport.objects.get_or_create(destination=destination.name)
    row = claim(AuditExport.objects.filter(destination=destination.name), LEASE)
    if row is None:
        return 0
    ends = time.monotonic() + (TURN_SECONDS if seconds is None else seconds)
    sent = 0
    try:
        while by_claim(row).update(claimed_until=Now() + LEASE):
            arrived = _export_batch(destination, by_claim(row))
            sent += arrived
            left = ends - time.monotonic()
            if left <= 0 or draining.is_draining():
                break
            if not arrived:
                time.sleep(min(LOOK_SECONDS, left))
    finally:
        end(row)
    return sent


def _export_batch(destination: AuditDestination, mine: QuerySet[AuditExport]) -> int:
    """How many have arrived: none where there are none, or the collector is to be left alone."""
    row = mine.filter(Q(retry_at=None) | Q(retry_at__lte=Now())).first()
    if row is None:
        return 0
    entries = _next(row.sequence)
    if not entries:
        return 0
    if entries[0].sequence != row.sequence + 1:
        logger.critical(
            "ALERT: the ledger has no entry %d; the collector gets the next existing entry",
            row.sequence + 1,
            extra={"alert": "ledger_gap"},
        )
    try:
        _SEND[destination.kind](entries, destination)
    except Exception as error:
        # Whatever it is, also an entry that somebody has made unreadable, is told and tried again.
        wait = min(timedelta(seconds=2 ** min(row.tries, 10)), LONGEST_RETRY)
        problem = f"{type(error).__name__}: {error}"[:500]
        mine.update(tries=row.tries + 1, retry_at=Now() + wait, problem=problem)
        logger.warning("the collector of the ledger has not taken a batch: %s", problem)
        return 0
    moved = mine.update(
        sequence=entries[-1].sequence, sent_at=Now(), tries=0, retry_at=None, problem=""
    )
    return len(entries) if moved else 0


def _next(after: int) -> list[LedgerEntry]:
    """The entries that come next, of bounded number and size."""
    found: list[LedgerEntry] = []
    size = 0
    rows = LedgerEntry.objects.filter(sequence__gt=after).order_by("sequence")
    for entry in rows[:BATCH]:
        size += len(entry.statement)
        if found and size > BATCH_BYTES:
            break
        found.append(entry)
    return found
