"""A receiver of webhooks for tests, and runs whose end is told to it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from executions.capabilities.webhooks.models import WebhookDelivery
from executions.capabilities.webhooks.service import Sender, create_secret
from tests.conftest import Caller
from tests.support.running import run, run_queued
from tests.support.sessions import wait_for

CODE = "answer = ExecutionResult('what it printed', '', 0, 0.0)"


class Receiver:
    """Somebody's receiver of webhooks on this machine. It answers with `statuses`, then with 204;
    while `holding` is set, not at all.
    """

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.came: list[tuple[str, dict[str, str], bytes]] = []
        self.asked = 0
        self.holding: set[str] = set()
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.asked += 1
                if self.path in receiver.holding:
                    receiver.released.wait(60)
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.came.append((self.path, headers, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str = "/hook?token=7f3a9c", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    found = Receiver()
    settings.WEBHOOK_PLAIN_HTTP = True
    settings.WEBHOOK_ALLOWED_NETWORKS = [f"127.0.0.1:{found.port}"]
    yield found
    found.released.set()
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def secret(alice: Caller) -> str:
    return create_secret(alice.tenant)[1]


def queue(caller: Caller, url: str, **body: Any) -> Any:
    return run(caller, CODE, mode="async", webhook={"url": url}, **body)


def ended(caller: Caller, url: str, **body: Any) -> WebhookDelivery:
    """The delivery of a run that has ended."""
    queued = queue(caller, url, **body)
    assert queued.status_code == 202, queued.content
    assert run_queued() is not None
    return WebhookDelivery.objects.get(execution=queued.json()["id"])


def tried(delivery: WebhookDelivery, sender: Sender | None = None) -> WebhookDelivery:
    """After one try that is due now."""
    sender = sender or Sender()
    WebhookDelivery.objects.filter(pk=delivery.pk, state="due").update(claimed_until=Now())
    assert sender.look()
    wait_for(sender.is_idle)
    delivery.refresh_from_db()
    return delivery


def tried_of(delivery: WebhookDelivery) -> WebhookDelivery:
    """After a try of this one, before all others."""
    first = timezone.now() - timedelta(hours=1)
    sender = Sender()
    assert WebhookDelivery.objects.filter(pk=delivery.pk, state="due").update(claimed_until=first)
    assert sender.look()
    wait_for(sender.is_idle)
    delivery.refresh_from_db()
    return delivery


def is_signed(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """As a receiver checks it, by the specification."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(key, text, hashlib.sha256)).decode()
    return f"v1,{expected}" in headers["webhook-signature"].split()
