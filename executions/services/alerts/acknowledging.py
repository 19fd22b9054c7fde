"""Somebody has taken an alert on."""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from executions.ledger.append import append
from executions.models.alert import Alert


def acknowledge(alert: Alert, by: str) -> bool:
    """Note who has, and when, once: False where somebody had before. It stays open."""
    with transaction.atomic():
        mine = Alert.objects.filter(pk=alert.pk, acknowledged_at=None)
        won = mine.update(acknowledged_at=timezone.now(), acknowledged_by=by[:150])
        if won:
            content = {"action": "acknowledged", "alert": alert.pk, "by": by[:150]}
            append("alert", str(alert), content)
    return bool(won)
