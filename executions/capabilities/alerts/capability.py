"""Alerts as a capability: what calls for attention is told by mail or webhook."""

from __future__ import annotations

from executions.runs.extensions import Extension


class Alerts(Extension):
    pages = ("executions.capabilities.alerts.admin",)
    tasks = {"executions.tasks.watch_alerts": 1}


CAPABILITY = Alerts()
