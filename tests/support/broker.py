"""What waits in django-q's queue, whichever broker keeps it."""

from __future__ import annotations

from typing import Any

from django_q.brokers import get_broker
from django_q.models import OrmQ
from django_q.signing import SignedPackage


def payloads() -> list[str]:
    """As they are kept, oldest first."""
    broker = get_broker()
    if hasattr(broker.connection, "lrange"):
        return [found.decode() for found in broker.connection.lrange(broker.list_key, 0, -1)]
    kept = OrmQ.objects.filter(key=broker.list_key).order_by("pk")
    return list(kept.values_list("payload", flat=True))


def queued_tasks() -> list[dict[str, Any]]:
    return [SignedPackage.loads(payload) for payload in payloads()]


def empty_queue() -> None:
    get_broker().purge_queue()
