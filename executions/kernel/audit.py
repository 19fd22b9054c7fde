"""Who acts, the admin's own log, and a line of JSON for each operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils import timezone

from executions.kernel.text import storable
from providers.models import ProviderConfig

SYSTEM = "system"

_actor: ContextVar[Callable[[], str]] = ContextVar("actor", default=lambda: SYSTEM)


def current_actor() -> str:
    """The user a request came from, a command's name, or "system"."""
    return _actor.get()()


@contextmanager
def acting_as(name: Callable[[], str]) -> Iterator[None]:
    """Within it, `name()` is who acts. It is asked only when somebody wants to know."""
    token = _actor.set(name)
    try:
        yield
    finally:
        _actor.reset(token)


def log_action(user: Any, provider_id: str, message: str) -> None:
    """Note what a signed-in user did to a provider. What a key does has no user to note it of."""
    if user is None or not user.is_authenticated:
        return
    pk = ProviderConfig.objects.filter(provider_id=provider_id).values_list("pk", flat=True).first()
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(ProviderConfig).pk,
        object_id=None if pk is None else str(pk),
        object_repr=provider_id,
        action_flag=CHANGE,
        change_message=message,
    )


audit_log = logging.getLogger("executions.audit")

SUCCESS = "success"
_NAMES = (
    *("tenant_id", "provider", "instance_id", "language", "code_hash", "duration_ms"),
    *("exit_code", "memory_used_mb", "region", "error_code", "request_id", "api_key"),
    *("session_id", "ledger_sequence", "ledger_digest"),
)
_MOST_CHARACTERS = 300


def log_operation(operation: str, status: str, *, at: datetime | None = None, **facts: Any) -> None:
    """`status` is "success", or how it failed. Of `facts` nothing is a secret or anybody's data."""
    line = {
        **dict.fromkeys(_NAMES),
        **facts,
        "timestamp": (at or timezone.now()).isoformat(),
        "operation": operation,
        "status": status,
    }
    audit_log.info("%s %s", operation, status, extra=line)


def log_entry(entry: Any, subject: str, content: Mapping[str, Any]) -> None:
    """Of what was entered in the ledger, an execution apart: sessions, keys, settings, people."""
    is_session = entry.kind == "session"
    log_operation(
        f"{entry.kind}.{content.get('action') or 'entered'}",
        "refused" if entry.kind == "refusal" else SUCCESS,
        at=entry.at,
        tenant_id=_text(content.get("tenant_slug") or content.get("tenant")),
        provider=_text(content.get("provider")),
        session_id=_text(content.get("row")) if is_session else None,
        actor=_text(content.get("actor")),
        subject=None if is_session else _text(subject),
        reason=_text(
            content.get("closed_because") or content.get("because") or content.get("reason")
        ),
        ledger_sequence=entry.sequence,
        ledger_digest=entry.digest,
    )


def _text(value: Any) -> str | None:
    return storable(value)[:_MOST_CHARACTERS] if isinstance(value, str) and value else None
