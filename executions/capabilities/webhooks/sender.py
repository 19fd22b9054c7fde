"""Sending what is due: by the worker processes, each so much at once, of a tenant a few.

One thread of a process looks and claims. Each try has a thread of its own, without a connection to
the database while it waits for its receiver, so a slow one holds no request, no run and no other
tenant's deliveries.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.webhooks import service as webhooks
from executions.capabilities.webhooks.models import WebhookDelivery
from executions.capabilities.webhooks.service import in_force, signed_headers
from executions.kernel.background import Shares
from executions.kernel.http import Budget, FetchError, Reason, exchange
from executions.runs.listing import LARGE, execution_summary
from executions.runs.models import Execution
from executions.runs.record import receipt_of
from executions.runs.requests import read_receiver, webhook_destinations
from providers.fields import DecryptionError
from providers.remote.receiver import Receiver
from providers.threads import Loop, start_thread

logger = logging.getLogger(__name__)

MOST = 16
MOST_OF_ONE = 2
LOOK_SECONDS = 1.0
TRY_SECONDS = 15.0
_PAUSE_SECONDS = 10.0
_PROBLEMS = {
    Reason.URL: "the URL is not allowed any more",
    Reason.HOST: "the host was not found, or webhooks may not be sent to it",
    Reason.CONNECTION: "the receiver cannot be connected to",
    Reason.CERTIFICATE: "the receiver's certificate is not accepted",
    Reason.ANSWER: "the receiver's answer is not HTTP",
    Reason.TOO_LARGE: "the receiver's answer has too long headers",
    Reason.TOO_SLOW: "the receiver did not answer in time",
}


@dataclass(frozen=True, repr=False)
class Message:
    """What is sent, signed."""

    url: str
    headers: dict[str, str]
    body: bytes


class NotSent(Exception):
    """Its text is for the tenant and the admin: nothing of this network, and no URL."""


@sensitive_variables()
def message_of(delivery: WebhookDelivery) -> Message:
    """Raises NotSent for what cannot be sent."""
    try:
        secrets = [each.secret for each in in_force(delivery.tenant_id)]
        url = delivery.url
    except DecryptionError:
        raise NotSent("the URL or the secret cannot be decrypted") from None
    if not secrets:
        raise NotSent("the tenant has no active secret")
    body = json.dumps(payload_of(delivery), ensure_ascii=False, separators=(",", ":")).encode(
        errors="replace"
    )
    # A receiver takes two messages of one id for one.
    is_end = delivery.event == WebhookDelivery.Event.FINISHED
    message_id = f"msg_{delivery.pk.hex}" if is_end else f"msg_{delivery.pk.hex}_approval"
    headers = signed_headers(secrets, message_id, int(time.time()), body)
    return Message(url, {**headers, "Content-Type": "application/json"}, body)


def payload_of(delivery: WebhookDelivery) -> dict[str, object]:
    """The execution as lists have it, with its receipt: neither code nor output leaves by it, and
    nothing of what a policy has found in the code.
    """
    execution = Execution.objects.defer(*LARGE).get(pk=delivery.execution_id)
    if delivery.event == WebhookDelivery.Event.WAITING_FOR_APPROVAL:
        at = execution.created_at
    else:
        at = execution.finished_at or timezone.now()
    return {
        "type": delivery.event,
        "timestamp": at.isoformat(),
        "data": {**execution_summary(execution), "receipt": receipt_of(execution)},
    }


def send(message: Message) -> int:
    """The status of the answer. Raises NotSent where there is none."""
    budget = Budget(time.monotonic() + TRY_SECONDS, _PAUSE_SECONDS)
    try:
        url = read_receiver(message.url)
        receiver = Receiver(webhook_destinations())
        with exchange(url, receiver, budget, "POST", message.headers, message.body) as answer:
            return answer.status
    except FetchError as error:
        raise NotSent(_PROBLEMS.get(error.reason, str(error.reason))) from None


class Sender:
    """Sends what is due until the process does not go on. What it leaves is sent by another."""

    def __init__(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._goes_on = goes_on
        self._under_way = Shares(MOST, MOST_OF_ONE)
        self._turns: dict[str, int] = {}
        self._turn = 0
        self._lock = threading.Lock()
        self.loop = Loop("webhooks", self._look, goes_on=goes_on)

    def look(self) -> bool:
        """Begin one try. False where there is nothing to be tried now."""
        delivery = webhooks.claim(self._in_turn)
        if delivery is None:
            return False
        try:
            message = message_of(delivery)
        except NotSent as problem:
            webhooks.note_answer(delivery, None, str(problem))
            return True
        except Exception as error:
            # The one whose row is at fault waits like one that is not taken, and the others not.
            logger.error("webhook %s could not be made: %s", delivery.pk, type(error).__name__)
            webhooks.note_answer(delivery, None, "it could not be made")
            return True
        with self._lock:
            self._under_way.take(delivery.tenant_slug)
            self._turn += 1
            self._turns[delivery.tenant_slug] = self._turn
        # Without a thread its claim ends, and it is tried again.
        start_thread(
            "webhook",
            partial(self._try, delivery, message),
            at_end=partial(self._note_end, delivery.tenant_slug),
        )
        return True

    def is_idle(self) -> bool:
        return not self._under_way.taken

    def _look(self) -> float:
        while self._goes_on() and self.look():
            pass
        return LOOK_SECONDS

    def _in_turn(self, tenants: list[str]) -> list[str]:
        """Who has the fewest under way, of these the one whose turn is longest ago."""
        with self._lock:
            for known in self._turns.keys() - set(tenants):
                del self._turns[known]
            free = [slug for slug in tenants if self._under_way.has_room(slug)]
            return sorted(
                free, key=lambda each: (self._under_way.of(each), self._turns.get(each, 0))
            )

    def _try(self, delivery: WebhookDelivery, message: Message) -> None:
        status, problem = None, ""
        try:
            status = send(message)
        except NotSent as error:
            problem = str(error)
        except Exception as error:
            # Not its text or traceback, which may have the URL or the signature.
            logger.error("webhook %s could not be sent: %s", delivery.pk, type(error).__name__)
            problem = "it could not be sent"
        try:
            webhooks.note_answer(delivery, status, problem)
        except Exception:
            logger.exception("the result of webhook %s could not be recorded", delivery.pk)

    def _note_end(self, tenant_slug: str) -> None:
        self._under_way.give_back(tenant_slug)
        # What is due may have waited for its place.
        self.loop.wake()


def send_in_background(goes_on: Callable[[], bool]) -> None:
    """Have a thread of this process look for what is due, until it does not go on."""
    # What it leaves is tried again by another: nobody waits for it at the end.
    Sender(goes_on).loop.start()
