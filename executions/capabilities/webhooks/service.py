"""Webhooks: the outbox, receivers, secrets and signatures, and the sender of what is due.

Worker processes send, each so much at once, of a tenant a few. One thread of a process looks and
claims. Each try has a thread of its own, without a connection to the database while it waits for
its receiver, so a slow one holds no request, no run and no other tenant's deliveries.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.kernel import claims
from executions.kernel.background import Shares
from executions.kernel.database import NOW, delete_in_batches
from executions.kernel.declarations import refuse
from executions.kernel.http import Budget, FetchError, Reason, exchange
from executions.ledger.append import enter_row, look_at
from executions.runs.models import Execution
from executions.runs.record import receipt_of
from executions.runs.requests import Webhook, origin_of, read_receiver, webhook_destinations
from executions.runs.results import LARGE, execution_summary
from executions.tenants.models import Tenant
from providers.fields import DecryptionError
from providers.remote.receiver import Receiver
from providers.threads import Loop, start_thread

logger = logging.getLogger(__name__)


PREFIX = "whsec_"


@sensitive_variables()
def signed_headers(
    secrets: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """The three headers. `timestamp` is seconds since 1970; every secret signs, which is base64
    behind `whsec_`.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(_signature(secret, signed) for secret in secrets),
    }


@sensitive_variables()
def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


_BYTES = 32
# One, and the one in its place while receivers change.
MOST_SECRETS = 2


@sensitive_variables("text")
def create_secret(tenant: Tenant) -> tuple[WebhookSecret, str]:
    """A new one and its text, which is shown now and never again.

    Raises InvalidConfiguration where the tenant has as many in force as it may.
    """
    text = PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()
    with transaction.atomic():
        # Of two who do this at once the other counts afterwards.
        Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
        check_room(tenant)
        return WebhookSecret.objects.create(tenant=tenant, secret=text), text


def check_room(tenant: Tenant) -> None:
    """Raises InvalidConfiguration where the tenant has as many in force as it may."""
    if in_force(tenant.pk).count() >= MOST_SECRETS:
        refuse("tenant", f"Has {MOST_SECRETS} active secrets. Retire one that no receiver uses.")


def retire(secret: WebhookSecret) -> bool:
    """Have nothing signed with it any more. False when it was so before."""
    with transaction.atomic():
        before = look_at(WebhookSecret, secret.pk)
        row = WebhookSecret.objects.filter(pk=secret.pk, retired_at=None)
        if not row.update(retired_at=timezone.now()):
            return False
        secret.refresh_from_db(fields=["retired_at"])
        enter_row(secret, "retired", before, {"tenant": secret.tenant.slug})
    return True


def in_force(tenant_id: int) -> QuerySet[WebhookSecret]:
    """Those that sign, the newest first."""
    return WebhookSecret.objects.filter(tenant=tenant_id, retired_at=None).order_by("-pk")


State = WebhookDelivery.State
Event = WebhookDelivery.Event

# Longer than a try takes, whatever its receiver does.
CLAIM = timedelta(seconds=60)
GIVE_UP = timedelta(days=1)
_MINUTE, _HOUR = 60.0, 3600.0
# Seconds from one try to the next; the last for all that follow, until it is given up.
WAITS = (
    *(5.0, 30.0, 2 * _MINUTE, 10 * _MINUTE, 30 * _MINUTE),
    *(_HOUR, 2 * _HOUR, 4 * _HOUR),
)
_JITTER = 0.1
# The receiver says that there is nothing any more, and never will be.
_GONE = 410
KEPT = timedelta(days=30)
_AT_ONCE = 1000

_TABLE = WebhookDelivery._meta.db_table
_DUE = f"SELECT tenant_slug FROM {_TABLE} WHERE state = 'due'"  # noqa: S608
# From one tenant to the next, whatever number of deliveries each has. Names of our own model.
_TENANTS = f"""
WITH RECURSIVE tenants (slug) AS (
    SELECT ({_DUE} ORDER BY tenant_slug LIMIT 1)
    UNION ALL
    SELECT ({_DUE} AND tenant_slug > tenants.slug ORDER BY tenant_slug LIMIT 1)
    FROM tenants WHERE tenants.slug IS NOT NULL
)
SELECT tenants.slug FROM tenants WHERE tenants.slug IS NOT NULL AND EXISTS (
    SELECT 1 FROM {_TABLE}
    WHERE state = 'due' AND tenant_slug = tenants.slug AND claimed_until <= {{now}}
)
"""  # noqa: S608


def ensure_signing_secret(tenant: Tenant) -> None:
    """Raise InvalidConfiguration where the tenant has nothing to sign a webhook with."""
    if not in_force(tenant.pk).exists():
        refuse(
            "webhook",
            "The tenant has no webhook secret. An administrator can create one in the admin, under "
            "webhook secrets.",
        )


def expect_end(execution: Execution, tenant: Tenant, webhook: Webhook) -> None:
    """Note where the end of this execution is to be told, in the transaction that inserts it."""
    WebhookDelivery.objects.create(
        tenant=tenant,
        tenant_slug=tenant.slug,
        execution=execution,
        url=webhook.url,
        receiver=origin_of(read_receiver(webhook.url))[:300],
    )


def tell_waiting(execution_id: UUID) -> None:
    """Have told that it waits for an approval, in the transaction that inserts it."""
    WebhookDelivery.objects.filter(execution=execution_id, state=State.WAITING).update(
        event=Event.WAITING_FOR_APPROVAL, **_due_now()
    )


def come_due(execution_id: UUID) -> None:
    """Have the end of this execution told, in the transaction that ends it. That it waited for an
    approval is then no news any more, told or not.
    """
    untold = Q(state=State.WAITING) | Q(event=Event.WAITING_FOR_APPROVAL)
    WebhookDelivery.objects.filter(untold, execution=execution_id).update(
        event=Event.FINISHED, **_due_now()
    )


def forget_old() -> int:
    """Remove what was over long ago. How many."""
    old = WebhookDelivery.objects.filter(ended_at__lt=Now() - KEPT)
    ids = list(old.order_by("ended_at").values_list("pk", flat=True)[:_AT_ONCE])
    return delete_in_batches(WebhookDelivery.objects.filter(pk__in=ids, ended_at__isnull=False))


def claim(order: Callable[[list[str]], list[str]]) -> WebhookDelivery | None:
    """A delivery that is the caller's to try now; None where there is none.

    `order` is given the tenants that have something due, and returns those that may be served, in
    their order.
    """
    with connection.cursor() as cursor:
        cursor.execute(_TENANTS.format(now=NOW[connection.vendor]), [])
        tenants = [slug for (slug,) in cursor.fetchall()]
    for slug in order(tenants):
        due = WebhookDelivery.objects.filter(state=State.DUE, tenant_slug=slug)
        rows = due.order_by("claimed_until").defer("url")
        if found := claims.claim(rows, CLAIM, tries=F("tries") + 1):
            return found
    return None


def note_answer(delivery: WebhookDelivery, status: int | None, problem: str = "") -> None:
    """What came of a try. Nothing, where it was somebody else's by then."""
    now = WebhookDelivery.objects.filter(pk=delivery.pk).values_list(Now(), flat=True).first()
    if now is None:
        return
    values: dict[str, Any] = {"last_status": status, "problem": problem[:500]}
    if status is not None and 200 <= status < 300:
        values |= {"state": State.DELIVERED, "claimed_until": None, "ended_at": now}
    else:
        following = now + timedelta(seconds=wait_after(delivery.tries))
        if status == _GONE or delivery.give_up_at is None or following > delivery.give_up_at:
            values |= {"state": State.FAILED, "claimed_until": None, "ended_at": now}
        else:
            values["claimed_until"] = following
    if delivery.event == Event.WAITING_FOR_APPROVAL and values["claimed_until"] is None:
        # Told or given up: the end is to be told all the same.
        values |= {"event": Event.FINISHED, "state": State.WAITING, "tries": 0}
        values |= {"give_up_at": None, "ended_at": None}
    claims.end(delivery, **values)


def wait_after(tries: int) -> float:
    """Seconds from this try to the next, a little different each time."""
    usual = WAITS[min(tries, len(WAITS)) - 1]
    return usual * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311  not to meet others


def send_again(delivery: WebhookDelivery) -> bool:
    """Begin anew with one that is over. False where it is not."""
    over = WebhookDelivery.objects.filter(pk=delivery.pk, state__in=(State.DELIVERED, State.FAILED))
    return bool(over.update(ended_at=None, **_due_now()))


def _due_now() -> dict[str, Any]:
    """The values of a delivery that is to be tried at once, and is nobody's any more."""
    begin = {"claimed_until": Now(), "claims": F("claims") + 1, "tries": 0}
    return {**begin, "state": State.DUE, "give_up_at": Now() + GIVE_UP}


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
        delivery = claim(self._in_turn)
        if delivery is None:
            return False
        try:
            message = message_of(delivery)
        except NotSent as problem:
            note_answer(delivery, None, str(problem))
            return True
        except Exception as error:
            # The one whose row is at fault waits like one that is not taken, and the others not.
            logger.error("webhook %s could not be made: %s", delivery.pk, type(error).__name__)
            note_answer(delivery, None, "it could not be made")
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
            note_answer(delivery, status, problem)
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
