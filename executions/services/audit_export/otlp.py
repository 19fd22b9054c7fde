"""OTLP over HTTP, in JSON: a request for each batch, which has arrived when that is answered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings

from executions.kernel import http
from executions.ledger.models import LedgerEntry
from executions.services.audit_export.events import events_of
from providers.addresses import Allowed, Rules
from providers.remote.receiver import Receiver
from sandbox_site.observability import AuditDestination

_INFO = 9


class NotTaken(OSError):
    """The collector did not take the batch, or not all of it."""


def send(entries: Sequence[LedgerEntry], destination: AuditDestination) -> None:
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
