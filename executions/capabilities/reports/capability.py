"""Audit reports as a capability."""

from __future__ import annotations

from executions.runs.extensions import Extension


class Reports(Extension):
    pages = ("executions.capabilities.reports.admin",)
    tasks = {"executions.tasks.make_reports": 1}


CAPABILITY = Reports()
