"""One alert as a signed POST (Standard Webhooks 1.0), to an address that may be connected to.

The address is of the environment, and is held to the rules of providers' addresses all the same:
public ones over https, others where ALERT_ALLOWED_NETWORKS names them.
"""

from __future__ import annotations

import json
import time
from typing import Any

from django.conf import settings

from executions.kernel import http
from executions.models.alert import Alert
from executions.services.webhooks.signing import signed_headers
from providers.addresses import Allowed, Rules
from providers.remote.receiver import Receiver


def post(alert: Alert) -> str:
    """Why it was not taken; "" when it was."""
    alerting = settings.ALERTING
    body = json.dumps(_content(alert), separators=(",", ":")).encode()
    # The same for each try, so that a receiver knows one that it has had.
    message_id = f"alert_{alert.pk}_{alert.state}"
    headers = {
        "Content-Type": "application/json",
        **signed_headers((alerting.webhook_secret,), message_id, int(time.time()), body),
    }
    return http.post(alerting.webhook_url, body, headers, Receiver(_rules()))


def _content(alert: Alert) -> dict[str, Any]:
    ended = alert.resolved_at
    return {
        "type": f"alert.{alert.state}",
        "timestamp": (ended or alert.opened_at).isoformat(),
        "data": {
            "id": alert.pk,
            "rule": alert.rule,
            "subject": alert.subject,
            "severity": str(alert.severity),
            "message": alert.message,
            "value": alert.value,
            "threshold": alert.threshold,
            "instance": settings.INSTANCE,
            "opened_at": alert.opened_at.isoformat(),
            "resolved_at": ended.isoformat() if ended else None,
        },
    }


def _rules() -> Rules:
    allowed = tuple(map(Allowed.parse, settings.ALERT_ALLOWED_NETWORKS))
    return Rules(allowed, allowed, "ALERT_ALLOWED_NETWORKS")
