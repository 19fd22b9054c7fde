"""Schedules as a capability."""

from __future__ import annotations

from executions.runs.extensions import Extension


class Schedules(Extension):
    def after_restore(self) -> int:
        # Imported here: the library that reads cron expressions takes a while to load.
        from executions.capabilities.schedules.service import pause_schedules

        return pause_schedules()
