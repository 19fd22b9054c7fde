"""What schemathesis cannot make by itself, and what no description can say. It loads this."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import strategies

CRON = ("30 6 * * mon-fri", "0 0 1 1 *", "*/5 8-17 * * *")
# What may be said by a header and in the body as well, and then is the same.
TWICE = {
    "X-Agent": "agent",
    "X-Model": "model",
    "X-Conversation": "conversation",
    "X-On-Behalf-Of": "on_behalf_of",
    "Idempotency-Key": "idempotency_key",
}

schemathesis.openapi.media_type("application/x-tar", strategies.binary(max_size=2048))
schemathesis.openapi.format("cron", strategies.sampled_from(CRON))
schemathesis.openapi.format("time-zone", strategies.sampled_from(("UTC", "Europe/Berlin")))


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Whether a header and the body do not contradict each other."""
    body, headers = case.body, case.headers or {}
    if not isinstance(body, dict):
        return True
    return not any(name in headers and body.get(field) for name, field in TWICE.items())
