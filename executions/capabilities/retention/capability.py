"""Retention as a capability: data is erased when its time is over, but for legal holds."""

from __future__ import annotations

from executions.runs.extensions import Extension


class Retention(Extension):
    pages = ("executions.capabilities.retention.admin",)
    tasks = {"executions.tasks.apply_retention": 24 * 60}


CAPABILITY = Retention()
