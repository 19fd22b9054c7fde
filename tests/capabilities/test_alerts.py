"""Alerts: what opens one, what does not, who is told, and that nobody can flood whoever reads."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from executions.capabilities.alerts import service as alerts
from executions.capabilities.alerts.models import Alert, AlertDelivery
from executions.capabilities.alerts.service import (
    MAIL,
    QUIET,
    WEBHOOK,
    acknowledge,
    watch,
    watch_without_workers,
)
from executions.capabilities.observability.counters import FAULT, LATENCY, OUTCOME, bucket_of
from executions.capabilities.observability.destinations import AuditDestination
from executions.capabilities.observability.models import (
    AuditExport,
)
from executions.capabilities.spending.models import SpendingAlert
from executions.kernel import claims, http
from executions.ledger.append import append
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Process, hour_of
from executions.runs.statistics import Increment, add
from executions.tasks import watch_alerts
from executions.tenants.models import Tenant
from executions.tenants.service import ADMINISTRATOR, AUDITOR, OPERATOR
from providers.models import CircuitBreaker, ProviderCheckCount, ProviderConfig, ProviderHealth
from sandbox_site.observability import Alerting
from tests.capabilities.alerts import open_alerts
from tests.capabilities.collectors import Receiver, SmtpServer
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.held import opened
from tests.support.listener import Listener
from tests.support.processes import free_port
from tests.support.roles import member
from tests.support.sessions import wait_for

pytestmark = [pytest.mark.django_db, pytest.mark.database]

NOW = datetime(2026, 11, 23, 7, 30, tzinfo=UTC)
HOUR = hour_of(NOW)
SECRET = "whsec_" + base64.b64encode(b"a secret of a webhook").decode()


def counted(number: int, status: str = "succeeded", faults: int = 0, code: str = "") -> None:
    add(
        [
            Increment(OUTCOME, "e2b", HOUR, f"{status} {code}".rstrip(), number),
            Increment(FAULT, "e2b", HOUR, code, faults),
        ]
    )


def test_each_rule_opens_an_alert_of_its_subject(alice: Caller, settings: Any) -> None:
    ProviderConfig.objects.create(provider_id="e2b", is_active=True)
    ProviderCheckCount.objects.create(provider_id="e2b", hour=HOUR, checks=60, good_checks=59)
    ProviderCheckCount.objects.create(provider_id="gone", hour=HOUR, checks=60, good_checks=0)
    counted(100)
    counted(6, "error", faults=6, code="SB003")
    counted(7, "error", code="SB008")
    for seconds, number in ((1.0, 80), (60.0, 20)):
        add([Increment(LATENCY, "e2b", HOUR, str(bucket_of(seconds * 1000)), number)])
    CircuitBreaker.objects.create(
        provider_id="e2b", state="open", retry_at=NOW, error_message="a service said: secret"
    )
    for pid in (1, 2):
        figures = {
            "host": {"memory_bytes": 100, "memory_free_bytes": 5, "disk_bytes": 0},
            "pools": {"local": {"busy": 4, "capacity": 4}},
        }
        Process.objects.create(instance="h", kind="web", pid=pid, figures=figures)
    for kind in ("warning", "stop", "spike"):
        SpendingAlert.objects.create(
            kind=kind, tenant_slug="wonderland", day=NOW.date(), message=f"a {kind}"
        )
    settings.SANDBOX_MAX_QUEUED = 2
    for _ in range(2):
        opened(alice, "async")
    # One that is no destination any more waits for nothing.
    AuditExport.objects.create(destination="syslog former:1", tries=3)
    settings.AUDIT_EXPORT = AuditDestination("syslog", "h", 1)
    oldest = LedgerEntry.objects.order_by("sequence")[0]
    LedgerEntry.objects.filter(pk=oldest.pk).update(at=NOW - timedelta(hours=1))

    assert watch(NOW) == 14
    found = open_alerts()
    assert set(found) == {
        "provider_availability e2b",
        "provider_out_of_service e2b",
        "error_rate e2b",
        "provider_throttles e2b",
        "average_time e2b",
        "slow_executions e2b",
        "pool_exhausted local",
        "budget_used_up wonderland",
        "budget_nearly_used_up wonderland",
        "cost_spike wonderland",
        "rate_limit_near tenants",
        "memory_high h",
        "audit_export_stalled syslog h:1",
        # No worker runs here.
        "queue_dead queue",
    }
    assert found["provider_availability e2b"] == "e2b was healthy in 98.3 % of 60 checks."
    assert "wonderland (2 of 2 queued)" in found["rate_limit_near tenants"]
    assert "secret" not in json.dumps(found)
    entry = LedgerEntry.objects.filter(kind="alert").first()
    assert entry is not None
    assert entry.stated["action"] == "opened"
    LedgerEntry.objects.filter(pk=oldest.pk).update(at=oldest.at)
    assert verify().is_intact


def test_what_tenants_bring_about_opens_nothing(alice: Caller) -> None:
    for status, code in (("failed", ""), ("timed_out", "SB005"), ("out_of_memory", "SB006")):
        for _ in range(15):
            ended(alice, status, error_code=code, total_ms=5.0)
    for _ in range(15):
        # Code may have been running, and may have ended its sandbox.
        ended(alice, "error", error_code="SB009", total_ms=5.0)
        ended(alice, "blocked", error_code="SB007", total_ms=5.0)
    assert watch() == 0


def test_one_host_with_room_is_no_exhausted_pool_and_few_runs_are_no_rate(
    alice: Caller,
) -> None:
    for host, busy in (("h", 4), ("i", 3)):
        figures = {"pools": {"local": {"busy": busy, "capacity": 4}}}
        Process.objects.create(instance=host, kind="web", pid=1, figures=figures)
    Process.objects.create(
        instance="dead", kind="web", pid=3, ended_at=NOW, figures={"host": {"memory_bytes": 9}}
    )
    ProviderHealth.objects.create(
        provider_id="e2b", config_version=1, healthy=True, latency_ms=1, checked_at=NOW
    )
    for _ in range(3):
        ended(alice, "error", error_code="SB003", retryable=True)
    assert watch() == 0


def test_many_tenants_near_their_bounds_are_one_alert(alice: Caller) -> None:
    tenants = [
        Tenant.objects.create(slug=f"t{n}", name="T", max_running=1, max_queued=1)
        for n in range(12)
    ]
    for tenant in tenants:
        alice.api_key.tenant = tenant
        opened(alice)
    assert watch() == 1
    (message,) = open_alerts().values()
    assert message.endswith("and 7 more.")


def test_what_comes_and_goes_is_one_alert_and_ends_when_it_was_quiet() -> None:
    row = CircuitBreaker.objects.create(provider_id="e2b", state="open", retry_at=NOW)
    assert watch(NOW) == 1
    for minute in range(1, 40):
        row.state = "open" if minute % 5 == 0 and minute < 25 else "closed"
        row.save()
        assert watch(NOW + timedelta(minutes=minute)) == 0
    alert = Alert.objects.get()
    assert alert.state == "resolved"
    assert alert.seen_at == NOW + timedelta(minutes=20)
    assert alert.resolved_at == alert.seen_at + QUIET + timedelta(minutes=1)
    row.state = "open"
    row.save()
    assert watch(NOW + timedelta(hours=1)) == 1
    assert Alert.objects.count() == 2


def test_one_rule_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    CircuitBreaker.objects.create(provider_id="e2b", state="open", retry_at=NOW)

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("executions.capabilities.alerts.rules.ProviderCheckCount", None)
    assert watch(NOW) == 1


def an_alert(**changes: Any) -> Alert:
    now = datetime.now(UTC)
    values = {
        "rule": "error_rate",
        "subject": "e2b",
        "active_key": "error_rate e2b",
        "severity": "critical",
        "message": "e2b failed.",
        "opened_at": now,
        "seen_at": now,
    }
    alert = Alert.objects.create(**{**values, **changes})
    alerts._tell(alert)
    return alert


def delivery(alert: Alert, way: str) -> AlertDelivery:
    return AlertDelivery.objects.get(alert=alert, way=way)


def at_once() -> None:
    AlertDelivery.objects.update(claimed_until=None)


def errors_on(client: Any, path: str) -> list[str]:
    """By webhook, and by mail."""
    page = client.get(path).content.decode()
    return re.findall(
        r'(?s)(?:Webhook|Email) error</label>.*?<div class="readonly[^>]*>(.*?)<', page
    )


def test_an_alert_is_acknowledged_in_the_admin_once_and_entered() -> None:
    alert = an_alert(message="a\u202ename")
    path, action = "/admin/executions/alert/", "acknowledge_alerts"

    def send(client: Any) -> int:
        body = {"action": action, "_selected_action": [alert.pk]}
        return int(client.post(path, body, follow=True).status_code)

    auditor = member(AUDITOR)
    page = auditor.get(path).content.decode()
    assert "error_rate" in page
    assert "[U+202E]" in page
    assert action not in page
    send(auditor)
    alert.refresh_from_db()
    assert alert.acknowledged_by == ""
    assert send(member(OPERATOR)) == 200
    assert send(member(ADMINISTRATOR)) == 200
    alert.refresh_from_db()
    assert (alert.acknowledged_by, alert.state) == ("user:operator", "open")
    entries = LedgerEntry.objects.filter(kind="alert")
    assert [(e.stated["action"], e.stated["by"]) for e in entries] == [
        ("acknowledged", "user:operator")
    ]
    assert not acknowledge(alert, "somebody else")
    page = f"{path}{alert.pk}/change/"
    assert errors_on(auditor, page) == ["-", "-"]
    alert.deliveries.filter(way=WEBHOOK).update(problem="HTTP 500")
    alert.deliveries.filter(way=MAIL).delete()
    assert errors_on(auditor, page) == ["HTTP 500", "-"]
    assert auditor.get("/admin/executions/auditexport/").status_code == 200


@pytest.fixture
def smtp(settings: Any) -> Iterator[SmtpServer]:
    server = SmtpServer()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
    yield server
    server.close()


def to(receiver_url: str, *emails: str) -> Alerting:
    return Alerting(emails, "from@example.com", receiver_url, SECRET)


def sent() -> list[int]:
    """By webhook, and by mail."""
    return [alerts.send_news(way) for way in (WEBHOOK, MAIL)]


def test_each_state_is_mailed_and_posted_once_and_signed(settings: Any, smtp: SmtpServer) -> None:
    receiver = Receiver()
    settings.ALERT_ALLOWED_NETWORKS = ["127.0.0.1"]
    settings.ALERTING = to(f"{receiver.url}/hook?token=t", "a@example.com", "b@example.com")
    alert = an_alert(subject="e2b\r\nBcc: evil@example.com")
    assert [sent() for _ in range(2)] == [[1, 1], [0, 0]]
    watch(alert.seen_at + timedelta(hours=1))
    assert [sent() for _ in range(2)] == [[1, 1], [0, 0]]
    receiver.close()

    first, second = smtp.mails
    assert (first["To"], first["Bcc"]) == ("a@example.com, b@example.com", None)
    assert "Critical: error_rate e2b" in str(first["Subject"])
    assert "Resolved: error_rate" in str(second["Subject"])
    for (path, headers, body), state in zip(receiver.requests, ("open", "resolved"), strict=True):
        assert path == "/hook?token=t"
        assert headers["webhook-id"] == f"alert_{alert.pk}_{state}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        mac = hmac.new(b"a secret of a webhook", signed, hashlib.sha256).digest()
        assert headers["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"
        assert json.loads(body)["type"] == f"alert.{state}"
        assert json.loads(body)["data"]["rule"] == "error_rate"


def test_what_could_not_be_sent_is_tried_again_and_nothing_twice(
    settings: Any, smtp: SmtpServer
) -> None:
    receiver = Receiver(lambda number: (500, {}) if number == 1 else (200, {}))
    settings.ALERT_ALLOWED_NETWORKS = ["127.0.0.1"]
    settings.ALERTING = to(receiver.url, "a@example.com")
    alert = an_alert()
    assert sent() == [0, 1]
    posted = alert.deliveries.get()
    assert (posted.way, posted.problem, posted.tries) == (WEBHOOK, "HTTP 500", 1)
    # Not at once.
    assert sent() == [0, 0]
    at_once()
    assert sent() == [1, 0]
    receiver.close()
    ids = [headers["webhook-id"] for _, headers, _ in receiver.requests]
    assert ids == [f"alert_{alert.pk}_open"] * 2
    assert len(smtp.mails) == 1
    assert not alert.deliveries.exists()


def test_a_way_that_is_away_for_long_does_not_put_off_the_other(
    settings: Any, smtp: SmtpServer
) -> None:
    settings.ALERTING = to("https://127.0.0.1/", "a@example.com")
    settings.EMAIL_PORT = free_port()
    alert = an_alert()
    AlertDelivery.objects.filter(way=WEBHOOK).update(tries=9)
    assert sent() == [0, 0]
    posted, mailed = delivery(alert, WEBHOOK), delivery(alert, MAIL)
    assert (posted.tries, mailed.tries) == (10, 1)
    assert (posted.problem, mailed.problem) == (
        "the address is refused",
        "ConnectionRefusedError",
    )
    assert posted.claimed_until is not None
    assert mailed.claimed_until is not None
    assert posted.claimed_until - mailed.claimed_until > timedelta(minutes=50)
    # That it is over is news by both.
    watch(alert.seen_at + timedelta(hours=1))
    posted, mailed = delivery(alert, WEBHOOK), delivery(alert, MAIL)
    assert (posted.tries, mailed.tries) == (0, 0)
    assert (posted.claimed_until, mailed.claimed_until) == (None, None)


def test_of_two_processes_one_sends(settings: Any) -> None:
    an_alert()
    rows = AlertDelivery.objects.order_by("pk")
    assert [claims.claim(rows, alerts.CLAIM) is not None for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("moment", ["before it is claimed", "while it is sent"])
def test_an_alert_that_another_process_resolves_is_told_once_in_each_state(
    moment: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ALERTING = to("https://example.com/")
    alert = an_alert()
    told: list[str] = []

    def resolve() -> None:
        watch(alert.seen_at + timedelta(hours=1))

    def send(each: Alert) -> str:
        if moment == "while it is sent":
            resolve()
        told.append(each.state)
        return ""

    by_claim = claims.by_claim

    def resolve_and_find(row: AlertDelivery) -> QuerySet[AlertDelivery]:
        if moment == "before it is claimed":
            resolve()
        return by_claim(row)

    monkeypatch.setitem(alerts._SEND, WEBHOOK, send)
    with monkeypatch.context() as patch:
        patch.setattr(claims, "by_claim", resolve_and_find)
        alerts.send_news(WEBHOOK)
    alerts.send_news(WEBHOOK)
    assert told == (["resolved"] if moment == "before it is claimed" else ["open", "resolved"])
    assert [each.way for each in alert.deliveries.all()] == [MAIL]


def test_a_webhook_reaches_nothing_within_and_follows_no_redirect(settings: Any) -> None:
    """Whoever sets it, or answers for its name, learns nothing of this network."""
    with Listener(answer=b"HTTP/1.1 200 OK\r\n\r\n") as within:
        settings.ALERTING = to(f"http://127.0.0.1:{within.port}/")
        an_alert()
        assert sent() == [0, 0]
        redirecting = Receiver(lambda _: (307, {"Location": f"{within.url}/metadata"}))
        settings.ALERT_ALLOWED_NETWORKS = [f"127.0.0.1:{redirecting.port}"]
        settings.ALERTING = to(redirecting.url)
        at_once()
        assert sent() == [0, 0]
        redirecting.close()
        assert within.connections == 0
    assert AlertDelivery.objects.get(way=WEBHOOK).problem == "HTTP 307"
    for address in (
        "http://example.com/",
        "https://169.254.169.254/",
        "https://[::1]/",
        "https://",
    ):
        settings.ALERTING = to(address)
        at_once()
        assert sent() == [0, 0]
        assert AlertDelivery.objects.get(way=WEBHOOK).problem == "the address is refused"


def test_a_slow_receiver_holds_no_task_and_is_given_up(
    settings: Any, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    monkeypatch.setattr(http, "SECONDS", 1.0)
    settings.ALERT_ALLOWED_NETWORKS = ["127.0.0.1"]
    with Listener(answer=b"HTTP/1.1 100 Continue\r\n") as slow:
        settings.ALERTING = to(slow.url)
        alert = an_alert()
        watch_alerts()
        wait_for(lambda: bool(delivery(alert, WEBHOOK).problem))
    assert slow.connections == 1


@pytest.mark.parametrize("look", [watch_alerts, watch_without_workers])
def test_while_the_ledger_takes_no_entry_what_is_open_is_told(
    look: Callable[[], object], settings: Any, transactional_db: None
) -> None:
    append("note", "the first", {})
    keys = settings.LEDGER_KEYS
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32)]
    settings.ALERT_ALLOWED_NETWORKS = ["127.0.0.1"]
    receiver = Receiver()
    settings.ALERTING = to(receiver.url)
    quiet = datetime.now(UTC) - QUIET - timedelta(minutes=1)
    over = an_alert(subject="over", active_key="error_rate over", seen_at=quiet)
    over.deliveries.all().delete()
    news = an_alert()
    look()
    wait_for(lambda: not news.deliveries.filter(way=WEBHOOK).exists())
    receiver.close()
    assert Alert.objects.get(pk=over.pk).state == "open"

    settings.LEDGER_KEYS, settings.ALERTING = keys, Alerting()
    look()
    assert Alert.objects.get(pk=over.pk).state == "resolved"
