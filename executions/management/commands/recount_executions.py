from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from executions.services.recounting import recount


class Command(BaseCommand):
    help = "Count all executions anew for the dashboard. Prints how many were counted."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(str(recount()))
