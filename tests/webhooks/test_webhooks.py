"""Webhooks: the end of a run is told once it is recorded, signed, to where it may be told."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import connection
from django.test import Client
from django.utils import timezone

from executions.capabilities.webhooks import service as webhooks
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.capabilities.webhooks.service import (
    GIVE_UP,
    MOST_OF_ONE,
    WAITS,
    Sender,
    create_secret,
    retire,
    send_in_background,
    signed_headers,
    wait_after,
)
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.tasks import tend_webhooks
from executions.tenants.service import AUDITOR, OPERATOR, ensure_roles
from tests.conftest import Caller
from tests.support.policies import in_force
from tests.support.resolving import resolve_as
from tests.support.running import run, run_queued
from tests.support.sessions import wait_for
from tests.support.webhook_receivers import CODE, Receiver, ended, is_signed, queue, tried, tried_of

pytest_plugins = ["tests.support.webhook_receivers"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

DELIVERIES = "/admin/executions/webhookdelivery/"
SECRETS = "/admin/executions/webhooksecret/"


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The example of its reference libraries."""
    found = signed_headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_end_of_a_run_is_told_signed_and_without_its_output(
    scripted: object, alice: Caller, charlie: Caller, secret: str, receiver: Receiver
) -> None:
    theirs = create_secret(charlie.tenant)[1]
    queued = queue(alice, receiver.url(), agent="reporter").json()
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, str(delivery.execution_id)) == ("waiting", queued["id"])
    assert not Sender().look()
    run_queued()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.receiver) == ("due", f"http://127.0.0.1:{receiver.port}")

    stopped = threading.Event()
    send_in_background(lambda: not stopped.is_set())
    wait_for(lambda: WebhookDelivery.objects.get().state == "delivered")
    stopped.set()
    [(path, headers, body)] = receiver.came
    assert path == "/hook?token=7f3a9c"
    assert headers["content-type"] == "application/json"
    assert is_signed(secret, headers, body)
    assert not is_signed(theirs, headers, body)
    assert not is_signed(secret, headers, body + b" ")
    told = json.loads(body)
    record = alice.client.get(f"/api/v1/executions/{queued['id']}").json()
    assert told["type"] == "execution.finished"
    assert told["timestamp"] == Execution.objects.get().finished_at.isoformat()
    assert (told["data"]["status"], told["data"]["agent"]) == ("succeeded", "reporter")
    assert told["data"]["receipt"] == record["receipt"]
    assert {name: record[name] for name in told["data"].keys() & record.keys()} == {
        name: value for name, value in told["data"].items() if name in record
    }
    assert "stdout" not in told["data"]
    assert b"printed" not in body
    delivery.refresh_from_db()
    assert (delivery.tries, delivery.last_status) == (1, 204)
    with connection.cursor() as cursor:
        cursor.execute("SELECT url FROM executions_webhookdelivery")
        assert b"7f3a9c" not in bytes(cursor.fetchone()[0])


@pytest.mark.usefixtures("policies_forgotten")
def test_that_an_approval_is_waited_for_is_told_before_the_end_is(
    scripted: object, alice: Caller, secret: str, receiver: Receiver
) -> None:
    in_force(alice.tenant.slug, analysis="ask", calls="print")
    code = f"print('secret of the code')\n{CODE}"
    receiver.statuses = [500, 204]
    queued = run(alice, code, mode="async", webhook={"url": receiver.url()}).json()
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.event) == ("due", "execution.waiting_for_approval")
    assert (tried(delivery).state, delivery.tries) == ("due", 1)
    # Told once, it waits for the end.
    assert (tried(delivery).state, delivery.event) == ("waiting", "execution.finished")
    assert not Sender().look()
    assert alice.client.post(f"/api/v1/executions/{queued['id']}/cancel").status_code == 200
    assert (tried(delivery).state, delivery.tries) == ("delivered", 1)

    told = [json.loads(body) for _, _, body in receiver.came]
    waiting = "execution.waiting_for_approval"
    assert [each["type"] for each in told] == [waiting, waiting, "execution.finished"]
    assert [each["data"]["status"] for each in told] == ["queued", "queued", "cancelled"]
    assert {each["data"]["id"] for each in told} == {queued["id"]}
    assert told[0]["timestamp"] == queued["created_at"]
    assert all(is_signed(secret, headers, body) for _, headers, body in receiver.came)
    ids = [headers["webhook-id"] for _, headers, _ in receiver.came]
    assert ids[0] == ids[1] != ids[2]
    assert b"secret of the code" not in b"".join(body for _, _, body in receiver.came)
    assert b"print" not in b"".join(body for _, _, body in receiver.came)


@pytest.mark.usefixtures("policies_forgotten")
def test_an_approval_that_nobody_could_be_told_of_keeps_no_end_from_being_told(
    scripted: object, alice: Caller, secret: str, receiver: Receiver
) -> None:
    in_force(alice.tenant.slug, analysis="ask", calls="print")

    def asked() -> WebhookDelivery:
        body = {"mode": "async", "webhook": {"url": receiver.url()}}
        queued = run(alice, f"print(1)\n{CODE}", **body).json()
        return WebhookDelivery.objects.get(execution=queued["id"])

    # Given up; and ended before it was told, also while a try is under way.
    gone, ended_first = asked(), asked()
    receiver.statuses = [410]
    assert (tried_of(gone).state, gone.event) == ("waiting", "execution.finished")
    mine = webhooks.claim(lambda tenants: tenants)
    assert mine is not None
    assert mine.pk == ended_first.pk
    for delivery in (gone, ended_first):
        path = f"/api/v1/executions/{delivery.execution_id}/cancel"
        assert alice.client.post(path).status_code == 200
    webhooks.note_answer(mine, 204)
    for delivery in (gone, ended_first):
        assert tried_of(delivery).state == "delivered"
    assert [json.loads(body)["type"] for _, _, body in receiver.came[1:]] == [
        "execution.finished",
        "execution.finished",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://user:password@example.com/",
        "https://127.0.0.1/",
        "https://10.0.0.1/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest",
        "https://example.com:22/",
        "ftp://example.com/",
        "https:///",
        "https://example.com/\\@",
        "",
    ],
)
def test_what_a_webhook_may_not_be_sent_to_is_refused(
    url: str, alice: Caller, secret: str, settings: Any
) -> None:
    settings.ALLOW_PRIVATE_URLS = True
    answer = queue(alice, url)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "webhook")
    assert not Execution.objects.exists()


def test_a_webhook_needs_a_secret_and_a_run_that_is_queued(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    create_secret(charlie.tenant)
    refused = queue(alice, "https://example.com/")
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "webhook")
    assert "webhook secrets" in refused.json()["error"]["message"]
    refused = run(charlie, CODE, webhook={"url": "https://example.com/"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "webhook")
    assert not Execution.objects.exists()
    assert queue(charlie, "https://example.com/").status_code == 202


def test_a_name_that_leads_here_and_a_redirect_are_not_followed(
    scripted: object,
    alice: Caller,
    secret: str,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_as(monkeypatch, "hooks.example", ["127.0.0.2"])
    delivery = tried(ended(alice, receiver.url(host="hooks.example")))
    assert (delivery.state, delivery.tries, receiver.asked) == ("due", 1, 0)
    assert "host" in delivery.problem

    receiver.statuses = [307]
    delivery = tried(ended(alice, receiver.url()))
    assert (delivery.state, delivery.last_status) == ("due", 307)
    assert [path for path, _, _ in receiver.came] == ["/hook?token=7f3a9c"]


def test_what_was_not_received_is_tried_again_later_with_the_same_id_for_a_day(
    scripted: object, alice: Caller, secret: str, receiver: Receiver
) -> None:
    receiver.statuses = [500, 404, 200]
    delivery = ended(alice, receiver.url())
    for number, state in enumerate(("due", "due", "delivered"), start=1):
        before = timezone.now()
        tried(delivery)
        assert (delivery.state, delivery.tries) == (state, number)
        if delivery.claimed_until is not None:
            wait = (delivery.claimed_until - before).total_seconds()
            assert wait >= WAITS[number - 1] * 0.9
    assert len({headers["webhook-id"] for _, headers, _ in receiver.came}) == 1
    assert len({body for _, _, body in receiver.came}) == 1
    assert not Sender().look()

    gone = ended(alice, receiver.url())
    receiver.statuses = [410]
    assert tried(gone).state == "failed"
    late = ended(alice, receiver.url())
    WebhookDelivery.objects.filter(pk=late.pk).update(give_up_at=timezone.now())
    receiver.statuses = [503]
    assert (tried(late).state, late.last_status) == ("failed", 503)
    # Nobody listens.
    receiver.server.shutdown()
    receiver.server.server_close()
    away = tried(ended(alice, receiver.url()))
    assert (away.state, away.last_status) == ("due", None)
    assert "connected" in away.problem


def test_all_tries_together_take_no_more_than_a_day() -> None:
    total, tries = 0.0, 0
    while (total := total + wait_after(tries := tries + 1)) < GIVE_UP.total_seconds():
        assert tries < 100
    assert 8 <= tries <= 20


def test_of_several_that_look_one_tries_and_one_that_died_is_made_good(
    scripted: object,
    alice: Caller,
    secret: str,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delivery = ended(alice, receiver.url())
    everybody = lambda tenants: tenants  # noqa: E731
    claimed = webhooks.claim(everybody)
    assert claimed is not None
    assert webhooks.claim(everybody) is None
    assert not Sender().look()
    with monkeypatch.context() as elsewhere:
        skewed = timezone.now() + timedelta(minutes=5)
        elsewhere.setattr(timezone, "now", lambda: skewed)
        assert webhooks.claim(everybody) is None
    # Whoever had it is not heard of any more; another has its turn.
    assert tried(delivery).state == "delivered"
    webhooks.note_answer(claimed, 500)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.tries) == ("delivered", 2)


def test_a_slow_receiver_holds_up_nobody_else(
    scripted: object, alice: Caller, charlie: Caller, secret: str, receiver: Receiver
) -> None:
    create_secret(charlie.tenant)
    receiver.holding = {"/slow"}
    for _ in range(MOST_OF_ONE + 2):
        ended(alice, receiver.url("/slow"))
    theirs = ended(charlie, receiver.url("/quick"))
    sender = Sender()
    while sender.look():
        pass
    wait_for(lambda: WebhookDelivery.objects.get(pk=theirs.pk).state == "delivered")
    wait_for(lambda: receiver.asked == MOST_OF_ONE + 1)
    assert WebhookDelivery.objects.filter(tries=0).count() == 2
    receiver.released.set()
    wait_for(sender.is_idle)
    while sender.look():
        pass
    wait_for(lambda: not WebhookDelivery.objects.exclude(state="delivered").exists())


def test_however_a_run_ends_it_is_told_once(
    scripted: object, alice: Caller, secret: str, receiver: Receiver
) -> None:
    queued = queue(alice, receiver.url(), idempotency_key="once").json()
    assert queue(alice, receiver.url(), idempotency_key="once").json()["id"] == queued["id"]
    assert queue(alice, receiver.url("/x"), idempotency_key="once").status_code == 409
    assert WebhookDelivery.objects.count() == 1
    assert alice.client.post(f"/api/v1/executions/{queued['id']}/cancel").status_code == 200
    delivery = tried(WebhookDelivery.objects.get())
    assert delivery.state == "delivered"
    assert json.loads(receiver.came[0][2])["data"]["status"] == "cancelled"

    queue(alice, receiver.url())
    assert tend_webhooks() == 0
    WebhookDelivery.objects.filter(pk=delivery.pk).update(
        ended_at=timezone.now() - timedelta(days=31)
    )
    assert tend_webhooks() == 1
    assert WebhookDelivery.objects.get().state == "waiting"


def test_a_secret_is_shown_once_and_two_sign_while_receivers_change(
    scripted: object, alice: Caller, receiver: Receiver, admin_client: Client
) -> None:
    found = []
    for _ in range(2):
        page = admin_client.post(f"{SECRETS}add/", {"tenant": alice.tenant.pk})
        assert page.status_code == 200
        assert "no-store" in page["Cache-Control"]
        found.append(page.content.decode().partition("whsec_")[2].partition("<")[0])
    assert found[0] != found[1]
    page = admin_client.post(f"{SECRETS}add/", {"tenant": alice.tenant.pk})
    assert "2 active secrets" in page.content.decode()
    assert WebhookSecret.objects.count() == 2
    with connection.cursor() as cursor:
        cursor.execute("SELECT secret FROM executions_webhooksecret")
        assert not any(found[0].encode() in bytes(row[0]) for row in cursor.fetchall())
    assert not any(text in entry.statement for entry in LedgerEntry.objects.all() for text in found)
    assert not any(text in admin_client.get(SECRETS).content.decode() for text in ("whsec", *found))

    tried(ended(alice, receiver.url()))
    old = WebhookSecret.objects.order_by("pk")[0]
    body = {"action": "retire_secrets", "_selected_action": [old.pk]}
    assert admin_client.post(SECRETS, body).status_code == 302
    assert not retire(old)
    tried(ended(alice, receiver.url()))
    signed = [[is_signed(text, *came[1:]) for text in found] for came in receiver.came]
    assert signed == [[True, True], [False, True]]
    assert LedgerEntry.objects.filter(kind="webhook_secret").count() == 3
    assert verify().is_intact
    retire(WebhookSecret.objects.get(retired_at=None))
    delivery = WebhookDelivery.objects.latest("pk")
    assert webhooks.send_again(delivery)
    assert tried(delivery).problem == "the tenant has no active secret"


def test_deliveries_are_seen_and_sent_again_by_who_may(
    scripted: object, alice: Caller, secret: str, receiver: Receiver
) -> None:
    ensure_roles()
    clients = {}
    for role in (AUDITOR, OPERATOR):
        user = get_user_model().objects.create_user(role, password="x", is_staff=True)
        user.groups.add(Group.objects.get(name=role))
        clients[role] = Client()
        clients[role].force_login(user)
    receiver.statuses = [410]
    delivery = tried(ended(alice, receiver.url()))
    again = {"action": "send_again", "_selected_action": [str(delivery.pk)]}

    for client in clients.values():
        for page in (DELIVERIES, f"{DELIVERIES}{delivery.pk}/change/"):
            text = client.get(page).content.decode()
            assert "410" in text
            assert "7f3a9c" not in text
        assert client.get(f"{SECRETS}add/").status_code == 403
    clients[AUDITOR].post(DELIVERIES, again)
    delivery.refresh_from_db()
    assert delivery.state == "failed"
    clients[OPERATOR].post(DELIVERIES, again)
    assert tried(delivery).state == "delivered"
    assert delivery.tries == 1
    assert LedgerEntry.objects.filter(statement__contains="Sent again.").exists()
