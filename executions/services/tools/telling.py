"""A call of a tool as a signed webhook, where the request named one: guarded as every other is.

The process that runs the code sends it, a few times, for as long as the call waits. Nothing but the
event on the stream is promised of it: what must not be missed is asked for by GET.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable

from executions.models import ToolCall, WebhookDelivery
from executions.services.tools.calls import describe
from executions.services.webhooks.delivering import Message, NotSent, send
from executions.services.webhooks.secrets import in_force
from executions.services.webhooks.signing import signed_headers
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

EVENT = "execution.tool_call"
# Seconds before each try.
WAITS = (0.0, 1.0, 5.0, 20.0)
# Of this process at once; beyond them the first try comes late.
_places = threading.BoundedSemaphore(8)


def tell(call: ToolCall, still_waits: Callable[[], bool]) -> None:
    """Begin to send it, where its execution has a webhook. Raises what the database does."""
    delivery = WebhookDelivery.objects.filter(execution=call.execution_id).first()
    if delivery is None:
        return
    try:
        message = _message(call, delivery)
    except DecryptionError:
        logger.warning("webhook of tool call %s cannot be decrypted", call.pk)
        return
    if message is not None:
        threading.Thread(
            target=_send, args=(call, message, still_waits), name="tool-webhook", daemon=True
        ).start()


def _message(call: ToolCall, delivery: WebhookDelivery) -> Message | None:
    secrets = [each.secret for each in in_force(delivery.tenant_id)]
    if not secrets:
        return None
    data = {"execution": str(call.execution_id), "call": describe(call)}
    said = {"type": EVENT, "timestamp": call.asked_at.isoformat(), "data": data}
    body = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    headers = signed_headers(secrets, f"msg_{call.pk.hex}", int(time.time()), body)
    return Message(delivery.url, {**headers, "Content-Type": "application/json"}, body)


def _send(call: ToolCall, message: Message, still_waits: Callable[[], bool]) -> None:
    nothing = threading.Event()
    for seconds in WAITS:
        nothing.wait(seconds)
        if not still_waits():
            return
        try:
            with _places:
                status = send(message)
        except NotSent as problem:
            logger.info("tool call %s could not be told: %s", call.pk, problem)
            continue
        except Exception as error:
            # Not its text, which may have the URL or the signature.
            logger.error("tool call %s could not be told: %s", call.pk, type(error).__name__)
            return
        if 200 <= status < 300:
            return
