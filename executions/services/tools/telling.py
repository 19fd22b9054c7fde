"""A call of a tool as a signed webhook, where the request named one: guarded as every other is.

The process that runs the code sends it, a few times, for as long as the call waits. Nothing but the
event on the stream is promised of it: what must not be missed is asked for by GET. A process has
some threads for it, of which one tenant has two at once; what has to wait for them is looked at
again before it is sent, and what is too much to wait is not sent at all.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from executions.models.tool_call import ToolCall
from executions.models.webhook import WebhookDelivery
from executions.services.tools.calls import describe
from executions.services.webhooks.delivering import MOST, MOST_OF_ONE, Message, NotSent, send
from executions.services.webhooks.secrets import in_force
from executions.services.webhooks.signing import signed_headers
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

EVENT = "execution.tool_call"
# Seconds before each try.
WAITS = (0.0, 1.0, 5.0, 20.0)
# Of one tenant in one process: each may have as many bytes as arguments of a call.
MOST_WAITING = 256
IDLE_SECONDS = 5.0


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
        _sender.take(_Telling(time.monotonic(), next(_numbers), call, message, still_waits))


def _message(call: ToolCall, delivery: WebhookDelivery) -> Message | None:
    secrets = [each.secret for each in in_force(delivery.tenant_id)]
    if not secrets:
        return None
    data = {"execution": str(call.execution_id), "call": describe(call)}
    said = {"type": EVENT, "timestamp": call.asked_at.isoformat(), "data": data}
    body = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    headers = signed_headers(secrets, f"msg_{call.pk.hex}", int(time.time()), body)
    return Message(delivery.url, {**headers, "Content-Type": "application/json"}, body)


_numbers = itertools.count()


@dataclass(order=True)
class _Telling:
    """What is to be sent, once it is due."""

    due: float
    number: int
    call: ToolCall = field(compare=False)
    message: Message = field(compare=False)
    still_waits: Callable[[], bool] = field(compare=False)
    tries: int = field(default=0, compare=False)


class _Sender:
    """As many threads as there is to send at once, MOST at most; one without work ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # What waits of each tenant, whose turn it is first; and how much of it is under way.
        self._waiting: dict[str, list[_Telling]] = {}
        self._under_way: Counter[str] = Counter()
        self._threads = self._idle = 0

    def take(self, telling: _Telling) -> None:
        tenant = telling.call.tenant_slug
        with self._changed:
            waiting = self._waiting.setdefault(tenant, [])
            if len(waiting) >= MOST_WAITING:
                logger.info("no webhook is sent for tool call %s: too many wait", telling.call.pk)
                return
            heappush(waiting, telling)
            if self._idle < sum(map(len, self._waiting.values())) and self._threads < MOST:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="tool-webhook", daemon=True).start()
            self._threads += 1
        except RuntimeError as error:
            logger.error("no thread for webhooks of tool calls: %s", error)

    def _work(self) -> None:
        while (telling := self._next()) is not None:
            is_over = not telling.still_waits() or _is_told(telling)
            self._has_tried(telling, is_over=is_over)

    def _next(self) -> _Telling | None:
        """What is due of the tenant whose turn it is; None once there was nothing for a while."""
        until = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                for tenant, waiting in self._waiting.items():
                    if waiting and waiting[0].due <= now and self._under_way[tenant] < MOST_OF_ONE:
                        # Whose turn it was is the last.
                        self._waiting[tenant] = self._waiting.pop(tenant)
                        self._under_way[tenant] += 1
                        return heappop(waiting)
                self._waiting = {each: some for each, some in self._waiting.items() if some}
                if now >= until and not self._waiting:
                    self._threads -= 1
                    return None
                # Of a tenant with as many under way as may be, the end of one of these is told.
                dues = [
                    waiting[0].due
                    for tenant, waiting in self._waiting.items()
                    if self._under_way[tenant] < MOST_OF_ONE
                ]
                self._idle += 1
                self._changed.wait(min([IDLE_SECONDS, *(due - now for due in dues)]))
                self._idle -= 1

    def _has_tried(self, telling: _Telling, *, is_over: bool) -> None:
        tenant = telling.call.tenant_slug
        with self._changed:
            self._under_way[tenant] -= 1
            self._under_way += Counter()  # forgets who has none
            telling.tries += 1
            if not is_over and telling.tries < len(WAITS):
                telling.due = time.monotonic() + WAITS[telling.tries]
                heappush(self._waiting.setdefault(tenant, []), telling)
            self._changed.notify()


def _is_told(telling: _Telling) -> bool:
    """Whether nothing more is to be done for it."""
    try:
        status = send(telling.message)
    except NotSent as problem:
        logger.info("the webhook of tool call %s could not be sent: %s", telling.call.pk, problem)
        return False
    except Exception as error:
        # Not its text, which may have the URL or the signature.
        logger.error(
            "the webhook of tool call %s could not be sent: %s",
            telling.call.pk,
            type(error).__name__,
        )
        return True
    return 200 <= status < 300


_sender = _Sender()


def _start_afresh() -> None:
    """The parent's threads are not in the child."""
    global _sender
    _sender = _Sender()


os.register_at_fork(after_in_child=_start_afresh)
