"""The settings of metrics, alerts and export: strict, and never with a secret in what they say."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from sandbox_site import observability
from sandbox_site.environment import StrictEnv

SECRET = "a secret that is nobody's"
SIGNING = "whsec_" + base64.b64encode(SECRET.encode()).decode()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StrictEnv]:
    def given(**variables: str) -> StrictEnv:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return StrictEnv()

    return given


@pytest.mark.parametrize(
    ("read", "variables"),
    [
        (observability.metrics_token, {"METRICS_TOKEN": "short"}),
        (observability.metrics_token, {"METRICS_TOKEN": "sixteen or more \u00e9"}),
        (observability.mail, {"EMAIL_URL": f"carrier-pigeon://me:{SECRET}@host"}),
        (observability.alerting, {"ALERT_EMAILS": "a@example.com"}),
        (observability.alerting, {"ALERT_EMAILS": "nobody", "EMAIL_URL": "smtp://h:25"}),
        (observability.alerting, {"ALERT_WEBHOOK_URL": "https://example.com/"}),
        (
            observability.alerting,
            {"ALERT_WEBHOOK_URL": "ftp://example.com/", "ALERT_WEBHOOK_SECRET": SIGNING},
        ),
        (observability.thresholds, {"ALERT_THRESHOLDS": "p95_seconds=-1"}),
        (observability.thresholds, {"ALERT_THRESHOLDS": "p95_seconds=nan"}),
        (observability.thresholds, {"ALERT_THRESHOLDS": "p95=1"}),
        (observability.audit_destination, {"AUDIT_EXPORT_URL": "syslog://host:514"}),
        (observability.audit_destination, {"AUDIT_EXPORT_URL": "http://host/v1/logs"}),
        (observability.audit_destination, {"AUDIT_EXPORT_URL": f"https://me:{SECRET}@host/"}),
        (observability.audit_destination, {"AUDIT_EXPORT_URL": "https://host:99999/"}),
        (
            observability.audit_destination,
            {"AUDIT_EXPORT_URL": "https://host/", "AUDIT_EXPORT_HEADERS": SECRET},
        ),
        (
            observability.audit_destination,
            {"AUDIT_EXPORT_URL": "https://host/", "AUDIT_EXPORT_CA_FILE": "/nowhere"},
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    read: Callable[[StrictEnv], Any], variables: dict[str, str], given: Callable[..., StrictEnv]
) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        read(given(**variables))
    assert any(name in str(refused.value) for name in variables)
    assert SECRET not in str(refused.value)


def test_what_is_understood_shows_no_secret(
    given: Callable[..., StrictEnv], tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("PEM")
    env = given(
        METRICS_TOKEN=SECRET,
        EMAIL_URL=f"smtp+tls://me:{SECRET.replace(' ', '%20')}@mail.example.com:587",
        ALERT_EMAILS="a@example.com,b@example.com",
        ALERT_WEBHOOK_URL=f"https://example.com/{SECRET}",
        ALERT_WEBHOOK_SECRET=SIGNING,
        ALERT_THRESHOLDS="p95_seconds=30, error_percent=1",
        AUDIT_EXPORT_URL="https://[::1]:4318",
        AUDIT_EXPORT_CA_FILE=str(tmp_path / "ca.pem"),
        AUDIT_EXPORT_HEADERS=f"Authorization: Bearer {SECRET}\nX-Scope: a",
    )
    assert observability.metrics_token(env) == SECRET
    mail = observability.mail(env)
    assert (mail["EMAIL_HOST"], mail["EMAIL_PORT"], mail["EMAIL_USE_TLS"]) == (
        *("mail.example.com", 587),
        True,
    )
    assert mail["EMAIL_HOST_PASSWORD"] == SECRET
    alerting = observability.alerting(env)
    assert alerting.emails == ("a@example.com", "b@example.com")
    found = observability.thresholds(env)
    assert (found["p95_seconds"], found["error_percent"], found["rate_percent"]) == (30, 1, 80)
    destination = observability.audit_destination(env)
    assert destination is not None
    assert (destination.name, destination.ca) == ("otlp ::1:4318/v1/logs", "PEM")
    assert destination.headers[1] == ("X-Scope", "a")
    assert SECRET not in repr((alerting, destination))


def test_without_any_of_them_nothing_is_sent(given: Callable[..., StrictEnv]) -> None:
    env = given()
    assert observability.metrics_token(env) == ""
    assert observability.mail(env) == {"EMAIL_BACKEND": observability.NO_MAIL}
    assert observability.alerting(env) == observability.Alerting((), "cofferdam@localhost")
    assert observability.audit_destination(env) is None
