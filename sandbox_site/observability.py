"""The settings of metrics, alerts and the export of the ledger, read strictly."""

from __future__ import annotations

import base64
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured

from executions.capabilities.observability.destinations import AuditDestination, Telemetry
from sandbox_site.environment import PROJECT, StrictEnv, declaration

# What is guessed in a minute is no token.
LEAST_TOKEN_LENGTH = 16
NO_MAIL = "django.core.mail.backends.dummy.EmailBackend"
_SYSLOG, _OTLP = "syslog+tls", "https"
_HEADER = re.compile(r"[A-Za-z0-9-]+: ?[\x20-\x7e]+")


def metrics_token(env: StrictEnv) -> str:
    """What a scrape must show; "" where none is set."""
    token = env.secret("METRICS_TOKEN")
    if token and not (len(token) >= LEAST_TOKEN_LENGTH and token.isascii() and token.isprintable()):
        raise ImproperlyConfigured(
            f"METRICS_TOKEN: {LEAST_TOKEN_LENGTH} or more printable ASCII characters, for example "
            "from `openssl rand -hex 32`"
        )
    return token


def mail(env: StrictEnv) -> dict[str, Any]:
    """Django's settings of mail, from EMAIL_URL; without it none is sent."""
    url = env.secret("EMAIL_URL")
    if not url:
        return {"EMAIL_BACKEND": NO_MAIL}
    try:
        found: dict[str, Any] = dict(environ.Env.email_url_config(url))
    except (KeyError, ValueError, ImproperlyConfigured):
        # Not its text, in which the password is.
        raise ImproperlyConfigured(
            "EMAIL_URL: not understood. Write smtp+tls://user:password@host:587 or smtp+ssl://..."
        ) from None
    names = ("EMAIL_HOST", "EMAIL_PORT", "EMAIL_HOST_USER", "EMAIL_HOST_PASSWORD")
    defaults = dict(zip(names, ("localhost", 25, "", ""), strict=True))
    return {
        **found,
        **{name: found.get(name) or default for name, default in defaults.items()},
        "EMAIL_TIMEOUT": 10,
    }


def thresholds(env: StrictEnv) -> dict[str, float]:
    """From when on an alert is opened: the defaults of ALERT_THRESHOLDS and what it says otherwise,
    `name=number`, by commas. `executions/capabilities/alerts/rules.py` says of what."""
    default = dict(entry.split("=") for entry in declaration("ALERT_THRESHOLDS").default)
    found = {name: float(number) for name, number in default.items()}
    for entry in env.list("ALERT_THRESHOLDS"):
        name, _, text = entry.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if name.strip() not in found or not 0 < number < 1_000_000:
            raise ImproperlyConfigured(
                f"ALERT_THRESHOLDS: {entry!r} is not name=number of one of {', '.join(found)}"
            )
        found[name.strip()] = number
    return found


@dataclass(frozen=True)
class Alerting:
    """Where alerts are sent. An empty address sends nothing there."""

    emails: tuple[str, ...] = ()
    sender: str = ""
    webhook_url: str = field(default="", repr=False)
    webhook_secret: str = field(default="", repr=False)


def alerting(env: StrictEnv) -> Alerting:
    """Raises ImproperlyConfigured where something to be sent could not be."""
    emails = tuple(env.list("ALERT_EMAILS"))
    for address in emails:
        if "@" not in address or not address.isprintable() or any(c.isspace() for c in address):
            raise ImproperlyConfigured(f"ALERT_EMAILS: {address!r} is not an email address")
    if emails and not env.secret("EMAIL_URL"):
        raise ImproperlyConfigured("ALERT_EMAILS needs EMAIL_URL or EMAIL_URL_FILE")
    url, secret = env.secret("ALERT_WEBHOOK_URL"), env.secret("ALERT_WEBHOOK_SECRET")
    if url and urlsplit(url).scheme not in ("https", "http"):
        raise ImproperlyConfigured("ALERT_WEBHOOK_URL: must begin with https://")
    if url and not _is_signing_secret(secret):
        raise ImproperlyConfigured(
            "ALERT_WEBHOOK_URL needs ALERT_WEBHOOK_SECRET in the format of Standard Webhooks: from "
            '`echo "whsec_$(openssl rand -base64 32)"`. Without it the receiver cannot tell who '
            "sends"
        )
    return Alerting(emails, env.str("ALERT_SENDER"), url, secret)


def _is_signing_secret(secret: str) -> bool:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        return False
    return len(key) >= LEAST_TOKEN_LENGTH


def telemetry(env: StrictEnv, instance: str) -> Telemetry | None:
    """Where OTEL_EXPORTER_OTLP_ENDPOINT leads; None where it is not set, or OTEL_SDK_DISABLED is.

    Raises ImproperlyConfigured where it is not understood, and where the packages are missing.
    """
    if env.bool("OTEL_SDK_DISABLED") or not (endpoint := env.str("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ImproperlyConfigured(
            "OTEL_EXPORTER_OTLP_ENDPOINT: must be such as https://collector:4318; /v1/traces and "
            "/v1/metrics are added"
        )
    protocol = env.str("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol != "http/protobuf":
        raise ImproperlyConfigured(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not http/protobuf, the only supported "
            "protocol"
        )
    for package, module in _OTEL_PACKAGES:
        if not _is_installed(module):
            raise ImproperlyConfigured(
                f"OTEL_EXPORTER_OTLP_ENDPOINT needs the package {package}, which is not installed. "
                "Run `.venv/bin/pip install --require-hashes -r requirements-otel.txt`, or unset it"
            )
    return Telemetry(
        endpoint,
        _otel_headers(env),
        env.str("OTEL_SERVICE_NAME"),
        instance,
        env.number("OTEL_EXPORTER_OTLP_TIMEOUT"),
    )


_OTEL_PACKAGES = (
    ("opentelemetry-sdk", "opentelemetry.sdk"),
    ("opentelemetry-exporter-otlp-proto-http", "opentelemetry.exporter.otlp.proto.http"),
)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _otel_headers(env: StrictEnv) -> tuple[tuple[str, str], ...]:
    """`name=value`, by commas, the values URL encoded, as OpenTelemetry has it."""
    found = []
    for entry in filter(None, env.secret("OTEL_EXPORTER_OTLP_HEADERS").split(",")):
        name, _, value = entry.partition("=")
        if not _HEADER.fullmatch(f"{name.strip()}: {unquote(value.strip())}"):
            raise ImproperlyConfigured("OTEL_EXPORTER_OTLP_HEADERS: not name=value, by commas")
        found.append((name.strip().lower(), unquote(value.strip())))
    return tuple(found)


def audit_destination(env: StrictEnv) -> AuditDestination | None:
    """Where AUDIT_EXPORT_URL leads; None where it is not set. Never without TLS."""
    url = env.str("AUDIT_EXPORT_URL")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if parts.scheme not in (_SYSLOG, _OTLP) or not host or parts.username or parts.query:
        raise ImproperlyConfigured(
            "AUDIT_EXPORT_URL: must be syslog+tls://host:6514 or https://host:4318/v1/logs"
        )
    if parts.scheme == _SYSLOG:
        return AuditDestination("syslog", host, port or 6514, "", _ca(env))
    path = parts.path or "/v1/logs"
    return AuditDestination("otlp", host, port or 443, path, _ca(env), _headers(env))


def _ca(env: StrictEnv) -> str:
    name = env.str("AUDIT_EXPORT_CA_FILE")
    if not name:
        return ""
    try:
        return Path(PROJECT / name).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ImproperlyConfigured(f"AUDIT_EXPORT_CA_FILE: cannot read {name}: {error}") from None


def _headers(env: StrictEnv) -> tuple[tuple[str, str], ...]:
    """`Name: value`, a line each."""
    found = []
    for line in env.secret("AUDIT_EXPORT_HEADERS").splitlines():
        if not _HEADER.fullmatch(line.strip()):
            raise ImproperlyConfigured("AUDIT_EXPORT_HEADERS: a line is not `Name: value`")
        name, _, value = line.strip().partition(":")
        found.append((name, value.strip()))
    return tuple(found)
