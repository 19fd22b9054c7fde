from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from executions.services.stale import end_stale_executions


class Command(BaseCommand):
    help = "End the records of executions whose process is gone. The workers do it every minute."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(f"{end_stale_executions()} ended")
