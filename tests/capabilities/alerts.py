"""Alerts that are open."""

from __future__ import annotations

from executions.capabilities.alerts.models import Alert


def open_alerts() -> dict[str, str]:
    """The message of each by its rule and subject."""
    found = Alert.objects.filter(state="open")
    return {f"{alert.rule} {alert.subject}": alert.message for alert in found}
