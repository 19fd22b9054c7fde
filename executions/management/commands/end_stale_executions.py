from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from executions.runs.orphaned_runs import end_stale_executions
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "End the records of executions whose process is gone. The workers do it every minute."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(f"{end_stale_executions()} ended")
